"""Numbers as people write them: 300M, 1B, 2.5e9, 262_144."""

from __future__ import annotations

import math
import re

from ..errors import ConfigError

_UNITS = {"": 1, "k": 10**3, "m": 10**6, "b": 10**9, "g": 10**9, "t": 10**12}
_QUANTITY = re.compile(r"(\d[\d_]*(?:\.\d*)?|\.\d+)(e[-+]?\d+)?([kmbgt]?)", re.IGNORECASE)


def quantity(text: str) -> float:
    """A number above 0, with a unit of thousands if it has one.

    Raises:
        ConfigError: it is none.
    """
    match = _QUANTITY.fullmatch(text.strip())
    value = float(match[1].replace("_", "") + (match[2] or "")) * _UNITS[match[3].lower()] if match else math.nan
    if not 0 < value < math.inf:
        raise ConfigError(f"{text[:80]!r} is not a number above 0. Write it as 300M, 1B, 2.5e9 or 262_144.")
    return value


def count(text: str) -> int:
    """A whole number of 1 or more, written as `quantity` takes it, below 2^63.

    Raises:
        ConfigError: it is none.
    """
    value = quantity(text)
    whole = round(value)
    digits = text.strip().replace("_", "")
    if digits.isdecimal():  # a float would round one of more than 16 digits
        whole = int(digits)
    if abs(value - whole) > 1e-6 * value or not 1 <= whole < 2**63:
        raise ConfigError(f"{text[:80]!r} is not a whole number of 1 or more. Write it as 300M, 1B, 2.5e9 or 262_144.")
    return whole
