"""The conversations of a chat run as the model sees them: counts, and text with its masks."""

from __future__ import annotations

import itertools
from typing import TYPE_CHECKING, Any

import numpy as np

from ..sections import RunConfig
from .conversations import Conversations, open_conversations

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast


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
