"""Is a new chat model better than the one in use? Both on the same held-out items, rules stated before, one pointer.

The model in use is what a symbolic link points at. It is moved by one rename, and only when every rule holds.
"""

from __future__ import annotations

import os
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch.nn import functional
from transformers import PreTrainedModel, PreTrainedTokenizerFast

from ..data.conversations import NOT_SUPERVISED, Conversations, load_conversations
from ..data.shards import load_shards
from ..data.windows import TokenWindows
from ..errors import ConfigError, TokenizerError, VerificationError
from ..files import replace_link
from ..modeling.factory import load_model
from ..sections import RunConfig
from ..tokenization.chat import Drawing
from ..tokenization.load import load_tokenizer, tokenizer_sha256
from .chat import TransformersChat
from .compare import Columns, paired_bootstrap
from .likelihood import CausalLMEngine, Span

PROMPTS = ("Who are you?", "What can you do?", "What time is it?", "Write one sentence about the sea.")
STOP_PROMPTS = 100
TEXT = "base text"
_CONVERSATIONS_AT_ONCE = 8


@dataclass(frozen=True)
class Rules:
    """What a candidate must show; losses in nats per token.

    Attributes:
        tolerance: on each set of conversations the 95% interval of (candidate - current) ends at most here.
        text_tolerance: the same for the base text, which a model that learns to chat may forget a little.
        min_stop_share: at least so many replies are ended by the model within `max_new_tokens`.
        seed: of the bootstrap.
    """

    tolerance: float = 0.05
    text_tolerance: float = 0.1
    min_stop_share: float = 0.95
    max_new_tokens: int = 128
    seed: int = 0


@dataclass(frozen=True, eq=False)
class HeldOut:
    """What both models are scored on: sets of conversations by name, and windows (n, T+1) of base text."""

    conversations: dict[str, Conversations]
    text: np.ndarray
    tokenizer_sha256: str


@dataclass(frozen=True, eq=False)
class Scores:
    """What one model did: losses by set, whether each reply was ended, and its replies to `PROMPTS`."""

    losses: dict[str, Columns]
    ended: np.ndarray
    replies: list[str]


def promote(
    candidate: Path, pointer: Path, config: RunConfig, rules: Rules, device: str = "cpu", progress: bool = False
) -> dict[str, Any]:
    """Score the candidate and what `pointer` points at, and point it at the candidate if every rule holds.

    Returns:
        `promoted`, `candidate`, `current`, `rules`, `sets` [{name, items, tokens, current, candidate, difference,
        interval, limit, ok}], `stop` {...}, `replies` [{prompt, current, candidate}], `failures` (a line each).

    Raises:
        ConfigError: no pointer, the same model, or a missing test set.
        TokenizerError: the two have different tokenizers, or the shards another one.
        VerificationError: the pointer was moved by another process meanwhile.
    """
    current = _pointed_at(pointer)
    if candidate.resolve() == current:
        raise ConfigError(f"{pointer} points at {candidate} already. Give another candidate.")
    held_out = load_held_out(config, candidate, current, progress)
    before, after = (_score_folder(folder, held_out, rules, device) for folder in (current, candidate))
    report = compare_scores(before, after, rules)
    report = {"promoted": not report["failures"], "candidate": str(candidate), "current": str(current), **report}
    if report["promoted"]:
        if _pointed_at(pointer) != current:
            raise VerificationError(f"{pointer} was moved while {current} was scored. Run the same command again.")
        replace_link(pointer, candidate)
    return report


def load_held_out(config: RunConfig, candidate: Path, current: Path, progress: bool = False) -> HeldOut:
    """The sets that a configuration names: `test_conversations`, and validation text of `shards`."""
    if not config.data.test_conversations:
        raise ConfigError("data.test_conversations is empty, so nothing decides. Name the held-out conversations.")
    if config.data.shards is None:
        raise ConfigError("data.shards is missing, so no base text is held out. Give the base run's: --shards DIR.")
    tokenizer, other = load_tokenizer(candidate), load_tokenizer(current)
    if tokenizer_sha256(tokenizer) != tokenizer_sha256(other):
        raise TokenizerError(
            f"{candidate} has another tokenizer than {current}: their losses per token do not compare, and what uses "
            "the one could not use the other. Give a candidate that was trained from the same base."
        )
    shards = load_shards(config.data.shards)
    if shards.tokenizer_sha256 != tokenizer_sha256(tokenizer):
        raise TokenizerError(
            f"{config.data.shards} was written with another tokenizer than that of {candidate}. Give the base run's "
            "shards: --shards DIR."
        )
    length = config.data.sequence_length
    windows = TokenWindows([shard.ids for shard in shards.validation], length, "sequential", 0)
    count = min(len(windows), max(1, config.evaluation.eval_tokens // length))
    sets = {
        source.name: load_conversations(
            [source], tokenizer, length, True, config.data.truncation, config.training.seed, progress=progress
        )
        for source in config.data.test_conversations
    }
    return HeldOut(sets, windows.gather(np.arange(count)), shards.tokenizer_sha256)


def score(model: PreTrainedModel, tokenizer: PreTrainedTokenizerFast, held_out: HeldOut, rules: Rules) -> Scores:
    """What a model does on the held-out sets; greedy replies."""
    losses = {name: conversation_losses(model, chats) for name, chats in held_out.conversations.items()}
    for name, (nats_of_chats, _) in losses.items():
        if not np.isfinite(nats_of_chats).all():
            raise VerificationError(
                f"the loss of {model.name_or_path or 'the model'} on {name} is not finite: the model is damaged."
            )
    windows = CausalLMEngine(model).score([[Span(tuple(row), 1)] for row in held_out.text.tolist()])
    nats = np.array([-span.total for (span,) in windows])
    losses[TEXT] = (nats, np.full(len(nats), held_out.text.shape[1] - 1))
    engine = TransformersChat(model, tokenizer)

    def reply(ids: list[int]) -> tuple[str, bool]:
        return engine.reply(ids, Drawing.greedy(rules.max_new_tokens))

    prompts = [ids for chats in held_out.conversations.values() for ids in _prompts(chats, engine.context)]
    ended = np.array([reply(ids)[1] for ids in prompts[:STOP_PROMPTS]])
    asked = [engine.prompt_ids([{"role": "user", "content": prompt}]) for prompt in PROMPTS]
    return Scores(losses, ended, [reply(ids)[0] for ids in asked])


@torch.no_grad()
def conversation_losses(model: PreTrainedModel, chats: Conversations) -> Columns:
    """Nats and supervised targets of each conversation, each seen alone."""
    nats, targets = [], []
    for first in range(0, len(chats), _CONVERSATIONS_AT_ONCE):
        rows = [chats.inputs_and_targets(i) for i in range(first, min(first + _CONVERSATIONS_AT_ONCE, len(chats)))]
        longest = max(len(inputs) for inputs, _ in rows)
        # Padding stands behind, where causal attention never looks.
        inputs, labels = np.zeros((len(rows), longest), np.int64), np.full((len(rows), longest), NOT_SUPERVISED)
        for place, (row_inputs, row_targets) in enumerate(rows):
            inputs[place, : len(row_inputs)], labels[place, : len(row_targets)] = row_inputs, row_targets
        logits = model(torch.from_numpy(inputs).to(model.device)).logits
        found = functional.cross_entropy(
            logits.transpose(1, 2).float(),
            torch.from_numpy(labels).to(model.device),
            ignore_index=NOT_SUPERVISED,
            reduction="none",
        )
        nats.append(found.double().sum(dim=1).cpu().numpy())
        targets.append((labels != NOT_SUPERVISED).sum(axis=1))
    return np.concatenate(nats), np.concatenate(targets)


def compare_scores(current: Scores, candidate: Scores, rules: Rules) -> dict[str, Any]:
    """The table of two models' scores and what of the rules does not hold."""
    failures: list[str] = []
    sets: list[dict[str, Any]] = []
    for name, before in current.losses.items():
        after = candidate.losses[name]
        limit = rules.text_tolerance if name == TEXT else rules.tolerance
        interval = paired_bootstrap(before, after, rules.seed)
        values = [float(nats.sum() / tokens.sum()) for nats, tokens in (before, after)]
        ok = interval[1] <= limit
        if not ok:
            failures.append(f"{name}: the loss may be {interval[1]:+.4f} worse; at most {limit:+.4f} is allowed")
        sets.append(
            {
                **{"name": name, "items": len(before[0]), "tokens": int(before[1].sum())},
                **{"current": values[0], "candidate": values[1], "difference": values[1] - values[0]},
                **{"interval": list(interval), "limit": limit, "ok": ok},
            }
        )
    if not any(row["interval"][1] < 0 for row in sets if row["name"] != TEXT):
        failures.append("on no set of conversations is the candidate better beyond chance")
    share = float(candidate.ended.mean())
    if share < rules.min_stop_share:
        failures.append(f"{share:.1%} of replies end by themselves; {rules.min_stop_share:.1%} is needed")
    ones = np.ones(len(current.ended))
    stop = {
        **{"items": len(ones), "current": float(current.ended.mean()), "candidate": share},
        "interval": list(paired_bootstrap((current.ended, ones), (candidate.ended, ones), rules.seed)),
        **{"limit": rules.min_stop_share, "ok": share >= rules.min_stop_share},
    }
    replies = [
        {"prompt": prompt, "current": before, "candidate": after}
        for prompt, before, after in zip(PROMPTS, current.replies, candidate.replies, strict=True)
    ]
    return {"rules": asdict(rules), "sets": sets, "stop": stop, "replies": replies, "failures": failures}


def promotion_lines(report: dict[str, Any]) -> list[str]:
    """`promote`'s report for people."""
    head = f"{'held out':<20}{'items':>7}{'current':>10}{'candidate':>11}{'difference':>12}  95% interval        rule"
    lines = [f"current    {report['current']}", f"candidate  {report['candidate']}", "", head]
    named = [(row["name"], row, "at most") for row in report["sets"]]
    for name, row, bound in [*named, ("replies that end", report["stop"], "candidate at least")]:
        low, high = row["interval"]
        lines.append(
            f"{name:<20}{row['items']:>7,}{row['current']:>10.4f}{row['candidate']:>11.4f}"
            f"{row['candidate'] - row['current']:>+12.4f}  {low:+.4f} to {high:+.4f}  "
            f"{bound} {row['limit']:g}: {'holds' if row['ok'] else 'FAILS'}"
        )
    lines += ["losses in nats per supervised token; interval of the difference from a paired bootstrap over items", ""]
    for shown in report["replies"]:
        lines += [shown["prompt"], f"  current:   {shown['current']!r}", f"  candidate: {shown['candidate']!r}"]
    return lines


def _score_folder(folder: Path, held_out: HeldOut, rules: Rules, device: str) -> Scores:
    model = load_model(folder)
    longest = max([held_out.text.shape[1] - 1, *(int(c.positions.max()) for c in held_out.conversations.values())])
    if model.config.max_position_embeddings < longest:
        raise ConfigError(
            f"{folder} reads {model.config.max_position_embeddings:,} tokens; the held-out sets need {longest:,}. "
            "Give a smaller --sequence_length."
        )
    return score(model.to(device), load_tokenizer(folder), held_out, rules)  # type: ignore[arg-type]


def _prompts(chats: Conversations, context: int) -> list[list[int]]:
    """The ids before the last reply of each conversation, where they leave room for one."""
    found = []
    for i in range(len(chats)):
        inputs, targets = chats.inputs_and_targets(i)
        supervised = targets != NOT_SUPERVISED
        begins = np.flatnonzero(supervised & ~np.concatenate(([False], supervised[:-1])))
        if begins[-1] + 1 < context:
            found.append([int(token) for token in inputs[: begins[-1] + 1]])
    return found


def _pointed_at(pointer: Path) -> Path:
    """The folder that the pointer names.

    Raises:
        ConfigError: it is no symbolic link, or leads nowhere.
    """
    if not pointer.is_symlink():
        what = "is no symbolic link" if pointer.exists() else "does not exist"
        raise ConfigError(
            f"{pointer} {what}; the model in use is named by one, so that it can be replaced at once. "
            f"Make it: ln -s FOLDER {pointer if not pointer.exists() else 'current'}"
        )
    if not pointer.is_dir():
        raise ConfigError(f"{pointer} points at {os.readlink(pointer)}, which does not exist. Point it at a model.")
    return pointer.resolve()
