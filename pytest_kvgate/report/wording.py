"""How the numbers of gates and costs are written, the same in a failure and in the summary."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from pytest_kvgate.analysis.wording import UNDEFINED, cost, nats, percent, share, which_layers

#: What a measure is called in a sentence and above a column.
NAMES = {
    "coverage": "coverage",
    "total_mass": "total mass",
    "output_error": "output error",
    "hit_rate": "hit rate",
    "required_budget": "required budget",
    "kl": "KL",
    "top1": "top-1 agreement",
    "nll_increase": "NLL increase",
}
#: Effects on the next token that are in nats.
NATS = ("kl", "nll_increase")


def measured(measure: str, value: float | None) -> str:
    """Write a number of a gate: a budget as a percentage, an error cut upwards, else a share."""
    if measure == "required_budget":
        return UNDEFINED if value is None else percent(value)
    if measure in NATS:
        return nats(value)
    return cost(value) if measure == "output_error" else share(value)


def count(number: int, noun: str) -> str:
    """Write a number of things: 1 layer, 2 layers."""
    return f"{number} {noun}{'' if number == 1 else 's'}"


def bytes_text(value: float | None) -> str:
    """Write a number of bytes in the largest unit of at least 1: 1536 → 1.5 KiB."""
    if value is None:
        return UNDEFINED
    for unit in ("B", "KiB", "MiB", "GiB"):
        if value < 1024 or unit == "GiB":
            return f"{value:.3g} {unit}" if value < 1000 else f"{value:.0f} {unit}"
        value /= 1024
    raise AssertionError


def gate_scope(gate: Mapping[str, Any]) -> str:
    """Say what a gate's number is of, where it is not the mean over everything."""
    text = {"mean": "", "worst-layer": ", worst layer", "p05": ", worst 5% of units"}[gate["scope"]]
    if gate["layers"] is not None:
        text += f", {which_layers(gate['layers'])}"
    if gate["kept_dense"]:
        text += f", {which_layers(gate['kept_dense'])} dense"
    if gate["confidence"] is not None:
        text += f", confidence {percent(gate['confidence'])}"
    return text
