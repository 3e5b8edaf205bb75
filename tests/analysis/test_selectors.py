"""Selectors, and what counts towards coverage."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra.numpy import array_shapes, arrays
from numpy.typing import NDArray

from pytest_kvgate.analysis import (
    PAGE_SELECTORS,
    SELECTORS,
    NotMeasuredError,
    PageGrid,
    Plan,
    Profile,
    UndefinedError,
    pool,
    profile_trace,
)
from pytest_kvgate.analysis.selectors import PageKeys, landmark, rank
from pytest_kvgate.trace import TraceError, load_trace
from tests.traces import LayerArrays, layer_of_masses, make_trace, random_layer

EXACT = 1e-6


def profile_of(
    path: Path,
    *layers: LayerArrays,
    grid: PageGrid,
    budgets: tuple[float, ...] = (),
    n_visible: list[int] | None = None,
) -> Profile:
    trace = load_trace(make_trace(path / "trace", layers, n_visible))
    return profile_trace(trace, grid, Plan(tuple(budgets)))


# Pages of two tokens. Free: page 0 (sinks) and the last two tokens. Eligible: pages 1, 2 and 3,
# with masses 0.2, 0.3 and 0.1 of a total of 1.
SIX_TENTHS = [0.15, 0.05, 0.1, 0.1, 0.01, 0.29, 0.05, 0.05, 0.15, 0.05]
GRID = PageGrid(page_size=2, sinks=2, recent=2)


def test_landmark_is_the_best_head_s_product_with_the_mean_key() -> None:
    keys = np.array([[[1, 0], [3, 2]], [[0, 4], [0, -2]]], dtype=np.float32)
    queries = np.array([[[1, 1], [-1, 5]], [[0, -1], [2, 0]]], dtype=np.float32)

    scores = landmark(queries, PageKeys(keys))

    # mean keys (2, 1) and (0, 1); per step and page the larger of both heads' products
    assert scores.tolist() == [[max(3, 3), max(1, 5)], [max(-1, 4), max(-1, 0)]]


def test_ranks_run_from_the_best_down_and_ties_go_to_the_lower_number() -> None:
    assert rank(np.array([1, 3, 2, 3, 1], dtype=np.float32)).tolist() == [1, 3, 2, 0, 4]


@settings(max_examples=200, deadline=None, database=None)
@given(
    arrays(
        np.float32,
        array_shapes(min_dims=1, max_dims=3, max_side=20),
        elements=st.one_of(
            st.sampled_from([0.0, -0.0, 1.0, -1.0, math.inf, -math.inf, 1e-45, -1e-45]),
            st.floats(width=32, allow_nan=False),
        ),
    )
)
def test_a_rank_is_that_of_a_stable_sort(scores: NDArray[np.float32]) -> None:
    wanted = np.argsort(-scores, axis=-1, kind="stable")

    assert np.array_equal(rank(scores), wanted)


def test_the_oracle_takes_the_heaviest_pages(tmp_path: Path) -> None:
    profile = profile_of(
        tmp_path, layer_of_masses(SIX_TENTHS), grid=GRID, budgets=(0.2, 0.4, 0.6, 1.0)
    )

    assert profile.coverage("oracle", 0.2) == pytest.approx(0.3 / 0.6, abs=EXACT)
    assert profile.coverage("oracle", 0.4) == pytest.approx(0.5 / 0.6, abs=EXACT)
    assert profile.coverage("oracle", 0.6) == 1
    assert profile.coverage("oracle", 1.0) == 1


def test_total_mass_adds_what_is_resident_anyway(tmp_path: Path) -> None:
    profile = profile_of(tmp_path, layer_of_masses(SIX_TENTHS), grid=GRID, budgets=(0.2, 1.0))

    assert profile.total_mass("oracle", 0.2) == pytest.approx(0.4 + 0.3, abs=EXACT)
    assert profile.total_mass("oracle", 1.0) == pytest.approx(1, abs=EXACT)


def test_total_mass_counts_real_tokens_only(tmp_path: Path) -> None:
    # a learned sink as heavy as all tokens together halves every mass, and changes no share
    layer = replace(layer_of_masses(SIX_TENTHS), sinks=np.zeros(1, dtype=np.float32))

    profile = profile_of(tmp_path, layer, grid=GRID, budgets=(0.2,))

    assert profile.total_mass("oracle", 0.2) == pytest.approx(0.7, abs=EXACT)
    assert profile.coverage("oracle", 0.2) == pytest.approx(0.5, abs=EXACT)
    assert profile.eligible_mass.tolist() == pytest.approx([0.6], abs=EXACT)


def test_landmark_ranks_by_the_mean_logit_not_by_mass(tmp_path: Path) -> None:
    # Logits are the logarithms of the masses: page 1 (0.1·0.1) has the highest mean, page 3
    # (0.05·0.05) is below page 2 (0.01·0.29), whose one hot token makes it the heaviest.
    profile = profile_of(tmp_path, layer_of_masses(SIX_TENTHS), grid=GRID, budgets=(0.2, 0.4))

    assert profile.coverage("landmark", 0.2) == pytest.approx(0.2 / 0.6, abs=EXACT)
    assert profile.coverage("landmark", 0.4) == pytest.approx(0.5 / 0.6, abs=EXACT)


def test_the_token_oracle_takes_the_hottest_tokens_of_any_page(tmp_path: Path) -> None:
    profile = profile_of(tmp_path, layer_of_masses(SIX_TENTHS), grid=GRID, budgets=(0.2, 0.4))

    assert profile.coverage("token-oracle", 0.2) == pytest.approx(0.39 / 0.6, abs=EXACT)
    assert profile.coverage("token-oracle", 0.4) == pytest.approx(0.54 / 0.6, abs=EXACT)


def test_pages_are_weighed_by_the_mass_of_the_whole_group(tmp_path: Path) -> None:
    # Two query heads of one KV head over three one-token pages: 8:1:1 and 1:1:8. Together the
    # outer pages hold 0.9 each, so the first (a tie) is taken, and it holds 0.9 of 2.
    eight = np.log(8.0)
    layer = LayerArrays(
        k=np.array([[[eight, 0], [0, 0], [0, eight]]], dtype=np.float32),
        q=np.array([[[1, 0], [0, 1]]], dtype=np.float32),
        scale=1.0,
    )

    profile = profile_of(tmp_path, layer, grid=PageGrid(1, 0, 0), budgets=(0.34, 0.67))

    assert profile.coverage("oracle", 0.34) == pytest.approx(0.9 / 2, abs=EXACT)
    assert profile.coverage("oracle", 0.67) == pytest.approx(1.8 / 2, abs=EXACT)
    # each head's own share of its hottest token is 0.8; the group's mean masses would say 0.45
    assert profile.hottest.tolist() == pytest.approx([0.8], abs=EXACT)


def test_landmark_ties_go_to_the_lower_page(tmp_path: Path) -> None:
    # Pages 1 to 3 have the same mean logit, 0, and different masses: page 1 is the lightest.
    logits = [0, 0, 0, 0, 2, -2, 1, -1, 0, 0]
    layer = layer_of_masses(np.exp(logits))
    masses = np.exp(logits) / np.exp(logits).sum()
    eligible = masses[2:8].sum()

    profile = profile_of(tmp_path, layer, grid=GRID, budgets=(0.2, 0.4))

    assert profile.coverage("landmark", 0.2) == pytest.approx(masses[2:4].sum() / eligible)
    assert profile.coverage("landmark", 0.4) == pytest.approx(masses[2:6].sum() / eligible)


@pytest.mark.parametrize("seed", range(4))
def test_landmark_never_beats_the_oracle_nor_the_oracle_the_tokens(
    tmp_path: Path, seed: int
) -> None:
    budgets = tuple(step / 20 for step in range(2, 21))
    layer = random_layer(seed, n_token=160, n_step=3, n_head=6)

    profile = profile_of(tmp_path, layer, grid=PageGrid(8, 8, 8), budgets=budgets)

    for budget in budgets:
        oracle = profile.coverage("oracle", budget)
        # the same pages summed in another order may differ in the last digit
        assert profile.coverage("landmark", budget) <= oracle + 1e-12
        assert oracle <= profile.coverage("token-oracle", budget) + 1e-12
    assert profile.coverage("landmark", 0.3) < profile.coverage("oracle", 0.3)


def test_mass_in_the_recent_window_does_not_count_towards_coverage(tmp_path: Path) -> None:
    # Nearly all mass is on the last tokens. Were they not masked, one page would hold it all.
    masses = [1.0] * 8 + [400.0, 400.0]
    budget = 0.2

    masked = profile_of(tmp_path / "masked", layer_of_masses(masses), grid=GRID, budgets=(budget,))
    unmasked = profile_of(
        tmp_path / "unmasked",
        layer_of_masses(masses),
        grid=PageGrid(page_size=2, sinks=2, recent=0),
        budgets=(budget,),
    )

    assert masked.coverage("oracle", budget) == pytest.approx(1 / 3, abs=EXACT)
    assert masked.coverage("landmark", budget) == pytest.approx(1 / 3, abs=EXACT)
    assert unmasked.coverage("oracle", budget) == pytest.approx(800 / 806, abs=EXACT)
    assert masked.eligible_mass.tolist() == pytest.approx([6 / 808], abs=EXACT)


def test_mass_on_the_sinks_does_not_count_towards_coverage(tmp_path: Path) -> None:
    masses = [400.0, 400.0] + [1.0] * 8

    profile = profile_of(tmp_path, layer_of_masses(masses), grid=GRID, budgets=(0.2,))

    assert profile.coverage("oracle", 0.2) == pytest.approx(1 / 3, abs=EXACT)


def test_support_and_hottest_describe_the_eligible_tokens(tmp_path: Path) -> None:
    masses = [50.0, 50.0, 2.0, 2.0, 2.0, 2.0, 2.0, 2.0, 50.0, 50.0]

    profile = profile_of(tmp_path, layer_of_masses(masses), grid=GRID)

    assert profile.support.tolist() == pytest.approx([6], abs=1e-4)
    assert profile.hottest.tolist() == pytest.approx([1 / 6], abs=EXACT)


def test_units_are_averaged_without_weights(tmp_path: Path) -> None:
    # Coverage 1/3 in a layer that is nearly all eligible, 1/2 in one that is nearly all free.
    even = layer_of_masses([1e-3] * 2 + [1.0] * 6 + [1e-3] * 2, index=0)
    steep = layer_of_masses([1e3] * 2 + [2.0, 2.0, 1, 1, 1, 1] + [1e3] * 2, index=4)

    profile = profile_of(tmp_path, even, steep, grid=GRID, budgets=(0.2,))

    assert profile.layer_coverage("oracle", 0.2) == pytest.approx({0: 1 / 3, 4: 1 / 2}, abs=EXACT)
    assert profile.coverage("oracle", 0.2) == pytest.approx(5 / 12, abs=EXACT)


def test_windowed_layers_are_left_out(tmp_path: Path) -> None:
    paged = layer_of_masses(SIX_TENTHS, index=1)
    windowed = replace(layer_of_masses([1.0] * 10, index=3), window=8)

    profile = profile_of(tmp_path, paged, windowed, grid=GRID, budgets=(0.2,))

    assert profile.layer.tolist() == [1]
    assert profile.n_unit == 1
    assert profile.skipped_units == 0
    assert profile.coverage("oracle", 0.2) == pytest.approx(0.5, abs=EXACT)


def test_a_trace_of_windowed_layers_only_has_nothing_to_page(tmp_path: Path) -> None:
    windowed = replace(layer_of_masses(SIX_TENTHS), window=8)

    with pytest.raises(TraceError, match="every layer with a KV cache has a sliding window"):
        profile_of(tmp_path, windowed, grid=GRID)


def test_a_trace_without_an_eligible_page_says_what_is_free(tmp_path: Path) -> None:
    with pytest.raises(TraceError, match=r"of 10 tokens the first 4 .* the last 5 ") as caught:
        profile_of(tmp_path, layer_of_masses(SIX_TENTHS), grid=PageGrid(2, 4, 5))

    assert "--kvgate-page-size" in str(caught.value)


@pytest.mark.parametrize(("mass", "skipped"), [(1e-13, 1), (1e-11, 0)])
def test_units_without_eligible_mass_are_skipped_and_counted(
    tmp_path: Path, mass: float, skipped: int
) -> None:
    # six eligible tokens share the mass; the other four hold the rest
    empty = layer_of_masses([1.0] * 2 + [mass * 4 / 6] * 6 + [1.0] * 2, index=0)
    full = layer_of_masses(SIX_TENTHS, index=1)

    profile = profile_of(tmp_path, empty, full, grid=GRID, budgets=(0.2,))

    assert profile.skipped_units == skipped
    assert profile.layer.tolist() == [0, 1][skipped:]
    average = 1 / 2 if skipped else (1 / 3 + 1 / 2) / 2
    assert profile.coverage("oracle", 0.2) == pytest.approx(average, abs=1e-5)


def test_a_step_without_an_eligible_page_is_skipped(tmp_path: Path) -> None:
    layer = layer_of_masses(SIX_TENTHS, n_step=2)

    profile = profile_of(tmp_path, layer, grid=GRID, budgets=(0.5,), n_visible=[4, 10])

    assert profile.skipped_units == 1
    assert profile.n_unit == 1
    assert profile.coverage("oracle", 0.5) == pytest.approx(5 / 6, abs=EXACT)


def test_nothing_is_defined_where_every_unit_is_skipped(tmp_path: Path) -> None:
    layer = layer_of_masses([1.0] * 2 + [1e-20] * 6 + [1.0] * 2)

    profile = profile_of(tmp_path, layer, grid=GRID, budgets=(0.2,))

    assert profile.skipped_units == 1
    with pytest.raises(UndefinedError, match="no sampled step has attention mass"):
        profile.coverage("oracle", 0.2)
    assert profile.required_budget("oracle", 0.5) is None


def test_a_head_whose_sink_takes_everything_says_nothing(tmp_path: Path) -> None:
    # The second head of the group leaves no mass that float32 could hold to any token.
    layer = LayerArrays(
        k=np.log(np.array(SIX_TENTHS, dtype=np.float32)).reshape(1, 10, 1),
        q=np.ones((1, 2, 1), dtype=np.float32),
        scale=1.0,
        sinks=np.array([-50.0, 200.0], dtype=np.float32),
    )

    profile = profile_of(tmp_path, layer, grid=GRID, budgets=(0.2,))

    assert profile.coverage("oracle", 0.2) == pytest.approx(0.5, abs=EXACT)
    assert profile.hottest.tolist() == pytest.approx([0.29 / 0.6], abs=EXACT)
    assert np.isfinite(profile.eligible_mass).all()


def test_a_unit_just_above_the_least_mass_has_a_shape(tmp_path: Path) -> None:
    # Two alike heads hold 7e-13 each on six eligible tokens: the unit counts, at 1.4e-12.
    masses = np.array([1.0] * 2 + [7e-13 * 4 / 6] * 6 + [1.0] * 2)
    layer = LayerArrays(
        k=np.log(masses).astype(np.float32).reshape(1, 10, 1),
        q=np.ones((1, 2, 1), dtype=np.float32),
        scale=1.0,
    )

    profile = profile_of(tmp_path, layer, grid=GRID, budgets=(0.2,))

    assert profile.skipped_units == 0
    assert profile.support.tolist() == pytest.approx([6], abs=1e-3)


def test_a_budget_below_one_page_is_undefined_and_says_why(tmp_path: Path) -> None:
    profile = profile_of(tmp_path, layer_of_masses(SIX_TENTHS), grid=GRID, budgets=(0.1, 0.2))

    reason = r"10% is undefined: 10% of 10 tokens is 1 tokens, less than one 2-token page"
    with pytest.raises(UndefinedError, match=reason):
        profile.coverage("oracle", 0.1)
    with pytest.raises(UndefinedError, match=reason):
        profile.layer_coverage("oracle", 0.1)
    # not asked for, and looked up on the grid of 0.1% steps
    with pytest.raises(UndefinedError, match=r"15% of 10 tokens is 1 tokens"):
        profile.coverage("oracle", 0.15)
    for name in ("coverage", "total_mass", "global_coverage", "starved"):
        assert np.isnan(profile.numbers.units.numbers[name][:, 0]).all()
    assert not np.isnan(profile.numbers.units.numbers["coverage"][:, 1]).any()


def test_a_budget_below_one_page_at_one_step_is_undefined_for_all(tmp_path: Path) -> None:
    layer = layer_of_masses(SIX_TENTHS, n_step=2)

    profile = profile_of(tmp_path, layer, grid=GRID, budgets=(0.2,), n_visible=[9, 10])

    with pytest.raises(UndefinedError, match="20% of 9 tokens is 1 tokens"):
        profile.coverage("oracle", 0.2)


def test_a_required_budget_counts_less_than_a_page_as_nothing(tmp_path: Path) -> None:
    profile = profile_of(tmp_path, layer_of_masses(SIX_TENTHS), grid=GRID)

    # one page is 20%: half of the eligible mass and not a budget earlier
    assert profile.required_budget("oracle", 0.001) == 0.2
    assert profile.required_budget("oracle", 0.49) == 0.2
    assert profile.required_budget("oracle", 0.51) == 0.4
    assert profile.required_budget("oracle", 1.0) == 0.6
    assert profile.required_budget("landmark", 0.49) == 0.4


def test_a_coverage_above_one_is_reached_by_no_budget(tmp_path: Path) -> None:
    profile = profile_of(tmp_path, layer_of_masses(SIX_TENTHS), grid=GRID)

    assert profile.required_budget("oracle", 1.01) is None


@pytest.mark.parametrize("copies", [3, 6, 10, 49])
def test_a_pool_reaches_all_of_the_mass_at_the_full_budget(tmp_path: Path, copies: int) -> None:
    one = profile_of(tmp_path, layer_of_masses(SIX_TENTHS), grid=GRID)

    pooled = pool([one] * copies)

    assert pooled.n_unit == copies
    assert pooled.coverage("oracle", 1.0) == 1
    assert pooled.required_budget("oracle", 1.0) == 0.6


def test_a_budget_that_was_measured_and_one_on_the_grid_agree(tmp_path: Path) -> None:
    layer = random_layer(2, n_token=160, n_step=3)
    asked = profile_of(tmp_path / "asked", layer, grid=PageGrid(8, 8, 8), budgets=(0.25, 0.5))
    looked_up = profile_of(tmp_path / "looked-up", layer, grid=PageGrid(8, 8, 8))

    for selector in SELECTORS:
        for budget in (0.25, 0.5):
            assert looked_up.coverage(selector, budget) == pytest.approx(
                asked.coverage(selector, budget), abs=1e-12
            )
            assert looked_up.total_mass(selector, budget) == pytest.approx(
                asked.total_mass(selector, budget), abs=1e-12
            )


def test_what_was_not_measured_is_named_with_what_was(tmp_path: Path) -> None:
    trace = load_trace(make_trace(tmp_path / "trace", [layer_of_masses(SIX_TENTHS)]))
    profile = profile_trace(trace, GRID, Plan((0.2,), ("oracle",)))

    with pytest.raises(NotMeasuredError, match=r"'landmark' was not measured; measured: oracle"):
        profile.coverage("landmark", 0.2)
    with pytest.raises(NotMeasuredError, match=r"0\.2005 was not measured.*--kvgate-budgets"):
        profile.coverage("oracle", 0.2005)
    with pytest.raises(NotMeasuredError, match=r"0\.4 was not measured"):
        profile.layer_coverage("oracle", 0.4)


@pytest.mark.parametrize("n_page", [5, 17, 21, 37, 101])
def test_pages_with_equal_keys_tie_wherever_they_lie(n_page: int) -> None:
    # A float32 matrix product gives the last columns of such shapes another last bit.
    rng = np.random.default_rng(n_page)
    page = rng.standard_normal((1, 8, 80)).astype(np.float32)
    queries = rng.standard_normal((5, 3, 80)).astype(np.float32)

    for selector in PAGE_SELECTORS.values():
        if selector.numbers_per_dim:  # the others do not look at keys
            scores = selector.scores(queries, PageKeys(np.repeat(page, n_page, axis=0)))
            assert (scores == scores[:, :1]).all()


def test_a_required_budget_reaches_exactly_the_coverage_that_is_reported_there(
    tmp_path: Path,
) -> None:
    layer = random_layer(4, n_token=320, n_step=7, n_head=6, n_head_kv=3)
    budgets = tuple(number / 100 for number in range(10, 100, 3))
    profile = profile_of(tmp_path, layer, grid=PageGrid(8, 8, 8), budgets=budgets)

    for selector in SELECTORS:
        for budget in budgets:
            required = profile.required_budget(selector, profile.coverage(selector, budget))
            assert required is not None
            assert required <= budget
            assert profile.coverage(selector, required) >= profile.coverage(selector, budget)
