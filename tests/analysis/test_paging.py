"""The LRU pool of resident pages, against sequences worked out by hand and against every size."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from hypothesis import event, given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from pytest_kvgate.analysis import PageGrid, Plan, Profile, pool, profile_trace
from pytest_kvgate.analysis.findings import page_bytes, paging_cost
from pytest_kvgate.analysis.paging import N_POOL, LruPools, pool_histogram
from pytest_kvgate.trace import load_trace
from tests.traces import LayerArrays, make_trace, random_layer


def pages(*numbers: int) -> NDArray[np.int64]:
    return np.array(numbers, dtype=np.int64)


class LruPool:
    """One of several pools side by side; its neighbours select other pages.

    With k = 10, a tenth of a step's pages is one page.
    """

    def buy(self, k: int) -> None:
        """Let the steps from the next one on buy k pages."""
        self._bought = k

    def __init__(self, n_page: int, k: int = 10) -> None:
        self._pools = LruPools(3, n_page)
        self._k = self._bought = k
        self._n_page = n_page

    @property
    def is_new(self) -> bool:
        return not self._pools.started[1]

    def access(self, selected: NDArray[np.int64], capacity: int) -> tuple[int, NDArray[np.int64]]:
        if self._bought != self._k:
            self._pools.settle(np.array([1, self._k, 1]))
        own = np.sort(selected) + self._n_page
        beside = np.arange(len(selected)) + 2 * self._n_page
        hits, needed = self._pools.access(
            np.concatenate([own, beside]),
            np.array([1, capacity, self._n_page]),
            np.array([1, self._k, 1]),
        )
        self._k = self._bought  # what bounds the pool until the next step
        assert hits[0] == 0
        return int(hits[1]), needed[np.searchsorted(own, selected + self._n_page)]


def counts_of(tenths: NDArray[np.int64]) -> NDArray[np.int64]:
    """Return the histogram of one row, while another row is counted beside it."""
    rows = np.array([0] * len(tenths) + [1])
    both = pool_histogram(np.concatenate([tenths, [10]]), rows, 2)
    assert np.flatnonzero(both[1]).tolist() == [10]
    counts: NDArray[np.int64] = both[0]
    return counts


def hits_of(capacity: int, *steps: Sequence[int]) -> list[int]:
    lru = LruPool(100)
    return [lru.access(pages(*step), capacity)[0] for step in steps]


def test_an_empty_pool_has_nothing_and_says_so() -> None:
    lru = LruPool(10)

    assert lru.is_new
    hits, needed = lru.access(pages(4, 2), 2)
    assert (hits, needed.tolist()) == (0, [0, 0])
    assert not lru.is_new


def test_what_was_selected_longest_ago_goes_first() -> None:
    # after 1, 2 and 3 the pool of two holds 2 and 3; selecting 2 again leaves 3 the oldest
    assert hits_of(2, [1], [2], [3], [2], [4], [2]) == [0, 0, 0, 1, 0, 1]
    assert hits_of(2, [1], [2], [3], [2], [4], [3]) == [0, 0, 0, 1, 0, 0]
    assert hits_of(2, [1], [2], [3], [1]) == [0, 0, 0, 0]


@pytest.mark.parametrize(("asked", "hits"), [(5, 0), (7, 1), (9, 1)])
def test_of_pages_selected_together_the_lower_goes_first(asked: int, hits: int) -> None:
    # five, seven and nine in any order, then one more into a pool of three: five goes
    assert hits_of(3, [7, 9, 5], [1], [asked]) == [0, 0, hits]


def test_a_hit_makes_a_page_most_recent_but_not_more_so_than_its_step() -> None:
    # 8 is hit together with the new 3; both are of the last step, so 3 is the lower and goes
    assert hits_of(2, [8], [8, 3], [5], [8]) == [0, 1, 0, 1]
    assert hits_of(2, [8], [8, 3], [5], [3]) == [0, 1, 0, 0]


def test_a_pool_that_grows_does_not_get_back_what_it_evicted() -> None:
    lru = LruPool(10)
    for page in (1, 2, 3):
        lru.access(pages(page), 2)

    assert lru.access(pages(4), 4)[0] == 0  # 2 and 3 stay, 4 joins them
    assert lru.access(pages(1), 4)[0] == 0  # 1 was evicted while there was room for two
    assert lru.access(pages(1, 2, 3, 4), 4)[0] == 4


def test_a_pool_that_shrinks_evicts_down_to_its_size() -> None:
    lru = LruPool(10)
    lru.access(pages(1, 2, 3, 4), 4)
    lru.access(pages(4), 1)

    assert lru.access(pages(3), 4)[0] == 0
    assert lru.access(pages(4), 4)[0] == 1


def test_the_pool_a_page_needs_counts_what_is_as_recent_or_more_so() -> None:
    lru = LruPool(10)
    lru.access(pages(6, 2), 2)
    lru.access(pages(4), 2)

    # the most recent first: 4, then of the first step 6 and 2; 9 was never selected
    assert lru.access(pages(2, 4, 9, 6), 4)[1].tolist() == [3, 1, 0, 2]


def test_a_pool_that_selects_nothing_stays_as_it_is() -> None:
    pools = LruPools(2, 4)
    sizes = k = np.array([2, 2])
    both = np.array([0, 1, 4, 5])  # pages 0 and 1 of each pool of four
    pools.access(both, sizes, k)

    pools.access(np.array([6, 7]), sizes, k)  # pages 2 and 3 of the second
    hits, _ = pools.access(both, sizes, k)

    assert hits.tolist() == [2, 0]


sequences = st.integers(1, 9).flatmap(
    lambda n_page: st.lists(
        st.sets(st.integers(0, n_page - 1), min_size=1).flatmap(
            lambda chosen: st.permutations(sorted(chosen))
        ),
        min_size=1,
        max_size=12,
    )
)


def simulate(steps: Sequence[Sequence[int]], capacities: Sequence[int]) -> list[list[bool]]:
    """Return which accesses hit a pool, from a table of when each page was last selected."""
    last: dict[int, int] = {}
    found = []
    for number, (step, capacity) in enumerate(zip(steps, capacities, strict=True)):
        found.append([page in last for page in step])
        last.update(dict.fromkeys(step, number))
        while len(last) > capacity:
            del last[min(last, key=lambda page: (last[page], page))]
    return found


@settings(max_examples=150, deadline=None, database=None)
@given(sequences)
def test_the_pool_a_page_needs_is_the_smallest_of_all_sizes_that_hits(
    steps: list[list[int]],
) -> None:
    by_size = {size: simulate(steps, [size] * len(steps)) for size in range(1, 10)}
    lru = LruPool(9)

    for number, step in enumerate(steps):
        needed = lru.access(pages(*step), 9)[1]
        for place in range(len(step)):
            enough = [size for size, found in by_size.items() if found[number][place]]
            assert needed[place] == min(enough, default=0)
            assert enough == list(range(min(enough, default=10), 10))  # no larger pool misses


@settings(max_examples=150, deadline=None, database=None)
@given(sequences, st.data())
def test_the_hits_of_a_pool_of_changing_size_are_the_simulated_ones(
    steps: list[list[int]], data: st.DataObject
) -> None:
    capacities = [len(step) + data.draw(st.integers(0, 4)) for step in steps]
    lru = LruPool(9)

    found = [
        lru.access(pages(*step), size)[0] for step, size in zip(steps, capacities, strict=True)
    ]

    event(f"hits: {sum(found) > 0}")
    assert found == [sum(hits) for hits in simulate(steps, capacities)]


def test_the_histogram_counts_first_selections_tenths_and_what_is_beyond() -> None:
    counts = counts_of(pages(0, 3, 10, 13, 20, N_POOL, N_POOL + 1, 5000))

    assert np.flatnonzero(counts).tolist() == [0, 3, 10, 13, 20, N_POOL, N_POOL + 1]
    assert counts[N_POOL + 1] == 2
    assert len(counts) == N_POOL + 2


def test_a_pool_is_measured_by_the_pages_of_its_steps() -> None:
    # of k = 4: 1 page is 0.25, so 0.3 of a step's pages serves it; 5 are 1.25 → 1.3
    lru = LruPool(10, k=4)
    lru.access(pages(1, 2, 3, 4, 5), 5)

    assert lru.access(pages(5, 1), 5)[1].tolist() == [3, 13]


def test_a_pool_that_was_too_small_earlier_does_not_serve_although_it_grew() -> None:
    lru = LruPool(20, k=2)
    lru.access(pages(1, 2), 20)
    lru.access(pages(3, 4), 20)  # 1 and 2 are the last of four pages, which is 2 · k
    lru.buy(4)
    lru.access(pages(5, 6), 20)

    # 1 is six pages deep now, 1.5 · k, but was four deep while k was 2: a pool had to be 2 · k
    assert lru.access(pages(1, 6), 20)[1].tolist() == [20, 3]
    # selected again, its history starts anew: 6 and 1 are the most recent
    assert lru.access(pages(1, 6), 20)[1].tolist() == [5, 3]


@settings(max_examples=100, deadline=None, database=None)
@given(sequences, st.data())
def test_the_pool_for_changing_steps_is_the_smallest_simulated_one_that_hits(
    steps: list[list[int]], data: st.DataObject
) -> None:
    ks = sorted(data.draw(st.lists(st.integers(1, 6), min_size=len(steps), max_size=len(steps))))
    multiples = range(1, 91)
    by_multiple = {tenths: simulate(steps, [tenths * k // 10 for k in ks]) for tenths in multiples}
    lru = LruPool(9)

    for number, step in enumerate(steps):
        lru.buy(ks[number])
        needed = lru.access(pages(*step), 9)[1]
        for place in range(len(step)):
            enough = [tenths for tenths, found in by_multiple.items() if found[number][place]]
            assert needed[place] == min(enough, default=0)


def sliding_profile(
    path: Path, tops: Sequence[Sequence[int]], *, values: int | None = None, k: int = 2
) -> Profile:
    """Profile one head whose oracle selects these pages of ten, of four tokens each."""
    # one dim per page: the query of a step turns up the pages that it selects
    keys = np.repeat(np.eye(10), 4, axis=0)[None]
    queries = np.zeros((len(tops), 1, 10))
    for step, top in enumerate(tops):
        queries[step, 0, list(top)] = 5.0 + np.arange(len(top)) / 10
    # the last tokens are those of the queries, and on no page
    keys = np.concatenate([keys, np.zeros((1, len(tops), 10))], axis=1)
    rng = np.random.default_rng(1)
    layer = LayerArrays(
        k=keys.astype(np.float16),
        q=queries.astype(np.float32),
        scale=1.0,
        v=None if values is None else rng.standard_normal((1, keys.shape[1], values)),
    )
    if layer.v is not None:
        layer = replace(layer, v=layer.v.astype(np.float16))
    trace = load_trace(make_trace(path / "trace", [layer]))
    # n is 41 to 44: of pages of four, a tenth of it is one page
    return profile_trace(trace, PageGrid(4, 0, 1), Plan((k / 10,)))


# Pages of the steps; hits of a pool of four, and the pool that each access needs:
# 0 1 | 1 2: hit 1 (1), miss | 3 4: misses | 0 1: 1 needs 4 (4 3 2 1 0) and hits, 0 needs 5
STEPS = [(0, 1), (1, 2), (3, 4), (0, 1)]


def test_a_pool_s_cost_by_hand(tmp_path: Path) -> None:
    profile = sliding_profile(tmp_path, STEPS)

    cost = paging_cost(profile, "oracle", 0.2)

    # six accesses from the second step on, of which two hit
    assert cost.hit_rate == pytest.approx(2 / 6)
    assert cost.missed_pages == pytest.approx(4 / 3)
    # 2, 3 and 4 are selected for the first time, and no pool serves them
    assert cost.first_selections == pytest.approx(3 / 6)
    assert cost.pool_for_most is None
    # a page of K is 4·10 numbers of 2 bytes, and V is taken to be as long
    assert cost.missed_bytes == pytest.approx(4 / 3 * 2 * 80)


def test_the_pool_for_most_is_a_multiple_of_a_step_s_pages(tmp_path: Path) -> None:
    # two pages by turns with two others: the pool that holds all four is 2 × 2
    profile = sliding_profile(tmp_path, [(0, 1, 2, 3), (0, 1, 2, 3), (3, 2, 1, 0)], k=4)

    cost = paging_cost(profile, "oracle", 0.4)

    assert (cost.hit_rate, cost.first_selections) == (1.0, 0.0)
    # the lowest page of four needs them all
    assert cost.pool_for_most == 1.0


def test_ninety_nine_percent_of_accesses_decide_the_pool(tmp_path: Path) -> None:
    profile = sliding_profile(tmp_path, STEPS)
    reuse = np.zeros_like(profile.numbers.reuse)

    def pool_for_most(served: int, rare: int) -> float | None:
        reuse[..., 12], reuse[..., 57] = served, rare
        numbers = replace(profile.numbers, reuse=reuse)
        return paging_cost(replace(profile, numbers=numbers), "oracle", 0.2).pool_for_most

    assert pool_for_most(99, 1) == 1.2
    assert pool_for_most(98, 2) == 5.7


def test_missed_bytes_are_in_the_types_of_the_cache(tmp_path: Path) -> None:
    profile = sliding_profile(tmp_path, STEPS, values=6)
    (trace,) = profile.traces
    quantized = replace(trace, capture={"cache_type_k": "q8_0", "cache_type_v": "q4_0"})
    unknown = replace(trace, capture={"cache_type_k": "tq9", "cache_type_v": None})
    single = replace(trace, capture={"cache_type_k": "f32"})

    # 40 numbers of K and 24 of V in a page
    assert page_bytes(trace, trace.layers[0], 4) == 40 * 2 + 24 * 2
    assert page_bytes(quantized, trace.layers[0], 4) == 40 * 34 / 32 + 24 * 18 / 32
    assert page_bytes(unknown, trace.layers[0], 4) == 40 * 2 + 24 * 2
    assert page_bytes(single, trace.layers[0], 4) == 40 * 4 + 24 * 2
    cost = paging_cost(replace(profile, traces=(quantized,)), "oracle", 0.2)
    assert cost.missed_bytes == pytest.approx(4 / 3 * (40 * 34 / 32 + 24 * 18 / 32))


def test_missed_bytes_are_of_all_layers_and_heads_per_step(tmp_path: Path) -> None:
    layers = [
        random_layer(seed, n_token=80, n_step=4, n_head_kv=2, index=seed, head_dim=dim)
        for seed, dim in ((1, 8), (2, 4))
    ]
    trace = load_trace(make_trace(tmp_path / "trace", layers))
    profile = profile_trace(trace, PageGrid(4, 4, 4), Plan((0.1,)))

    cost = paging_cost(profile, "landmark", 0.1)

    units = profile.samples("missed_pages", "landmark", 0.1)
    assert len(units.value) == 2 * 2 * 3
    by_layer = {layer: units.value[units.layer == layer].sum() for layer in (1, 2)}
    assert cost.missed_bytes == pytest.approx((by_layer[1] * 192 + by_layer[2] * 96) / 3)
    assert cost.missed_pages == pytest.approx(units.value.mean())


def test_missed_bytes_of_a_pool_of_traces_are_per_step_in_each_trace_s_types(
    tmp_path: Path,
) -> None:
    first = sliding_profile(tmp_path / "first", STEPS)
    second = sliding_profile(tmp_path / "second", STEPS)
    third = sliding_profile(tmp_path / "third", [(0, 1), (0, 1)])
    (trace,) = second.traces
    second = replace(second, traces=(replace(trace, capture={"cache_type_k": "f32"}),))
    # four misses of 160 and of 240 bytes in three steps each, and one step without a miss
    expected = (4 * 160 + 4 * 240) / 7

    at_once = pool([first, second, third])
    in_turn = pool([pool([first, second]), third])
    the_other_way = pool([third, pool([first, second])])

    for pooled in (at_once, in_turn, the_other_way):
        assert paging_cost(pooled, "oracle", 0.2).missed_bytes == pytest.approx(expected)
        assert len(np.unique(pooled.numbers.units.trace)) == 3


def test_hits_of_the_default_pool_are_those_the_histogram_says(tmp_path: Path) -> None:
    # one n for all steps keeps k the same, so the pool of 2·k is the twentieth tenth
    layer = random_layer(3, n_token=200, n_step=6)
    trace = load_trace(make_trace(tmp_path / "trace", [layer]))
    profile = profile_trace(trace, PageGrid(4, 4, 4), Plan((0.05,)))
    assert {profile.grid.pages_for(0.05, step.n_visible) for step in trace.steps} == {2}

    for row, selector in enumerate(profile.selectors[:-1]):
        reuse = profile.numbers.reuse[row, 0]
        assert math.isclose(
            profile.measure("hit_rate", selector, 0.05), reuse[1:21].sum() / reuse.sum()
        )
