"""The files that a configuration is read from: one, or one that says what differs from its base.

A file that gives `base: NAME_OR_PATH` states only its own keys; all others are those of the base, which may have a base
in turn. A key is replaced whole, a list such as `sources` too. `base` ends with reading: no configuration has it.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from .errors import ConfigError
from .files import bundled, read_json
from .sections import RunConfig
from .values import parse_text, shown

BASE = "base"
_SECTIONS = tuple(f.name for f in dataclasses.fields(RunConfig))
# What one invocation was asked, which is no part of what the run is.
_OF_ONE_INVOCATION = ("stop_after_updates", "max_hours", "max_cost", "resume_from_checkpoint")


def find_config(path: str, beside: Path | None = None) -> Path:
    """The file that `path` names: itself, or `recipes/configs/NAME.yaml` of this installation.

    Args:
        beside: the configuration whose base it is, if it is one: then the path begins at its folder.

    Raises:
        ConfigError: neither exists.
    """
    itself = Path(path) if beside is None else beside.parent / path
    if _is_file(itself):
        return itself
    folder = bundled("recipes", "configs")
    named = folder / f"{path.removesuffix('.yaml')}.yaml"
    if named.parent == folder and _is_file(named):
        return named
    names = ", ".join(sorted(f.stem for f in folder.glob("*.yaml")))
    if beside is not None:
        raise ConfigError(
            f"{beside}: its base {shown(path)} does not exist. Give a file, by its path from that folder, or the name "
            f"of a bundled config: {names}."
        )
    raise ConfigError(f"Config {path} does not exist. Give a YAML file, or the name of a bundled config: {names}.")


def _is_file(path: Path) -> bool:
    try:
        return path.is_file()
    except OSError:  # such as a name that is too long
        return False


def read_with_bases(path: Path) -> list[tuple[Path, dict[str, Any]]]:
    """The file and what it holds, after those that it is based on: what comes later replaces what comes before.

    Raises:
        ConfigError: a file is missing or is no YAML of sections, or the bases never end.
    """
    chain = [(path, _read(path))]
    while BASE in chain[0][1]:
        file, content = chain[0]
        name = content.pop(BASE)
        if not isinstance(name, str) or not name.strip():
            raise ConfigError(f"{file}: base={shown(name)} must be the path of a file or the name of a bundled config.")
        base = find_config(name, file)
        if any(base.samefile(known) for known, _ in chain):
            way = " is based on ".join(str(known) for known in (*(known for known, _ in reversed(chain)), base))
            raise ConfigError(f"These bases never end: {way}. Take the key base out of one of these files.")
        chain.insert(0, (base, _read(base)))
    return chain


def _read(path: Path) -> dict[str, Any]:
    if path.suffix == ".json":
        return _read_run(path)
    try:
        values = parse_text(path.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path} cannot be read as UTF-8 text: {error}") from error
    except ConfigError as error:
        raise ConfigError(f"{path} is {error}") from error
    if not isinstance(values, Mapping):
        raise ConfigError(f"{path} holds no sections; the sections are {', '.join(_SECTIONS)}.")
    return dict(values)


def _read_run(path: Path) -> dict[str, Any]:
    """The configuration that a run.json keeps, without the budgets of the invocation that wrote it."""
    values = read_json(path)
    config = values.get("config") if isinstance(values, dict) else None
    if not isinstance(config, dict):
        raise ConfigError(f"{path} holds no configuration: give the run.json of a run that has one, or a YAML file.")
    training = {k: v for k, v in (config.get("training") or {}).items() if k not in _OF_ONE_INVOCATION}
    return {**config, "training": training}
