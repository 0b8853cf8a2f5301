"""Training on conversations: windows hold different numbers of targets, and each of them is counted."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from hf_tinylm.data.conversations import load_conversations
from hf_tinylm.data.packing import ConversationWindows
from hf_tinylm.errors import ConfigError, ContractError
from hf_tinylm.sections import ConversationSource
from hf_tinylm.training.checkpoint import list_checkpoints
from hf_tinylm.training.metrics import read_rows

Make = Callable[..., Any]
T = 64
FIELDS = {"vocabulary": 260, "length": T, "global_batch_tokens": 4 * T, "save_strategy": "steps", "save_steps": 1}


@pytest.fixture(scope="module")
def chats(chat_file: Callable[..., Path], byte_chat_tokenizer: Any) -> Callable[..., ConversationWindows]:
    """Twenty-two conversations with replies of 1 to 22 targets, in windows of 64 positions."""
    path = chat_file("chats.jsonl", [[("user", "abc"[: i % 4]), ("assistant", "x" * i)] for i in range(22)])

    def make(order: Any = "permutation", packing: bool = True) -> ConversationWindows:
        source = ConversationSource("chats", str(path))
        loaded = load_conversations([source], byte_chat_tokenizer, T, cache=path.parent)
        return ConversationWindows(loaded, T, packing, order, 7, pad_id=3)

    return make


def losses(trainer: Any) -> list[dict[str, Any]]:
    return [row for row in read_rows(trainer.output_dir / "metrics.jsonl") if "loss" in row]


@pytest.mark.parametrize("packing", [True, False])
def test_every_supervised_target_of_an_epoch_is_counted_once(make_trainer: Make, chats: Make, packing: bool) -> None:
    dataset = chats(packing=packing)
    trainer = make_trainer(train=dataset, evaluation=chats("sequential"), **FIELDS, train_tokens="epoch", epochs=2)
    trainer.train()
    total = 2 * sum(range(1, 23))
    assert trainer.plan.supervised_tokens == trainer.supervised_tokens == total
    assert len(losses(trainer)) == trainer.plan.updates == -(-2 * len(dataset) // 4)
    done = np.cumsum([int(dataset.targets[dataset.locate(np.arange(4 * n, 4 * n + 4))].sum()) for n in range(50)])
    told = [row["supervised_tokens"] for row in losses(trainer)]
    assert told == [*done[: len(told) - 1].tolist(), total]


@pytest.mark.parametrize("packing", [True, False])
def test_arithmetic_is_counted_for_every_position_and_tokens_for_targets(
    make_trainer: Make, chats: Make, packing: bool
) -> None:
    """Windows of 64 positions four at a time, whatever is masked, padded or beyond the budget: all are multiplied."""
    computed = []

    class Counts(torch.nn.Module):
        def forward(self, module: Any, arguments: Any) -> None:
            computed.append(arguments[0].shape[:2].numel())

    trainer = make_trainer(
        train=chats(packing=packing), evaluation=None, **FIELDS, train_tokens=301, eval_strategy="no", peak_flops=1e9
    )
    trainer.model.model.layers[0].mlp.register_forward_pre_hook(Counts())
    trainer.train()
    rows, shape = losses(trainer), trainer.model.config.shape
    wide = 12 * shape.num_hidden_layers * shape.num_attention_heads * shape.head_dim * T
    updates = trainer.plan.updates
    assert sum(computed) == updates * 4 * T
    assert [row["positions"] for row in rows] == [4 * T * n for n in range(1, updates + 1)]
    assert trainer.record.clocks.flops == sum(computed) * (6 * shape.parameters + wide)
    assert rows[-1]["supervised_tokens"] == 301
    for row, before in zip(rows, [{"supervised_tokens": 0}, *rows], strict=False):
        flops = 4 * T * (6 * shape.parameters + wide) / row["seconds"]
        assert row["flops_per_second"] == pytest.approx(flops, rel=1e-2)
        assert row["mfu"] == pytest.approx(flops / 1e9, rel=1e-2)
        targets = row["supervised_tokens"] - before["supervised_tokens"]
        assert row["tokens_per_second"] == pytest.approx(targets / row["seconds"], rel=1e-2)


def test_a_budget_of_targets_is_met_to_the_target(make_trainer: Make, chats: Make) -> None:
    trainer = make_trainer(train=chats(), evaluation=chats("sequential"), **FIELDS, train_tokens=301)
    trainer.train()
    assert losses(trainer)[-1]["supervised_tokens"] == 301
    assert trainer.plan.updates == len(losses(trainer))
    events = read_rows(trainer.output_dir / "events.jsonl")
    assert (events[0]["train_tokens"], events[0]["updates"]) == (301, trainer.plan.updates)


def test_an_update_is_the_mean_over_its_real_targets(make_trainer: Make, chats: Make) -> None:
    """Against each conversation alone, without packing, padding or positions: summed nats over all targets."""
    dataset = chats()
    trainer = make_trainer(train=dataset, evaluation=chats("sequential"), **FIELDS, train_tokens="epoch")
    nats, count = 0.0, 0
    with torch.no_grad():
        for window in dataset.locate(np.arange(4)):
            for item in dataset.bins[window]:
                inputs, targets = (torch.from_numpy(part) for part in dataset.conversations.inputs_and_targets(item))
                log_probabilities = trainer.model(inputs[None]).logits[0].log_softmax(-1)
                kept = targets != -100
                nats -= log_probabilities[kept].gather(1, targets[kept][:, None]).sum().item()
                count += int(kept.sum())
    trainer.train()
    assert losses(trainer)[0]["loss"] == pytest.approx(nats / count, abs=1e-5)
    assert losses(trainer)[0]["supervised_tokens"] == count


def test_the_test_loss_is_the_mean_over_the_targets_whatever_the_batch(make_trainer: Make, chats: Make) -> None:
    found = []
    for size, packing in ((1, True), (3, True), (4, False)):
        trainer = make_trainer(
            train=chats(), evaluation=chats("sequential", packing), **FIELDS, per_device_eval_batch_size=size
        )
        found.append(trainer.evaluate())
    assert {value["eval_tokens"] for value in found} == {sum(range(1, 23))}
    assert [value["eval_loss"] for value in found] == pytest.approx([found[0]["eval_loss"]] * 3, abs=1e-5)


def test_a_chat_run_resumed_at_any_update_ends_bit_for_bit_as_the_uninterrupted_one(
    make_trainer: Make, chats: Make, tmp_path: Path
) -> None:
    """Dropout, packing, an epoch border in the middle of an update and a partial end are crossed."""
    fields = {**FIELDS, "model": {"attention_dropout": 0.1}, "train_tokens": 700, "save_total_limit": None}
    whole = make_trainer("whole", train=chats(), evaluation=chats("sequential"), **fields)
    whole.train()
    updates = whole.plan.updates
    assert updates * 4 > 2 * len(chats())
    end = list_checkpoints(whole.output_dir)[-1]
    for stop in range(1, updates):
        folder = tmp_path / f"resumed{stop}"
        shutil.copytree(whole.output_dir, folder)
        for later in list_checkpoints(folder)[stop:]:
            shutil.rmtree(later)
        again = make_trainer(
            folder.name, train=chats(), evaluation=chats("sequential"), **fields, resume_from_checkpoint="auto"
        )
        again.train()
        for name in ("model.safetensors", "optimizer.safetensors", "rng-00000.safetensors"):
            first, second = load_file(end / name), load_file(folder / end.name / name)
            assert all(torch.equal(first[key], second[key]) for key in first), (stop, name)
        assert [(r["loss"], r["supervised_tokens"]) for r in losses(whole)] == [
            (r["loss"], r["supervised_tokens"]) for r in losses(again)
        ]


def test_a_resume_with_other_conversations_or_masks_is_refused(make_trainer: Make, chats: Make) -> None:
    fields = {**FIELDS, "train_tokens": 300, "evaluation": chats("sequential")}

    def trainer(identity: str, **more: Any) -> Any:
        made = make_trainer(train=chats(), **fields, **more)
        made.run_facts = {"conversations_sha256": identity}
        return made

    trainer("a").train()
    with pytest.raises(ContractError, match=r"data\.conversations_sha256: 'a' -> 'b'"):
        trainer("b", resume_from_checkpoint="auto").train()


def test_epochs_of_plain_windows_are_counted_too(make_trainer: Make) -> None:
    one, two = (make_trainer(train_tokens="epoch", epochs=epochs) for epochs in (1.0, 2.5))
    assert two.plan.train_tokens == round(2.5 * one.plan.train_tokens)
    assert one.plan.supervised_tokens == one.plan.train_tokens


def test_a_batch_that_is_no_whole_number_of_windows_is_refused(make_trainer: Make, chats: Make) -> None:
    with pytest.raises(ConfigError, match="is not a multiple of the 128 tokens of one micro-step"):
        make_trainer(train=chats(), evaluation=None, **{**FIELDS, "global_batch_tokens": 3 * T})
