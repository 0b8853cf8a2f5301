"""Files that are either whole or absent: temporary name, fsync, one rename; and their SHA-256."""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from .errors import ConfigError

TEMPORARY_PREFIX = ".tmp-"


def cache_folder() -> Path:
    """Where compiled code is kept from one run to the next: under XDG_CACHE_HOME, or ~/.cache."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "hf_tinylm"


def temporary_sibling(path: Path) -> Path:
    """A fresh hidden name beside `path`, on the same volume, so that one rename puts it in place."""
    return path.with_name(f"{TEMPORARY_PREFIX}{path.name}-{uuid.uuid4().hex[:8]}")


def fsync_path(path: Path) -> None:
    """Force a file or a folder entry to the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def fsync_tree(folder: Path) -> None:
    """Force every file and folder under `folder`, and `folder` itself, to the disk."""
    for root, _, names in os.walk(folder, topdown=False):
        for name in names:
            fsync_path(Path(root) / name)
        fsync_path(Path(root))


@contextmanager
def atomic_file(path: str | os.PathLike[str]) -> Iterator[Path]:
    """Yield a temporary path; when the block ends well it is fsynced and renamed to `path`, else removed.

    A link is written through: the file it points at is replaced, the link stays.
    """
    target = Path(os.path.realpath(path))
    target.parent.mkdir(parents=True, exist_ok=True)
    temporary = temporary_sibling(target)
    try:
        yield temporary
        fsync_path(temporary)
        os.replace(temporary, target)
        fsync_path(target.parent)
    finally:
        temporary.unlink(missing_ok=True)


@contextmanager
def atomic_folder(path: str | os.PathLike[str], replace: bool = False) -> Iterator[Path]:
    """Yield a temporary folder; when the block ends well it is fsynced and renamed to `path`, else removed.

    A link is written through: the folder it points at is replaced, the link stays.

    Raises:
        ConfigError: `path` is a file, or it holds something and `replace` is false.
    """
    target = Path(os.path.realpath(path))
    if not replace or not target.is_dir():
        refuse_folder_in_use(target)
    target.parent.mkdir(parents=True, exist_ok=True)
    temporary = temporary_sibling(target)
    temporary.mkdir()
    try:
        yield temporary
        fsync_tree(temporary)
        _swap_in(temporary, target)
    finally:
        shutil.rmtree(temporary, ignore_errors=True)


def _swap_in(folder: Path, target: Path) -> None:
    """Rename `folder` to `target`; what was there is removed after, or put back if the rename fails."""
    previous = temporary_sibling(target) if target.exists() else None
    if previous is not None:
        os.rename(target, previous)
    try:
        os.rename(folder, target)
    except OSError:
        if previous is not None:
            os.rename(previous, target)
        raise
    fsync_path(target.parent)
    if previous is not None:
        shutil.rmtree(previous)


def replace_link(link: Path, target: Path) -> None:
    """Point the symbolic link `link` at `target` by one rename: at every moment it leads to the old or the new one.

    The target is written relative to the link's folder, so that both can be moved together.
    """
    temporary = temporary_sibling(link)
    temporary.symlink_to(os.path.relpath(target.resolve(), link.parent.resolve()))
    try:
        os.replace(temporary, link)
        fsync_path(link.parent)
    finally:
        temporary.unlink(missing_ok=True)


def refuse_folder_in_use(folder: Path) -> None:
    """Raise `ConfigError` when `folder` is a file or holds anything."""
    if folder.exists() and not folder.is_dir():
        raise ConfigError(f"{folder} is a file; a new or empty folder is needed. Give another output folder.")
    if folder.is_dir() and any(folder.iterdir()):
        raise ConfigError(
            f"{folder} exists and is not empty; a new or empty folder is needed. Give another folder, or remove it."
        )


def write_text(path: str | os.PathLike[str], text: str) -> None:
    """Write UTF-8 text atomically."""
    with atomic_file(path) as temporary:
        temporary.write_text(text, encoding="utf-8", newline="\n")


def write_json(path: str | os.PathLike[str], value: Any) -> None:
    """Write JSON atomically, indented, keys in the order given."""
    write_text(path, json.dumps(value, indent=2, ensure_ascii=False, allow_nan=False) + "\n")


def read_json(path: str | os.PathLike[str]) -> Any:
    """Read a JSON file.

    Raises:
        ConfigError: the file is missing or is not JSON.
    """
    source = Path(path)
    if not source.is_file():
        raise ConfigError(f"{source} does not exist; a JSON file was expected there. Check the path.")
    try:
        return json.loads(source.read_text(encoding="utf-8"))
    except (ValueError, RecursionError) as error:  # not UTF-8, not JSON, a number or a nesting beyond reason
        raise ConfigError(f"{source} is not valid JSON ({error}).") from error


def read_record(path: str | os.PathLike[str], *keys: str) -> dict[str, Any]:
    """Read a JSON file that holds one object with these keys, such as the record of a run.

    Raises:
        ConfigError: the file is missing, is not JSON, or holds something else.
    """
    value = read_json(path)
    missing = [key for key in keys if key not in value] if isinstance(value, dict) else []
    if not isinstance(value, dict) or missing:
        has = f"has no {missing[0]}" if missing else "does not hold an object with keys"
        raise ConfigError(f"{path} {has}; it is damaged or not what its name says. Restore it from where it came from.")
    return value


def read_rows(path: Path) -> list[dict[str, Any]]:
    """Whole rows of a JSON-lines file; none when it does not exist."""
    if not path.is_file():
        return []
    rows = []
    for line in path.read_bytes().split(b"\n"):  # not splitlines: a row may hold other characters that end a line
        try:
            row = json.loads(line)
        except ValueError:
            continue  # empty, or torn by a crash in the middle of an append
        if isinstance(row, dict):
            rows.append(row)
    return rows


def sha256_of_file(path: str | os.PathLike[str]) -> str:
    """Hexadecimal SHA-256 of a file's bytes, read in blocks."""
    with open(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def sha256_of_json(value: Any) -> str:
    """Hexadecimal SHA-256 of `value` as canonical JSON (sorted keys, no white space, UTF-8)."""
    text = json.dumps(value, sort_keys=True, separators=(",", ":"), ensure_ascii=False)
    return hashlib.sha256(text.encode("utf-8", "surrogatepass")).hexdigest()


def bundled(*parts: str) -> Path:
    """Path of something that ships with the package: `bundled("recipes", "configs")`.

    In a wheel these folders are package data; in a checkout they are at the top of the repository.
    """
    package = Path(__file__).resolve().parent
    for root in (package / "bundled", package.parent):
        candidate = root.joinpath(*parts)
        if candidate.exists():
            return candidate
    raise ConfigError(
        f"{'/'.join(parts)} is not part of this installation. Reinstall: pip install --force-reinstall hf-tinylm"
    )
