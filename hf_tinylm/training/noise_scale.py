"""How much of an update is signal: gradient noise scale, Adam's signal beside its noise, cosine of successive updates.

The norm of the gradient is measured at two batch sizes, the first micro-batch and the whole update. With per-token
gradients of mean G and covariance Sigma, E|g_B|^2 = |G|^2 + tr(Sigma)/B, so two sizes give both unknowns without bias.
tr(Sigma)/|G|^2 is the noise scale in tokens: an update of that many tokens is half signal, half noise.

Source: McCandlish et al. 2018, An Empirical Model of Large-Batch Training, arXiv:1812.06162, appendix A.1.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch

from ..modeling.loss import count_targets

WINDOW = 200  # measured updates that the noise scale is smoothed over
_BLOCKS = 10  # of the window, for the uncertainty; an estimate needs two updates in each
ADAM_EVERY = 10  # updates between two looks at Adam's moments
_SAMPLE = 2**20  # elements of all weights that are looked at; their mean is known to 0.1%
_ADAM_FROM = 20  # updates before Adam's moments say anything


def unbiased(
    small_square: float, per_small: float, big_square: float, big_tokens: int
) -> tuple[float, float] | tuple[None, None]:
    """|G|^2 and tr(Sigma) of one token from the squared norms of mean gradients over two batches.

    Args:
        per_small: 1 / tokens of the small batch (the mean of it, where several small batches were averaged).
    """
    per_big = 1 / big_tokens
    if per_small <= per_big:
        return None, None
    noise = (small_square - big_square) / (per_small - per_big)
    return big_square - noise * per_big, noise


def noise_scale(signals: Sequence[float], noises: Sequence[float]) -> tuple[float | None, float | None]:
    """The noise scale in tokens and its standard error, from `unbiased` of successive updates.

    A ratio of averages: single updates are far too noisy for an average of ratios. The error is a jackknife over ten
    blocks, so neighbours may depend on each other. None without enough updates, or while no signal is found.
    """
    pairs = np.array([signals, noises], dtype=np.float64)
    if pairs.shape[1] < 2 * _BLOCKS or pairs[0].mean() <= 0:
        return None, None
    sums = np.stack([block.sum(1) for block in np.array_split(pairs, _BLOCKS, axis=1)], axis=1)
    left_out = pairs.sum(1, keepdims=True) - sums
    value = float(pairs[1].mean() / pairs[0].mean())
    if (left_out[0] <= 0).any():
        return value, None
    ratios = left_out[1] / left_out[0]
    return value, float(np.sqrt((_BLOCKS - 1) / _BLOCKS * ((ratios - ratios.mean()) ** 2).sum()))


def adam_signal_of_noise(beta1: float, beta2: float, updates: int) -> float:
    """The mean of |m| / sqrt(v) that gradients without any signal give after `updates` updates; 0.183 for 0.9.

    For independent normal gradients m is normal with variance sum(a^2), a its weights of past gradients, so
    E|m| = sqrt(2/pi * sum(a^2)), which is sqrt(2/pi * (1-beta1)/(1+beta1)) in the long run. v has mean 1 and weights b;
    expanding v^(-1/2) to second order multiplies by 1 + 3/4 sum(b^2) - 1/2 sum(b a^2) / sum(a^2).
    """
    ages = np.arange(min(updates, round(40 / (1 - min(max(beta1, beta2), 0.99999)))))
    first, second = ((beta**ages) / (beta**ages).sum() for beta in (beta1, beta2))
    variance = (first**2).sum()
    correction = 1 + 0.75 * (second**2).sum() - 0.5 * (second * first**2).sum() / variance
    return float(math.sqrt(2 / math.pi * variance) * correction)


class NoiseMeter:
    """Measures the updates of a run. It reads gradients and moments and changes nothing.

    One process with one micro-batch per update has a gradient of one size only, and so has any number of processes
    with one micro-batch each, whose own gradients are reduced as they appear: there is no noise scale then.

    Args:
        enabled: off, nothing is read and `row` is empty.
    """

    def __init__(
        self,
        optimizer: torch.optim.Optimizer,
        processes: int = 1,
        scaler: torch.amp.GradScaler | None = None,
        enabled: bool = True,
    ) -> None:
        self.optimizer, self.processes, self.scaler, self.enabled = optimizer, processes, scaler, enabled
        self.adam = [group for group in optimizer.param_groups if "betas" in group]  # other groups have other moments
        self.parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
        self._stride = _stride(sum(parameter.numel() for parameter in self.parameters))
        self._measured: deque[tuple[float, float]] = deque(maxlen=WINDOW)
        self._first: tuple[torch.Tensor, int] | None = None
        self._before: torch.Tensor | None = None

    def continue_from(self, rows: Sequence[dict[str, Any]]) -> None:
        """Take up the smoothing of a run that is resumed, from the rows of its metrics.jsonl."""
        measured = (row for row in rows if row.get("gradient_signal") is not None)
        self._measured.extend((row["gradient_signal"], row["gradient_noise"]) for row in measured)

    def see_first(self, batch: dict[str, torch.Tensor]) -> None:
        """Called after the backward pass of this process's first micro-batch, when another one follows."""
        if self.enabled:
            norm = torch.nn.utils.get_total_norm([p.grad for p in self.parameters if p.grad is not None])
            self._first = (norm, int(count_targets(batch["shift_labels"])))

    def own(self) -> tuple[float, float, float]:
        """Numbers of this process that are summed over all: squared norm of the first summed gradient per target,
        1 / its targets, and 1 if there is such a gradient. The gradient is still divided by the targets of all.
        """
        if self._first is None or not self._first[1]:
            return 0.0, 0.0, 0.0
        norm, targets = float(self._first[0]), self._first[1]
        scale = self.processes * (self.scaler.get_scale() if self.scaler is not None else 1.0)
        square = (norm / scale / targets) ** 2
        return (square, 1 / targets, 1.0) if math.isfinite(square) else (0.0, 0.0, 0.0)

    def before_update(self, number: int) -> None:
        """Look at Adam's direction before the zero-based update, where that is due."""
        self._first = None
        due = self.enabled and self.adam and (number + 1) % ADAM_EVERY == 0 and number + 1 >= _ADAM_FROM
        self._before = self._direction()[0] if due else None

    def row(self, step: int, summed: Sequence[float], targets: int, grad_norm: float) -> dict[str, float | None]:
        """What metrics.jsonl says of the update that was applied.

        Args:
            summed: `own` summed over processes.
            targets: of the update, all processes.
            grad_norm: of the whole update, before clipping.
        """
        if not self.enabled:
            return {}
        found: dict[str, float | None] = {}
        square, per_small, count = summed
        signal = noise = None
        if count == self.processes:  # in float64: each process's share was divided by the targets of the update
            signal, noise = unbiased(square * targets**2 / count, per_small / count, grad_norm**2, targets)
        if signal is not None and noise is not None:
            self._measured.append((signal, noise))
        scale, error = noise_scale([s for s, _ in self._measured], [n for _, n in self._measured])
        found |= {"gradient_signal": signal, "gradient_noise": noise, "noise_scale": scale, "noise_scale_error": error}
        found["signal_share"] = None if scale is None or scale < 0 else targets / (targets + scale)
        if self._before is not None:
            after, ratio = self._direction()
            found["update_cosine"] = float(torch.nn.functional.cosine_similarity(self._before, after, dim=0))
            found["adam_signal"] = ratio
            beta1, beta2 = self.adam[0]["betas"]
            found["adam_signal_of_noise"] = adam_signal_of_noise(beta1, beta2, step)
            self._before = None
        return found

    @torch.no_grad()
    def _direction(self) -> tuple[torch.Tensor, float]:
        """Adam's last step per unit of rate, without decay, of a sample of all elements; and their mean |m|/sqrt(v)."""
        first, second = [], []
        group, corrected = self.adam[0], (1.0, 1.0)
        for parameter in (parameter for each in self.adam for parameter in each["params"]):
            state = self.optimizer.state.get(parameter)
            if not state:
                continue
            first.append(state["exp_avg"].flatten()[:: self._stride])
            second.append(state["exp_avg_sq"].flatten()[:: self._stride])
            corrected = tuple(1 - beta ** float(state["step"]) for beta in group["betas"])
        if not first:
            return torch.zeros(1), math.nan
        m, v = torch.cat(first) / corrected[0], (torch.cat(second) / corrected[1]).sqrt()
        moved = v > 0  # an element without any gradient so far has neither
        return m / (v + group["eps"]), float((m[moved].abs() / v[moved]).mean())


def _stride(elements: int) -> int:
    """Distance of the elements of a sample; it shares no small factor with the width of a matrix."""
    stride = max(1, -(-elements // _SAMPLE))
    while stride > 1 and any(stride % prime == 0 for prime in (2, 3, 5, 7, 11)):
        stride += 1
    return stride
