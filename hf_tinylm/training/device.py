"""What the device of a run is, as far as it decides the numbers."""

from __future__ import annotations

import torch


def device_name(device: torch.device) -> str:
    """The model of a GPU; of a CPU the instructions that its matrix products choose by."""
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    if device.type == "cpu":
        return f"CPU {torch.backends.cpu.get_cpu_capability()}{' with bf16' if cpu_has_bf16() else ''}"
    return device.type


def cpu_has_bf16() -> bool:
    """Whether the CPU has instructions that multiply bfloat16, which then are several times faster than float32."""
    return "AVX512" in torch.backends.cpu.get_cpu_capability() and bool(torch.cpu._is_avx512_bf16_supported())
