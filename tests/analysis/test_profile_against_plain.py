"""The fast profile against the plain one, over everything a trace can vary in."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import event, given, settings
from hypothesis import strategies as st

from pytest_kvgate.analysis import MEASURES, PageGrid, profile_on_grids, profile_trace
from pytest_kvgate.analysis.masses import group_masses
from pytest_kvgate.trace import load_trace
from tests.analysis.generated import (
    POOLS,
    ROUNDED,
    SELECTORS,
    TOLERANCE,
    Limits,
    Setup,
    assert_measure,
    is_decided,
    is_decided_globally,
    judged,
    layers,
    limits,
    selective,
    setups,
)
from tests.plain import PlainProfile, eligible_pages, head_masses, read_layer
from tests.traces import LayerArrays, make_trace

PAGING = ("hit_rate", "missed_pages")
OF_A_GLOBAL_SET = ("global_coverage", "starved")


def decided(plain: PlainProfile, name: str, selector: str, budget: float) -> bool:
    """Whether a measure does not hang on how scores are rounded; say so in the statistics."""
    if name in ("coverage", "total_mass") and selector == "oracle":
        return True  # pages of nearly the same mass hold nearly the same mass
    of_sets = is_decided_globally if name in OF_A_GLOBAL_SET else is_decided
    found = of_sets(plain, selector, budget)
    if selector in ROUNDED:
        event(f"{selector} {'compared' if found else 'left out, near-tie'}")
    return found


@settings(max_examples=40, deadline=None, database=None)
@given(setups())
def test_every_measure_is_the_plain_one(setup: Setup) -> None:
    with setup.loaded() as (trace, (plain,)):
        with setup.limits.applied():
            by_pool = {pool: profile_trace(trace, setup.grid, setup.plan(pool)) for pool in POOLS}

        fast = by_pool[2.0]
        assert fast.n_unit == len(plain.units)
        assert fast.skipped_units == plain.skipped_units
        event(f"skipped units: {fast.skipped_units > 0}")
        for selector in SELECTORS:
            for budget in setup.budgets:
                event(f"a budget below one page: {not plain.is_defined(budget)}")
                for name in MEASURES:
                    if not decided(plain, name, selector, budget):
                        continue
                    for pool in POOLS if name in PAGING else (2.0,):
                        number = judged(plain, name, selector, budget, pool)
                        event(f"{name}: {'undefined' if number is None else 'a number'}")
                        assert_measure(by_pool[pool], number, name, selector, budget)


@settings(max_examples=15, deadline=None, database=None)
@given(setups())
def test_the_shape_of_attention_is_the_plain_one_in_every_unit(setup: Setup) -> None:
    with setup.loaded() as (trace, (plain,)), setup.limits.applied():
        fast = profile_trace(trace, setup.grid, setup.plan())

    # the order of units within a layer says nothing, so both sides are sorted
    for layer in {unit.layer for unit in plain.units}:
        own = fast.layer == layer
        units = [unit for unit in plain.units if unit.layer == layer]
        for number, relative in (("eligible_mass", 0.0), ("hottest", 0.0), ("support", TOLERANCE)):
            assert sorted(getattr(fast, number)[own]) == pytest.approx(
                sorted(getattr(unit, number) for unit in units), rel=relative, abs=TOLERANCE
            )


@settings(max_examples=15, deadline=None, database=None)
@given(setups(n_grid=2))
def test_several_page_grids_at_once_are_the_plain_ones(setup: Setup) -> None:
    with setup.loaded() as (trace, plains):
        with setup.limits.applied():
            together = profile_on_grids(trace, setup.grids, setup.plan())

        for fast, plain, grid in zip(together, plains, setup.grids, strict=True):
            assert fast.grid == grid
            assert fast.skipped_units == plain.skipped_units
            for selector in SELECTORS:
                for budget in setup.budgets:
                    for name in MEASURES:
                        if decided(plain, name, selector, budget):
                            number = judged(plain, name, selector, budget)
                            assert_measure(fast, number, name, selector, budget)


@settings(max_examples=60, deadline=None, database=None)
@given(
    layer=st.booleans().flatmap(lambda windowed: layers(0, 40, 3, 8, windowed=windowed)),
    n_visible=st.sets(st.integers(1, 40), min_size=3, max_size=3).map(sorted),
    cut=limits(),
    data=st.data(),
)
def test_the_masses_of_every_token_are_the_plain_ones(
    layer: LayerArrays,
    n_visible: list[int],
    cut: Limits,
    data: st.DataObject,
    tmp_path_factory: pytest.TempPathFactory,
) -> None:
    layer = data.draw(selective(layer, n_visible))
    directory = make_trace(tmp_path_factory.mktemp("masses") / "trace", [layer], n_visible)
    (loaded,) = load_trace(directory).layers
    plain = read_layer(directory, layer.fields)
    event(f"window: {layer.window is not None}")
    event(f"hidden by its own top-k: {layer.visible is not None}")

    for kv_head in range(loaded.n_head_kv):
        heads = loaded.query_heads(kv_head)
        with cut.applied():
            found = group_masses(
                loaded, kv_head, np.asarray(loaded.q[:, heads]), loaded.k[kv_head], n_visible
            )
        for step, n in enumerate(n_visible):
            wanted = [
                head_masses(plain, step, head, n) + [0.0] * (40 - n)
                for head in range(heads.start, heads.stop)
            ]
            assert found[step] == pytest.approx(np.array(wanted), abs=1e-6)


@settings(max_examples=300, deadline=None, database=None)
@given(
    page_size=st.integers(1, 64),
    sinks=st.integers(0, 200),
    recent=st.one_of(
        st.integers(1, 300).map(float),
        st.integers(0, 999).map(lambda thousandths: thousandths / 1000),
    ),
    n=st.integers(1, 400),
)
def test_the_eligible_pages_are_the_plain_ones(
    page_size: int, sinks: int, recent: float, n: int
) -> None:
    first, end = PageGrid(page_size, sinks, recent).eligible(n)

    assert list(range(first, end)) == eligible_pages(page_size, sinks, recent, n)
