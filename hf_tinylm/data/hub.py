"""Datasets by name: from the Hub, streamed at one commit, or from a folder that `datasets` reads."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, cast

from ..errors import DataError
from ..sections import SourceSection
from .chunks import CHUNK_BYTES, CHUNK_DOCUMENTS, Chunk
from .readers import require_columns


def pinned(source: SourceSection) -> SourceSection:
    """The source of a Hub dataset with the commit that its `revision` (or its main branch) has now.

    So every read is of the same data, a run that goes on after a stop too, and the manifest can say which it was.

    Raises:
        DataError: there is no such dataset or revision, this account may not read it, or the Hub cannot be reached.
    """
    if Path(source.path).exists():
        return source
    from huggingface_hub import HfApi
    from huggingface_hub.errors import HfHubHTTPError

    client_error = cast(type[Exception], HfHubHTTPError.__bases__[0])  # of whichever HTTP library it uses
    try:
        return dataclasses.replace(source, revision=HfApi().dataset_info(source.path, revision=source.revision).sha)
    except (OSError, ValueError, client_error) as error:
        raise DataError(f"source {source.name}: {_why_unreadable(source, error)}") from error


def _why_unreadable(source: SourceSection, error: Exception) -> str:
    from huggingface_hub import constants, errors

    status = getattr(getattr(error, "response", None), "status_code", None)
    if isinstance(error, errors.OfflineModeIsEnabled):
        return (
            f"{source.path} is no file here, and the Hub is not asked for a dataset of that name in offline mode. "
            f"Unset HF_HUB_OFFLINE, or give local files."
        )
    if isinstance(error, errors.GatedRepoError):
        page = f"{constants.ENDPOINT}/datasets/{source.path}"
        return f"{source.path} is gated, and its terms are not accepted with this token. Accept them on {page}"
    if isinstance(error, errors.RevisionNotFoundError):
        return f"{source.path} has no revision {source.revision}. Correct revision, or leave it out."
    if isinstance(error, errors.RepositoryNotFoundError) or status in (401, 403):
        return (
            f"{source.path} is no file here, and the Hub shows no dataset of that name to this account (HTTP {status})."
            f" Correct path; if the dataset is private, log in with `hf auth login` or set HF_TOKEN."
        )
    reason = " ".join(str(error).split())[:200]
    if status is not None:
        return f"{source.path} cannot be read from the Hub: it answers HTTP {status}. Run the same command again later."
    return (
        f"{source.path} is no file here, and the Hub at {constants.ENDPOINT} cannot be asked for a dataset of that "
        f"name ({reason}). Check the network and HF_ENDPOINT, or give local files."
    )


def read_dataset(source: SourceSection, columns: Sequence[str]) -> Iterator[Chunk]:
    """The given columns (the text first) of each row of a dataset by name, streamed.

    Raises:
        DataError: there is no such dataset, configuration, split or column, or reading it failed.
    """
    source = pinned(source)
    import datasets

    try:
        rows = datasets.load_dataset(
            source.path, source.config, split=source.split, revision=source.revision, streaming=True
        )
        if rows.column_names is not None:
            require_columns(source.path, columns, rows.column_names)
        yield from row_chunks(source.path, rows, columns)
    except DataError:
        raise
    except (OSError, ValueError, datasets.exceptions.DatasetsError) as error:
        reason = " ".join(str(error).split())[:200]
        raise DataError(
            f"source {source.name}: the dataset {source.path} could not be read: {reason}. Correct path, config or "
            f"split of the source; if the connection broke, run the same command again to go on."
        ) from error


def row_chunks(path: str, rows: Iterable[Mapping[str, Any]], columns: Sequence[str]) -> Iterator[Chunk]:
    """Rows as chunks of JSON lines; `path` says where they come from.

    Raises:
        DataError: a value is of a kind that JSON has not.
    """
    lines: list[bytes] = []
    size, first = 0, 1
    for number, row in enumerate(rows, start=1):
        try:
            line = json.dumps({name: row[name] for name in columns if name in row}).encode()
        except TypeError as error:
            raise DataError(f"{path} row {number:,}: {error}. Name the column that holds the text.") from error
        if lines and (size + len(line) > CHUNK_BYTES or len(lines) == CHUNK_DOCUMENTS):
            yield Chunk("jsonl", path, b"\n".join(lines), first, unit="row")
            lines, size, first = [], 0, number
        lines.append(line)
        size += len(line)
    if lines:
        yield Chunk("jsonl", path, b"\n".join(lines), first, unit="row")
