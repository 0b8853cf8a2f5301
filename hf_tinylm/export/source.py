"""What an export starts from: a final folder, a checkpoint of a run, a stock folder, or a model's name on the Hub."""

from __future__ import annotations

import shutil
from dataclasses import dataclass
from pathlib import Path

from ..files import read_record
from ..model_folder import OWN_MODEL_TYPES, find_model_folder
from .weights import weight_files

_COPIED_SUFFIXES = (".json", ".jinja", ".md", ".txt")


@dataclass(frozen=True)
class ModelSource:
    """A model folder; `stock` when other programs open it as it is, with the tokenizer in it."""

    folder: Path
    stock: bool


def find_source(model: str) -> ModelSource:
    """The model that a user names; one that is not on this machine is fetched from the Hub.

    Raises:
        ConfigError: there is no such model.
    """
    folder = find_model_folder(model)
    kind = read_record(folder / "config.json").get("model_type")
    return ModelSource(folder, stock=kind not in OWN_MODEL_TYPES and (folder / "tokenizer.json").is_file())


def copy_stock_folder(source: Path, target: Path) -> None:
    """Copy what makes a stock model folder: configuration, weights, tokenizer, card and licence, byte for byte."""
    weights = {path.name for path in weight_files(source)}
    for path in sorted(source.iterdir()):
        wanted = path.name in weights or path.suffix in _COPIED_SUFFIXES or path.name.startswith("LICENSE")
        if wanted and path.is_file() and not path.name.startswith("."):
            shutil.copyfile(path, target / path.name)
