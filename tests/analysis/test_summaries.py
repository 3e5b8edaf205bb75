"""Page summaries that grow: the same as from scratch, and each page's made once."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray

from pytest_kvgate.analysis import PAGE_SELECTORS, PageKeys, Selector, SelectorError
from pytest_kvgate.analysis.selectors import StackedSelector
from pytest_kvgate.analysis.summaries import PageSummaries

SUMMARIES = ("mean", "maximum", "minimum", "deviation", "center", "radius")
SIZE, DIMS, CAPACITY = 3, 4, 9


def drawn(n_head: int, n_page: int, seed: int, dtype: type = np.float32) -> NDArray[Any]:
    keys = np.random.default_rng(seed).normal(size=(n_head, n_page * SIZE, DIMS))
    return keys.astype(dtype)


@given(
    n_head=st.integers(1, 3),
    events=st.lists(
        st.tuples(st.booleans(), st.integers(0, CAPACITY), st.sampled_from(SUMMARIES)),
        max_size=15,
    ),
)
def test_growing_and_cutting_gives_what_is_made_from_scratch(
    n_head: int, events: list[tuple[bool, int, str]]
) -> None:
    """Each event brings the number of pages to one, by cutting or adding, then asks for one."""
    kept = PageSummaries(SIZE, 5, CAPACITY)
    rows = drawn(n_head, 0, 0)
    for seed, (cuts_first, n_page, name) in enumerate(events):
        if cuts_first:
            kept.truncate(n_page // 2)
            rows = rows[:, : n_page // 2 * SIZE]
        have = rows.shape[1] // SIZE
        if n_page > have:
            new = drawn(n_head, n_page - have, seed)
            kept.extend(new)
            rows = np.concatenate([rows, new], axis=1)
        assert kept.n_page == rows.shape[1] // SIZE
        asked = min(n_page, kept.n_page)
        if not asked:
            continue
        found = kept.pages(asked)
        assert found.numbers.tolist() == list(range(5, 5 + asked))
        summary = getattr(found, name)
        for head in range(n_head):
            by_page = rows[head].reshape(-1, SIZE, DIMS)[:asked]
            np.testing.assert_array_equal(found.of_head(head).rows, by_page)
            np.testing.assert_array_equal(summary[head], getattr(PageKeys(by_page), name))


@pytest.mark.parametrize("name", SUMMARIES)
def test_the_pages_of_one_step_stay_as_they_are_when_more_come(name: str) -> None:
    kept = PageSummaries(SIZE, 0, CAPACITY)
    kept.extend(drawn(2, 3, 1))
    before = getattr(kept.pages(3), name)
    copy = before.copy()
    kept.extend(drawn(2, 2, 2))
    assert getattr(kept.pages(5), name).shape == (2, 5, DIMS)
    np.testing.assert_array_equal(before, copy)
    with pytest.raises(ValueError, match="read-only"):
        before[:] = 0


def test_every_page_is_summarised_once(monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[int] = []
    original: Callable[[PageKeys], NDArray[np.float32]] = vars(PageKeys)["deviation"].func

    def noted(pages: PageKeys) -> NDArray[np.float32]:
        made.append(pages.rows.shape[1])
        return original(pages)

    monkeypatch.setattr(PageKeys, "deviation", property(noted))
    kept = PageSummaries(SIZE, 0, CAPACITY)
    for step in range(6):
        kept.extend(drawn(2, 1, step))
        for _ in range(2):
            assert kept.pages(step + 1).deviation.shape == (2, step + 1, DIMS)
    assert made == [1] * 6
    kept.truncate(2)
    kept.extend(drawn(2, 4, 9))
    assert kept.pages(6).deviation.shape == (2, 6, DIMS)
    assert made == [*[1] * 6, 4]


def pages_and_queries(
    n_head: int, n_page: int, seed: int
) -> tuple[NDArray[np.float32], NDArray[np.float32]]:
    """Return keys in small whole numbers, so that pages tie, and queries of a group of two."""
    rng = np.random.default_rng(seed)
    keys = rng.integers(-2, 3, size=(n_head, n_page * SIZE, DIMS)).astype(np.float32)
    return keys, rng.integers(-3, 4, size=(n_head, 1, 2, DIMS)).astype(np.float32)


@pytest.mark.parametrize("name", PAGE_SELECTORS)
@given(n_head=st.integers(1, 4), n_page=st.integers(1, CAPACITY), seed=st.integers(0, 10**6))
def test_heads_that_are_scored_together_get_the_scores_of_each(
    name: str, n_head: int, n_page: int, seed: int
) -> None:
    keys, queries = pages_and_queries(n_head, n_page, seed)
    kept = PageSummaries(SIZE, 2, CAPACITY)
    kept.extend(keys)
    selector = PAGE_SELECTORS[name]
    found = selector.scores_of_heads(queries, kept.pages(n_page))
    assert found.shape == (n_head, n_page)
    assert found.dtype == np.float32
    for head in range(n_head):
        pages = PageKeys(keys[head].reshape(n_page, SIZE, DIMS), 2)
        np.testing.assert_array_equal(found[head], selector.scores(queries[head], pages)[0])


def test_a_selector_of_ones_own_is_given_one_head_at_a_time() -> None:
    shapes: list[tuple[tuple[int, ...], tuple[int, ...]]] = []

    def nearest(queries: NDArray[np.float32], pages: PageKeys) -> NDArray[np.float64]:
        shapes.append((queries.shape, pages.rows.shape))
        assert pages.mean.shape == (len(pages.rows), DIMS)
        distance = queries[:, :, None, None] - pages.keys  # 3-D keys only
        return np.asarray(-np.square(distance, dtype=np.float64).sum(axis=-1).min(axis=(1, 3)))

    keys, queries = pages_and_queries(3, 4, 1)
    kept = PageSummaries(SIZE, 0, CAPACITY)
    kept.extend(keys)
    found = Selector("nearest", nearest).scores_of_heads(queries, kept.pages(4))
    assert shapes == [((1, 2, DIMS), (4, SIZE, DIMS))] * 3
    for head, page in np.ndindex(3, 4):
        of_page = keys[head, page * SIZE : (page + 1) * SIZE]
        squares = [((q - k) ** 2).sum() for q in queries[head, 0] for k in of_page]
        assert found[head, page] == -min(squares)


@pytest.mark.parametrize("kind", [Selector, StackedSelector])
@pytest.mark.parametrize(("value", "message"), [(np.nan, "NaN"), (None, "shape")])
def test_scores_of_several_heads_are_checked(
    kind: type[Selector], value: float | None, message: str
) -> None:
    def score(queries: NDArray[np.float32], pages: PageKeys) -> NDArray[np.float64]:
        if value is None:
            return np.zeros(3)
        return np.full((*queries.shape[:-2], pages.rows.shape[-3]), value)

    keys, queries = pages_and_queries(2, 4, 1)
    kept = PageSummaries(SIZE, 0, CAPACITY)
    kept.extend(keys)
    with pytest.raises(SelectorError, match=message):
        kind("mine", score).scores_of_heads(queries, kept.pages(4))
