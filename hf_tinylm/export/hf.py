"""From a run's weights to files that others open: a stock Hugging Face folder, a card, and GGUF files beside it."""

from __future__ import annotations

import importlib.util
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from ..contract import RUN_FILE
from ..errors import ConfigError, MissingExtraError, VerificationError
from ..files import read_json, refuse_folder_in_use
from ..modeling.factory import load_model
from ..modeling.stock import save_stock_model
from ..tokenization.load import load_tokenizer
from .gguf import write_gguf
from .parity import ParityReport, verify_gguf

FileType = Literal["f32", "f16"]


@dataclass
class ExportedFiles:
    """What an export wrote, with the verification of each GGUF file when it was asked for."""

    folder: Path
    gguf: dict[str, Path] = field(default_factory=dict)
    reports: dict[str, ParityReport] = field(default_factory=dict)

    def lines(self) -> list[str]:
        """A line for people on each file."""
        found = []
        for kind, path in self.gguf.items():
            size, report = path.stat().st_size, self.reports.get(kind)
            checked = (
                "not verified"
                if report is None
                else (
                    f"verified in llama.cpp: {report.strings:,} strings with {report.token_mismatches} mismatches, "
                    f"log-probabilities within {report.max_logit_difference:.1e} nats, "
                    f"{report.greedy_tokens} greedy tokens {'equal' if report.greedy_equal else 'different'}"
                )
            )
            found.append(f"{path} ({size:,} bytes): {checked}")
        return found

    def to_json(self) -> dict[str, Any]:
        """Plain values for `--json`."""
        return {
            "folder": str(self.folder),
            "gguf": {kind: {"path": str(path), "bytes": path.stat().st_size} for kind, path in self.gguf.items()},
            "verification": {kind: report.to_json() for kind, report in self.reports.items()},
        }


def export_model(
    source: Path,
    output_dir: Path,
    gguf: Sequence[FileType] = (),
    verify: bool = False,
    tokenizer_path: str | None = None,
) -> ExportedFiles:
    """Write the model in `source` (a final folder, a checkpoint, or a stock folder) to `output_dir`.

    Args:
        gguf: file types written as `output_dir/NAME-TYPE.gguf`.
        verify: compare each GGUF file with the written folder through llama.cpp.
        tokenizer_path: needed when neither the source nor its run says which tokenizer it has.

    Raises:
        ConfigError: `source` is no model, or `output_dir` is in use.
        ExportError: a model that has no such form.
        VerificationError: a written file does not do what the model does; the file is left for inspection.
    """
    refuse_folder_in_use(output_dir)
    check_engines(gguf, verify)
    model = load_model(source)
    tokenizer = load_tokenizer(tokenizer_path or find_tokenizer(source))
    save_stock_model(model, output_dir, tokenizer, replace=False)
    return add_gguf(output_dir, output_dir, output_dir.name, gguf, verify)


def add_gguf(folder: Path, target_dir: Path, name: str, gguf: Sequence[FileType], verify: bool) -> ExportedFiles:
    """Write the stock `folder` as `target_dir/NAME-TYPE.gguf` for each type, and verify each if asked.

    Raises:
        VerificationError: naming the file and what differs.
    """
    done = ExportedFiles(folder)
    for kind in gguf:
        path = target_dir / f"{name}-{kind.upper()}.gguf"
        write_gguf(folder, path, kind, name=name)
        done.gguf[kind] = path
        if verify:
            report = verify_gguf(path, folder)
            done.reports[kind] = report
            if not report.ok:
                raise VerificationError(f"{path} does not match {folder}: {'; '.join(report.failures)}.")
    return done


def check_engines(gguf: Sequence[str], verify: bool) -> None:
    """Find out before long work, not after it, that what a verification needs is not installed.

    Raises:
        MissingExtraError: naming the extra to install.
    """
    if gguf and verify and importlib.util.find_spec("xllamacpp") is None:
        raise MissingExtraError("xllamacpp", "gguf-verify", "verifying a GGUF file in llama.cpp")


def find_tokenizer(source: Path) -> str:
    """The tokenizer of a model folder: its own, or the one that the run of a checkpoint names.

    Raises:
        ConfigError: neither exists.
    """
    if (source / "tokenizer.json").is_file():
        return str(source)
    run = source.parent / RUN_FILE
    if run.is_file():
        config = read_json(run).get("config") or {}
        path = (config.get("tokenizer") or {}).get("tokenizer_path")
        if path:
            return str(path)
    raise ConfigError(f"{source} has no tokenizer.json and no run.json beside it names one. Give it: --tokenizer DIR.")
