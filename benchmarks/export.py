"""Converting 345 million random weights beside llama.cpp's own converter: bytes, seconds, peak memory.

    python -m benchmarks.export FOLDER

FOLDER is for the source package of llama-cpp-python (75 MB, downloaded once), whose copy of convert_hf_to_gguf is the
other side, with its check of known tokenizers bypassed. Needs 5 GB of disk there. Every tensor of the F16 and Q8_0
files must have the same bytes in both, else the exit code is 1. Figures are of whole processes, imports included.
"""

from __future__ import annotations

import argparse
import datetime
import json
import os
import subprocess
import sys
import tarfile
import time
from pathlib import Path
from typing import Any

import numpy as np

from hf_tinylm.gguf_plan import gguf_tensors
from hf_tinylm.planning import ModelShape
from hf_tinylm.tokenization.special import QWEN2_SPLIT, SPECIAL_TOKENS, byte_of_character

SHAPE = ModelShape(32_000, 960, 32, 15, 5, 2_560, 64, qk_norm=False, tie_word_embeddings=True)
COMPARED, ROUNDS = ("f16", "q8_0"), 3

# Each child ends by printing its peak memory: VmHWM is its own, while ru_maxrss would count what started it too.
_PEAK = "\nprint(next(l.split()[1] for l in open('/proc/self/status') if l.startswith('VmHWM')))"
_OURS = (
    """
import sys
from pathlib import Path
from hf_tinylm.export.gguf import write_gguf
write_gguf(Path(sys.argv[1]), Path(sys.argv[2]), sys.argv[3])
"""
    + _PEAK
)
_THEIRS = (
    """
import runpy, sys
folder, output, kind, converter = sys.argv[1:]
sys.path.insert(0, converter)
sys.path.insert(1, converter + "/gguf-py")
from conversion import base
def no_sentencepiece(self):
    raise FileNotFoundError  # as it would where the package is installed: there is no tokenizer.model
for each in vars(base).values():
    if isinstance(each, type) and "get_vocab_base_pre" in vars(each):
        each.get_vocab_base_pre = lambda self, tokenizer: "qwen2"
        each._set_vocab_sentencepiece = no_sentencepiece
sys.argv = ["convert", folder, "--outfile", output, "--outtype", kind]
runpy.run_path(converter + "/convert_hf_to_gguf.py", run_name="__main__")
"""
    + _PEAK
)


def main() -> int:
    """Measure, print and record; 1 when a tensor differs."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    folder = parser.parse_args().folder
    converter = unpacked_converter(folder)
    model = folder / "model"
    if not (model / "config.json").is_file():
        write_random_model(model)
    found: dict[str, Any] = {}
    different = []
    for kind in COMPARED:
        files = {"ours": folder / f"ours-{kind}.gguf", "llama.cpp": folder / f"theirs-{kind}.gguf"}
        runs: dict[str, list[tuple[float, int]]] = {name: [] for name in files}
        for _ in range(ROUNDS):  # taken in turn, so that a busy machine slows both
            runs["ours"].append(timed(_OURS, model, files["ours"], kind))
            runs["llama.cpp"].append(timed(_THEIRS, model, files["llama.cpp"], kind, converter))
        different += different_tensors(files["ours"], files["llama.cpp"])
        found[kind] = summary(runs, files["ours"].stat().st_size)
        print(kind, json.dumps(found[kind]), flush=True)
    seconds, _ = timed(_OURS, model, folder / "ours-q4_k_m.gguf", "q4_k_m")
    size = (folder / "ours-q4_k_m.gguf").stat().st_size
    found["q4_k_m"] = {"bytes": size, "seconds": seconds}
    found["different_tensors"] = different
    print(json.dumps(found, indent=2))
    record(found)
    return 1 if different else 0


def summary(runs: dict[str, list[tuple[float, int]]], size: int) -> dict[str, Any]:
    """Medians of both sides, and ours divided by theirs."""
    seconds = {name: float(np.median([run[0] for run in each])) for name, each in runs.items()}
    peaks = {name: int(np.median([run[1] for run in each])) for name, each in runs.items()}
    ratios = {"seconds_ratio": seconds["ours"] / seconds["llama.cpp"], "peak_ratio": peaks["ours"] / peaks["llama.cpp"]}
    return {"bytes": size, "seconds": seconds, "peak_bytes": peaks, **ratios}


def timed(code: str, *arguments: object) -> tuple[float, int]:
    """Seconds and peak bytes of a fresh Python that runs `code`."""
    began = time.perf_counter()
    command = [sys.executable, "-c", code, *map(str, arguments)]
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        raise SystemExit(f"error: {' '.join(command[3:])} failed: {done.stderr[-2000:]}")
    return time.perf_counter() - began, 1024 * int(done.stdout.split()[-1])


def different_tensors(ours: Path, theirs: Path) -> list[str]:
    """Names of tensors that are not the same in both files: absent, of another type or shape, or other bytes."""
    from gguf import GGUFReader

    left, right = ({each.name: each for each in GGUFReader(path).tensors} for path in (ours, theirs))
    return [
        f"{ours.name}: {name}"
        for name in sorted(left.keys() | right.keys())
        if name not in left
        or name not in right
        or left[name].tensor_type != right[name].tensor_type
        or list(left[name].shape) != list(right[name].shape)
        or not np.array_equal(left[name].data.view(np.uint8), right[name].data.view(np.uint8))
    ]


def unpacked_converter(folder: Path) -> Path:
    """The folder of convert_hf_to_gguf.py, from the source package that pip downloads into `folder`."""
    folder.mkdir(parents=True, exist_ok=True)
    if not list(folder.glob("llama_cpp_python-*.tar.gz")):
        options = ["--no-binary", "llama-cpp-python", "--no-deps", "-d", str(folder)]
        subprocess.run([sys.executable, "-m", "pip", "download", *options, "llama-cpp-python"], check=True)
    (package,) = folder.glob("llama_cpp_python-*.tar.gz")
    root = folder / package.name.removesuffix(".tar.gz")
    if not root.is_dir():
        with tarfile.open(package) as archive:
            archive.extractall(folder, filter="data")
    return root / "vendor" / "llama.cpp"


def write_random_model(folder: Path) -> None:
    """A stock llama folder of `SHAPE` in float32, with a tokenizer whose tokens are pairs and triples of letters."""
    from safetensors.numpy import save_file

    folder.mkdir(parents=True, exist_ok=True)
    generator = np.random.default_rng(0)
    weights = {}
    for tensor in gguf_tensors(SHAPE, SHAPE.vocab_size):
        numbers = generator.standard_normal(tensor.source_shape, dtype=np.float32)
        weights[tensor.source] = numbers * np.float32(0.02) if numbers.ndim > 1 else numbers * np.float32(0.1) + 1
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    files = {"tokenizer.json": made_up_tokenizer(), "tokenizer_config.json": {}, "config.json": {}}
    files["tokenizer_config.json"] = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": SPECIAL_TOKENS[0]}
    files["config.json"] = {
        "architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_act": "silu", "eos_token_id": 0,
        "vocab_size": SHAPE.vocab_size, "hidden_size": SHAPE.hidden_size, "head_dim": SHAPE.head_dim,
        "intermediate_size": SHAPE.intermediate_size, "num_hidden_layers": SHAPE.num_hidden_layers,
        "num_attention_heads": SHAPE.num_attention_heads, "num_key_value_heads": SHAPE.num_key_value_heads,
        "max_position_embeddings": 1_024, "rms_norm_eps": 1e-6, "rope_theta": 10_000.0, "tie_word_embeddings": True,
    }  # fmt: skip
    for name, value in files.items():
        (folder / name).write_text(json.dumps(value), encoding="utf-8")


def made_up_tokenizer() -> dict[str, Any]:
    """The tokenizer.json of a byte-level BPE of the model's size."""
    vocab = {text: place for place, text in enumerate([*SPECIAL_TOKENS, *byte_of_character()])}
    letters = [letter for letter in byte_of_character() if letter.isascii() and letter.isalpha()]
    pairs = [(left, right) for left in letters for right in letters]
    merges = [*pairs, *((left + right, letter) for left, right in pairs for letter in letters)]
    merges = merges[: SHAPE.vocab_size - len(vocab)]
    vocab |= {left + right: len(vocab) + place for place, (left, right) in enumerate(merges)}
    flags = dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized"), False)
    byte_level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": False}
    split = {"type": "Split", "pattern": {"Regex": QWEN2_SPLIT}, "behavior": "Isolated", "invert": False}
    return {
        "version": "1.0",
        "added_tokens": [{"id": i, "content": text, "special": True, **flags} for i, text in enumerate(SPECIAL_TOKENS)],
        "pre_tokenizer": {"type": "Sequence", "pretokenizers": [split, byte_level]},
        "decoder": byte_level,
        "model": {"type": "BPE", "vocab": vocab, "merges": [list(pair) for pair in merges]},
    }


def record(found: dict[str, Any]) -> None:
    """Write benchmarks/results/export-DATE.json."""
    from .machine import machine

    day = datetime.date.today().isoformat()
    report = {"benchmark": "export", "date": day, "machine": machine(), "cores": os.cpu_count(), "results": found}
    path = Path(__file__).parent / "results" / f"export-{day}.json"
    path.write_text(json.dumps(report, indent=2) + "\n", encoding="utf-8")


if __name__ == "__main__":
    sys.exit(main())
