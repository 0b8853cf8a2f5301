"""The conversations of one source as token ids and masks, kept in a cache so that a second start costs nothing."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from tqdm import tqdm

from ..errors import ConfigError, DataError
from ..files import atomic_folder, bundled, read_json, sha256_of_file, sha256_of_json, write_json
from ..sections import ConversationSource, SourceSection
from ..tokenization.chat import ChatRenderer, RenderedChat, chat_template, describe_fault, why_malformed
from ..tokenization.load import tokenizer_sha256
from .chunks import Skipped
from .records import rows_of
from .sources import BUNDLED_PREFIX, read_chunks, source_files

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast

# A new number whenever the same rows would be rendered differently.
VERSION = 1
_ARRAYS = {"ids": np.uint32, "supervised": np.bool_, "starts": np.int64, "message_ends": np.int64, "messages": np.int64}


@dataclass(frozen=True, eq=False)
class Rendering:
    """All well-formed conversations of one source. Conversation i is `ids[starts[i]:starts[i + 1]]`.

    Attributes:
        ids: (N,) uint32, `supervised`: (N,) bool, both memory-mapped.
        starts: (n + 1,) int64.
        message_ends: (m,) int64 places in `ids` where a message ends; conversation i's are
            `message_ends[messages[i]:messages[i + 1]]`.
        rows: rows read. `dropped`: those that are no conversation, by reason; `first`: where each was first met.
        sha256: of ids, masks and borders.
    """

    ids: np.ndarray
    supervised: np.ndarray
    starts: np.ndarray
    message_ends: np.ndarray
    messages: np.ndarray
    rows: int
    dropped: dict[str, int]
    first: dict[str, str]
    sha256: str

    def __len__(self) -> int:
        return len(self.starts) - 1


def render_source(
    source: ConversationSource, tokenizer: PreTrainedTokenizerFast, cache: Path | None = None, progress: bool = False
) -> Rendering:
    """Render a source, or take what an earlier call left in the cache for the same rows and tokenizer.

    Args:
        cache: a folder; None: beside the cache of `datasets` (HF_HOME and HF_DATASETS_CACHE move it).

    Raises:
        ConfigError: the cache cannot be written.
        DataError: the source cannot be read, or holds no conversation.
    """
    fingerprint, rows = _open(source)
    tokens = tokenizer_sha256(tokenizer)
    chosen = [source.messages_column, source.filter_column, sorted(source.allowed_values)]
    key = sha256_of_json([VERSION, fingerprint, chosen, tokens, chat_template()])
    folder = (cache or _default_cache()) / key
    found = _read(folder)
    if found is None:
        try:
            with atomic_folder(folder, replace=True) as temporary:
                _write(temporary, rows, source, ChatRenderer(tokenizer), progress)
        except OSError as error:  # an account without a home, or a cache that others share
            raise ConfigError(
                f"the cache {folder.parent}, which keeps rendered conversations, cannot be written ({error.strerror}). "
                "Name a folder that can: export HF_DATASETS_CACHE=DIR"
            ) from error
        found = _read(folder)
    assert found is not None, "what was written a moment ago can be read"
    if not len(found):
        raise DataError(
            f"source {source.name}: none of the {found.rows:,} rows of {source.path} is a conversation "
            f"({fault_counts(found.dropped, found.first)}). A column {source.messages_column} with a list of messages "
            f"(role, content) is needed."
        )
    return found


def fault_counts(dropped: dict[str, int], first: dict[str, str]) -> str:
    """Dropped rows in words: `3 null_content (a message has no content; first at chats.jsonl line 7)`."""
    return "; ".join(
        f"{count:,} {why} ({describe_fault(why)}; first at {first[why]})" for why, count in dropped.items()
    )


def _default_cache() -> Path:
    import datasets

    return Path(datasets.config.HF_DATASETS_CACHE) / "hf_tinylm-conversations"


def is_local(source: ConversationSource) -> bool:
    """Whether a source is files on this machine, and not the name of a dataset.

    Raises:
        DataError: its files do not exist.
    """
    return bool(source_files(_as_files(source)))


def _as_files(source: ConversationSource) -> SourceSection:
    path = source.path
    if path.startswith(BUNDLED_PREFIX):
        path = str(bundled("recipes", *path.removeprefix(BUNDLED_PREFIX).split("/")))
    return SourceSection(
        source.name, path, text_column=source.messages_column, split=source.split,
        language_column=source.filter_column, allowed_languages=source.allowed_values,
    )  # fmt: skip


def _open(source: ConversationSource) -> tuple[list[str], Iterator[tuple[str, Any]]]:
    """What identifies the rows of a source, and (place, messages) of each."""
    files = _as_files(source)
    found = source_files(files)
    if not found:
        return _open_dataset(source)
    wrong = [file for file, format_ in found if format_ not in ("jsonl", "parquet", "arrow")]
    if wrong:
        raise DataError(f"source {source.name}: {wrong[0]} holds no rows. Give .jsonl, .parquet or .arrow files.")
    rows = (row for chunk in read_chunks(files) for row in rows_of(chunk, files, Skipped()))
    wanted = ((row.place, row.text) for row in rows if _is_wanted(source, row.columns.get(source.filter_column or "")))
    return [sha256_of_file(file) for file, _ in found], wanted


def _is_wanted(source: ConversationSource, value: Any) -> bool:
    return source.filter_column is None or value in source.allowed_values


def _open_dataset(source: ConversationSource) -> tuple[list[str], Iterator[tuple[str, Any]]]:
    import datasets

    try:
        table = datasets.load_dataset(source.path, source.config, split=source.split)
    except (OSError, ValueError, datasets.exceptions.DatasetsError) as error:
        reason = " ".join(str(error).split())[:200]
        raise DataError(
            f"source {source.name}: {source.path} is no local file, and the dataset of that name could not be read: "
            f"{reason}. Correct path, config or split of the source."
        ) from error
    columns = [source.messages_column, *([source.filter_column] if source.filter_column else [])]
    for column in columns:
        if column not in table.column_names:
            names = ", ".join(table.column_names)
            raise DataError(f"{source.path} has no column {column}; its columns are {names}. Name one of them.")
    rows = (
        (f"{source.path} row {number:,}", row[source.messages_column])
        for number, row in enumerate(table.select_columns(columns), start=1)
        if _is_wanted(source, row.get(source.filter_column or ""))
    )
    return [table._fingerprint], rows


def _write(
    folder: Path,
    rows: Iterator[tuple[str, Any]],
    source: ConversationSource,
    renderer: ChatRenderer,
    progress: bool,
) -> None:
    """Render into `folder`, one conversation after the other: memory stays small however many there are."""
    skipped, read = Skipped(), 0
    starts, message_ends, messages = [0], [], [0]
    hashes = hashlib.sha256()
    with (folder / "ids.bin").open("wb") as ids_file, (folder / "supervised.bin").open("wb") as mask_file:
        bar = tqdm(rows, desc=f"render {source.name}", unit=" rows", delay=2, disable=not progress)
        for place, conversation in bar:
            read += 1
            reason = why_malformed(conversation)
            if reason is not None:
                skipped.add(reason, place)
                continue
            chat: RenderedChat = renderer.render(conversation)
            for file, content in ((ids_file, chat.ids.tobytes()), (mask_file, chat.supervised.tobytes())):
                file.write(content)
                hashes.update(content)
            message_ends += [starts[-1] + end for end in chat.message_ends]
            messages.append(len(message_ends))
            starts.append(starts[-1] + len(chat.ids))
    for name, values in (("starts", starts), ("message_ends", message_ends), ("messages", messages)):
        content = np.array(values, dtype=np.int64).tobytes()
        (folder / f"{name}.bin").write_bytes(content)
        hashes.update(content)
    facts = {"rows": read, "dropped": dict(skipped.counts), "first": skipped.first, "sha256": hashes.hexdigest()}
    write_json(folder / "manifest.json", facts)


def _read(folder: Path) -> Rendering | None:
    """What the cache holds; None when it is absent or damaged, and then it is rendered afresh."""
    if not (folder / "manifest.json").is_file():
        return None
    facts = read_json(folder / "manifest.json")
    arrays: dict[str, np.ndarray] = {}
    for name, dtype in _ARRAYS.items():
        file = folder / f"{name}.bin"
        if not file.is_file() or file.stat().st_size % np.dtype(dtype).itemsize:
            return None
        empty = not file.stat().st_size  # a file of no bytes cannot be mapped
        arrays[name] = np.empty(0, dtype) if empty else np.memmap(file, dtype, mode="r")
    rendering = Rendering(**{**arrays, **facts})
    return rendering if _is_whole(rendering) else None


def _is_whole(rendering: Rendering) -> bool:
    """Whether the arrays are those that were written. Ids and masks were hashed conversation by conversation."""
    ids, supervised, starts = rendering.ids, rendering.supervised, rendering.starts
    if not len(starts) or not len(ids) == len(supervised) == starts[-1]:
        return False
    hashes = hashlib.sha256()
    for begin, end in zip(starts[:-1].tolist(), starts[1:].tolist(), strict=True):
        hashes.update(ids[begin:end].tobytes())
        hashes.update(supervised[begin:end].tobytes())
    for array in (starts, rendering.message_ends, rendering.messages):
        hashes.update(array.tobytes())
    return hashes.hexdigest() == rendering.sha256


def check_masks(rendering: Rendering, renderer: ChatRenderer, name: str) -> None:
    """Look at every id: each message has one control token at each end, and each reply, nothing else, is supervised
    from behind its header to its `<|im_end|>`.

    Raises:
        DataError: naming the first conversation of which this is not true.
    """
    for block in range(0, len(rendering), 4096):
        fault = _first_fault(rendering, block, min(block + 4096, len(rendering)), renderer)
        if fault is not None:
            conversation = int(np.searchsorted(rendering.messages, fault, "right"))
            raise DataError(
                f"source {name}: the mask of conversation {conversation:,} is wrong; training on it would not teach "
                f"what it should. Remove the rendering from the cache of datasets, and start again."
            )


def _first_fault(rendering: Rendering, first: int, last: int, renderer: ChatRenderer) -> int | None:
    """The first message of conversations `first` to `last` (exclusive) that is not masked as it should be."""
    begin = int(rendering.starts[first])
    ids, mask = rendering.ids[begin : rendering.starts[last]], rendering.supervised[begin : rendering.starts[last]]
    ends = rendering.message_ends[rendering.messages[first] : rendering.messages[last]] - begin
    heads = np.concatenate(([0], ends[:-1]))  # where each message begins

    def per_message(flags: np.ndarray) -> np.ndarray:
        return np.add.reduceat(flags, heads, dtype=np.int64)

    header = renderer.reply_header
    run_begins = mask & ~np.concatenate(([False], mask[:-1]))
    run_ends = mask & ~np.concatenate((mask[1:], [False]))
    is_reply = np.ones(len(heads), dtype=bool)
    for place, id_ in enumerate(header[:-1], start=1):  # a reply may share the last id, of the line break
        is_reply &= ids[np.minimum(heads + place, len(ids) - 1)] == id_
    wrong = (per_message(ids == renderer.start_id) != 1) | (ids[heads] != renderer.start_id)
    wrong |= per_message(ids == renderer.end_id) != 1
    wrong |= (per_message(run_begins) != is_reply) | (per_message(run_ends & (ids == renderer.end_id)) != is_reply)
    places = np.flatnonzero(run_begins)
    message = np.searchsorted(heads, places, "right") - 1
    wrong[message] |= places - heads[message] != 1 + len(header)
    found = np.flatnonzero(wrong)
    return int(rendering.messages[first] + found[0]) if len(found) else None
