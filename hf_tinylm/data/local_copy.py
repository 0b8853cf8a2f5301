"""`stage_dir`: a folder on a slow or shared disk, copied once per host to a local one, verified, and used from there.

    STAGE/ shards-3f2a90c1d4e5/ staged.json   what was copied, with the SHA-256 of each file
                                NAME/         the folder under its own name, whole or absent
           shards-3f2a90c1d4e5.lock           held by the process that copies or verifies

A slot is named after the path that it is a copy of. Every start verifies the copy, in one process of the host; the
others wait for it.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import shutil
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import IO, Any

import psutil
from tqdm import tqdm

from ..errors import ConfigError, DataError, TrainingError
from ..files import TEMPORARY_PREFIX, atomic_folder, read_json, sha256_of_file, sha256_of_json, write_json

try:
    import fcntl
except ImportError:  # Windows has no advisory locks of this kind, and no launcher of several processes either
    fcntl = None  # type: ignore[assignment]

RECORD = "staged.json"
_BLOCK = 2**24
# The holder of a lock touches it while it works; one that is silent for longer is stuck.
SILENCE_SECONDS = 600.0
_POLL_SECONDS = 0.2
# A folder on a network may take so long to appear after it was first asked for.
_PROBES, _PROBE_SECONDS = 5, 0.5


@dataclass(frozen=True)
class _File:
    """A file to be copied. `sha256` is what a manifest says of it; without one the time of change tells files apart."""

    bytes: int
    sha256: str | None
    changed: int | None


def local_copy(source: Path, stage_dir: Path, kind: str, slot_of: Path | None = None) -> Path:
    """The folder `source` on the local disk: copied there, or found there from an earlier start, verified in any case.

    Args:
        kind: first word of the slot's name, such as `shards`.
        slot_of: the path that names the slot; what is copied for one path replaces what was copied for it before.

    Raises:
        ConfigError: `source` does not exist, or the disk has too little room.
        DataError: a file of `source` is not what its manifest says.
        TrainingError: the process that copies has stopped making progress.
    """
    source = Path(os.path.abspath(source))
    appear(source)
    files = _files_of(source)
    key = sha256_of_json(os.path.abspath(slot_of or source))[:12]
    slot = Path(os.path.abspath(stage_dir)) / f"{kind}-{key}"
    wanted = sha256_of_json({name: [file.bytes, file.sha256, file.changed] for name, file in files.items()})
    with _alone(slot, source) as lock:
        if lock.left.get("wanted") == wanted and lock.left.get("verified", 0.0) >= psutil.Process().create_time():
            return slot / source.name  # another process of this launch has just done it
        fault = _fault(slot, source, files, lock.beat)
        if fault is not None:
            if slot.exists():
                print(f"notice: {slot} is written again: {fault}.", file=sys.stderr, flush=True)
            _copy(source, slot, files, lock.beat)
        lock.leave({"wanted": wanted, "verified": time.time()})
    return slot / source.name


def appear(folder: Path) -> None:
    """Open each folder on the way to `folder`, so that network folders that are mounted when they are used appear.

    Raises:
        ConfigError: naming the first that does not exist.
    """
    for step in (*reversed(folder.parents), folder):
        for last in range(_PROBES):
            try:
                os.close(os.open(step, os.O_RDONLY))
                break
            except PermissionError:
                break  # it can be passed through all the same
            except FileNotFoundError:
                if last == _PROBES - 1:
                    raise ConfigError(
                        f"{folder} does not exist: {step} is not in {step.parent}. Check the path and the mount."
                    ) from None
                time.sleep(_PROBE_SECONDS)


def _files_of(source: Path) -> dict[str, _File]:
    """What a folder of shards, a checkpoint or a model folder consists of, by relative name."""
    manifest = source / "manifest.json"
    if not manifest.is_file():
        if not (source / "config.json").is_file():
            raise ConfigError(
                f"{source} has neither manifest.json nor config.json. Give shards, a checkpoint or a model folder."
            )
        return {path.name: _on_disk(path) for path in sorted(source.iterdir()) if path.is_file()}
    try:
        values = read_json(manifest)
        shards = [entry for split in values.get("splits", {}).values() for entry in split["shards"]]
        listed = {entry["name"]: entry for entry in shards} | values.get("files", {})
        files = {str(name): _File(int(facts["bytes"]), str(facts["sha256"]), None) for name, facts in listed.items()}
    except (ConfigError, AttributeError, KeyError, TypeError, ValueError) as error:
        raise DataError(f"{manifest} does not list files with bytes and sha256 ({error!r}). Write it again.") from error
    outside = [name for name in files if ".." in PurePosixPath(name).parts or PurePosixPath(name).is_absolute()]
    if outside:
        raise DataError(f"{manifest} lists {outside[0]!r}, which is outside its folder. Write it again.")
    return {**files, manifest.name: _File(manifest.stat().st_size, sha256_of_file(manifest), None)}


def _on_disk(path: Path) -> _File:
    facts = path.stat()
    return _File(facts.st_size, None, facts.st_mtime_ns)


def _fault(slot: Path, source: Path, files: dict[str, _File], beat: Callable[[], None]) -> str | None:
    """Why the slot is no copy of `files`, or None when every byte is."""
    if not (slot / RECORD).is_file():
        return "it is not finished"
    try:
        recorded = {name: (_File(*facts[:3]), facts[3]) for name, facts in read_json(slot / RECORD)["files"].items()}
    except (ConfigError, KeyError, TypeError, AttributeError):
        return f"its {RECORD} is damaged"
    if {name: file for name, (file, _) in recorded.items()} != files:
        return f"{source} has changed"
    for name, (file, digest) in recorded.items():
        copied = slot / source.name / name
        if not copied.is_file() or copied.stat().st_size != file.bytes or _digest(copied, beat) != digest:
            return f"{name} is damaged"
    return None


def _copy(source: Path, slot: Path, files: dict[str, _File], beat: Callable[[], None]) -> None:
    """Write the slot, whole or not at all."""
    for left in (slot, *slot.parent.glob(f"{TEMPORARY_PREFIX}{slot.name}-*")):
        if left.exists():
            shutil.rmtree(left)
    needed, free = sum(file.bytes for file in files.values()), shutil.disk_usage(slot.parent).free
    if free < needed:
        raise ConfigError(
            f"stage_dir {slot.parent} has {free / 1e9:.3f} GB free and {source} needs {needed / 1e9:.3f} GB. "
            "Free space, give another stage_dir, or leave it out."
        )
    record: dict[str, list[Any]] = {}
    progress = tqdm(total=needed, unit="B", unit_scale=True, desc=f"stage {source.name}", disable=None)
    with atomic_folder(slot) as temporary, progress:
        for name, file in files.items():
            target = temporary / source.name / name
            target.parent.mkdir(parents=True, exist_ok=True)
            if not (source / name).is_file():
                raise DataError(f"{name} of {source} does not exist, and its manifest lists it. Write it again.")
            digest = _digest(source / name, beat, target, progress.update)
            if digest != (file.sha256 or digest) or target.stat().st_size != file.bytes:
                raise DataError(
                    f"{name} of {source} is damaged: {target.stat().st_size:,} bytes with SHA-256 {digest[:12]}..., "
                    f"listed are {file.bytes:,} with {(file.sha256 or 'any')[:12]}.... Write it again."
                )
            if _digest(target, beat) != digest:
                raise DataError(f"{target} is not what was written there. Give a stage_dir on another disk.")
            record[name] = [file.bytes, file.sha256, file.changed, digest]
        write_json(temporary / RECORD, {"source": str(source), "files": record})


def _digest(
    path: Path, beat: Callable[[], None], target: Path | None = None, moved: Callable[[int], Any] = lambda _: None
) -> str:
    """SHA-256 of a file, which is also written to `target` if there is one."""
    digest = hashlib.sha256()
    with open(path, "rb") as file, open(target, "wb") if target else contextlib.nullcontext() as copy:
        while block := file.read(_BLOCK):
            digest.update(block)
            if copy is not None:
                copy.write(block)
            moved(len(block))
            beat()
    return digest.hexdigest()


class _Lock:
    """A lock that is held; `left` is what its last holder left in it."""

    def __init__(self, file: IO[str], left: dict[str, Any]) -> None:
        self._file = file
        self.left = left

    def beat(self) -> None:
        """Show those who wait that the work goes on."""
        os.utime(self._file.name)

    def leave(self, values: dict[str, Any]) -> None:
        """Leave something for the next holder."""
        self._file.seek(0)
        self._file.truncate()
        json.dump(values, self._file)
        self._file.flush()


@contextlib.contextmanager
def _alone(slot: Path, source: Path) -> Iterator[_Lock]:
    """Hold the lock of a slot, after waiting for the process that holds it.

    Raises:
        TrainingError: that process has been silent for too long.
    """
    slot.parent.mkdir(parents=True, exist_ok=True)
    path = slot.with_name(f"{slot.name}.lock")
    with os.fdopen(os.open(path, os.O_RDWR | os.O_CREAT, 0o644), "r+", encoding="utf-8") as file:
        told = False
        while fcntl is not None:
            try:
                fcntl.flock(file.fileno(), fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                silent = time.time() - path.stat().st_mtime
            if silent > SILENCE_SECONDS:
                raise TrainingError(
                    f"The process that copies {source} to {slot} has made no progress for {silent:,.0f} s. "
                    "Look for it and for the disks, end it, and start again; or leave stage_dir out."
                )
            if not told:
                print(f"notice: waiting for another process to copy {source} to {slot}.", file=sys.stderr, flush=True)
                told = True
            time.sleep(_POLL_SECONDS)
        try:
            left = json.loads(file.read() or "{}")
        except ValueError:
            left = {}  # its holder was killed while it wrote
        lock = _Lock(file, left if isinstance(left, dict) else {})
        lock.beat()
        yield lock
