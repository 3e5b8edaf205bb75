"""Scopes, required budgets, pools of traces and findings against the plain profile."""

from __future__ import annotations

import math
from dataclasses import replace
from decimal import Decimal

import numpy as np
import pytest
from hypothesis import event, given, settings
from hypothesis import strategies as st

from pytest_kvgate.analysis import (
    MEASURES,
    SELECTORS,
    Plan,
    UndefinedError,
    pool,
    profile_on_grids,
    profile_trace,
)
from pytest_kvgate.analysis.findings import dense_layers, dim_ablation, gap, strides
from pytest_kvgate.trace import load_trace
from tests.analysis.generated import (
    SELECTORS as JUDGED,
)
from tests.analysis.generated import (
    TOLERANCE,
    Setup,
    assert_measure,
    is_decided,
    is_decided_for_all,
    is_decided_globally,
    judged,
    of_layer,
    plain_on,
    setups,
)
from tests.plain import TOKEN_ORACLE, PlainProfile, PlainUnit

# of these less is better
COSTS = ("starved", "output_error", "missed_pages")
COVERAGES = (0.1, 0.5, 0.9, 0.95, 1.01)


def worst_twentieth(values: list[float], *, ascending: bool) -> float | None:
    """Return the value at position ``floor(0.05·(n−1))``, counted from the worst."""
    if not values:
        return None
    return sorted(values, reverse=not ascending)[(len(values) - 1) // 20]


def of_units(plain: PlainProfile, name: str, selector: str, budget: float) -> list[float]:
    """Return a measure of every unit where it is defined."""
    numbers = (
        judged(replace(plain, all_units=[unit]), name, selector, budget) for unit in plain.units
    )
    return [number for number in numbers if number is not None]


@settings(max_examples=20, deadline=None, database=None)
@given(setups())
def test_the_worst_layer_and_every_layer_alone_are_the_plain_ones(setup: Setup) -> None:
    with setup.loaded() as (trace, (plain,)):
        with setup.limits.applied():
            fast = profile_trace(trace, setup.grid, setup.plan())

        layers = sorted({unit.layer for unit in plain.units})
        event(f"layers: {len(layers)}")
        for selector in JUDGED:
            for budget in setup.budgets:
                if not (
                    is_decided(plain, selector, budget)
                    and is_decided_globally(plain, selector, budget)
                ):
                    continue
                for name in MEASURES:
                    worst = max if name in COSTS else min
                    numbers = [
                        judged(of_layer(plain, layer), name, selector, budget) for layer in layers
                    ]
                    known = [number for number in numbers if number is not None]
                    for layer, number in zip(layers, numbers, strict=True):
                        assert_measure(fast, number, name, selector, budget, layer=layer)
                    if name == "output_error" and len(known) < len(numbers):
                        known = []  # a mean of some layers would pass for one of all
                    number = worst(known, default=None)
                    assert_measure(fast, number, name, selector, budget, "worst-layer")


@settings(max_examples=20, deadline=None, database=None)
@given(setups())
def test_the_worst_twentieth_of_the_units_is_the_plain_one(setup: Setup) -> None:
    with setup.loaded() as (trace, (plain,)):
        with setup.limits.applied():
            fast = profile_trace(trace, setup.grid, setup.plan())

        for selector in JUDGED:
            for budget in setup.budgets:
                if not is_decided(plain, selector, budget):
                    continue
                number = plain.quantile_coverage(selector, budget)
                assert_measure(fast, number, "coverage", selector, budget, "p05")
                event(f"position from the worst: {(fast.n_unit - 1) // 20}")
                for name in ("total_mass", "jaccard", "stale_coverage", "output_error"):
                    if name == "output_error" and any(unit.values is None for unit in plain.units):
                        continue
                    values = of_units(plain, name, selector, budget)
                    number = worst_twentieth(values, ascending=name not in COSTS)
                    assert_measure(fast, number, name, selector, budget, "p05")


def held_at(plain: PlainProfile, selector: str, step: int, scope: str) -> float:
    """Return what ``step`` thousandths hold, where less than a page holds nothing."""
    budget = f"{step / 1000:.3f}"
    if scope == "p05":
        units: list[PlainUnit] = plain.units
        held = [unit.coverage(selector, plain.k(budget, unit)) for unit in units]
        number = worst_twentieth(held, ascending=True)
        assert number is not None
        return number
    parts = [plain]
    if scope == "worst-layer":
        parts = [of_layer(plain, layer) for layer in {unit.layer for unit in plain.units}]
    return min(part.coverage_with_nothing_as_zero(selector, budget) for part in parts)


@settings(max_examples=20, deadline=None, database=None)
@given(setups())
def test_a_required_budget_is_enough_and_one_step_less_is_not(setup: Setup) -> None:
    with setup.loaded() as (trace, (plain,)):
        with setup.limits.applied():
            fast = profile_trace(trace, setup.grid, setup.plan(coverages=COVERAGES))

        if not plain.units:
            assert fast.required_budget("oracle", 0.5) is None
            return
        for selector in JUDGED:
            if selector != "oracle" and not is_decided_for_all(plain, selector):
                continue
            for coverage in COVERAGES:
                for scope in ("mean", "worst-layer", "p05"):
                    found = fast.required_budget(selector, coverage, scope)
                    if found is None:
                        assert held_at(plain, selector, 1000, scope) < coverage + TOLERANCE
                        continue
                    step = Decimal(str(found)) * 1000
                    assert step == int(step)
                    assert held_at(plain, selector, int(step), scope) >= coverage - TOLERANCE
                    if step > 1:
                        below = held_at(plain, selector, int(step) - 1, scope)
                        assert below < coverage + TOLERANCE


@settings(max_examples=20, deadline=None, database=None)
@given(setups())
def test_the_gap_the_ablation_and_the_dense_layers_are_the_plain_ones(setup: Setup) -> None:
    with setup.loaded() as (trace, (plain,)):
        with setup.limits.applied():
            fast = profile_trace(trace, setup.grid, setup.plan())

        assert strides(fast) == tuple(
            sorted(
                {
                    after - before
                    for before, after in zip(
                        setup.decode_indices[:-1], setup.decode_indices[1:], strict=True
                    )
                }
            )
        )
        for budget in setup.budgets:
            if not plain.is_defined(budget) or not plain.units:
                for finding in (
                    lambda at: gap(fast, "landmark", at),
                    lambda at: dim_ablation(fast, at),
                    lambda at: dense_layers(fast, at, 0.5),
                ):
                    with pytest.raises(UndefinedError):
                        finding(budget)
                continue
            unrotated = plain.unrotated_coverage(budget)
            ablation = dim_ablation(fast, budget)
            event(f"ablation: {unrotated is not None}")
            assert (ablation is None) == (unrotated is None)
            if ablation is not None:
                assert ablation.unrotated == pytest.approx(unrotated, abs=TOLERANCE)
                assert ablation.all_dims == pytest.approx(
                    plain.rotated_reference(budget), abs=TOLERANCE
                )
                assert set(ablation.layers) == {
                    unit.layer for unit in plain.units if unit.is_partly_rotated
                }
            held = plain.layer_coverage("oracle", budget)
            assert held is not None
            for least in (0.3, 0.7, 1.1):
                if all(abs(least - value) > TOLERANCE for value in held.values()):
                    assert dense_layers(fast, budget, least) == tuple(
                        layer for layer in sorted(held) if held[layer] < least
                    )
            for selector in JUDGED:
                if not is_decided(plain, selector, budget) or not is_decided(
                    plain, "oracle", budget
                ):
                    continue
                found = gap(fast, selector, budget)
                plain_gap = plain.gap(selector, budget)
                event(f"gap with staleness: {plain_gap is not None}")
                if plain_gap is not None:
                    parts = (found.diffuse, found.granularity, found.selector, found.staleness)
                    assert parts == pytest.approx(tuple(plain_gap), abs=TOLERANCE)
                    continue
                units = plain.units if selector == TOKEN_ORACLE or not plain.followers else []
                assert found.staleness is None
                if units:
                    lost = 1 - (plain.coverage(selector, budget) or 0.0)
                    assert found.shortfall == pytest.approx(lost, abs=TOLERANCE)


@settings(max_examples=15, deadline=None, database=None)
@given(setups(n_grid=3))
def test_grids_at_once_in_tiles_and_blocks_are_the_same_as_one_at_a_time_whole(
    setup: Setup,
) -> None:
    # exact scores only, and the seeded ones: a near-tie may fall either way with another tile
    selectors = tuple(name for name in SELECTORS if name not in ("oracle", "mean-std"))
    plan = Plan(setup.budgets, selectors, coverages=())
    with setup.written() as (directory,):
        trace = load_trace(directory)
        with setup.limits.applied():
            together = profile_on_grids(trace, setup.grids, plan)
        alone = [profile_trace(trace, grid, plan) for grid in setup.grids]

    for one, other in zip(together, alone, strict=True):
        # blocks of steps decide the order of the units of a layer, heads keep theirs at each step
        orders = [
            np.lexsort((units.decode_index, units.layer))
            for units in (one.numbers.units, other.numbers.units)
        ]
        for name, numbers in one.numbers.units.numbers.items():
            found, wanted = numbers[..., orders[0]], other.numbers.units.numbers[name]
            assert found == pytest.approx(
                wanted[..., orders[1]], abs=TOLERANCE, rel=TOLERANCE, nan_ok=True
            ), name
        assert one.numbers.covered == pytest.approx(other.numbers.covered, abs=TOLERANCE)
        assert (one.numbers.reuse == other.numbers.reuse).all()


@settings(max_examples=15, deadline=None, database=None)
@given(setups(), st.integers(1, 2))
def test_every_unit_weighs_the_same_in_a_pool(setup: Setup, more: int) -> None:
    tail = Setup(
        [
            replace(
                layer,
                q=layer.q[-1:],
                visible=None if layer.visible is None else layer.visible[-1:],
            )
            for layer in setup.layers
        ],
        setup.n_visible[-1:],
        [0],
        setup.grids,
        setup.budgets,
        setup.limits,
    )
    with setup.written(*[tail] * more) as directories:
        plains = [plain_on(directory, setup.grid) for directory in directories]
        plan = Plan((0.3, 1.0))
        profiles = [profile_trace(load_trace(one), setup.grid, plan) for one in directories]
        pooled = pool(profiles)

    units = [unit for profile in plains for unit in profile.units]
    assert pooled.n_unit == len(units)
    assert pooled.skipped_units == sum(profile.skipped_units for profile in plains)
    for selector in JUDGED:
        if not all(is_decided_for_all(plain, selector) for plain in plains):
            continue
        # a budget of 30% was measured; 31% is looked up on the grid of 0.1% steps
        for asked, hundredths in ((0.3, 30), (0.31, 31)):
            counts = [hundredths * unit.n // (100 * unit.page_size) for unit in units]
            everywhere = [hundredths * n // 100 for plain in plains for n in plain.n_visible]
            if min(everywhere) < setup.grid.page_size or not units:
                continue
            expected = math.fsum(
                unit.coverage(selector, k) for unit, k in zip(units, counts, strict=True)
            ) / len(units)
            assert pooled.coverage(selector, asked) == pytest.approx(expected, abs=TOLERANCE)
