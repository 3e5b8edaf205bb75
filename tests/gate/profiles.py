"""Profiles of made traces, and gates judged on them."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

from pytest_kvgate.analysis import PageGrid, Plan, Profile, profile_trace
from pytest_kvgate.analysis.pages import BUDGET_GRID
from pytest_kvgate.gate import GateResult, decide, gate_from_arguments
from pytest_kvgate.trace import load_trace
from tests.traces import PASSED, layer_of_masses, make_trace

# Pages of two tokens. Free: page 0 and the last two tokens. Of the eligible mass the pages 1 to 3
# hold a third, half and a sixth, and landmark, which ranks by the mean logit, takes page 1 first.
MASSES = [0.15, 0.05, 0.1, 0.1, 0.01, 0.29, 0.05, 0.05, 0.15, 0.05]
GRID = PageGrid(page_size=2, sinks=2, recent=2)
BUDGETS = (0.2, 0.4, 0.6)
LISTED = ("oracle", "landmark", "token-oracle")


def profile_of(
    path: Path,
    *,
    grid: PageGrid = GRID,
    budgets: tuple[float, ...] = BUDGETS,
    n_layer: int = 1,
    verification: dict[str, Any] | None = PASSED,
    workload: str = "story",
) -> Profile:
    layers = [layer_of_masses(MASSES, index=index) for index in range(n_layer)]
    directory = make_trace(
        path / workload, layers, name="tiny", workload=workload, verification=verification
    )
    return profile_trace(load_trace(directory), grid, Plan(budgets, LISTED))


def with_coverage(profile: Profile, budget: float, **coverage: float) -> Profile:
    """Return the profile with exact coverages, the same for every unit, at one budget."""
    numbers = profile.numbers
    covered = numbers.units.numbers["coverage"].copy()
    curve = numbers.covered.copy()
    for selector, value in coverage.items():
        row = profile.selectors.index(selector.replace("_", "-"))
        covered[row, profile.budgets.index(budget)] = value
        curve[:, row, BUDGET_GRID.index(budget)] = value * numbers.n_unit
    units = replace(numbers.units, numbers={**numbers.units.numbers, "coverage": covered})
    return replace(profile, numbers=replace(numbers, units=units, covered=curve))


def judged(profile: Profile, **arguments: Any) -> GateResult:  # noqa: ANN401 - as in a marker
    gate = gate_from_arguments((), arguments)
    return decide("test_gate.py::test_it", "tiny", gate, profile)
