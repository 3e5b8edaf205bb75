"""How shares and budgets are written, the same in a reason, a table and an error."""

from __future__ import annotations

import math
from collections.abc import Sequence
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
    return UNDEFINED if value is None else f"{_cut(value):.4f}"


def cost(value: float | None) -> str:
    """Write what must stay small with four digits, cut upwards, so that 0.10001 is not 0.1."""
    return UNDEFINED if value is None else f"{0.0 - _cut(-value):.4f}"


def nats(value: float | None) -> str:
    """Write a KL or a rise of the NLL in nats: four digits, cut upwards, or 1.4e-05."""
    if value is None:
        return UNDEFINED
    return cost(value) if value == 0 or abs(value) >= 1e-3 else f"{value:.1e}"


def part(value: float | None) -> str:
    """Write one part of a sum with four digits, rounded."""
    return UNDEFINED if value is None else f"{value:.4f}"


def multiple(value: float) -> str:
    """Write a pool size relative to a step's pages: 2 → 2 ×."""
    return f"{value:g} ×"


def margin(value: float | None) -> str:
    """Write a difference with sign and four digits, cut downwards: a miss is never -0.0000."""
    return UNDEFINED if value is None else f"{_cut(value):+.4f}"


def native_sparsity_note(top_k: int, layers: Sequence[int]) -> str:
    """Say what a model's own top-k does to its coverage; ``layers`` are those that it masked."""
    text = f"natively sparse attention, top-k of {top_k} tokens: "
    if not layers:
        return text + "here the engine attended to everything, where the model was made to select"
    return text + (
        f"in {which_layers(layers)} a query attends to no more "
        "than the model selects for it; what that hides has no mass, so coverage looks better"
    )


def ranges(numbers: Sequence[int]) -> str:
    """Write ascending whole numbers with runs joined: 0, 1, 2, 5 → 0-2, 5."""
    parts: list[str] = []
    start = None
    for position, number in enumerate(numbers):
        start = number if start is None else start
        last = position + 1 == len(numbers) or numbers[position + 1] != number + 1
        if last:
            parts.append(str(number) if start == number else f"{start}-{number}")
            start = None
    return ", ".join(parts)


def which_layers(layers: Sequence[int]) -> str:
    """Write ascending layer indices: layer 3, or layers 0-2, 5."""
    return f"layer{'' if len(layers) == 1 else 's'} {ranges(layers)}"


def distinct(labels: list[str]) -> list[str]:
    """Number the labels that repeat, so that each is unique."""
    result: list[str] = []
    for label in labels:
        number, candidate = 1, label
        while candidate in result or (number > 1 and candidate in labels):
            number += 1
            candidate = f"{label}-{number}"
        result.append(candidate)
    return result


def _cut(value: float) -> float:
    # the small addend keeps what is decimal to four digits, such as 0.57, from losing one
    return math.floor(value * 1e4 + 1e-9) / 1e4
