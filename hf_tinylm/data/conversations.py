"""What a chat run trains on: sources of conversations mixed, cut to length, masked and packed into windows."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import numpy as np

from ..errors import ConfigError, DataError
from ..files import sha256_of_json
from ..sections import ConversationSource, RunConfig
from ..tokenization.chat import ChatRenderer
from ..tokenization.load import tokenizer_sha256
from .packing import ConversationWindows
from .permutation import key_of, permute
from .renderings import Rendering, check_masks, fault_counts, render_source

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast

Truncation = Literal["drop", "left", "turns"]
NOT_SUPERVISED = -100


@dataclass(frozen=True, eq=False)
class Conversations:
    """Conversations of several sources, each a span of ids of its source; one taken twice is in it twice.

    A span of p + 1 ids gives p positions: each id but the last is an input, each but the first may be a target.

    Attributes:
        source, begin, end: (n,) int64; conversation i is `renderings[source[i]].ids[begin[i]:end[i]]`.
        targets: (n,) int64 supervised targets of each, at least one.
        facts: what became of each source, by name: see `docs/chat.md`.
    """

    names: list[str]
    renderings: list[Rendering]
    source: np.ndarray
    begin: np.ndarray
    end: np.ndarray
    targets: np.ndarray
    assistant_only_loss: bool
    facts: dict[str, dict[str, Any]]

    def __len__(self) -> int:
        return len(self.source)

    @property
    def positions(self) -> np.ndarray:
        """Inputs of each conversation, (n,) int64."""
        return self.end - self.begin - 1

    def inputs_and_targets(self, i: int) -> tuple[np.ndarray, np.ndarray]:
        """Inputs and targets of conversation i, both int64 (p,); a target that is not supervised is -100."""
        rendering = self.renderings[self.source[i]]
        ids = rendering.ids[self.begin[i] : self.end[i]].astype(np.int64)
        if not self.assistant_only_loss:
            return ids[:-1], ids[1:]
        supervised = rendering.supervised[self.begin[i] + 1 : self.end[i]]
        return ids[:-1], np.where(supervised, ids[1:], NOT_SUPERVISED)

    def place(self, i: int) -> str:
        """Where conversation i comes from, for people."""
        source = int(self.source[i])
        number = int(np.searchsorted(self.renderings[source].starts, self.begin[i], "right"))
        return f"{self.names[source]} conversation {number:,}"

    @property
    def sha256(self) -> str:
        """Of all that decides inputs and targets."""
        spans = [self.source.tolist(), self.begin.tolist(), self.end.tolist()]
        return sha256_of_json([[r.sha256 for r in self.renderings], spans, self.assistant_only_loss])


def load_conversations(
    sources: Sequence[ConversationSource],
    tokenizer: PreTrainedTokenizerFast,
    sequence_length: int,
    assistant_only_loss: bool = True,
    truncation: Truncation = "drop",
    seed: int = 0,
    cache: Path | None = None,
    progress: bool = False,
) -> Conversations:
    """Read, render, cut and mix sources.

    A source with `epochs` (or nothing: 1) is taken so often, of a broken number a seeded part; one with `share` fills
    its part of all supervised targets in a seeded order, again from the start if it has too few.

    Args:
        truncation: of a conversation of more than `sequence_length` + 1 ids. `drop` leaves it out; `left` keeps its
            last ids, so that its end is always learned; `turns` keeps as many whole messages from its beginning as
            fit, so that each reply has all that came before it.

    Raises:
        DataError: a source cannot be read, or none of its conversations has a supervised token within the length.
    """
    renderer = ChatRenderer(tokenizer)
    cut: list[_Cut] = []
    for source in sources:
        rendering = render_source(source, tokenizer, cache, progress)
        check_masks(rendering, renderer, source.name)
        cut.append(_cut(source, rendering, sequence_length, assistant_only_loss, truncation))
    base = sum(_targets_of_epochs(c) for c in cut if c.source.share is None)
    left_for_base = 1 - sum(source.share or 0.0 for source in sources)
    taken = [_take(c, base / left_for_base, seed) for c in cut]
    return Conversations(
        names=[source.name for source in sources],
        renderings=[c.rendering for c in cut],
        source=np.repeat(np.arange(len(cut)), [len(picks) for picks in taken]),
        begin=np.concatenate([c.begin[picks] for c, picks in zip(cut, taken, strict=True)]),
        end=np.concatenate([c.end[picks] for c, picks in zip(cut, taken, strict=True)]),
        targets=np.concatenate([c.targets[picks] for c, picks in zip(cut, taken, strict=True)]),
        assistant_only_loss=assistant_only_loss,
        facts={c.source.name: _facts(c, picks) for c, picks in zip(cut, taken, strict=True)},
    )


@dataclass(frozen=True, eq=False)
class _Cut:
    """The conversations of a source that can be trained on, and why the others cannot."""

    source: ConversationSource
    rendering: Rendering
    begin: np.ndarray
    end: np.ndarray
    targets: np.ndarray
    dropped: Counter[str]
    truncated: int


def _cut(
    source: ConversationSource, rendering: Rendering, length: int, assistant_only_loss: bool, truncation: Truncation
) -> _Cut:
    begin, end = np.array(rendering.starts[:-1]), np.array(rendering.starts[1:])
    long = np.flatnonzero(end - begin > length + 1)
    kept = np.ones(len(begin), dtype=bool)
    dropped: Counter[str] = Counter()
    if truncation == "drop":
        kept[long] = False
        dropped["too_long"] += len(long)
    elif truncation == "left":
        begin[long] = end[long] - length - 1
    else:
        for i in long.tolist():
            borders = rendering.message_ends[rendering.messages[i] : rendering.messages[i + 1]]
            fitting = int(np.searchsorted(borders, begin[i] + length + 1, "right"))
            end[i] = borders[fitting - 1] if fitting else begin[i]
    targets = np.maximum(end - begin - 1, 0)
    if assistant_only_loss:
        spans = zip(begin.tolist(), end.tolist(), strict=True)
        targets = np.array([np.count_nonzero(rendering.supervised[b + 1 : e]) for b, e in spans], dtype=np.int64)
    bare = kept & (targets == 0)
    dropped["no_supervised_token"] += int(bare.sum())
    kept &= ~bare
    if not kept.any():
        raise DataError(
            f"source {source.name}: none of its {len(begin):,} conversations has a supervised token within "
            f"sequence_length={length:,} (elsewhere called max_length): {_counts(+dropped)}. Raise sequence_length, or "
            f"set truncation: left."
        )
    cut_short = 0 if truncation == "drop" else int(kept[long].sum())
    return _Cut(source, rendering, begin[kept], end[kept], targets[kept], +dropped, cut_short)


def _targets_of_epochs(cut: _Cut) -> float:
    return float(cut.targets.sum()) * (1.0 if cut.source.epochs is None else cut.source.epochs)


def _take(cut: _Cut, all_targets: float, seed: int) -> np.ndarray:
    """Which conversations of a source are in the mixture, (n,) int64, repeated ones several times."""
    size, source = len(cut.begin), cut.source
    order = permute(np.arange(size), size, key_of("conversations", source.name, seed))
    if source.share is None:
        epochs = 1.0 if source.epochs is None else source.epochs
        whole, part = divmod(epochs, 1.0)
        return np.concatenate([np.tile(np.arange(size), int(whole)), np.sort(order[: round(part * size)])])
    whole, left = divmod(round(source.share * all_targets), int(cut.targets.sum()))
    enough = int(np.searchsorted(np.cumsum(cut.targets[order]), left)) + 1 if left else 0
    return np.concatenate([np.tile(np.arange(size), whole), np.sort(order[:enough])])


def _facts(cut: _Cut, picks: np.ndarray) -> dict[str, Any]:
    rendering = cut.rendering
    return {
        "licence": cut.source.licence,
        "rows": rendering.rows,
        "dropped": {**rendering.dropped, **cut.dropped},
        "first_faults": fault_counts(rendering.dropped, rendering.first),
        "truncated": cut.truncated,
        "documents": len(picks),  # conversations taken; the name that shards use
        "passes": round(len(picks) / len(cut.begin), 4),
        "ids": int((cut.end - cut.begin)[picks].sum()),
        "supervised_tokens": int(cut.targets[picks].sum()),
    }


def _counts(dropped: Counter[str]) -> str:
    return ", ".join(f"{count:,} {reason}" for reason, count in dropped.items())


@dataclass(frozen=True, eq=False)
class ChatData:
    """The windows of a chat run, and what identifies them."""

    train: ConversationWindows
    test: ConversationWindows | None
    identity: dict[str, Any]

    def report(self) -> dict[str, Any]:
        """Counts of both sets: by source what was read, dropped and cut, and how full the windows are."""
        sets = {"train": self.train, "test": self.test}
        return {name: windows.report() for name, windows in sets.items() if windows is not None}

    def lines(self) -> list[str]:
        """The report for people."""
        return [line for name, facts in self.report().items() for line in _report_lines(name, facts)]


def open_conversations(config: RunConfig, tokenizer: PreTrainedTokenizerFast, progress: bool = False) -> ChatData:
    """The training and test windows that a configuration names.

    Raises:
        ConfigError: it names no conversations.
        DataError: a source cannot be read or used.
    """
    data, seed = config.data, config.training.seed
    if not data.conversations:
        raise ConfigError("data.conversations is empty. Name at least one source: conversations: [{name, path}].")
    pad = tokenizer.pad_token_id if tokenizer.pad_token_id is not None else tokenizer.eos_token_id

    def windows(sources: list[ConversationSource], order: Literal["permutation", "sequential"]) -> ConversationWindows:
        chats = load_conversations(
            sources, tokenizer, data.sequence_length, data.assistant_only_loss, data.truncation, seed, progress=progress
        )
        return ConversationWindows(chats, data.sequence_length, data.packing, order, seed, pad)

    train = windows(data.conversations, "permutation")
    test = windows(data.test_conversations, "sequential") if data.test_conversations else None
    identity = {
        "tokenizer_sha256": tokenizer_sha256(tokenizer),
        "conversations_sha256": train.conversations.sha256,
        "test_conversations_sha256": None if test is None else test.conversations.sha256,
        "assistant_only_loss": data.assistant_only_loss,
        "packing": data.packing,
        "truncation": data.truncation,
    }
    return ChatData(train, test, identity)


def _report_lines(name: str, facts: dict[str, Any]) -> list[str]:
    lines = [
        f"{name}: {facts['conversations']:,} conversations in {facts['windows']:,} windows, "
        f"{facts['utilisation']:.1%} of their positions used; {facts['supervised_tokens']:,} supervised targets"
    ]
    for source, of in facts["sources"].items():
        dropped = ", ".join(f"{count:,} {reason}" for reason, count in of["dropped"].items()) or "none"
        lines.append(
            f"  {source}: {of['documents']:,} of {of['rows']:,} rows ({of['passes']:g} passes), "
            f"{of['supervised_tokens']:,} supervised targets; dropped: {dropped}; truncated: {of['truncated']:,}"
        )
        if of["first_faults"]:
            lines.append(f"    {of['first_faults']}")
    return lines
