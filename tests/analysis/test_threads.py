"""One profile, however many threads measure it; and BLAS gets its threads back."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from numpy.typing import NDArray
from threadpoolctl import threadpool_info, threadpool_limits

from pytest_kvgate.analysis import (
    PAGE_SELECTORS,
    PageGrid,
    PageKeys,
    Plan,
    Profile,
    Selector,
    profile_trace,
)
from pytest_kvgate.analysis.selectors import register
from pytest_kvgate.analysis.threads import workers
from pytest_kvgate.trace import Trace, TraceError, load_trace
from tests.traces import make_trace, random_layer

GRID = PageGrid(4, 4, 4)


def blas_threads() -> set[int]:
    return {
        library["num_threads"] for library in threadpool_info() if library["user_api"] == "blas"
    }


@pytest.fixture(autouse=True)
def _three_threads() -> Iterator[None]:
    """Give BLAS three threads, whatever this machine has."""
    with threadpool_limits(3, user_api="blas"):
        if blas_threads() != {3}:
            pytest.skip("numpy has no BLAS whose threads can be set")
        yield


@pytest.fixture
def trace(tmp_path: Path) -> Trace:
    layers = [
        random_layer(
            seed, n_token=150, n_step=5, n_head=8, n_head_kv=4, index=seed, values=True, sinks=True
        )
        for seed in (1, 2)
    ]
    return load_trace(make_trace(tmp_path / "trace", layers))


def recorded(seen: list[tuple[set[int], str]], *, fail: bool = False) -> Plan:
    """Plan a selector that records how many threads BLAS has, and in which thread it runs."""

    def score(queries: NDArray[np.float32], pages: PageKeys) -> NDArray[np.float64]:
        seen.append((blas_threads(), threading.current_thread().name))
        if fail:
            raise RuntimeError("a selector that fails")
        return np.zeros((len(queries), len(pages.rows)))

    registry = register([Selector("mine", score)], PAGE_SELECTORS)
    return Plan((0.1,), ("oracle", "mine"), registry)


def test_blas_has_one_thread_while_heads_are_measured_and_gets_its_own_back(trace: Trace) -> None:
    seen: list[tuple[set[int], str]] = []

    profile_trace(trace, GRID, recorded(seen))

    assert {frozenset(counts) for counts, _ in seen} == {frozenset({1})}
    assert all(name.startswith("kvgate") for _, name in seen)
    assert blas_threads() == {3}


def test_blas_gets_its_threads_back_when_measuring_raises(trace: Trace) -> None:
    seen: list[tuple[set[int], str]] = []

    with pytest.raises(RuntimeError, match="a selector that fails"):
        profile_trace(trace, GRID, recorded(seen, fail=True))

    assert seen
    assert blas_threads() == {3}
    assert not [thread for thread in threading.enumerate() if thread.name.startswith("kvgate")]


def test_blas_gets_its_threads_back_from_a_trace_that_is_broken(tmp_path: Path) -> None:
    layer = random_layer(n_token=80)
    layer.k[1, 30] = np.nan
    broken = load_trace(make_trace(tmp_path / "broken", [layer]))

    with pytest.raises(TraceError):
        profile_trace(broken, GRID, Plan((0.1,)))

    assert blas_threads() == {3}


@pytest.mark.parametrize(("most", "count"), [(1, 1), (2, 2), (3, 3), (8, 3)])
def test_there_are_as_many_workers_as_heads_and_as_blas_had_threads(most: int, count: int) -> None:
    with workers(most) as threads:
        assert threads.count == count
        # with one worker nothing is shared, and BLAS keeps its threads
        assert blas_threads() == {3 if count == 1 else 1}
        barrier = threading.Barrier(count)

        def wait(_: int) -> str:
            barrier.wait(timeout=20)  # passes only where all run at once
            return threading.current_thread().name

        assert len(set(threads.executor.map(wait, range(count)))) == count
    assert blas_threads() == {3}


def test_a_limit_of_one_thread_holds_for_the_workers(trace: Trace) -> None:
    seen: list[tuple[set[int], str]] = []

    with threadpool_limits(1, user_api="blas"):
        profile_trace(trace, GRID, recorded(seen))

    assert len({name for _, name in seen}) == 1


def numbers(profile: Profile) -> list[NDArray[np.float64] | NDArray[np.int64]]:
    units = profile.numbers.units
    return [
        *units.numbers.values(),
        units.support,
        units.hottest,
        units.eligible_mass,
        units.needed,
        units.layer,
        units.decode_index,
        profile.numbers.covered,
        profile.numbers.reuse,
    ]


def test_a_profile_is_the_same_in_one_thread_and_in_several(trace: Trace) -> None:
    plan = Plan((0.05, 0.2))
    several = [profile_trace(trace, GRID, plan) for _ in range(3)]
    with threadpool_limits(1, user_api="blas"):
        one = profile_trace(trace, GRID, plan)

    for profile in several:
        for found, wanted in zip(numbers(profile), numbers(one), strict=True):
            assert np.array_equal(found, wanted, equal_nan=True)
