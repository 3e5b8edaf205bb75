"""How fast the profile is, against the product that cannot be avoided.

Head dim 128, 4 KV heads of 6 query heads each, 33 steps, K float16. The floor is the bare float32
product of the same logits with one ``np.exp`` over them, per KV head, K converted before. The
figures asked for are printed at the end.
"""

from __future__ import annotations

import tracemalloc
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from pytest_kvgate.analysis import PAGE_SELECTORS, PageGrid, Plan, Profile, profile_trace
from pytest_kvgate.trace import Trace, load_trace
from tests.benchmarks.conftest import Figures, Timing
from tests.benchmarks.plain_numpy import BASE, PlainNumbers, plain_profile
from tests.traces import LayerArrays, make_trace

N_STEP, STRIDE = 33, 8
N_HEAD_KV, GROUP, HEAD_DIM = 4, 6, 128
SHORT, LONG = 65_536, 131_072
BUDGETS = (0.005, 0.01, 0.02, 0.04)
GRID = PageGrid()
ROUNDS = 7
FURTHER = [name for name in PAGE_SELECTORS if name not in BASE]

BestTime = Callable[..., Timing]


def made_trace(path: Path, n_token: int) -> Trace:
    rng = np.random.default_rng(n_token)
    n_head = N_HEAD_KV * GROUP
    keys = rng.standard_normal((N_HEAD_KV, n_token, HEAD_DIM), dtype=np.float32)
    queries = rng.standard_normal((N_STEP, n_head, HEAD_DIM), dtype=np.float32) * 1.5
    first = n_token - STRIDE * (N_STEP - 1)
    layer = LayerArrays(k=keys.astype(np.float16), q=queries)
    return load_trace(make_trace(path, [layer], range(first, n_token + 1, STRIDE)))


@pytest.fixture(scope="session")
def short(tmp_path_factory: pytest.TempPathFactory) -> Trace:
    """65,536 tokens, memory-mapped."""
    return made_trace(tmp_path_factory.mktemp("speed") / "short", SHORT)


@pytest.fixture(scope="session")
def long(tmp_path_factory: pytest.TempPathFactory) -> Trace:
    """131,072 tokens, memory-mapped."""
    return made_trace(tmp_path_factory.mktemp("speed") / "long", LONG)


def floor_of(trace: Trace) -> Callable[[], object]:
    """Return the bare product of the same logits and one exponential over them."""
    (layer,) = trace.layers
    keys = [layer.k[head].astype(np.float32) for head in range(N_HEAD_KV)]
    queries = [
        (layer.q[:, layer.query_heads(head)].reshape(-1, HEAD_DIM) * layer.scale).astype(np.float32)
        for head in range(N_HEAD_KV)
    ]

    def run() -> None:
        for head in range(N_HEAD_KV):
            logits = queries[head] @ keys[head].T
            np.exp(logits, out=logits)

    return run


def fast_profile(trace: Trace, selectors: tuple[str, ...] = BASE) -> Profile:
    return profile_trace(trace, GRID, Plan(BUDGETS, selectors))


def assert_equal(fast: Profile, plain: PlainNumbers) -> None:
    for (name, budget), values in plain.coverage.items():
        assert fast.coverage(name, budget) == pytest.approx(np.mean(values), abs=1e-5)
    for (name, budget), values in plain.jaccard.items():
        assert fast.measure("jaccard", name, budget) == pytest.approx(np.mean(values), abs=1e-3)
    assert fast.support.mean() == pytest.approx(np.mean(plain.support), rel=1e-5)
    assert fast.hottest.mean() == pytest.approx(np.mean(plain.hottest), rel=1e-5)


@pytest.mark.benchmark(group="65,536 tokens")
def test_floor(best_time: BestTime, short: Trace) -> None:
    assert best_time(floor_of(short), ROUNDS).best > 0


@pytest.mark.benchmark(group="65,536 tokens")
def test_profile(best_time: BestTime, figures: Figures, short: Trace) -> None:
    timing = best_time(lambda: fast_profile(short), ROUNDS, floor=floor_of(short))

    ratio = timing.best / timing.beside["floor"]
    assert figures.state("the profile", ratio, 2.0, "× floor", most=True)


@pytest.mark.benchmark(group="65,536 tokens")
def test_plain(best_time: BestTime, figures: Figures, short: Trace) -> None:
    timing = best_time(
        lambda: plain_profile(short, GRID, BUDGETS), 1, profile=lambda: fast_profile(short)
    )

    assert_equal(fast_profile(short), timing.result)
    ratio = timing.best / timing.beside["profile"]
    assert figures.state("step by step and head by head", ratio, 4.0, "× profile", most=False)


@pytest.mark.benchmark(group="65,536 tokens")
@pytest.mark.parametrize("selector", FURTHER)
def test_one_more_selector(
    best_time: BestTime, figures: Figures, short: Trace, selector: str
) -> None:
    timing = best_time(
        lambda: fast_profile(short, (*BASE, selector)),
        ROUNDS,
        floor=floor_of(short),
        profile=lambda: fast_profile(short),
    )

    ratio = (timing.best - timing.beside["profile"]) / timing.beside["floor"]
    assert figures.state(f"{selector} on top", ratio, 0.5, "× floor", most=True)


@pytest.mark.benchmark(group="131,072 tokens")
def test_twice_the_context(
    best_time: BestTime, figures: Figures, short: Trace, long: Trace
) -> None:
    timing = best_time(lambda: fast_profile(long), ROUNDS, profile=lambda: fast_profile(short))

    ratio = timing.best / timing.beside["profile"]
    assert figures.state("twice the context", ratio, 2.1, "× profile", most=True)


def test_memory_beyond_the_trace(figures: Figures, long: Trace) -> None:
    tracemalloc.start()
    try:
        fast_profile(long)
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()

    assert figures.state(
        "peak memory at 131,072 tokens, beside the mapped trace",
        peak / 2**20,
        512,
        "MiB",
        most=True,
    )
