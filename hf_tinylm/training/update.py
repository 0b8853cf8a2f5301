"""One optimizer update: count, accumulate, agree, commit. Nothing is changed before every process agrees."""

from __future__ import annotations

import contextlib
import math
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from ..modeling.loss import count_targets


@dataclass(frozen=True)
class UpdateResult:
    """What an update did. `loss` is nats per target over all processes, `grad_norm` the norm before clipping."""

    loss: float
    targets: int
    grad_norm: float
    clipped: bool

    @property
    def finite(self) -> bool:
        """Whether the update was applied."""
        return math.isfinite(self.loss) and math.isfinite(self.grad_norm)


class Update:
    """Runs updates of one model and optimizer.

    Every micro-batch's summed loss is divided by the targets of the whole update over all processes, so the result
    does not depend on how the batch was split; DDP averages over processes, which the factor `processes` undoes.
    """

    def __init__(
        self, accelerator: Any, model: nn.Module, optimizer: torch.optim.Optimizer, max_grad_norm: float
    ) -> None:
        self.accelerator = accelerator
        self.model = model
        self.optimizer = optimizer
        self.max_grad_norm = max_grad_norm
        self.parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]

    def run(self, batches: list[dict[str, torch.Tensor]], learning_rate: float) -> UpdateResult:
        """Accumulate gradients over `batches`, then step with `learning_rate`, or leave everything as it was."""
        targets = self._targets_of_all(batches)
        loss = self._accumulate(batches, targets)
        norm = torch.nn.utils.get_total_norm([p.grad for p in self.parameters if p.grad is not None])
        loss_value, norm_value = self._agree(loss, norm)
        clipped = self.max_grad_norm > 0 and norm_value > self.max_grad_norm
        result = UpdateResult(loss_value, targets, norm_value, clipped)
        if result.finite:
            if self.max_grad_norm > 0:
                torch.nn.utils.clip_grads_with_norm_(self.parameters, self.max_grad_norm, norm)
            for group in self.optimizer.param_groups:
                group["lr"] = learning_rate
            self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        return result

    def _targets_of_all(self, batches: list[dict[str, torch.Tensor]]) -> int:
        own = sum(int(count_targets(batch["shift_labels"])) for batch in batches)
        if self.accelerator.num_processes == 1:
            return own
        counted = torch.tensor([own], dtype=torch.int64, device=self.accelerator.device)
        return int(self.accelerator.reduce(counted, reduction="sum").item())

    def _accumulate(self, batches: list[dict[str, torch.Tensor]], targets: int) -> torch.Tensor:
        """Backward over all micro-batches, reducing over processes once; this process's share of the mean loss."""
        processes = self.accelerator.num_processes
        total = torch.zeros((), dtype=torch.float32, device=self.accelerator.device)
        for position, batch in enumerate(batches):
            last = position == len(batches) - 1
            with contextlib.nullcontext() if last else self.accelerator.no_sync(self.model):
                on_device = {k: v.to(self.accelerator.device, non_blocking=True) for k, v in batch.items()}
                loss = self.model(**on_device, num_items_in_batch=targets).loss
                self.accelerator.backward(loss * processes if processes > 1 else loss)
            total += loss.detach()
        return total

    def _agree(self, loss: torch.Tensor, norm: torch.Tensor) -> tuple[float, float]:
        """The loss summed over processes and the gradient norm; not finite anywhere means not finite everywhere."""
        pair = torch.stack((loss, norm.to(loss.dtype)))
        if self.accelerator.num_processes > 1:
            agreed = torch.stack((loss, (~torch.isfinite(pair)).any().to(loss.dtype)))
            summed, bad = self.accelerator.reduce(agreed, reduction="sum").tolist()
            return (math.nan if bad else summed), float(pair[1])
        return float(pair[0]), float(pair[1])
