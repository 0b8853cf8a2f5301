"""Checks of a chat run: the model it starts from, its template, its conversations and what is learned of them."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from ..data.conversations import NOT_SUPERVISED, ChatData, Conversations, open_conversations
from ..data.lengths import length_statistics
from ..data.pack import special_ids
from ..data.packing import ConversationWindows
from ..model_folder import find_model_folder
from ..modeling.factory import untrained_like
from ..modeling.model import TinyLMForCausalLM
from ..tokenization.audit import round_trip_failures
from ..tokenization.chat import chat_tokenizer, control_ids, end_ids
from ..tokenization.load import backend_json, find_tokenizer, is_byte_level, tokenizer_sha256, vocabulary_size
from . import data
from .checks import Check, Finding, rule
from .inputs import Inputs, output_folder
from .subject import Subject

RENDERED_AGAIN = 16  # conversations of each source
SHOWN = 3  # replies
# Public sets hold a few conversations twice, and no mean loss moves by it; a copied file holds all of them.
SHARED = 0.01

# What is checked of a pretraining run and says nothing here.
NOT_OF_CHAT = {
    "shards": "a chat run reads conversations",
    "separators": "each message has control tokens, which the conversations are checked for",
    "round trip": "template renders conversations again",
    "initial loss": "the run does not start from a fresh model; starting weights tells its loss",
}


@dataclass
class ChatInputs(Inputs):
    """What a chat run starts from, each part once it was checked."""

    base: Path | None = None
    tokenizer: Any = None
    model: TinyLMForCausalLM | None = None
    chats: ChatData | None = None


@rule("starting model", "init_from names no model, or its folder has no tokenizer: nothing could be tuned")
def starting_model(inputs: ChatInputs) -> Finding:
    """The model is a folder here or on the Hub, and a tokenizer with the control tokens of ChatML is known."""
    inputs.base = find_model_folder(inputs.config.training.init_from)
    inputs.tokenizer = chat_tokenizer(inputs.config.tokenizer.tokenizer_path or find_tokenizer(inputs.base))
    start, end = control_ids(inputs.tokenizer)
    value = f"{inputs.base}, tokenizer {tokenizer_sha256(inputs.tokenizer)[:12]}..., control tokens {start} and {end}"
    return Finding(True, value, "a model, and a tokenizer with control tokens")


@rule(
    "tokenizer",
    "this tokenizer is not the model's, or the windows are longer than it reads",
    needs=("starting model",),
)
def tokenizer(inputs: ChatInputs) -> Finding:
    """The model has a row for each token and reads windows of the configured length; text comes back unchanged."""
    assert inputs.base is not None, "it was found"
    ids = {**special_ids(inputs.tokenizer), "eos_token_id": end_ids(inputs.tokenizer)}
    size, length = vocabulary_size(inputs.tokenizer), inputs.config.data.sequence_length
    inputs.model = untrained_like(inputs.base, inputs.config.model, size, length, **ids)
    byte_level = is_byte_level(backend_json(inputs.tokenizer))
    broken = round_trip_failures(inputs.tokenizer) if byte_level else []
    shape = inputs.model.config
    value = f"{size:,} tokens, windows of {length:,}; {len(broken)} hostile strings differ"
    return Finding(not broken, value, f"{shape.num_tokens:,} and {shape.max_position_embeddings:,} at most; 0")


@rule("conversations", "a source is missing, is no list of messages, or a mask is wrong", needs=("tokenizer",))
def conversations(inputs: ChatInputs) -> Finding:
    """Every source can be read, every conversation was rendered, and the mask of each of its ids was looked at."""
    inputs.chats = open_conversations(inputs.config, inputs.tokenizer)
    lines = inputs.chats.lines()
    for name, windows in (("train", inputs.chats.train), ("test", inputs.chats.test)):
        lines += [] if windows is None else [f"{name}: ids of a conversation", *_length_lines(windows)]
    return Finding(
        True, lines[0].removeprefix("train: "), "each conversation masked as its template says", tuple(lines)
    )


def _length_lines(windows: ConversationWindows) -> list[str]:
    """How long the conversations of each source are before they are cut: quantiles, and how many are too long."""
    chats, length = windows.conversations, windows.sequence_length
    lengths = {name: np.diff(r.starts) for name, r in zip(chats.names, chats.renderings, strict=True)}
    found = []
    for name, facts in length_statistics(lengths).items():
        quantiles = " ".join(f"{int(value):,}" for value in facts["quantiles"].values())
        long = int((lengths[name] > length + 1).sum())
        found.append(
            f"  {name}: {quantiles} ({' '.join(facts['quantiles'])}%); "
            f"{long:,} of {facts['documents']:,} are above {length + 1:,}"
        )
    return found


@rule("targets", "the loss is over other tokens than the replies (or whole conversations) that the masks say", ("ids",))
def targets(subject: Subject) -> Finding:
    """Inputs, targets and positions of the first update are cut from the rendered ids and masks once more."""
    plan, windows = subject.trainer.plan, subject.chats.train
    ks, updates = subject.noted(1)
    batches = updates[0]
    found = {name: np.concatenate([batch[name].numpy() for batch in batches]) for name in batches[0]}
    wanted = [_window(windows.conversations, windows.bins[int(w)], plan.sequence_length) for w in windows.locate(ks)]
    inputs, labels, positions, used = (np.stack(parts) for parts in zip(*wanted, strict=True))
    first = subject.trainer.accelerator.process_index * len(ks)  # of this process's windows in the update
    places = (first + np.arange(len(ks)))[:, None] * plan.sequence_length + np.arange(plan.sequence_length)
    labels = np.where(places < plan.tokens_of_update(0), labels, NOT_SUPERVISED)
    wrong = int((found["shift_labels"] != labels).sum())
    moved = int((used & ((found["input_ids"] != inputs) | (found["position_ids"] != positions))).sum())
    supervised = int((found["shift_labels"] != NOT_SUPERVISED).sum())
    value = f"{supervised:,} targets of {found['shift_labels'].size:,} positions; {wrong + moved:,} are not as masked"
    shown = tuple(repr(text) for text in _replies(found["shift_labels"], subject.chat_tokenizer)[:SHOWN])
    return Finding(not wrong and not moved and supervised > 0, value, "some; 0", shown)


def _window(chats: Conversations, items: list[int], length: int) -> tuple[np.ndarray, ...]:
    """Inputs, targets, positions and used places of a window, each (T,), from ids and masks as they were rendered."""
    inputs, labels = np.zeros(length, np.int64), np.full(length, NOT_SUPERVISED, np.int64)
    positions, used, at = np.zeros(length, np.int64), np.zeros(length, bool), 0
    for item in items:
        rendering, begin, end = chats.renderings[chats.source[item]], int(chats.begin[item]), int(chats.end[item])
        for place in range(begin, end - 1):
            inputs[at], positions[at], used[at] = rendering.ids[place], place - begin, True
            if rendering.supervised[place + 1] or not chats.assistant_only_loss:
                labels[at] = rendering.ids[place + 1]
            at += 1
    return inputs, labels, positions, used


def _replies(labels: np.ndarray, tokenizer: Any) -> list[str]:
    """The texts of consecutive targets in the first window, in order."""
    row = labels[0]
    borders = np.flatnonzero(np.diff(np.concatenate(([False], row != NOT_SUPERVISED, [False])).astype(int)))
    return [str(tokenizer.decode(row[begin:end].tolist())) for begin, end in borders.reshape(-1, 2)]


@rule("template", "chat programs would render other ids than the model has learned, or mark other tokens as its own")
def template(subject: Subject) -> Finding:
    """Conversations, taken apart into messages, get the same ids and masks from transformers and the Jinja template.

    One is passed over if a message spells control tokens, which only our renderer keeps apart from real ones, or if a
    reply begins with a line break.
    """
    tokenizer, differing, compared = subject.chat_tokenizer, 0, 0
    for rendering in subject.chats.train.conversations.renderings:
        rows = np.unique(np.linspace(0, len(rendering) - 1, min(RENDERED_AGAIN, len(rendering)), dtype=np.int64))
        for row in rows.tolist():
            begin, end = int(rendering.starts[row]), int(rendering.starts[row + 1])
            ids = rendering.ids[begin:end].tolist()
            messages = _messages(ids, tokenizer)
            if any("<|" in one["content"] or one["content"].startswith("\n") for one in messages):
                continue
            theirs = tokenizer.apply_chat_template(messages, return_dict=True, return_assistant_tokens_mask=True)
            mask = [bool(one) for one in theirs["assistant_masks"]]
            compared += 1
            differing += theirs["input_ids"] != ids or mask != rendering.supervised[begin:end].tolist()
    return Finding(differing == 0, f"{differing} of {compared} conversations differ", "0")


def _messages(ids: list[int], tokenizer: Any) -> list[dict[str, str]]:
    """Role and content of each message between two control tokens."""
    start, end = control_ids(tokenizer)
    found = []
    for place in (place for place, id_ in enumerate(ids) if id_ == start):
        text = tokenizer.decode(ids[place + 1 : ids.index(end, place)], clean_up_tokenization_spaces=False)
        role, _, content = text.partition("\n")
        found.append({"role": role, "content": content})
    return found


@rule("split", "test conversations are learned too: the test loss would be too good")
def split(subject: Subject) -> Finding:
    """Hardly any test conversation is, word for word, among those for training."""
    test = subject.chats.test
    if test is None:
        return Finding(True, "no test_conversations", "none in training")
    held = _texts(test.conversations)
    shared = len(held & _texts(subject.chats.train.conversations))
    value = f"{shared:,} of {len(held):,} different test conversations are in training"
    return Finding(shared <= SHARED * len(held), value, f"at most {SHARED:.0%}")


def _texts(chats: Conversations) -> set[bytes]:
    """The ids of each conversation that is taken, before it was cut."""
    found = set()
    for number, rendering in enumerate(chats.renderings):
        rows = np.unique(np.searchsorted(rendering.starts, chats.begin[chats.source == number], "right") - 1)
        found |= {rendering.ids[rendering.starts[row] : rendering.starts[row + 1]].tobytes() for row in rows.tolist()}
    return found


def not_of_chat() -> list[Check]:
    """The checks of a pretraining run that do not apply, each with the reason."""
    return [Check(name, None, f"does not apply: {why}", "", "", 0.0) for name, why in NOT_OF_CHAT.items()]


INPUT_RULES = (output_folder, starting_model, tokenizer, conversations)
RULES = (data.ids, targets, template, split)
