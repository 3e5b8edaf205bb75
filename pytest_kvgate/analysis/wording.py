"""How shares and budgets are written, the same in a reason, a table and an error."""

from __future__ import annotations

import math
from fractions import Fraction
from functools import cache

UNDEFINED = "–"


@cache
def exact(value: float) -> Fraction:
    """Return the decimal number that ``value`` prints as."""
    return Fraction(repr(float(value)))


def percent(fraction: float) -> str:
    """Write a fraction as the shortest exact percentage: 0.005 → 0.5%."""
    text = f"{float(exact(fraction) * 100):.10f}".rstrip("0").rstrip(".")
    return f"{text}%"


def share(value: float | None) -> str:
    """Write a share with four digits, cut and not rounded, so that 0.94999 is not 0.95."""
    if value is None:
        return UNDEFINED
    # the small addend keeps what is decimal to four digits, such as 0.57, from losing one
    return f"{math.floor(value * 1e4 + 1e-9) / 1e4:.4f}"
