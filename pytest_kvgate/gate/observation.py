"""The number that a demand is compared with: of a profile, or of a closed loop."""

from __future__ import annotations

from pytest_kvgate.analysis import Interval, Profile
from pytest_kvgate.analysis.effects import ClosedLoop
from pytest_kvgate.gate.model import Demand, Gate, on_grid


def observe(
    gate: Gate, profile: Profile, loop: ClosedLoop | None, demand: Demand, selector: str
) -> float | None:
    """Return what a demand is compared with; None where no budget reaches the coverage.

    Raises:
        UndefinedError: the number is not defined.
    """
    if demand.effect is not None:
        assert loop is not None
        variant = gate.variant(selector, profile.grid.page_size)
        return loop.run(variant).effects.mean(demand.effect)
    layers = gate.counted_layers(profile.layers)
    if demand.measure == "required_budget":
        assert gate.coverage is not None
        return profile.required_budget(selector, gate.coverage, gate.scope, layers)
    assert gate.budget is not None
    return profile.measure(demand.measure, selector, gate.budget, gate.scope, layers)


def observed_interval(
    gate: Gate, profile: Profile, loop: ClosedLoop | None, demand: Demand, selector: str
) -> tuple[Interval | None, float]:
    """Return the interval that a demand is judged by, and what that is compared with."""
    assert gate.confidence is not None
    if demand.effect is not None:
        assert loop is not None
        effects = loop.run(gate.variant(selector, profile.grid.page_size)).effects
        return effects.interval(demand.effect, gate.confidence), demand.threshold
    name, budget, required = demand.measure, gate.budget, demand.threshold
    if demand.measure == "required_budget":
        # it is small enough exactly if the budget allowed reaches the coverage
        assert gate.coverage is not None
        name, budget, required = "coverage", on_grid(demand.threshold), gate.coverage
    assert budget is not None
    layers = gate.counted_layers(profile.layers)
    return profile.interval(name, selector, budget, gate.scope, layers, gate.confidence), required
