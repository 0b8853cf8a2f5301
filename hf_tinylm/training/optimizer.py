"""AdamW with its two parameter groups, and its state as named tensors."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import nn

from ..errors import CheckpointError, TrainingError


def named_trainable_parameters(model: nn.Module) -> dict[str, nn.Parameter]:
    """Every trainable parameter once, by its first name (a tied embedding keeps the embedding's)."""
    return {name: parameter for name, parameter in model.named_parameters() if parameter.requires_grad}


def parameter_groups(model: nn.Module, weight_decay: float) -> list[dict[str, object]]:
    """Two groups: tensors with two or more dimensions are decayed, norm gains and other vectors are not.

    Raises:
        TrainingError: a parameter is not float32, or the groups do not cover every parameter exactly once.
    """
    named = named_trainable_parameters(model)
    for name, parameter in named.items():
        if parameter.dtype != torch.float32:
            raise TrainingError(
                f"Parameter {name} is {parameter.dtype}; training needs float32 weights (bf16 updates round away). "
                "Load the model with dtype=torch.float32; bf16: true still multiplies in bf16."
            )
    decayed = [p for p in named.values() if p.ndim >= 2]
    undecayed = [p for p in named.values() if p.ndim < 2]
    unique = {id(p) for p in model.parameters() if p.requires_grad}
    grouped = [id(p) for p in decayed + undecayed]
    if len(set(grouped)) != len(grouped) or set(grouped) != unique:
        raise TrainingError("The optimizer's groups do not hold every trainable parameter exactly once.")
    return [{"params": decayed, "weight_decay": weight_decay}, {"params": undecayed, "weight_decay": 0.0}]


def adamw(
    model: nn.Module, learning_rate: float, betas: tuple[float, float], epsilon: float, weight_decay: float
) -> torch.optim.AdamW:
    """AdamW over `parameter_groups`, fused where the device has a fused kernel."""
    groups = parameter_groups(model, weight_decay)
    fused = next(model.parameters()).device.type in ("cpu", "cuda")
    return torch.optim.AdamW(groups, lr=learning_rate, betas=betas, eps=epsilon, fused=fused)


def optimizer_tensors(optimizer: torch.optim.Optimizer, model: nn.Module) -> dict[str, torch.Tensor]:
    """The optimizer's state as `{"exp_avg.model.norm.weight": tensor, ...}`."""
    tensors = {}
    for name, parameter in named_trainable_parameters(model).items():
        for key, value in optimizer.state.get(parameter, {}).items():
            tensors[f"{key}.{name}"] = value if torch.is_tensor(value) else torch.tensor(value)
    return tensors


def load_optimizer_tensors(
    optimizer: torch.optim.Optimizer, model: nn.Module, tensors: dict[str, torch.Tensor]
) -> None:
    """Put tensors written by `optimizer_tensors` back; every parameter must have its state.

    Raises:
        CheckpointError: naming the first parameter whose state is missing or of another shape.
    """
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
