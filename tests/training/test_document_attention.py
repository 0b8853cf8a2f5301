"""With document attention a window trains and scores as its documents would, each run alone."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch.nn import functional
from transformers import modeling_flash_attention_utils

from hf_tinylm.data.windows import TokenWindows, document_positions
from hf_tinylm.errors import ContractError, RunStopped
from hf_tinylm.modeling.stock import stock_model
from hf_tinylm.training.metrics import read_rows
from hf_tinylm.training.update import Update

Make = Callable[..., Any]
SEPARATOR, LENGTH = 0, 32


def document_stream(ids: int, seed: int) -> np.ndarray:
    """Documents of 1 to 16 ids, one of them a separator alone, so that windows hold several and begin inside one."""
    generator = np.random.default_rng(seed)
    stream = generator.integers(4, 101, ids).astype(np.uint16)
    stream[np.cumsum(generator.integers(1, 17, ids // 17))] = SEPARATOR
    stream[50:52] = SEPARATOR
    return stream


def windows_over(order: str, separator: int | None = SEPARATOR) -> TokenWindows:
    streams = [document_stream(2_000, 0), document_stream(700, 1)]
    return TokenWindows(streams, LENGTH, order, 7, separator=separator)  # type: ignore[arg-type]


def documents_alone(model: Any, windows: np.ndarray) -> tuple[torch.Tensor, int, int]:
    """Summed loss of windows (n, T+1) from a stock model that sees one document at a time; targets; documents."""
    total, targets, documents = torch.zeros(()), 0, 0
    for window in windows.tolist():
        begins = sorted({0, *(place for place, token in enumerate(window[:-1]) if token == SEPARATOR)})
        for begin, end in zip(begins, [*begins[1:], len(window) - 1], strict=True):
            logits = model(torch.tensor([window[begin:end]]), use_cache=False).logits[0]
            expected = torch.tensor(window[begin + 1 : end + 1])
            total = total + functional.cross_entropy(logits.float(), expected, reduction="sum")
            targets, documents = targets + len(expected), documents + 1
    return total, targets, documents


def varlen_reference(q: Any, k: Any, v: Any, cu_seqlens_q: Any, cu_seqlens_k: Any, **options: Any) -> torch.Tensor:
    """What the flash kernel promises, in plain torch: (tokens, heads, d), causal within each pair of bounds."""
    assert options["causal"]
    assert options["max_seqlen_q"] == int(cu_seqlens_q.diff().max())
    assert torch.equal(cu_seqlens_q, cu_seqlens_k)
    k, v = (x.repeat_interleave(q.shape[1] // k.shape[1], 1) for x in (k, v))
    outputs = []
    for begin, end in zip(cu_seqlens_q[:-1].tolist(), cu_seqlens_q[1:].tolist(), strict=True):
        queries, keys, values = (x[begin:end].transpose(0, 1) for x in (q, k, v))
        scores = queries @ keys.transpose(1, 2) * options["softmax_scale"]
        hidden = torch.ones(end - begin, end - begin, dtype=torch.bool).triu(1)
        outputs.append((scores.masked_fill(hidden, -torch.inf).softmax(-1) @ values).transpose(0, 1))
    return torch.cat(outputs)


@pytest.fixture
def flash_without_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """Put the reference in the place of the kernel; all of transformers' own handling of its arguments stays."""

    def arguments(softmax_scale: float, is_causal: bool, **others: Any) -> dict[str, Any]:
        return {"softmax_scale": softmax_scale, "causal": is_causal} | {
            name: value for name, value in others.items() if name in ("max_seqlen_q", "max_seqlen_k")
        }

    def never(*_: Any, **__: Any) -> None:
        raise AssertionError("the kernel without document bounds was called")

    kernels = (never, varlen_reference, None, None, None), (arguments, None)
    monkeypatch.setattr(modeling_flash_attention_utils, "lazy_import_flash_attention", lambda *_: kernels)


def check_one_update(trainer: Any, windows: TokenWindows) -> None:
    """Loss and gradients of an update of 8 windows in 4 micro-batches, against documents alone in a stock model."""
    model = trainer.model.train()
    stock = stock_model(model).train()
    stock.set_attn_implementation("sdpa")
    total, targets, documents = documents_alone(stock, windows.gather(range(8)))
    assert documents > 24, "windows with one document prove nothing"
    (total / targets).backward()
    before = {name: parameter.detach().clone() for name, parameter in model.named_parameters()}
    update = Update(trainer.accelerator, model, torch.optim.SGD(model.parameters(), lr=1.0), max_grad_norm=0.0)
    result = update.run([windows.batch(range(first, first + 2)) for first in (0, 2, 4, 6)], learning_rate=1.0)
    assert result.targets == targets == 8 * LENGTH
    assert result.loss == pytest.approx(total.item() / targets, abs=1e-5)
    for name, parameter in stock.named_parameters():
        gradient = before[name] - model.get_parameter(name).detach()
        assert (gradient - parameter.grad).abs().max() < 1e-5, name


@pytest.mark.parametrize("attention", ["sdpa", "eager"])
@pytest.mark.parametrize("checkpointing", [False, True], ids=["", "gradient_checkpointing"])
def test_an_update_has_the_loss_and_gradients_of_each_document_alone(
    make_trainer: Make, attention: str, checkpointing: bool
) -> None:
    trainer = make_trainer(model={"attn_implementation": attention, "initializer_range": 0.3})
    if checkpointing:
        trainer.model.gradient_checkpointing_enable({"use_reentrant": False})
    check_one_update(trainer, windows_over("random"))


def test_flash_attention_is_given_the_documents_of_every_row(make_trainer: Make, flash_without_a_gpu: None) -> None:
    trainer = make_trainer(model={"initializer_range": 0.3})
    trainer.model.config._attn_implementation = "flash_attention_2"
    check_one_update(trainer, windows_over("random"))


@pytest.mark.slow
@pytest.mark.long
def test_a_compiled_update_has_the_loss_and_gradients_of_each_document_alone(make_trainer: Make) -> None:
    trainer = make_trainer(model={"num_hidden_layers": 1, "initializer_range": 0.3})
    trainer.model.forward = torch.compile(trainer.model.forward)
    check_one_update(trainer, windows_over("random"))


@pytest.mark.slow
def test_flex_attention_scores_each_document_alone(make_trainer: Make) -> None:
    """Without gradients: on a CPU it has no backward pass, which `training_arguments` says before a run."""
    trainer = make_trainer(model={"initializer_range": 0.3})
    stock = stock_model(trainer.model)
    trainer.model.set_attn_implementation("flex_attention")
    windows = windows_over("random")
    with torch.no_grad():
        total, targets, _ = documents_alone(stock, windows.gather(range(4)))
        loss = trainer.model.eval()(**windows.batch(range(4))).loss
    assert float(loss) == pytest.approx(total.item() / targets, abs=1e-5)


def test_rows_of_several_lengths_filled_up_with_padding_are_each_as_if_alone(make_trainer: Make) -> None:
    """A padded batch: padding has position 0 and no target."""
    model = make_trainer(model={"initializer_range": 0.3}).model
    window = windows_over("random").gather([3])[0]
    ids, labels = torch.full((3, LENGTH), 3), torch.full((3, LENGTH), -100)
    positions = torch.zeros((3, LENGTH), dtype=torch.int64)
    losses = []
    for row, length in enumerate((9, 20, LENGTH)):
        ids[row, :length], labels[row, :length] = (
            torch.from_numpy(window[:length]),
            torch.from_numpy(window[1:][:length]),
        )
        positions[row, :length] = torch.from_numpy(document_positions(window[None, :length], SEPARATOR)[0])
        losses.append(documents_alone(model, window[None, : length + 1])[0])
    total = model(input_ids=ids, shift_labels=labels, position_ids=positions, num_items_in_batch=1).loss
    assert total.item() == pytest.approx(sum(loss.item() for loss in losses), rel=1e-6)


def test_a_run_trains_and_validates_on_documents_alone(make_trainer: Make) -> None:
    """Through the trainer: the first update's loss, and the evaluation after it."""
    train, validation = windows_over("permutation"), windows_over("sequential")
    updates = {"train_tokens": 8 * LENGTH, "warmup_steps": 0, "eval_strategy": "steps", "eval_steps": 1}
    shape = {"initializer_range": 0.3}
    trainer = make_trainer(model=shape, train=train, evaluation=validation, eval_tokens=5 * LENGTH, **updates)
    before, targets, _ = documents_alone(stock_model(trainer.model), train.gather(range(8)))
    trainer.train()
    after, eval_targets, _ = documents_alone(stock_model(trainer.model), validation.gather(range(5)))
    row, evaluation = read_rows(trainer.output_dir / "metrics.jsonl")
    assert row["loss"] == pytest.approx(before.item() / targets, abs=1e-5)
    assert evaluation["eval_loss"] == pytest.approx(after.item() / eval_targets, abs=1e-5)
    run_on = make_trainer("run_on", model=shape, train=windows_over("permutation", None), **updates)
    run_on.train()
    assert abs(read_rows(run_on.output_dir / "metrics.jsonl")[0]["loss"] - row["loss"]) > 1e-3, "packing must be seen"


def test_the_choice_is_recorded_and_a_resume_with_another_is_refused(make_trainer: Make) -> None:
    some = {"stop_after_updates": 1, "save_strategy": "steps", "save_steps": 1}
    with pytest.raises(RunStopped):
        make_trainer(train=windows_over("permutation"), **some).train()
    recorded = json.loads((make_trainer().output_dir / "run.json").read_text())
    assert recorded["identity"]["data"]["document_attention"] is True
    with pytest.raises(ContractError, match="document_attention: True -> False"):
        make_trainer(train=windows_over("permutation", None)).train(resume_from_checkpoint="auto")
