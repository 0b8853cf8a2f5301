"""Published figures of devices by name: dense bfloat16 peak and memory."""

from __future__ import annotations

import re
from dataclasses import dataclass

from ..errors import ConfigError


@dataclass(frozen=True)
class Device:
    """A device's name, its dense bfloat16 peak in FLOP/s (float32 accumulation), and its memory in GiB."""

    name: str
    peak_flops: float
    memory_gib: int


# Dense bfloat16 peaks without sparsity, as published in each vendor's data sheet (nvidia.com/en-us/data-center/NAME,
# "BFLOAT16 Tensor Core"; of Hopper and B200 half of the figure, which is with sparsity); GeForce cards from the white
# papers of their architectures, with float32 accumulation, at which they run half of the headline figure. Memory is
# that of the common variant. Cards without bfloat16 (V100, T4) have none.
DEVICES = {
    device.name: device
    for device in (
        Device("H200", 989e12, 141),
        Device("H100 PCIe", 756e12, 80),
        Device("H100 NVL", 835e12, 94),
        Device("H100", 989e12, 80),
        Device("GH200", 989e12, 96),
        Device("B200", 2250e12, 180),
        Device("A100", 312e12, 80),
        Device("A30", 165e12, 24),
        Device("A40", 149.7e12, 48),
        Device("L40S", 362e12, 48),
        Device("L40", 181e12, 48),
        Device("L4", 121e12, 24),
        Device("A10", 125e12, 24),
        Device("A10G", 70e12, 24),
        Device("RTX 5090", 209.5e12, 32),
        Device("RTX 5080", 112.6e12, 16),
        Device("RTX 5070 Ti", 87.9e12, 16),
        Device("RTX 4090", 165.2e12, 24),
        Device("RTX 3090", 71e12, 24),
        Device("TPU v5e", 197e12, 16),
        Device("TPU v5p", 459e12, 95),
        Device("TPU v4", 275e12, 32),
    )
}
# Words that make another product of a name in the table, with other figures, or a part of one (MIG; vGPU: "A40-8Q").
_VARIANTS = {"NVL", "Laptop", "SUPER", "Ti", "D", "MIG"}
_VGPU_PROFILE = re.compile(r"\d+[abcq]")


def device_of(name: str) -> Device | None:
    """The device of a name as drivers give it, which must hold every word of an entry and no other variant's."""
    words = set(re.split(r"[\s-]+", name.lower()))
    found = [device for key, device in DEVICES.items() if set(key.lower().split()) <= words]
    if not found:
        return None
    device = max(found, key=lambda one: len(one.name.split()))
    others = words - set(device.name.lower().split())
    other_variant = {variant.lower() for variant in _VARIANTS} & others
    return None if other_variant or any(map(_VGPU_PROFILE.fullmatch, others)) else device


def peak_of(name: str) -> float | None:
    """The published peak of a device in FLOP/s; None when it is not in the table."""
    device = device_of(name)
    return device.peak_flops if device else None


def find_device(name: str) -> Device:
    """The device that a user names.

    Raises:
        ConfigError: it is not in the table.
    """
    device = device_of(name)
    if device is None:
        raise ConfigError(
            f"The figures of device {name[:80]!r} are not known. Give --tokens_per_second, or one of: cpu, "
            f"{', '.join(DEVICES)}."
        )
    return device
