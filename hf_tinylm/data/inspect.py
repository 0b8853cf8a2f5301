"""What is in a folder of shards, or in the conversations of a config: counts, and windows as the model sees them."""

from __future__ import annotations

import itertools
from typing import TYPE_CHECKING, Any

import numpy as np

from ..errors import TokenizerError
from ..sections import RunConfig
from ..tokenization.load import load_tokenizer, tokenizer_sha256
from .conversations import Conversations, open_conversations
from .shards import load_shards
from .windows import TokenWindows

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast


def inspection(
    path: str, tokenizer_path: str | None = None, sequence_length: int = 64, windows: int = 3
) -> dict[str, Any]:
    """The manifest of a pack, and `windows` decoded training windows when a tokenizer is given.

    Raises:
        DataError: the folder is no pack, or a file differs from its manifest.
        TokenizerError: the tokenizer is not the one that wrote the pack.
    """
    shards = load_shards(path)
    found = {"path": str(path), **shards.manifest, "windows": []}
    if tokenizer_path is None:
        return found
    tokenizer = load_tokenizer(tokenizer_path)
    if tokenizer_sha256(tokenizer) != shards.tokenizer_sha256:
        raise TokenizerError(
            f"{path} was written with another tokenizer than {tokenizer_path}. Give the one it was written with."
        )
    cut = TokenWindows(
        [shard.ids for shard in shards.train], sequence_length, "permutation", 0, [shard.name for shard in shards.train]
    )
    for k in range(min(windows, len(cut))):
        ids = cut.gather([k])[0]
        found["windows"].append(
            {**cut.describe(k), "input": tokenizer.decode(ids[:-1]), "target": tokenizer.decode(ids[1:])}
        )
    return found


def inspection_lines(found: dict[str, Any]) -> list[str]:
    """`inspection` for people."""
    lines = manifest_lines(found["path"], found)
    for window in found["windows"]:
        lines.append(f"\nwindow {window['window']} ({window['shard']}, ids {window['start']:,} to {window['end']:,})")
        lines.append(f"  input:  {window['input']!r}")
        lines.append(f"  target: {window['target']!r}")
    return lines


def chat_inspection(config: RunConfig, tokenizer: PreTrainedTokenizerFast, windows: int = 3) -> dict[str, Any]:
    """What a chat run would learn from: the report of its conversations, and the first `windows` windows in spans.

    Raises:
        ConfigError: the configuration names no conversations.
        DataError: a source cannot be read, or a mask is wrong.
    """
    data = open_conversations(config, tokenizer)
    shown = []
    for window in range(min(windows, len(data.train))):
        items = data.train.bins[int(data.train.locate([window])[0])]
        chats = data.train.conversations
        shown.append([{"place": chats.place(i), "spans": _spans(chats, i, tokenizer)} for i in items])
    return {**data.report(), "lines": data.lines(), "windows": shown}


def _spans(chats: Conversations, i: int, tokenizer: PreTrainedTokenizerFast) -> list[dict[str, Any]]:
    """Conversation i as texts that are supervised or are not, in turn."""
    inputs, targets = chats.inputs_and_targets(i)
    ids = chats.renderings[chats.source[i]].ids[chats.begin[i] : chats.end[i]]
    supervised = np.concatenate(([False], targets != -100))
    borders = [0, *(np.flatnonzero(np.diff(supervised)) + 1).tolist(), len(inputs) + 1]
    return [
        {"text": str(tokenizer.decode(ids[begin:end].tolist())), "supervised": bool(supervised[begin])}
        for begin, end in itertools.pairwise(borders)
    ]


def chat_inspection_lines(found: dict[str, Any], colour: bool) -> list[str]:
    """`chat_inspection` for people: what is supervised is green (between ⟦ and ⟧ without colour), the rest grey."""
    on, off, rest, end = ("\x1b[32m", "\x1b[0m", "\x1b[90m", "\x1b[0m") if colour else ("⟦", "⟧", "", "")
    lines = list(found["lines"])
    for number, window in enumerate(found["windows"]):
        lines.append(f"\nwindow {number}: {len(window)} conversations; supervised: {on}like this{off}")
        for chat in window:
            # a control character of a conversation is shown, not obeyed by the terminal
            texts = [(span["text"].replace("\x1b", "\\x1b"), span["supervised"]) for span in chat["spans"]]
            shown = "".join(f"{on}{text}{off}" if green else f"{rest}{text}{end}" for text, green in texts)
            lines.append(f"  {chat['place']}\n{shown}")
    return lines


def manifest_lines(path: str, manifest: dict[str, Any]) -> list[str]:
    """A manifest for people."""
    lines = [
        f"{path}: {manifest['ids']:,} {manifest['dtype']} ids of {manifest['documents']:,} documents, "
        f"vocabulary {manifest['vocab_size']:,}, tokenizer {manifest['tokenizer_sha256'][:12]}...",
        f"  train {manifest['splits']['train']['ids']:,} ids, validation {manifest['splits']['validation']['ids']:,}; "
        f"duplicates dropped: {manifest['duplicates']:,}; dropped for other reasons: {manifest['dropped'] or 'none'}",
    ]
    for name, source in manifest["sources"].items():
        lines.append(f"  {name}: {source['ids']:,} ids, {source['documents']:,} documents, licence {source['licence']}")
    return lines
