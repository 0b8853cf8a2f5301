"""Checks of what a run starts from and writes to, before anything is built: folder, shards, tokenizer."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from ..contract import RUN_FILE
from ..data.pack import Pack, open_pack
from ..data.shards import load_shards
from ..files import fsync_path, refuse_folder_in_use
from ..sections import RunConfig
from ..training.folder import is_start_that_was_killed
from .checks import Finding, rule
from .subject import scratch_folder


@dataclass
class Inputs:
    """The configuration of a run, and the pack that it names once its tokenizer was checked."""

    config: RunConfig
    pack: Pack | None = None

    @property
    def output_dir(self) -> Path:
        """The run's folder."""
        return Path(str(self.config.training.output_dir))


@rule("output folder", "nothing could be saved there: no permission, no such volume, or another run's files")
def output_folder(inputs: Inputs) -> Finding:
    """Files can be written, forced to disk and renamed where the run's folder is or will be, and it is free."""
    folder = inputs.output_dir
    try:
        with scratch_folder(folder) as scratch:
            (scratch / "written").write_bytes(b"x")
            fsync_path(scratch / "written")
            (scratch / "written").rename(scratch / "renamed")
    except OSError as error:
        return Finding(False, f"{folder}: {error.strerror or error}", "files can be written, synced and renamed")
    resumed = inputs.config.training.resume_from_checkpoint is not None and (folder / RUN_FILE).is_file()
    if not resumed and not is_start_that_was_killed(folder):
        refuse_folder_in_use(folder)
    return Finding(True, f"{folder}: {'a run to resume' if resumed else 'free'}", "writable; new, or a run to resume")


@rule("shards", "a copy was cut short, or a file was changed since hf-tinylm prepare wrote it")
def shards(inputs: Inputs) -> Finding:
    """Every byte of the shards has the manifest's SHA-256, ids are below the vocabulary, separators are counted."""
    found = load_shards(str(inputs.config.data.shards), verify=True)
    files = len(found.train) + len(found.validation)
    return Finding(True, f"{files} files, {found.manifest['ids']:,} ids: all as in the manifest", "as in the manifest")


@rule(
    "tokenizer", "the shards were written with another tokenizer: every id would mean something else", needs=("shards",)
)
def tokenizer(inputs: Inputs) -> Finding:
    """The tokenizer of the configuration has the hash that the shards record."""
    inputs.pack = open_pack(inputs.config, verify=False)
    return Finding(True, f"SHA-256 {inputs.pack.shards.tokenizer_sha256[:12]}...", "that of the shards")


RULES = (output_folder, shards, tokenizer)
