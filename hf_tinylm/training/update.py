"""One optimizer update: count, accumulate, agree, commit. Nothing is changed before every process agrees."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import nn

from ..errors import TrainingError
from ..modeling.loss import count_targets
from .optimizer import set_rates
from .source_loss import SOURCE_IDS, source_sums
from .xla import average_over_processes, hand_over


@dataclass(frozen=True)
class UpdateResult:
    """What an update did. `loss` is nats per target over all processes, `grad_norm` the norm before clipping.

    Attributes:
        requests: the sums over processes of what each of them asked for.
        bad_batches: this process's micro-batches whose loss was not finite.
        source_sums: nats and targets of each source over all processes, (2, sources); no sources unless asked for.
        overflow: float16 gradients overflowed at the present scale; the update is to be tried again at a lower one.
    """

    loss: float
    targets: int
    grad_norm: float
    clipped: bool
    requests: tuple[float, ...] = ()
    bad_batches: list[int] = field(default_factory=list)
    source_sums: np.ndarray = field(default_factory=lambda: np.zeros((2, 0)))
    overflow: bool = False

    @property
    def applied(self) -> bool:
        """Whether weights and optimizer were changed."""
        return math.isfinite(self.loss) and math.isfinite(self.grad_norm)


class Update:
    """Runs updates of one model and optimizer.

    Every micro-batch's summed loss is divided by the targets of the whole update over all processes, so the result
    does not depend on how the batch was split; DDP averages over processes, which the factor `processes` undoes.

    Args:
        accelerator: gives `device`, `num_processes`, `no_sync(model)`, `reduce(tensor, reduction)`. On an XLA device
            each micro-batch is a program, what comes after them is one, and the step of the optimizer is one.
        scaler: a gradient scaler for float16, or None.
        sources: above 0, batches have `source_ids` (n, T) below it, and the loss of each source is summed.
        after_first: called with the first of several micro-batches when `.grad` holds its gradient alone.
        rows_of_pass: windows of a micro-batch that one forward and backward pass takes; None: all.
    """

    def __init__(
        self,
        accelerator: Any,
        model: nn.Module,
        optimizer: torch.optim.Optimizer,
        max_grad_norm: float,
        scaler: torch.amp.GradScaler | None = None,
        sources: int = 0,
        after_first: Callable[[dict[str, torch.Tensor]], None] = lambda batch: None,
        rows_of_pass: int | None = None,
    ) -> None:
        self.accelerator = accelerator
        self.model = model
        self.optimizer = optimizer
        self.max_grad_norm = max_grad_norm
        self.scaler = scaler
        self.sources = sources
        self.after_first = after_first
        self.rows_of_pass = rows_of_pass
        self.parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]

    def run(
        self,
        batches: list[dict[str, torch.Tensor]],
        learning_rate: float,
        requests: Callable[[], Sequence[float]] = tuple,
        known: tuple[int, int] | None = None,
    ) -> UpdateResult:
        """Accumulate gradients over `batches`, then step with `learning_rate`, or leave everything as it was.

        Args:
            requests: asked after the last backward for numbers of this process that travel with the agreement, such as
                "stop after this update".
            known: targets of this process and of all, where they follow from the plan and need not be exchanged.

        Raises:
            TrainingError: the batches hold another number of targets than is known.
        """
        targets = self._targets_of_all(batches, known)
        losses, sums = self._accumulate(batches, targets)
        if self.scaler is not None:
            self.scaler.unscale_(self.optimizer)
        gradients = [p.grad for p in self.parameters if p.grad is not None]
        if self.accelerator.device.type == "xla" and self.accelerator.num_processes > 1:
            average_over_processes(gradients, self.accelerator.num_processes)
        norm = torch.nn.utils.get_total_norm(gradients)
        loss, norm_value, bad, agreed = self._agree(losses, norm, (*requests(), *sums.ravel()))
        split = len(agreed) - sums.size
        agreed, by_source = agreed[:split], np.array(agreed[split:]).reshape(sums.shape)
        clipped = self.max_grad_norm > 0 and norm_value > self.max_grad_norm
        overflow = self.scaler is not None and math.isfinite(loss) and not math.isfinite(norm_value)
        result = UpdateResult(loss, targets, norm_value, clipped, agreed, bad, by_source, overflow)
        if result.applied:
            self._commit(learning_rate, norm)
        if self.scaler is not None:  # a loss that is not finite says nothing about the scale, which then stays
            self.scaler.update(None if result.applied or overflow else self.scaler.get_scale())
        self.optimizer.zero_grad(set_to_none=True)
        hand_over(self.accelerator.device)
        return result

    def warm_up(self, batch: dict[str, torch.Tensor]) -> None:
        """A backward pass of zeros: DDP arranges its buckets after its first one, and sums then keep their order.

        Without it the first update after a resume would add gradients of three or more processes in another order.
        """
        (self._forward(self._passes(batch)[0], 1).loss * 0.0).backward()
        self.optimizer.zero_grad(set_to_none=True)

    def _commit(self, learning_rate: float, norm: torch.Tensor) -> None:
        if self.max_grad_norm > 0:
            torch.nn.utils.clip_grads_with_norm_(self.parameters, self.max_grad_norm, norm)
        set_rates(self.optimizer, learning_rate)
        if self.scaler is None:
            self.optimizer.step()
        else:
            self.scaler.step(self.optimizer)

    def _targets_of_all(self, batches: list[dict[str, torch.Tensor]], known: tuple[int, int] | None) -> int:
        own = sum(int(count_targets(batch["shift_labels"])) for batch in batches)
        if known is not None:
            if own != known[0]:
                raise TrainingError(f"An update has {own:,} targets on this process; its plan has {known[0]:,}.")
            return known[1]
        if self.accelerator.num_processes == 1:
            return own
        counted = torch.tensor([own], dtype=torch.int64, device=self.accelerator.device)
        return int(self.accelerator.reduce(counted, reduction="sum").item())

    def _accumulate(self, batches: list[dict[str, torch.Tensor]], targets: int) -> tuple[torch.Tensor, np.ndarray]:
        """Backward over all micro-batches, reducing over processes once.

        Returns:
            (micro-batches,) float32: each one's share of the mean loss; and this process's `source_sums` (2, sources).
        """
        with self.casts_kept():
            losses, of_targets = self._backward(batches, targets)
        sums = np.zeros((2, self.sources))
        parts = (part for batch in batches for part in self._passes(batch))
        for part, each in zip(parts, of_targets, strict=False):  # not before all micro-batches are under way
            sums += source_sums(each, part["shift_labels"], part[SOURCE_IDS], self.sources)
        return torch.stack(losses), sums

    def casts_kept(self) -> AbstractContextManager[Any]:
        """One copy of each layer's weights in the precision of products for all micro-batches of an update.

        Autocast keeps the copies it made until its outermost context ends; this one is outermost and casts nothing.
        """
        kind = self.accelerator.device.type
        return contextlib.nullcontext() if kind == "xla" else torch.autocast(kind, enabled=False)

    def _backward(
        self, batches: list[dict[str, torch.Tensor]], targets: int
    ) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
        """Each micro-batch's share of the mean loss, and, with sources, each pass's losses of targets."""
        processes = self.accelerator.num_processes
        losses, of_targets = [], []
        for position, batch in enumerate(batches):
            last = position == len(batches) - 1
            passes, own = self._passes(batch), []
            for number, part in enumerate(passes):
                reducing = last and number == len(passes) - 1
                with contextlib.nullcontext() if reducing else self.accelerator.no_sync(self.model):
                    output = self._forward(part, max(1, targets))
                    loss = output.loss * processes if processes > 1 else output.loss
                    (loss if self.scaler is None else self.scaler.scale(loss)).backward()
                own.append(output.loss.detach().float())
                if self.sources:
                    of_targets.append(output.target_losses)
                hand_over(self.accelerator.device)
            losses.append(sum(own[1:], start=own[0]))  # put into one tensor by its place, it would be another program
            if position == 0 and not last:
                self.after_first(batch)
        return losses, of_targets

    def _passes(self, batch: dict[str, torch.Tensor]) -> list[dict[str, torch.Tensor]]:
        """A micro-batch in the parts that are computed one after the other."""
        rows = self.rows_of_pass or len(batch["shift_labels"])
        parts = zip(*(tensor.split(rows) for tensor in batch.values()), strict=True)
        return [dict(zip(batch, part, strict=True)) for part in parts]

    def _forward(self, batch: dict[str, torch.Tensor], targets: int) -> Any:
        """The model's output for a micro-batch whose summed loss is divided by `targets`."""
        device = self.accelerator.device
        wanted = {"return_target_losses": True} if self.sources else {}
        inputs = {k: v.to(device, non_blocking=True) for k, v in batch.items() if k != SOURCE_IDS}
        count = torch.tensor(targets, device=device)  # a number would be compiled into the graph
        return self.model(**inputs, num_items_in_batch=count, **wanted)

    def _agree(
        self, losses: torch.Tensor, norm: torch.Tensor, requests: Sequence[float]
    ) -> tuple[float, float, list[int], tuple[float, ...]]:
        """The summed loss, the gradient norm, this process's bad micro-batches, the summed requests.

        One exchange, and one wait for the device. Not finite anywhere is not finite everywhere; a loss that is not
        finite says so before a norm does.
        """
        loss = losses.sum()
        own = [~torch.isfinite(loss), ~torch.isfinite(norm)]
        row = torch.stack([torch.nan_to_num(loss), *(flag.to(loss.dtype) for flag in own)])
        row = torch.cat((row, torch.tensor(requests, dtype=loss.dtype, device=loss.device)))
        if self.accelerator.num_processes > 1:
            row = self.accelerator.reduce(row, reduction="sum")
        row = torch.cat((row, norm.reshape(1).to(row.dtype), losses))
        hand_over(self.accelerator.device)
        summed, bad_loss, bad_norm, *agreed = row.tolist()
        agreed, norm_value, own_losses = agreed[: len(requests)], agreed[len(requests)], agreed[len(requests) + 1 :]
        bad = [number for number, value in enumerate(own_losses) if not math.isfinite(value)]
        return (math.nan if bad_loss else summed), (math.nan if bad_norm else norm_value), bad, tuple(agreed)
