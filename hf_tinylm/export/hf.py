"""From a run's weights to files that others open: a stock Hugging Face folder, GGUF files and a Modelfile beside it."""

from __future__ import annotations

import importlib.util
import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..errors import MissingExtraError, VerificationError
from ..files import atomic_folder, refuse_folder_in_use
from ..gguf_plan import GGUFPlan, GGUFType, needs_llamacpp
from .gguf import GGUFSource
from .modelfile import MODELFILE, lm_studio_path, write_modelfile
from .parity import ParityReport, Reference, verify_gguf
from .quality import quality_table
from .quantize import check_quantizer
from .source import copy_stock_folder, find_source

if TYPE_CHECKING:
    from ..modeling.stock import Dtype


@dataclass
class ExportedFiles:
    """What an export wrote, with the verification of each GGUF file when it was asked for."""

    folder: Path
    gguf: dict[GGUFType, Path] = field(default_factory=dict)
    reports: dict[GGUFType, ParityReport] = field(default_factory=dict)

    def lines(self) -> list[str]:
        """For people: a line on each file, what quantization costs, and where other programs want the files."""
        found = [f"{path} ({path.stat().st_size:,} bytes): {self._verdict(kind)}" for kind, path in self.gguf.items()]
        measured = {kind: report.quality for kind, report in self.reports.items() if report.quality is not None}
        found += quality_table({kind: (self.gguf[kind].stat().st_size, each) for kind, each in measured.items()})
        if self.gguf:
            first = next(iter(self.gguf.values()))
            name = first.stem.rpartition("-")[0]
            found.append(f"LM Studio: copy to {lm_studio_path(name, first.name)} in its folder")
            found.append(f"Ollama: ollama create {name.lower()} -f {first.parent / MODELFILE}")
        return found

    def _verdict(self, kind: GGUFType) -> str:
        report = self.reports.get(kind)
        if report is None:
            return "not verified"
        same = f"verified in llama.cpp: {report.strings:,} strings with {report.token_mismatches} mismatches"
        if report.quality is not None and report.logit_limit is None:
            return f"{same}, KL divergence {report.quality.kl_divergence:.1e} nats"
        return (
            f"{same}, log-probabilities within {report.max_logit_difference:.1e} nats, "
            f"{report.greedy_tokens} greedy tokens {'equal' if report.greedy_equal else 'different'}"
        )

    def to_json(self) -> dict[str, Any]:
        """Plain values for `--json`."""
        return {
            "folder": str(self.folder),
            "gguf": {kind: {"path": str(path), "bytes": path.stat().st_size} for kind, path in self.gguf.items()},
            "verification": {kind: report.to_json() for kind, report in self.reports.items()},
        }


def plan_model(
    model: str, gguf: Sequence[GGUFType], tokenizer_path: str | None = None, output_dir: Path | None = None
) -> list[GGUFPlan]:
    """What `export_model` would write, after every check of the model but that of its numbers; nothing is written.

    The name in a file is that of its folder: with `output_dir` the sizes are exact, else a few bytes may differ.

    Raises:
        ConfigError: there is no such model.
        ExportError: it has no such form.
    """
    from ..tokenization.load import find_tokenizer, load_tokenizer, write_tokenizer_files

    source = find_source(model)
    tokenizer = tokenizer_path or find_tokenizer(source.folder)
    with tempfile.TemporaryDirectory() as fetched:
        folder = Path(tokenizer)
        if not (folder / "tokenizer.json").is_file():
            folder = Path(fetched)
            write_tokenizer_files(load_tokenizer(tokenizer), folder)
        name = None if output_dir is None else output_dir.resolve().name
        files = GGUFSource(source.folder, name=name, tokenizer_folder=folder)
    return [files.plan(kind) for kind in dict.fromkeys(gguf)]


def export_model(
    model: str,
    output_dir: Path,
    gguf: Sequence[GGUFType] = (),
    verify: bool = False,
    tokenizer_path: str | None = None,
    text: Path | None = None,
    limits: Mapping[str, float] | None = None,
    tell: Callable[[str], None] = print,
    dtype: Dtype | None = None,
    max_shard_size: str | None = None,
) -> ExportedFiles:
    """Write a model as a stock folder `output_dir` with GGUF files in it; the folder appears whole or not at all.

    A model that is stock already is copied as it is and never loaded, unless another dtype or shard size is asked for;
    GGUF files are made a few rows at a time.

    Args:
        model: a final folder, a checkpoint, a stock folder, or a name on the Hub.
        gguf: file types written as `output_dir/NAME-TYPE.gguf`.
        verify: compare each GGUF file with the written folder through llama.cpp.
        tokenizer_path: needed when neither the source nor its run says which tokenizer it has.
        text, limits: see `verify_gguf`.
        tell: gets the plan, before anything is written.
        dtype, max_shard_size: of the safetensors, see `save_stock_model`.

    Raises:
        ConfigError: `model` is no model, or `output_dir` is in use.
        ExportError: a model that has no such form.
        VerificationError: a written file does not do what the model does; the files are left for inspection.
    """
    from ..modeling.factory import load_model
    from ..modeling.stock import save_stock_model
    from ..tokenization.load import find_tokenizer, load_tokenizer

    refuse_folder_in_use(output_dir)
    check_engines(gguf, verify)
    source = find_source(model)
    name = output_dir.resolve().name
    copied = source.stock and tokenizer_path is None and dtype is None and max_shard_size is None
    # a model that will be copied is refused before anything is written
    files = GGUFSource(source.folder, name=name) if gguf and copied else None
    with atomic_folder(output_dir) as folder:
        if copied:
            copy_stock_folder(source.folder, folder)
        else:
            tokenizer = load_tokenizer(tokenizer_path or find_tokenizer(source.folder))
            model_of_source = load_model(source.folder)
            save_stock_model(model_of_source, folder, tokenizer, False, dtype or "float32", max_shard_size)
        if gguf:
            write_files(files or GGUFSource(folder, name=name), folder, name, gguf, tell)
    done = ExportedFiles(output_dir, {kind: output_dir / _file_name(name, kind) for kind in gguf})
    return verify_files(done, text, limits) if verify else done


def add_gguf(folder: Path, target_dir: Path, name: str, gguf: Sequence[GGUFType], verify: bool) -> ExportedFiles:
    """Write the stock `folder` as `target_dir/NAME-TYPE.gguf` for each type, and verify each if asked.

    Raises:
        ExportError: the model has no such form.
        VerificationError: naming the file and what differs.
    """
    done = ExportedFiles(folder, {kind: target_dir / _file_name(name, kind) for kind in gguf})
    if gguf:
        write_files(GGUFSource(folder, name=name), target_dir, name, gguf, print)
    return verify_files(done) if verify else done


def write_files(
    source: GGUFSource, target_dir: Path, name: str, gguf: Sequence[GGUFType], tell: Callable[[str], None]
) -> None:
    """Tell the plan of each type, then write the files and a Modelfile."""
    for kind in dict.fromkeys(gguf):
        for line in source.plan(kind).lines():
            tell(line)
    names = {kind: _file_name(name, kind) for kind in gguf}
    source.write_all({kind: target_dir / file for kind, file in names.items()})
    write_modelfile(target_dir, list(names.values()), source.section, source.config.context_length)


def verify_files(
    done: ExportedFiles, text: Path | None = None, limits: Mapping[str, float] | None = None
) -> ExportedFiles:
    """Add the verification of each file; the model is loaded once.

    Raises:
        VerificationError: naming the first file that differs, and how.
    """
    reference = Reference(done.folder) if done.gguf else None
    for kind, path in done.gguf.items():
        report = verify_gguf(path, done.folder, text=text, limits=limits, reference=reference)
        done.reports[kind] = report
        if not report.ok:
            raise VerificationError(f"{path} does not match {done.folder}: {'; '.join(report.failures)}.")
    return done


def check_engines(gguf: Sequence[GGUFType], verify: bool) -> None:
    """Find out before long work, not after it, that what a type or its verification needs is not installed.

    Raises:
        MissingExtraError: naming the extra to install.
    """
    if gguf and verify and importlib.util.find_spec("xllamacpp") is None:
        raise MissingExtraError("xllamacpp", "gguf-verify", "verifying a GGUF file in llama.cpp")
    if any(needs_llamacpp(kind) for kind in gguf):
        check_quantizer()


def _file_name(name: str, kind: GGUFType) -> str:
    """A run may be named as trackers group them, `sweep/first`; its file stays in the folder."""
    within = name.replace("/", "-").replace("\\", "-")
    return f"{within}-{kind.upper()}.gguf"
