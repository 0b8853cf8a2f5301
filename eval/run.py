"""Score a model on a suite, raw text or a pack, or compare two: `hf-tinylm eval`, as a script.

python eval/run.py runs/demo/pretrain/final --config demo
python eval/run.py runs/demo/pretrain/final --suite hellaswag --json
"""

from __future__ import annotations

import sys

from hf_tinylm.cli import main

if __name__ == "__main__":
    sys.exit(main(["eval", *sys.argv[1:]]))
