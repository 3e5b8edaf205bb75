"""What selectors give pages: formulas by hand, what is refused, and the random baseline."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from pytest_kvgate.analysis import (
    PAGE_SELECTORS,
    SELECTORS,
    PageGrid,
    PageKeys,
    Plan,
    Selector,
    SelectorError,
    masses,
    measure,
    profile_trace,
)
from pytest_kvgate.analysis.scoring import page_scorer
from pytest_kvgate.analysis.selectors import rank, register
from pytest_kvgate.trace import load_trace
from tests.traces import make_trace, random_layer

RANDOM = PAGE_SELECTORS["random"]
# Two pages of two keys, and the queries of two heads at two steps.
KEYS = np.array([[[1, -2], [3, 4]], [[0, 0], [-4, 2]]], dtype=np.float32)
QUERIES = np.array([[[1, 1], [0, -2]], [[-1, 3], [2, -1]]], dtype=np.float32)


def test_what_is_stored_of_a_page() -> None:
    pages = PageKeys(KEYS)

    assert pages.mean.tolist() == [[2, 1], [-2, 1]]
    assert pages.maximum.tolist() == [[3, 4], [0, 2]]
    assert pages.minimum.tolist() == [[1, -2], [-4, 0]]
    # of two keys, half of their distance, for the population deviation and the mean from the centre
    assert pages.deviation.tolist() == [[1, 3], [2, 1]]
    assert pages.center.tolist() == [[2, 1], [-2, 1]]
    assert pages.radius.tolist() == [[1, 3], [2, 1]]


def test_deviation_radius_and_centre_differ_where_a_page_is_skewed() -> None:
    pages = PageKeys(np.array([[[0], [0], [0], [8]]], dtype=np.float32))

    assert (pages.mean.item(), pages.center.item(), pages.radius.item()) == (2, 4, 4)
    assert pages.deviation.item() == pytest.approx(math.sqrt((3 * 4 + 36) / 4))


@pytest.mark.parametrize(
    ("name", "scores"),
    [
        # per step and page the larger of both heads'
        ("landmark", [[max(3, -2), max(-1, -2)], [max(1, 3), max(5, -5)]]),
        # q·max where q is positive, q·min where it is negative
        ("quest", [[max(3 + 4, 4), max(0 + 2, 0)], [max(-1 + 12, 6 + 2), max(4 + 6, 0 + 0)]]),
        # q·mean + Σ|q|·std, with std (1, 3) and (2, 1)
        ("mean-std", [[max(3 + 4, -2 + 6), max(-1 + 3, -2 + 2)], [max(1 + 10, 3 + 5), 5 + 5]]),
        ("cuboid-mean", [[max(3 + 4, -2 + 6), max(-1 + 3, -2 + 2)], [max(1 + 10, 3 + 5), 5 + 5]]),
        ("recency", [[7, 8], [7, 8]]),
    ],
)
def test_scores_by_hand(name: str, scores: list[list[float]]) -> None:
    found = PAGE_SELECTORS[name].scores(QUERIES, PageKeys(KEYS, 7))

    assert found.dtype == np.float32
    assert found.tolist() == scores


def test_mean_std_and_cuboid_mean_on_a_skewed_page() -> None:
    pages = PageKeys(np.array([[[0], [0], [0], [8]]], dtype=np.float16))
    queries = np.array([[[-0.5]]], dtype=np.float32)

    found = {name: PAGE_SELECTORS[name].scores(queries, pages).item() for name in PAGE_SELECTORS}

    assert found["landmark"] == -1
    assert found["quest"] == 0
    assert found["mean-std"] == pytest.approx(-1 + math.sqrt(12) / 2)
    assert found["cuboid-mean"] == -2 + 2


def test_quest_bounds_the_logits_of_its_page() -> None:
    rng = np.random.default_rng(0)
    keys = rng.standard_normal((9, 6, 5)).astype(np.float32)
    queries = rng.standard_normal((4, 3, 5)).astype(np.float32)

    best = np.einsum("sgd,ptd->sgpt", queries, keys).max(axis=(1, 3))

    assert (PAGE_SELECTORS["quest"].scores(queries, PageKeys(keys)) >= best - 1e-5).all()


def selector(score: Callable[..., Any]) -> Selector:
    return Selector("mine", score)


@pytest.mark.parametrize(
    ("returned", "named"),
    [
        (np.zeros(2), r"float64 of shape \(2,\)"),
        (np.zeros((2, 3)), r"float64 of shape \(2, 3\)"),
        (np.zeros((2, 2, 2)), r"shape \(2, 2, 2\)"),
        (np.zeros((2, 2), dtype=complex), "complex128"),
        (np.zeros((2, 2), dtype=bool), "bool"),
        (np.full((2, 2), "1"), "<U1"),
        (None, "object"),
        ([[1.0, 2.0], [3.0, math.nan]], "NaN for a page"),
    ],
)
def test_what_is_no_score_is_refused_with_the_selector_s_name(returned: Any, named: str) -> None:  # noqa: ANN401
    with pytest.raises(SelectorError, match=f"selector 'mine' returned.*{named}"):
        selector(lambda queries, pages: returned).scores(QUERIES, PageKeys(KEYS))


@pytest.mark.parametrize(
    "returned",
    [[[1, 2], [3, 4]], np.array([[1, 2], [3, 4]], dtype=np.uint8), [[1.0, 1e300], [-math.inf, 0]]],
)
def test_numbers_of_any_real_type_are_scores(returned: Any) -> None:  # noqa: ANN401
    found = selector(lambda queries, pages: returned).scores(QUERIES, PageKeys(KEYS))

    assert found.dtype == np.float32
    wanted = np.asarray(returned, dtype=np.float64)
    assert found.tolist() == np.where(wanted > 1e38, np.inf, wanted).tolist()


@pytest.mark.parametrize("name", ["", "my first", "mine!", "-", "a_b", 3, None])
def test_a_name_that_no_command_line_takes_is_refused(name: Any) -> None:  # noqa: ANN401
    with pytest.raises(SelectorError, match="selector name"):
        register([Selector(name, RANDOM.score)], {})


@pytest.mark.parametrize("name", ["oracle", "token-oracle", "quest", "mine"])
def test_a_name_is_given_once(name: str) -> None:
    mine = Selector("mine", RANDOM.score)
    with pytest.raises(SelectorError, match=f"two selectors named '{name}'"):
        register([mine, Selector(name, RANDOM.score)], PAGE_SELECTORS)


def test_what_is_no_selector_is_not_registered() -> None:
    with pytest.raises(SelectorError, match="is no selector"):
        register([RANDOM.score], {})  # type: ignore[list-item] # what a user may do


def test_registering_adds_to_a_copy() -> None:
    mine = Selector("my-2nd", RANDOM.score, numbers_per_dim=1.5)

    registry = register([mine], PAGE_SELECTORS)

    assert list(registry) == [*PAGE_SELECTORS, "my-2nd"]
    assert "my-2nd" not in PAGE_SELECTORS
    assert mine.page_bytes(10) == 30


def test_a_registered_selector_is_measured_by_its_own_scores(tmp_path: Path) -> None:
    first = Selector("first", lambda queries, pages: -np.tile(pages.numbers / 1, (len(queries), 1)))
    plan = Plan((0.2,), ("oracle", "first"), register([first], PAGE_SELECTORS))
    layer = random_layer(4, n_token=50)
    trace = load_trace(make_trace(tmp_path / "trace", [layer]))

    profile = profile_trace(trace, PageGrid(5, 5, 5), plan)

    queries, keys = layer.q[0, :2].astype(np.float64), layer.k[0].astype(np.float64)
    weights = np.exp(queries @ keys.T * 8**-0.5)
    by_token = (weights / weights.sum(axis=1, keepdims=True)).sum(axis=0)
    held = by_token[5:15].sum() / by_token[5:45].sum()
    assert profile.samples("coverage", "first", 0.2).value[0] == pytest.approx(held, abs=1e-5)


def test_a_registered_selector_that_returns_no_scores_is_named(tmp_path: Path) -> None:
    broken = Selector("broken", lambda queries, pages: np.zeros(3))
    plan = Plan((0.2,), ("oracle", "broken"), register([broken], PAGE_SELECTORS))
    trace = load_trace(make_trace(tmp_path / "trace", [random_layer(4, n_token=50)]))

    with pytest.raises(SelectorError, match="'broken' returned"):
        profile_trace(trace, PageGrid(5, 5, 5), plan)


def test_a_page_scorer_scores_every_whole_page_of_every_paged_head(tmp_path: Path) -> None:
    layers = [
        random_layer(1, n_token=43, n_step=3, n_head=6, n_head_kv=3, index=0, dtype="float16"),
        random_layer(2, n_token=43, n_step=3, index=1, window=7),
        random_layer(3, n_token=43, n_step=3, n_head=4, n_head_kv=2, index=2),
    ]
    trace = load_trace(make_trace(tmp_path / "trace", layers))

    for name, kind in PAGE_SELECTORS.items():
        scorer = page_scorer(trace, 8, kind)
        found = scorer()
        assert scorer.n_score == (3 + 2) * 3 * 5
        assert name in repr(scorer)
        heads = [(layers[0], head) for head in range(3)] + [(layers[2], head) for head in range(2)]
        assert len(found) == len(heads)
        for scores, (layer, head) in zip(found, heads, strict=True):
            pages = PageKeys(layer.k[head, :40].reshape(5, 8, 8))
            queries = np.ascontiguousarray(layer.q[:, 2 * head : 2 * head + 2])
            assert scores == pytest.approx(kind.score(queries, pages))


def test_a_page_scorer_refuses_what_is_no_score(tmp_path: Path) -> None:
    trace = load_trace(make_trace(tmp_path / "trace", [random_layer(n_token=43)]))

    with pytest.raises(SelectorError):
        page_scorer(trace, 8, selector(lambda queries, pages: np.zeros((1, 4))))


def random_scores(queries: NDArray[np.float32], n_page: int, first: int = 0) -> NDArray[np.float32]:
    return RANDOM.scores(queries, PageKeys(np.zeros((n_page, 2, 3), dtype=np.float32), first))


def test_random_scores_are_those_of_every_run() -> None:
    queries = np.arange(6, dtype=np.float32).reshape(2, 1, 3)

    # pinned: another Python, another machine or another order of calls changes nothing
    assert random_scores(queries, 3, 5).tolist() == [
        [12233396.0, 10836279.0, 878115.0],
        [1216117.0, 13768303.0, 16423183.0],
    ]


@settings(max_examples=50, deadline=None, database=None)
@given(st.integers(0, 10**6), st.integers(0, 50), st.lists(st.integers(1, 9), min_size=1))
def test_random_scores_do_not_depend_on_the_batch(
    seed: int, first: int, batches: list[int]
) -> None:
    queries = np.random.default_rng(seed).standard_normal((3, 2, 3)).astype(np.float32)
    whole = random_scores(queries, sum(batches), first)

    parts, at = [], first
    for n_page in batches:
        parts.append(random_scores(queries, n_page, at))
        at += n_page

    assert (np.concatenate(parts, axis=1) == whole).all()
    assert (random_scores(queries[1:2], sum(batches), first) == whole[1:2]).all()


def test_random_scores_differ_between_steps_and_pages() -> None:
    queries = np.random.default_rng(0).standard_normal((40, 2, 3)).astype(np.float32)

    scores = random_scores(queries, 500)

    # 20 000 scores of 24 bits: a dozen may coincide
    assert len(np.unique(scores)) > 19_950
    ranked = rank(scores)[:, :50]
    overlaps = [len(set(a) & set(b)) / 50 for a, b in itertools.pairwise(ranked)]
    assert np.mean(overlaps) == pytest.approx(0.1, abs=0.03)


def test_every_page_is_as_likely_as_any_other() -> None:
    queries = np.random.default_rng(0).standard_normal((2000, 1, 3)).astype(np.float32)

    first = rank(random_scores(queries, 20))[:, 0]

    # chi-squared of 19 degrees of freedom: 43.8 is the 99.9th percentile
    counts = np.bincount(first, minlength=20)
    assert ((counts - 100) ** 2 / 100).sum() < 43.8
    scores = random_scores(queries[:200], 100) / 2**24
    assert np.histogram(scores, 10, (0, 1))[0] == pytest.approx(np.full(10, 2000), abs=250)


def test_random_coverage_is_the_share_of_pages_where_all_weigh_the_same(tmp_path: Path) -> None:
    layer = random_layer(n_token=402, n_step=30, n_head_kv=4)
    even = replace(layer, k=np.zeros_like(layer.k))
    trace = load_trace(make_trace(tmp_path / "trace", [even]))

    profile = profile_trace(trace, PageGrid(2, 0, 2), Plan((0.1,)))

    # about 19 of 186 to 200 pages, each as heavy as any other
    assert profile.coverage("random", 0.1) == pytest.approx(0.1, abs=0.01)
    # two independent choices of a tenth share a nineteenth of their union
    assert profile.measure("jaccard", "random", 0.1) == pytest.approx(1 / 19, abs=0.02)


def test_random_pages_are_the_same_in_other_tiles_and_blocks(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    trace = load_trace(make_trace(tmp_path / "trace", [random_layer(n_token=203, n_step=5)]))
    plan = Plan((0.1, 0.3), ("random",))
    whole = profile_trace(trace, PageGrid(4, 4, 4), plan)
    monkeypatch.setattr(measure, "BLOCK_LOGITS", 1)
    monkeypatch.setattr(masses, "TILE_LOGITS", 1)
    monkeypatch.setattr(masses, "SHORTEST_TILE", 12)

    cut = profile_trace(trace, PageGrid(4, 4, 4), plan)

    assert "random" in SELECTORS
    for name in ("coverage", "jaccard", "global_coverage", "hit_rate", "stale_coverage"):
        for budget in plan.budgets:
            assert cut.measure(name, "random", budget) == pytest.approx(
                whole.measure(name, "random", budget), abs=1e-6
            )
