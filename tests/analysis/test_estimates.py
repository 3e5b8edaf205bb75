"""Means, worst layers and worst twentieths, and how sure they are."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from pytest_kvgate.analysis import SCOPES, Interval, Scope
from pytest_kvgate.analysis import estimates as module
from pytest_kvgate.analysis.estimates import FEWEST_TRACES, Samples, estimate, interval


def samples(
    value: Sequence[float] | NDArray[np.float64],
    *,
    weight: Sequence[float] | None = None,
    layer: Sequence[int] | NDArray[np.int64] | None = None,
    trace: Sequence[int] | NDArray[np.int64] | None = None,
    step: Sequence[int] | NDArray[np.int64] | None = None,
    ascending: bool = True,
) -> Samples:
    """Make samples of weight 1 and of one layer, trace and step where nothing else is said."""
    n = len(value)

    def whole(given: Sequence[int] | NDArray[np.int64] | None) -> NDArray[np.int64]:
        return np.zeros(n, dtype=np.int64) if given is None else np.asarray(given, dtype=np.int64)

    return Samples(
        np.asarray(value, dtype=np.float64),
        np.ones(n) if weight is None else np.asarray(weight, dtype=np.float64),
        whole(layer),
        whole(trace),
        whole(step),
        ascending,
    )


def test_a_mean_weighs_its_samples() -> None:
    assert estimate(samples([0.2, 0.8]), "mean") == pytest.approx(0.5)
    assert estimate(samples([0.2, 0.8], weight=[1, 3]), "mean") == pytest.approx(0.65)


def test_the_worst_layer_is_the_lowest_mean_and_of_costs_the_highest() -> None:
    value, layer, weight = [0.1, 0.9, 0.4, 0.3], [7, 7, 2, 2], [3, 1, 1, 1]

    assert samples(value, layer=layer, weight=weight).by_layer() == pytest.approx({2: 0.35, 7: 0.3})
    assert estimate(samples(value, layer=layer), "worst-layer") == pytest.approx(0.35)
    assert estimate(samples(value, layer=layer, weight=weight), "worst-layer") == pytest.approx(0.3)
    costs = samples(value, layer=layer, ascending=False)
    assert estimate(costs, "worst-layer") == pytest.approx(0.5)


@pytest.mark.parametrize(
    ("n", "place"), [(1, 0), (20, 0), (21, 1), (40, 1), (41, 2), (61, 3), (1001, 50)]
)
def test_p05_is_the_unit_a_twentieth_of_the_way_up_from_the_worst(n: int, place: int) -> None:
    value = np.random.default_rng(n).permutation(n).astype(np.float64)

    assert estimate(samples(value), "p05") == place
    assert estimate(samples(value, ascending=False), "p05") == n - 1 - place


def test_the_place_of_p05_is_exact_for_every_number_of_units() -> None:
    # 0.05 is not a binary fraction, and its product with n - 1 is cut
    assert all(int(module.TAIL * (n - 1)) == (n - 1) // 20 for n in range(1, 200_000))


def test_an_interval_is_the_same_every_time() -> None:
    rng = np.random.default_rng(5)
    value, step = rng.random(60), np.arange(60) // 4

    for scope in SCOPES:
        first = interval(samples(value, step=step), scope, 0.95)
        module._draws.cache_clear()
        assert interval(samples(value, step=step), scope, 0.95) == first


def test_each_replicate_draws_one_fewer_than_there_are() -> None:
    counts = module._draws(9)

    assert counts.shape == (2000, 9)
    assert (counts.sum(axis=1) == 8).all()
    assert (counts.max(axis=1) > 1).any()  # with replacement
    assert counts.mean(axis=0) == pytest.approx(np.full(9, 8 / 9), abs=0.1)


def test_of_two_steps_each_replicate_draws_one() -> None:
    found = interval(samples([0.2, 0.6], step=[0, 1]), "mean", 0.95)

    # two of two would give their mean half of the time; the quantiles are still the two
    assert found == Interval(0.2, 0.6, 0.95, 2, "steps")
    middle = interval(samples([0.2, 0.6], step=[0, 1]), "mean", 0.02)
    assert middle is not None
    assert {middle.low, middle.high} <= {0.2, 0.6}


def test_of_three_steps_the_replicates_are_the_means_of_all_pairs() -> None:
    replicates = module._resampled_means(
        samples([0.0, 0.3, 0.9], step=[0, 1, 2]), np.arange(3), module._draws(3), by_layer=False
    )

    pairs = itertools.combinations_with_replacement([0.0, 0.3, 0.9], 2)
    assert set(np.round(replicates, 9)) == {round(sum(pair) / 2, 9) for pair in pairs}
    # the pairs of two different ones come twice as often as those of the same
    share = np.mean(np.isclose(replicates, 0.45))
    assert share == pytest.approx(2 / 9, abs=0.03)


def test_what_belongs_to_a_step_is_drawn_together() -> None:
    # every step has the mean 0.5, however its units differ
    value, step = [0.0, 1.0] * 10, np.arange(20) // 2

    assert interval(samples(value, step=step), "mean", 0.95) == Interval(
        0.5, 0.5, 0.95, 10, "steps"
    )


def test_a_weighted_mean_stays_weighted_in_its_replicates() -> None:
    value, step, weight = [0.0, 1.0] * 3, np.arange(6) // 2, [3.0, 1.0] * 3

    assert interval(samples(value, step=step, weight=weight), "mean", 0.9) == Interval(
        0.25, 0.25, 0.9, 3, "steps"
    )


def test_one_step_alone_has_no_interval() -> None:
    for scope in SCOPES:
        assert interval(samples([0.1, 0.5, 0.9], layer=[0, 1, 2]), scope, 0.95) is None


def test_steps_of_the_same_number_in_two_traces_are_two() -> None:
    found = interval(samples([0.1, 0.5], trace=[0, 1]), "mean", 0.95)

    assert found is not None
    assert (found.n, found.drawn) == (2, "steps")


@pytest.mark.parametrize(
    ("n_trace", "n", "drawn"),
    [(1, 3, "steps"), (FEWEST_TRACES - 1, 12, "steps"), (FEWEST_TRACES, 5, "traces")],
)
def test_traces_are_drawn_from_the_fewest_on_and_steps_before(
    n_trace: int, n: int, drawn: str
) -> None:
    trace, step = np.divmod(np.arange(3 * n_trace), 3)
    found = interval(samples(np.arange(3.0 * n_trace), trace=trace, step=step), "mean", 0.95)

    assert found is not None
    assert (found.n, found.drawn) == (n, drawn)


def test_traces_drawn_as_a_whole_make_no_more_of_their_steps() -> None:
    trace, step = np.divmod(np.arange(200), 40)
    alike = samples(trace / 10, trace=trace, step=step)

    one_each = samples(np.arange(5) / 10, trace=np.arange(5))

    for scope in SCOPES:
        many, few = interval(alike, scope, 0.95), interval(one_each, scope, 0.95)
        assert many is not None
        assert few is not None
        assert (many.low, many.high) == pytest.approx((few.low, few.high))


@settings(max_examples=30, deadline=None, database=None)
@given(st.floats(-5, 5), st.sampled_from(SCOPES), st.booleans())
def test_the_interval_of_a_constant_is_that_constant(
    constant: float, scope: Scope, ascending: bool
) -> None:
    layer, step = np.divmod(np.arange(24), 6)
    found = interval(
        samples(np.full(24, constant), layer=layer, step=step, ascending=ascending), scope, 0.95
    )

    assert found is not None
    assert (found.low, found.high) == pytest.approx((constant, constant))


def test_a_layer_that_a_replicate_misses_is_not_the_worst() -> None:
    # layer 1 has units at step 0 only; where that is not drawn, layer 0 is all there is
    found = interval(
        samples([0.9, 0.1, 0.8, 0.7], layer=[0, 1, 0, 0], step=[0, 0, 1, 2]), "worst-layer", 0.95
    )

    assert found is not None
    assert found.low == pytest.approx(0.1)
    assert 0.7 <= found.high <= 0.8


@pytest.mark.parametrize("ascending", [True, False])
def test_the_tail_of_a_replicate_is_that_of_the_units_it_drew(ascending: bool) -> None:
    rng = np.random.default_rng(3)
    step = np.repeat(np.arange(6), 9)
    drawn_from = samples(rng.random(54), step=step, ascending=ascending)
    counts = module._draws(6)

    found = module._resampled_tail(drawn_from, step, counts)

    for row in range(0, 2000, 97):
        times = counts[row, step].astype(int)
        units = np.repeat(drawn_from.value, times)
        assert found[row] == estimate(samples(units, ascending=ascending), "p05")


def held(found: Interval | None, truth: float) -> bool:
    assert found is not None
    return found.low <= truth <= found.high


@pytest.mark.parametrize(
    ("drawn", "n", "confidence", "least", "most"),
    [
        # a percentile interval of n samples is a little too narrow: so many it holds at least
        ("steps", 8, 0.95, 0.88, 0.97),
        ("steps", 30, 0.95, 0.91, 0.98),
        ("traces", 8, 0.95, 0.88, 0.97),
        ("steps", 30, 0.5, 0.42, 0.58),
    ],
)
def test_about_as_many_intervals_hold_the_true_mean_as_they_claim(
    drawn: str, n: int, confidence: float, least: float, most: float
) -> None:
    rng = np.random.default_rng(11)
    found = []
    for _ in range(400):
        # units of a step, or of a trace, have much in common
        common = np.repeat(rng.normal(0.7, 0.1, n), 6)
        value = common + rng.normal(0, 0.05, 6 * n)
        at = np.repeat(np.arange(n), 6)
        trace, step = (at, None) if drawn == "traces" else (None, at)
        found.append(
            held(interval(samples(value, trace=trace, step=step), "mean", confidence), 0.7)
        )

    assert least <= np.mean(found) <= most


def test_the_worst_twentieth_s_interval_holds_the_true_one_most_of_the_time() -> None:
    rng = np.random.default_rng(12)
    truth = 0.05  # of uniform units
    found = [
        held(
            interval(samples(rng.random(200), step=np.repeat(np.arange(25), 8)), "p05", 0.95), truth
        )
        for _ in range(100)
    ]

    assert np.mean(found) >= 0.85


def test_a_wider_confidence_is_a_wider_interval() -> None:
    rng = np.random.default_rng(4)
    drawn = samples(rng.random(40), step=np.arange(40))
    half, most = interval(drawn, "mean", 0.5), interval(drawn, "mean", 0.99)

    assert half is not None
    assert most is not None
    assert most.low < half.low < half.high < most.high
    assert math.isclose(sum((half.low, half.high)) / 2, drawn.value.mean(), abs_tol=0.05)
