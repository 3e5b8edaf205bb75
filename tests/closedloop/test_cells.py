"""What is kept of a cache between steps and runs: read once, cut back, the same as from scratch."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray

from pytest_kvgate.analysis.selectors import PageKeys
from pytest_kvgate.closedloop.cells import LayerPages, Mirror
from pytest_kvgate.trace import FloatArray
from tests.capture.captures import hadamard

SUMMARIES = ("mean", "maximum", "minimum", "deviation", "center", "radius")
PAGE_SIZE, FIRST, LAST, N_HEAD_KV = 4, 2, 12, 3


@dataclass
class Cache:
    """Cells that change as a sequence is decoded anew, and what was read of them."""

    dims: int = 5
    dtype: type = np.float32
    seed: int = 0
    asked: list[tuple[int, int]] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.cells: FloatArray = self._drawn()

    def _drawn(self) -> FloatArray:
        self.seed += 1
        shape = (N_HEAD_KV, LAST * PAGE_SIZE, self.dims)
        drawn: FloatArray = np.random.default_rng(self.seed).normal(size=shape).astype(self.dtype)
        return drawn

    def decode_anew(self, n_token: int) -> None:
        """Write other cells from a position on."""
        self.cells[:, n_token:] = self._drawn()[:, n_token:]

    def read(self, start: int, stop: int) -> FloatArray:
        self.asked.append((start, stop))
        return self.cells[:, start:stop].copy()

    def pages(self, end: int) -> list[PageKeys]:
        """Return the pages of each KV head, made from scratch."""
        rows = self.cells[:, FIRST * PAGE_SIZE : end * PAGE_SIZE]
        return [PageKeys(of_head.reshape(-1, PAGE_SIZE, self.dims), FIRST) for of_head in rows]


def check_pages(found: PageKeys, cache: Cache, end: int) -> None:
    assert found.numbers.tolist() == list(range(FIRST, end))
    for head, expected in enumerate(cache.pages(end)):
        np.testing.assert_array_equal(found.of_head(head).rows, expected.rows)
        for name in SUMMARIES:
            summary = getattr(found, name)
            assert summary.shape == (N_HEAD_KV, end - FIRST, cache.dims)
            assert summary.dtype == np.float32
            np.testing.assert_array_equal(summary[head], getattr(expected, name), err_msg=name)


@pytest.mark.parametrize("dtype", [np.float16, np.float32])
def test_pages_are_read_once_as_they_fill(dtype: type) -> None:
    cache = Cache(dtype=dtype)
    pages = LayerPages(PAGE_SIZE, FIRST, LAST - FIRST, None)
    for end in (4, 4, 5, 9, 9, 12):
        check_pages(pages.until(end, cache.read), cache, end)
    assert cache.asked == [(8, 16), (16, 20), (20, 36), (36, 48)]


@given(
    st.lists(
        st.tuples(st.booleans(), st.integers(FIRST + 1, LAST), st.integers(0, PAGE_SIZE - 1)),
        max_size=12,
    )
)
def test_pages_after_any_rewinds_are_those_of_the_cache(
    events: list[tuple[bool, int, int]],
) -> None:
    """A page that reaches beyond the place of a rewind is read anew, and no other."""
    cache = Cache()
    pages = LayerPages(PAGE_SIZE, FIRST, LAST - FIRST, None)
    for rewinds, end, within in events:
        if rewinds:
            n_token = end * PAGE_SIZE - within
            pages.rewind(n_token)
            cache.decode_anew(n_token)
        else:
            check_pages(pages.until(end, cache.read), cache, end)


def test_what_lies_before_a_rewind_is_not_read_again() -> None:
    cache, pages = Cache(), LayerPages(PAGE_SIZE, FIRST, LAST - FIRST, None)
    pages.until(9, cache.read)
    for n_token, again in ((28, 28), (27, 24), (7, 8)):
        cache.asked.clear()
        pages.rewind(n_token)
        pages.until(9, cache.read)
        assert cache.asked == [(again, 36)]


def test_summaries_are_made_of_keys_in_the_basis_of_the_model() -> None:
    matrix = hadamard()
    cache = Cache(dims=len(matrix))
    pages = LayerPages(PAGE_SIZE, FIRST, LAST - FIRST, matrix)
    found = pages.until(6, cache.read)
    found = pages.until(9, cache.read)
    plain = cache.cells.astype(np.float64) @ matrix.astype(np.float64)
    by_page = plain[:, FIRST * PAGE_SIZE : 9 * PAGE_SIZE].reshape(N_HEAD_KV, -1, PAGE_SIZE, 64)
    np.testing.assert_allclose(found.mean, by_page.mean(axis=2), atol=1e-5)
    np.testing.assert_allclose(found.maximum, by_page.max(axis=2), atol=1e-5)
    np.testing.assert_allclose(found.deviation, by_page.std(axis=2), atol=1e-5)


@pytest.mark.parametrize("dtype", [np.float16, np.float32])
def test_a_mirror_reads_each_cell_once(dtype: type) -> None:
    cache, mirror = Cache(dtype=dtype), Mirror(LAST * PAGE_SIZE)
    for n_token in (3, 3, 4, 20):
        found = mirror.cells(cache.read, n_token)
        assert found.dtype == np.float32
        np.testing.assert_array_equal(found, cache.cells[:, :n_token].astype(np.float32))
    assert cache.asked == [(0, 3), (3, 4), (4, 20)]
    mirror.rewind(30)
    mirror.cells(cache.read, 20)
    assert len(cache.asked) == 3
    mirror.rewind(10)
    cache.decode_anew(10)
    np.testing.assert_array_equal(mirror.cells(cache.read, 25), cache.cells[:, :25])
    assert cache.asked[-1] == (10, 25)


def test_values_may_be_narrower_than_keys() -> None:
    narrow = Cache(dims=2)
    found: NDArray[np.float32] = Mirror(LAST * PAGE_SIZE).cells(narrow.read, 7)
    np.testing.assert_array_equal(found, narrow.cells[:, :7])


def test_a_summary_that_nobody_asks_for_is_not_made(monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[tuple[str, int]] = []
    for name in SUMMARIES:
        original: Callable[[PageKeys], NDArray[np.float32]] = vars(PageKeys)[name].func

        def noted(
            pages: PageKeys,
            name: str = name,
            original: Callable[[PageKeys], NDArray[np.float32]] = original,
        ) -> NDArray[np.float32]:
            made.append((name, pages.rows.shape[1]))
            return original(pages)

        monkeypatch.setattr(PageKeys, name, property(noted))
    cache, pages = Cache(), LayerPages(PAGE_SIZE, FIRST, LAST - FIRST, None)
    for end in (4, 4, 7):
        found = pages.until(end, cache.read)
        for _ in range(2):
            assert found.mean.shape[1] == end - FIRST
    assert made == [("mean", 2), ("mean", 3)]
