"""The number of a profile that a demand is compared with."""

from __future__ import annotations

from pytest_kvgate.analysis import Profile
from pytest_kvgate.gate.model import Demand, Gate


def observe(gate: Gate, profile: Profile, demand: Demand, selector: str) -> float | None:
    """Return what a demand is compared with; None where no budget reaches the coverage."""
    if demand.measure == "required_budget":
        assert gate.coverage is not None
        return profile.required_budget(selector, gate.coverage, gate.scope, gate.layers)
    assert gate.budget is not None
    return profile.measure(demand.measure, selector, gate.budget, gate.scope, gate.layers)
