"""The fast profile against the plain one, over everything a trace can vary in."""

from __future__ import annotations

import math
import tempfile
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest
from hypothesis import event, given, settings
from hypothesis import strategies as st

from pytest_kvgate.analysis import SELECTORS, PageGrid, Plan, UndefinedError, pool, profile_trace
from pytest_kvgate.trace import load_trace
from tests.plain import eligible_pages, plain_profile
from tests.traces import LayerArrays, make_trace

TOLERANCE = 1e-5


@dataclass(frozen=True)
class Setup:
    layers: list[LayerArrays]
    n_visible: list[int]
    grid: PageGrid
    budgets: list[float]


def _layer(
    draw: st.DrawFn, index: int, n_token: int, n_step: int, page_size: int, *, windowed: bool
) -> LayerArrays:
    n_head_kv, group = draw(st.integers(1, 2)), draw(st.integers(1, 3))
    n_head, head_dim = n_head_kv * group, draw(st.integers(1, 5))
    rng = np.random.default_rng(draw(st.integers(0, 2**32 - 1)))
    # K is page_size·i/16 and q is i/8 with small whole i: the mean of a page and its product with
    # q are then exact in float32, so landmark scores are either equal or well apart.
    k = rng.integers(-16, 17, (n_head_kv, n_token, head_dim)) * page_size / 16
    q = rng.integers(-16, 17, (n_step, n_head, head_dim)) / 8
    has_alibi, has_sinks = draw(st.booleans()), draw(st.booleans())
    slopes = rng.uniform(0.001, 0.1, n_head) if has_alibi else None
    return LayerArrays(
        k=k.astype(draw(st.sampled_from(["float16", "float32"]))),
        q=q.astype(np.float32),
        index=index,
        scale=draw(st.sampled_from([0.25, 0.5, 0.7])) / page_size,
        softcap=draw(st.sampled_from([None, 1.5, 20.0])),
        alibi_slopes=None if slopes is None else tuple(float(slope) for slope in slopes),
        window=draw(st.integers(1, n_token + 5)) if windowed else None,
        sinks=rng.uniform(-3, 3, n_head).astype(np.float32) if has_sinks else None,
    )


@st.composite
def setups(draw: st.DrawFn) -> Setup:
    page_size = draw(st.integers(1, 9))
    sinks = draw(st.integers(0, 2 * page_size))
    recent = draw(
        st.one_of(
            st.integers(1, 12).map(float),
            st.integers(0, 300).map(lambda thousandths: thousandths / 1000),
        )
    )
    # long enough for two eligible pages at the last step, whatever is free
    shortest = math.ceil((sinks + 3 * page_size + 13) / 0.7)
    n_token = draw(st.integers(shortest, shortest + 20))
    n_step = draw(st.integers(1, 3))
    n_visible = sorted(
        draw(st.sets(st.integers(n_token // 2, n_token), min_size=n_step, max_size=n_step))
        | {n_token}
    )[-n_step:]
    windowed = [False, *draw(st.lists(st.booleans(), max_size=1))]
    layers = [
        _layer(draw, index, n_token, n_step, page_size, windowed=is_windowed)
        for index, is_windowed in enumerate(windowed)
    ]
    budgets = draw(
        st.lists(
            st.integers(1, 1000).map(lambda thousandths: thousandths / 1000),
            min_size=1,
            max_size=4,
            unique=True,
        )
    )
    return Setup(layers, n_visible, PageGrid(page_size, sinks, recent), budgets)


@settings(max_examples=40, deadline=None, database=None)
@given(setups())
def test_every_number_of_the_profile_is_the_plain_one(setup: Setup) -> None:
    grid = setup.grid
    with tempfile.TemporaryDirectory() as folder:
        directory = make_trace(Path(folder) / "trace", setup.layers, setup.n_visible)
        plain = plain_profile(directory, grid.page_size, grid.sinks, grid.recent)
        fast = profile_trace(load_trace(directory), grid, Plan(tuple(setup.budgets)))

    assert fast.skipped_units == plain.skipped_units
    # the order of units within a layer says nothing, so both sides are sorted
    for layer in {unit.layer for unit in plain.units}:
        own = fast.layer == layer
        units = [unit for unit in plain.units if unit.layer == layer]
        for number, relative in (("eligible_mass", 0.0), ("hottest", 0.0), ("support", TOLERANCE)):
            assert sorted(getattr(fast, number)[own]) == pytest.approx(
                sorted(getattr(unit, number) for unit in units), rel=relative, abs=TOLERANCE
            )
    for selector in SELECTORS:
        for budget in setup.budgets:
            coverage = plain.coverage(selector, budget)
            if coverage is None:
                event("a budget below one page")
                with pytest.raises(UndefinedError):
                    fast.coverage(selector, budget)
                with pytest.raises(UndefinedError):
                    fast.total_mass(selector, budget)
                continue
            assert fast.coverage(selector, budget) == pytest.approx(coverage, abs=TOLERANCE)
            assert fast.total_mass(selector, budget) == pytest.approx(
                plain.total_mass(selector, budget), abs=TOLERANCE
            )


@settings(max_examples=20, deadline=None, database=None)
@given(setups(), st.sampled_from([0.1, 0.5, 0.9, 0.95]))
def test_a_required_budget_is_enough_and_one_step_less_is_not(
    setup: Setup, coverage: float
) -> None:
    grid = setup.grid
    with tempfile.TemporaryDirectory() as folder:
        directory = make_trace(Path(folder) / "trace", setup.layers, setup.n_visible)
        plain = plain_profile(directory, grid.page_size, grid.sinks, grid.recent)
        fast = profile_trace(load_trace(directory), grid, Plan(()))

    for selector in SELECTORS:
        found = fast.required_budget(selector, coverage)
        assert found is not None
        step = round(found * 1000)
        held = plain.coverage_with_nothing_as_zero(selector, f"{step / 1000:.3f}")
        assert held >= coverage - TOLERANCE
        if step > 1:
            held = plain.coverage_with_nothing_as_zero(selector, f"{(step - 1) / 1000:.3f}")
            assert held < coverage + TOLERANCE


@settings(max_examples=15, deadline=None, database=None)
@given(setups(), st.data())
def test_every_unit_weighs_the_same_in_a_pool(setup: Setup, data: st.DataObject) -> None:
    budget = 1.0
    more = data.draw(st.integers(1, 2))
    with tempfile.TemporaryDirectory() as folder:
        first = make_trace(Path(folder) / "first", setup.layers, setup.n_visible)
        tail = [
            LayerArrays(
                k=layer.k,
                q=layer.q[-1:],
                index=layer.index,
                scale=layer.scale,
                window=layer.window,
            )
            for layer in setup.layers
        ]
        others = [
            make_trace(Path(folder) / f"other-{number}", tail, setup.n_visible[-1:])
            for number in range(more)
        ]
        grid = setup.grid
        plain = [
            plain_profile(directory, grid.page_size, grid.sinks, grid.recent)
            for directory in (first, *others)
        ]
        pooled = pool(
            [
                profile_trace(load_trace(directory), grid, Plan((0.3, budget)))
                for directory in (first, *others)
            ]
        )

    units = [unit for profile in plain for unit in profile.units]
    assert pooled.n_unit == len(units)
    assert pooled.skipped_units == sum(profile.skipped_units for profile in plain)
    for selector in SELECTORS:
        # a budget of 30% was measured; 31% is looked up on the grid of 0.1% steps
        for asked, hundredths in ((0.3, 30), (0.31, 31)):
            counts = [hundredths * unit.n // (100 * unit.page_size) for unit in units]
            if 0 in counts:
                continue
            expected = math.fsum(
                unit.coverage(selector, k) for unit, k in zip(units, counts, strict=True)
            ) / len(units)
            assert pooled.coverage(selector, asked) == pytest.approx(expected, abs=TOLERANCE)


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
