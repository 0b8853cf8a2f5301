"""The tensors of a model folder's safetensors files, read some rows at a time with numpy."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any, cast

import numpy as np

from ..errors import ExportError
from .gguf_tokenizer import read_json_object

_NUMPY_TYPES: dict[str, np.dtype[Any]] = {
    "F32": np.dtype("<f4"),
    "F16": np.dtype("<f2"),
    "BF16": np.dtype("<u2"),
    "F64": np.dtype("<f8"),
}


class SafetensorsFolder:
    """The safetensors files of a folder, one or sharded; nothing is loaded before it is asked for."""

    def __init__(self, model_folder: Path) -> None:
        paths = weight_files(model_folder)
        self._entries: dict[str, tuple[Path, int, dict[str, Any]]] = {}
        for path in paths:
            for name, start, entry in _read_header(path):
                if name in self._entries:
                    raise ExportError(
                        f"{name} is in both {self._entries[name][0].name} and {path.name} of {model_folder}."
                    )
                self._entries[name] = (path, start, entry)

    def check(self, expected: dict[str, tuple[int, ...]]) -> None:
        """Raise `ExportError` unless the tensors are exactly `expected`, by name and shape."""
        missing, extra = sorted(expected.keys() - self._entries.keys()), sorted(self._entries.keys() - expected.keys())
        for names, problem in ((missing, "lack"), (extra, "have beside those that config.json implies")):
            if names:
                raise ExportError(
                    f"the weights {problem} {len(names)} tensor(s): {', '.join(names[:3])}. "
                    "Export an unaltered model folder."
                )
        for name, shape in expected.items():
            entry = self._entries[name][2]
            if tuple(entry["shape"]) != shape:
                raise ExportError(f"{name} has shape {tuple(entry['shape'])}; config.json implies {shape}.")
            if entry["dtype"] not in _NUMPY_TYPES:
                raise ExportError(f"{name} is stored as {entry['dtype']}; {', '.join(_NUMPY_TYPES)} can be exported.")

    def rows(self, name: str, start: int, stop: int) -> np.ndarray:
        """Rows `start` to `stop` of a tensor, read from its file; bfloat16 widened to float32, which is exact."""
        path, data_start, entry = self._entries[name]
        dtype: np.dtype[Any] = _NUMPY_TYPES[entry["dtype"]]
        shape = (stop - start, *entry["shape"][1:])
        row_numbers = math.prod(shape[1:])
        offset = data_start + entry["data_offsets"][0] + start * row_numbers * dtype.itemsize
        # read, not mapped: mapped pages would stay in memory for as long as the file is open
        flat = np.fromfile(path, dtype=dtype, count=shape[0] * row_numbers, offset=offset)
        numbers = (flat.astype("<u4") << 16).view("<f4") if entry["dtype"] == "BF16" else flat
        return cast(np.ndarray, numbers.reshape(shape))


def weight_files(model_folder: Path) -> list[Path]:
    """The safetensors files of a model folder, one or sharded; they may be missing.

    Raises:
        ExportError: the folder has neither form.
    """
    single, index = model_folder / "model.safetensors", model_folder / "model.safetensors.index.json"
    if single.is_file():
        return [single]
    if not index.is_file():
        raise ExportError(f"{model_folder} has no model.safetensors. Give a folder with a model's config and weights.")
    names = read_json_object(index).get("weight_map")
    if not isinstance(names, dict) or not names:
        raise ExportError(f"{index} names no weights. Copy the whole folder again.")
    return [model_folder / Path(name).name for name in sorted(set(names.values()))]


def _read_header(path: Path) -> Iterator[tuple[str, int, dict[str, Any]]]:
    """Name, start of the data section and header entry of each tensor of a safetensors file.

    Source: safetensors, README, "Format".
    """
    import safetensors

    if not path.is_file():
        raise ExportError(f"{path} is named by the index of the weights and does not exist. Copy the whole folder.")
    try:
        with safetensors.safe_open(path, framework="np"):  # checks sizes and offsets against the file
            pass
    except safetensors.SafetensorError as error:
        raise ExportError(f"{path} is not a whole safetensors file ({error}). Copy or export it again.") from error
    with open(path, "rb") as file:
        length = int.from_bytes(file.read(8), "little")
        header = json.loads(file.read(length))
    for name, entry in header.items():
        if name != "__metadata__":
            yield name, 8 + length, entry
