"""What the device of a run is, as far as it decides the numbers: its name, and the precision that suits it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch

from .xla import uses_xla, xla_kind

Precision = Literal["bf16", "fp16", "fp32"]


@dataclass(frozen=True)
class DeviceFacts:
    """What decides the precision of a run.

    Attributes:
        kind: cuda, xla, mps, cpu, or another name of torch.
        name: for people.
        capability: compute capability of an NVIDIA GPU.
        bf16: instructions that multiply bfloat16; asked of a CPU and of GPUs without a compute capability.
    """

    kind: str
    name: str
    capability: tuple[int, int] | None = None
    bf16: bool = False


def choose_precision(facts: DeviceFacts) -> tuple[Precision, str]:
    """The precision of matrix products for `precision: auto`, and why. Weights and moments are float32 in any case.

    Source of the capabilities: CUDA C++ Programming Guide, "Compute Capabilities" (bf16 from 8.0, fp16 tensor cores
    from 7.0).
    """
    if facts.kind == "cuda" and facts.capability is not None:
        written = ".".join(map(str, facts.capability))
        if facts.capability >= (8, 0):
            return "bf16", f"{facts.name} has compute capability {written}: tensor cores for bfloat16"
        if facts.capability >= (7, 0):
            return "fp16", f"{facts.name} has compute capability {written}: tensor cores for float16 only; scaled loss"
        return "fp32", f"{facts.name} has compute capability {written}: no tensor cores"
    if facts.kind == "xla":
        if facts.bf16:
            return "bf16", f"{facts.name}: its matrix unit multiplies bfloat16"
        return "fp32", f"{facts.name} is no TPU: XLA would only imitate bfloat16"
    if facts.kind == "mps":
        return "fp32", f"{facts.name}: autocast there is neither exact enough nor faster"
    if facts.bf16:
        return "bf16", f"{facts.name} multiplies bfloat16 by instructions of its own"
    return "fp32", f"{facts.name} has no instructions for bfloat16"


def device_facts(use_cpu: bool) -> DeviceFacts:
    """The facts of the device that a run of this process is on."""
    if uses_xla():
        kind = xla_kind()
        return DeviceFacts("xla", f"XLA ({kind})", bf16=kind == "TPU")
    if not use_cpu and torch.cuda.is_available():
        name = torch.cuda.get_device_name()
        if torch.version.hip:
            return DeviceFacts("cuda", name, bf16=torch.cuda.is_bf16_supported(including_emulation=False))
        return DeviceFacts("cuda", name, torch.cuda.get_device_capability())
    if not use_cpu and torch.accelerator.is_available():
        kind = str(torch.accelerator.current_accelerator())
        return DeviceFacts(kind, kind.upper(), bf16=kind == "xpu" and torch.xpu.is_bf16_supported())
    return DeviceFacts("cpu", device_name(torch.device("cpu")), bf16=cpu_has_bf16())


def device_name(device: torch.device) -> str:
    """The model of a GPU; of a CPU the instructions that its matrix products choose by."""
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    if device.type == "cpu":
        return f"CPU {torch.backends.cpu.get_cpu_capability()}{' with bf16' if cpu_has_bf16() else ''}"
    if device.type == "xla":
        return f"XLA ({xla_kind()})"
    return device.type


def cpu_has_bf16() -> bool:
    """Whether the CPU has instructions that multiply bfloat16, which then are several times faster than float32."""
    return "AVX512" in torch.backends.cpu.get_cpu_capability() and bool(torch.cpu._is_avx512_bf16_supported())
