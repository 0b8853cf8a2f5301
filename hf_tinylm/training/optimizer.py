"""AdamW, and Muon for hidden matrices beside AdamW for the rest: their parameter groups, and their state by name."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from itertools import islice
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from ..errors import CheckpointError, TrainingError

if TYPE_CHECKING:
    from .arguments import LMTrainingArguments

# Key of a parameter group: its learning rate as a multiple of the scheduled one; groups without it have that one.
RATE_RATIO = "rate_ratio"
_SMALLEST = torch.finfo(torch.float32).tiny
_ADAMW_STATE, _MUON_STATE = {"exp_avg", "exp_avg_sq", "step"}, {"momentum_buffer"}
_EMBEDDINGS = ("model.embed_tokens.weight", "transformer.wte.weight", "transformer.wpe.weight")  # the last two: GPT-2's
_HEAD = "lm_head.weight"


def named_trainable_parameters(model: nn.Module) -> dict[str, nn.Parameter]:
    """Every trainable parameter once, by its first name (a tied embedding keeps the embedding's)."""
    return {name: parameter for name, parameter in model.named_parameters() if parameter.requires_grad}


def parameter_groups(model: nn.Module, weight_decay: float) -> list[dict[str, object]]:
    """Two groups: tensors with two or more dimensions are decayed, norm gains and other vectors are not.

    Raises:
        TrainingError: a parameter is not float32, or the groups do not cover every parameter exactly once.
    """
    named = named_trainable_parameters(model)
    decayed = [p for p in named.values() if p.ndim >= 2]
    undecayed = [p for p in named.values() if p.ndim < 2]
    _check_groups(model, named, decayed + undecayed)
    return [{"params": decayed, "weight_decay": weight_decay}, {"params": undecayed, "weight_decay": 0.0}]


def _check_groups(model: nn.Module, named: dict[str, nn.Parameter], grouped: list[nn.Parameter]) -> None:
    for name, parameter in named.items():
        if parameter.dtype != torch.float32:
            raise TrainingError(
                f"Parameter {name} is {parameter.dtype}; training needs float32 weights (bf16 updates round away). "
                "Load the model with dtype=torch.float32; bf16: true still multiplies in bf16."
            )
    unique = {id(p) for p in model.parameters() if p.requires_grad}
    ids = [id(p) for p in grouped]
    if len(set(ids)) != len(ids) or set(ids) != unique:
        raise TrainingError("The optimizer's groups do not hold every trainable parameter exactly once.")


def adamw(
    model: nn.Module, learning_rate: float, betas: tuple[float, float], epsilon: float, weight_decay: float
) -> torch.optim.AdamW:
    """AdamW over `parameter_groups`, fused where the device has a fused kernel.

    On XLA devices the rate and the counts of steps are tensors there, so that no compiled step can hold their values.
    """
    groups = parameter_groups(model, weight_decay)
    device = next(model.parameters()).device
    if device.type == "xla":
        rate = torch.tensor(learning_rate, device=device)
        return torch.optim.AdamW(groups, lr=rate, betas=betas, eps=epsilon, capturable=True)
    fused = device.type in ("cpu", "cuda")
    return torch.optim.AdamW(groups, lr=learning_rate, betas=betas, eps=epsilon, fused=fused)


class MuonWithAdamW(torch.optim.Optimizer):
    """`torch.optim.Muon` for hidden matrices and `torch.optim.AdamW` for embedding, head and norm gains, as one.

    The parts share this optimizer's groups and state, so whoever sets a rate, reads a moment or loads a state sees one
    optimizer. The first group is Muon's.

    Args:
        matrices: the group of hidden matrices, with Muon's settings.
        others: AdamW's groups; each may have a `rate_ratio`.

    Source: Jordan et al. 2024, https://kellerjordan.github.io/posts/muon; matched to AdamW's update size by
        Liu et al. 2025, arXiv 2502.16982.
    """

    def __init__(
        self,
        matrices: dict[str, Any],
        others: list[dict[str, Any]],
        learning_rate: float,
        betas: tuple[float, float],
        epsilon: float,
    ) -> None:
        device = others[0]["params"][0].device.type
        self.muon = torch.optim.Muon([matrices], lr=learning_rate)
        self.adamw = torch.optim.AdamW(others, learning_rate, betas, epsilon, fused=device in ("cpu", "cuda"))
        super().__init__([*self.muon.param_groups, *self.adamw.param_groups], {})
        self._share()

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> float | None:  # type: ignore[override]
        """One step of both parts."""
        assert closure is None, "the loss is computed before the step"
        self.muon.step()
        self.adamw.step()
        return None

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Replace the state of both parts."""
        super().load_state_dict(state_dict)
        self._share()

    def _share(self) -> None:
        groups = iter(self.param_groups)
        for part in (self.muon, self.adamw):
            part.state = self.state
            part.param_groups = list(islice(groups, len(part.param_groups)))


def hidden_matrices(model: nn.Module) -> dict[str, nn.Parameter]:
    """The matrices of attention and feed-forward layers: all with two dimensions but the embeddings and the head."""
    named = named_trainable_parameters(model)
    return {name: p for name, p in named.items() if p.ndim == 2 and name not in (*_EMBEDDINGS, _HEAD)}


def muon_with_adamw(
    model: nn.Module,
    learning_rate: float,
    betas: tuple[float, float],
    epsilon: float,
    weight_decay: float,
    momentum: float,
    ns_steps: int,
    embedding_lr_ratio: float,
    head_lr_ratio: float,
    gain_lr_ratio: float,
) -> MuonWithAdamW:
    """Hidden matrices by Muon at `learning_rate`; embeddings, untied head and vectors by AdamW at multiples of it.

    Muon's update has the root mean square of AdamW's (0.2 of the rate for each weight), so rates compare.

    Raises:
        TrainingError: a parameter is not float32, or the groups do not cover every parameter exactly once.
    """
    named = named_trainable_parameters(model)
    hidden = hidden_matrices(model)
    embedding, head = ([named[name] for name in names if name in named] for names in (_EMBEDDINGS, (_HEAD,)))
    gains = [p for p in named.values() if p.ndim < 2]
    _check_groups(model, named, [*hidden.values(), *embedding, *head, *gains])
    matrices = {
        **{"params": list(hidden.values()), "weight_decay": weight_decay, RATE_RATIO: 1.0},
        **{"momentum": momentum, "nesterov": True, "ns_steps": ns_steps, "adjust_lr_fn": "match_rms_adamw"},
    }
    others: list[dict[str, Any]] = [
        {"params": embedding, "weight_decay": weight_decay, RATE_RATIO: embedding_lr_ratio},
        {"params": head, "weight_decay": weight_decay, RATE_RATIO: head_lr_ratio},
        {"params": gains, "weight_decay": 0.0, RATE_RATIO: gain_lr_ratio},
    ]
    return MuonWithAdamW(matrices, [group for group in others if group["params"]], learning_rate, betas, epsilon)


def optimizer_of(model: nn.Module, args: LMTrainingArguments) -> torch.optim.Optimizer:
    """The optimizer that `args.optim` names, with the settings of `args`."""
    betas = (args.adam_beta1, args.adam_beta2)
    if args.optim == "adamw":
        return adamw(model, args.learning_rate, betas, args.adam_epsilon, args.weight_decay)
    return muon_with_adamw(
        model, args.learning_rate, betas, args.adam_epsilon, args.weight_decay, args.muon_momentum, args.muon_ns_steps,
        args.embedding_lr_ratio, args.head_lr_ratio, args.gain_lr_ratio,
    )  # fmt: skip


def set_rates(optimizer: torch.optim.Optimizer, learning_rate: float) -> None:
    """Give every group its multiple of the scheduled rate.

    A rate that is a tensor is never zero: torch divides by it, and an element that never had a gradient is 0 / 0 then.
    """
    for group in optimizer.param_groups:
        rate, held = learning_rate * group.get(RATE_RATIO, 1.0), group["lr"]
        group["lr"] = torch.tensor(max(rate, _SMALLEST), device=held.device) if torch.is_tensor(held) else rate


def set_momentum(optimizer: torch.optim.Optimizer, momentum: float) -> None:
    """Give Muon's group its momentum; other optimizers have none to set."""
    if isinstance(optimizer, MuonWithAdamW):
        optimizer.param_groups[0]["momentum"] = momentum


def optimizer_tensors(optimizer: torch.optim.Optimizer, model: nn.Module) -> dict[str, torch.Tensor]:
    """The optimizer's state as `{"exp_avg.model.norm.weight": tensor, ...}`."""
    tensors = {}
    for name, parameter in named_trainable_parameters(model).items():
        for key, value in optimizer.state.get(parameter, {}).items():
            tensors[f"{key}.{name}"] = value if torch.is_tensor(value) else torch.tensor(value)
    return tensors


def moments_are_zero(optimizer: torch.optim.Optimizer) -> bool:
    """Whether the optimizer remembers no gradient: it has no state yet, or one of zeros."""
    held = (value for state in optimizer.state.values() for value in state.values())
    return not any(bool(value.any()) if torch.is_tensor(value) else bool(value) for value in held)


def load_optimizer_tensors(
    optimizer: torch.optim.Optimizer, model: nn.Module, tensors: dict[str, torch.Tensor]
) -> None:
    """Put tensors written by `optimizer_tensors` back; every parameter must have its state.

    Raises:
        CheckpointError: naming the first parameter whose state is missing, of another shape, or another optimizer's.
    """
    kinds = {id(p): _ADAMW_STATE if "betas" in g else _MUON_STATE for g in optimizer.param_groups for p in g["params"]}
    names = {id(parameter): name for name, parameter in named_trainable_parameters(model).items()}
    by_parameter: dict[str, dict[str, torch.Tensor]] = {name: {} for name in names.values()}
    for key, tensor in tensors.items():
        kind, _, name = key.partition(".")
        if name not in by_parameter:
            raise CheckpointError(f"The optimizer file holds state of {name}, which the model does not have.")
        by_parameter[name][kind] = tensor
    state = {}
    for position, parameter in enumerate(_parameters(optimizer)):
        name = names[id(parameter)]
        found = by_parameter[name]
        if not found:
            raise CheckpointError(f"The optimizer file holds no state of {name}.")
        if set(found) != kinds[id(parameter)]:
            raise CheckpointError(
                f"The optimizer file holds {', '.join(sorted(found))} of {name}, and this run's optimizer keeps "
                f"{', '.join(sorted(kinds[id(parameter)]))}: they are of different kinds. Give the optim of the run "
                "that the file is of, or leave out init_optimizer: moments then begin at zero."
            )
        for kind, tensor in found.items():
            if tensor.ndim and tensor.shape != parameter.shape:
                raise CheckpointError(
                    f"The optimizer file's {kind} of {name} has shape {tuple(tensor.shape)}, "
                    f"the parameter {tuple(parameter.shape)}."
                )
        state[position] = found
    optimizer.load_state_dict({"state": state, "param_groups": optimizer.state_dict()["param_groups"]})


def _parameters(optimizer: torch.optim.Optimizer) -> Iterable[nn.Parameter]:
    return (parameter for group in optimizer.param_groups for parameter in group["params"])
