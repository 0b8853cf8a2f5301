"""Conversations in windows: nothing lost, nothing seen across a border, the same windows every time."""

from __future__ import annotations

import itertools
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from hf_tinylm.data.conversations import load_conversations
from hf_tinylm.data.packing import ConversationWindows, best_fit
from hf_tinylm.modeling.factory import new_model
from hf_tinylm.sections import ConversationSource, ModelSection

T = 64
SHAPE = {
    **{"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2},
    "intermediate_size": 64,
}


@pytest.fixture(scope="module")
def windows(
    chat_file: Callable[..., Path], byte_chat_tokenizer: Any, tmp_path_factory: pytest.TempPathFactory
) -> Callable[..., ConversationWindows]:
    """Twenty-four conversations of many lengths in windows of 64 positions."""
    words = ["hi", "no", "a longer word", "yes", "perhaps", ""]
    rows = [
        [("user", words[i % 6]), ("assistant", words[(i * 5 + 2) % 6])] * (1 + (i % 4 == 3) * (i % 6 in (1, 5)))
        for i in range(24)
    ]
    path = chat_file("many.jsonl", rows)

    def make(
        packing: bool = True, order: Any = "permutation", seed: int = 0, assistant_only_loss: bool = True
    ) -> ConversationWindows:
        chats = load_conversations(
            [ConversationSource("many", str(path))], byte_chat_tokenizer, T, assistant_only_loss, cache=path.parent
        )
        return ConversationWindows(chats, T, packing, order, seed, pad_id=3)

    return make


@pytest.mark.parametrize("seed", range(5))
def test_best_fit_loses_nothing_and_overfills_nothing(seed: int) -> None:
    lengths = np.random.default_rng(seed).integers(1, 101, 300)
    bins = best_fit(lengths, 100)
    assert sorted(item for bin_ in bins for item in bin_) == list(range(300))
    assert max(int(lengths[bin_].sum()) for bin_ in bins) <= 100
    assert bins == best_fit(lengths, 100)


def test_best_fit_takes_the_fullest_bin_that_fits() -> None:
    assert best_fit(np.array([6, 7, 3, 4, 10]), 10) == [[4], [1, 2], [0, 3]]
    assert best_fit(np.array([2, 5, 6, 3, 4]), 10) == [[2, 4], [1, 3, 0]]
    assert best_fit(np.array([10]), 10) == [[0]]


def test_every_conversation_is_in_one_window_with_positions_from_zero(
    windows: Callable[..., ConversationWindows],
) -> None:
    packed = windows()
    batch = packed.batch(np.arange(len(packed)))
    seen: list[tuple[list[int], list[int]]] = []
    for ids, labels, positions in zip(*(batch[k] for k in ("input_ids", "shift_labels", "position_ids")), strict=True):
        starts = [*torch.nonzero(positions == 0)[:, 0].tolist(), T]
        for begin, end in itertools.pairwise(starts):
            assert positions[begin:end].tolist() == list(range(end - begin))
            if int(ids[begin]) != 3:
                seen.append((ids[begin:end].tolist(), labels[begin:end].tolist()))
            else:
                assert set(labels[begin:end].tolist()) == {-100}
    chats = packed.conversations
    expected = [tuple(part.tolist() for part in chats.inputs_and_targets(i)) for i in range(len(chats))]
    assert sorted(seen) == sorted(expected)
    assert packed.report()["utilisation"] == sum(len(ids) for ids, _ in expected) / (T * len(packed))
    assert packed.report()["utilisation"] > 0.75 > windows(packing=False).report()["utilisation"]


def test_each_epoch_is_a_permutation_of_its_own_and_any_window_can_be_asked_for(
    windows: Callable[..., ConversationWindows],
) -> None:
    packed = windows()
    size = len(packed)
    orders = [packed.locate(np.arange(e * size, (e + 1) * size)).tolist() for e in range(4)]
    assert all(sorted(order) == list(range(size)) for order in orders)
    assert len({tuple(order) for order in orders}) > 1
    assert windows(seed=1).locate(np.arange(4 * size)).tolist() != [k for order in orders for k in order]
    whole, one = packed.batch([3, 1, size + 2]), windows()[size + 2]
    assert all(torch.equal(whole[name][2], one[name]) for name in one)
    with pytest.raises(IndexError):
        windows(order="sequential").batch([size])
    with pytest.raises(IndexError):
        packed.batch([-1])


@pytest.mark.parametrize("attention", ["sdpa", "eager"])
@pytest.mark.parametrize("assistant_only_loss", [True, False])
def test_packed_and_unpacked_losses_agree(
    windows: Callable[..., ConversationWindows], attention: str, assistant_only_loss: bool
) -> None:
    """Through the batches that training takes; gradients too, and with a model that is in training."""
    model = new_model(ModelSection(**SHAPE, attn_implementation=attention), 260, T, seed=3).train()
    found = []
    for packing in (True, False):
        dataset = windows(packing=packing, assistant_only_loss=assistant_only_loss)
        model.zero_grad()
        targets = int(dataset.targets.sum())
        loss = model(**dataset.batch(np.arange(len(dataset))), num_items_in_batch=targets).loss
        loss.backward()
        found.append((loss.item(), targets, [p.grad.clone() for p in model.parameters()]))
    (packed, targets, gradients), (unpacked, same_targets, others) = found
    assert targets == same_targets
    assert packed == pytest.approx(unpacked, abs=1e-5)
    assert all(torch.allclose(a, b, atol=1e-5) for a, b in zip(gradients, others, strict=True))


@pytest.mark.parametrize("attention", ["sdpa", "eager"])
def test_a_conversation_does_not_see_its_neighbour(windows: Callable[..., ConversationWindows], attention: str) -> None:
    """Each conversation by itself, with no window and no positions at all, gives the logits that it has in a window."""
    packed = windows(order="sequential")
    model = new_model(ModelSection(**SHAPE, attn_implementation=attention), 260, T, seed=3).train()
    window = next(k for k in range(len(packed)) if len(packed.bins[int(packed.locate([k])[0])]) > 1)
    items = packed.bins[int(packed.locate([window])[0])]
    batch = packed.batch([window])
    labels = batch.pop("shift_labels")
    logits, at = model(**batch).logits[0], 0
    for item in items:
        ids, _ = packed.conversations.inputs_and_targets(item)
        alone = model(torch.from_numpy(ids)[None]).logits[0]
        assert (logits[at : at + len(ids)] - alone).abs().max().item() < 1e-5
        assert labels[0, at + len(ids) - 1] == -100, "the newline behind a reply is no target"
        at += len(ids)
    neighbour = len(packed.conversations.inputs_and_targets(items[0])[0])
    seen = model(batch["input_ids"]).logits[0]
    assert (logits[neighbour:] - seen[neighbour:]).abs().max().item() > 1e-3, "without positions they see each other"


def test_a_budget_of_targets_becomes_positions_and_back(windows: Callable[..., ConversationWindows]) -> None:
    packed = windows()
    labels = packed.batch(np.arange(3 * len(packed)))["shift_labels"].flatten()
    reached = torch.cumsum(labels != -100, 0)
    for budget in range(1, int(reached[-1]) + 1, 5):
        positions = packed.positions_of(budget)
        first = int(torch.nonzero(reached >= budget)[0, 0]) + 1
        if budget % int(packed.targets.sum()):
            assert positions == first
        else:
            assert positions % (len(packed) * T) == 0
        assert packed.targets_of(positions) == budget


def test_a_window_says_where_it_comes_from(windows: Callable[..., ConversationWindows]) -> None:
    packed = windows(order="sequential")
    told = [place for k in range(len(packed)) for place in packed.describe(k)["conversations"]]
    assert sorted(told) == sorted(f"many conversation {number}" for number in range(1, 25))
    assert json.dumps(packed.describe(0))
