"""Train the tokenizer of a configuration: the same as `hf-tinylm tokenizer train`.

python tokenizer/train.py --config tokenizer/byte_bpe.yaml
python tokenizer/train.py --config tokenizer/byte_bpe.yaml --vocab_size 8192 --tokenizer_path runs/mine/tokenizer
"""

from __future__ import annotations

import argparse
import json
import sys

from hf_tinylm.config import load_config
from hf_tinylm.errors import exit_with_error_line


def make_parser() -> argparse.ArgumentParser:
    """Options of this script; every key of the configuration is an option too."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--config", required=True, help="a YAML file, or the name of a bundled one such as demo")
    return parser


def main(arguments: list[str] | None = None) -> int:
    """Train, write, and print the report as JSON; the exit code."""
    options, overrides = make_parser().parse_known_args(arguments)
    config = load_config(options.config, overrides)

    from hf_tinylm.data.tokenizer_corpus import train_from_config

    print(json.dumps(train_from_config(config), indent=2, ensure_ascii=False))
    return 0


if __name__ == "__main__":
    sys.exit(exit_with_error_line(main))
