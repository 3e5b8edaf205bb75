"""What one decode step keeps, and the softmax over it, against loops."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray

from pytest_kvgate.analysis.selection import (
    StepPages,
    attend_to,
    best,
    page_masses,
    token_masses,
)

Floats = NDArray[np.float32]


@dataclass(frozen=True)
class Step:
    """A softmax ``[n_head, n_cell]`` of which the first ``n_token`` cells are visible."""

    weights: Floats
    n_head_kv: int
    group: int
    n_token: int
    pages: StepPages
    sink: bool

    def heads(self, kv_head: int) -> range:
        return range(kv_head * self.group, (kv_head + 1) * self.group)

    def tokens(self, page: int) -> range:
        return range(page * self.pages.size, (page + 1) * self.pages.size)


@st.composite
def steps(draw: st.DrawFn) -> Step:
    n_head_kv, group = draw(st.integers(1, 3)), draw(st.integers(1, 3))
    size, first, n_page = (draw(st.integers(low, 4)) for low in (1, 0, 1))
    free = draw(st.integers(1, 5))
    n_token = (first + n_page) * size + free
    n_cell = n_token + draw(st.integers(0, 3))
    sink = draw(st.booleans())
    rng = np.random.default_rng(draw(st.integers(0, 10**6)))
    # few levels, so that there are ties
    logits = rng.integers(-3, 4, size=(n_head_kv * group, n_token)).astype(np.float64)
    weights = np.zeros((len(logits), n_cell), dtype=np.float32)
    exponentials = np.exp(logits)
    rest = np.exp(rng.normal(size=len(logits))) if sink else np.zeros(len(logits))
    total = exponentials.sum(axis=1) + rest
    weights[:, :n_token] = exponentials / total[:, None]
    pages = StepPages(size, first, first + n_page, draw(st.integers(0, n_page)))
    return Step(weights, n_head_kv, group, n_token, pages, sink)


def page_mass(step: Step, kv_head: int, page: int) -> float:
    total = 0.0
    for head in step.heads(kv_head):
        for token in step.tokens(page):
            total += float(step.weights[head, token])
    return total


@given(steps())
def test_masses_are_sums_over_a_group_and_a_page(step: Step) -> None:
    by_page = page_masses(step.weights, step.n_head_kv, step.pages)
    by_token = token_masses(step.weights, step.n_head_kv, step.pages)
    assert by_page.shape == (step.n_head_kv, step.pages.n_page)
    assert by_token.shape == (step.n_head_kv, step.pages.n_page * step.pages.size)
    assert by_page.dtype == by_token.dtype == np.float32
    for kv_head in range(step.n_head_kv):
        for place, page in enumerate(range(step.pages.first, step.pages.end)):
            assert by_page[kv_head, place] == pytest.approx(
                page_mass(step, kv_head, page), rel=1e-5
            )
            for within, token in enumerate(step.tokens(page)):
                expected = sum(float(step.weights[head, token]) for head in step.heads(kv_head))
                found = by_token[kv_head, place * step.pages.size + within]
                assert found == pytest.approx(expected, rel=1e-5)


@given(
    st.lists(st.lists(st.integers(-3, 3), min_size=6, max_size=6), min_size=1, max_size=4),
    st.integers(0, 8),
)
def test_the_best_are_taken_and_ties_go_to_the_lower_one(rows: list[list[int]], n: int) -> None:
    kept = best(np.array(rows, dtype=np.float32), n)
    for row, of_row in zip(rows, kept, strict=True):
        left = dict(enumerate(row))
        taken = set()
        for _ in range(min(n, len(row))):
            highest = max(left.values())
            place = min(place for place, score in left.items() if score == highest)
            taken.add(place)
            del left[place]
        assert set(np.flatnonzero(of_row).tolist()) == taken


def test_infinite_scores_and_both_zeros_have_an_order() -> None:
    scores = np.array([[0.0, -0.0, -np.inf, np.inf], [-0.0, 0.0, -np.inf, -np.inf]], np.float32)
    assert best(scores, 2).tolist() == [[True, False, False, True], [True, True, False, False]]
    assert best(scores, 3).tolist() == [[True, True, False, True], [True, True, True, False]]
    assert not best(scores, 0).any()
    assert best(scores, 9).all()


@given(steps(), st.sampled_from(["pages", "tokens", "everything"]), st.integers(0, 10**6))
def test_attention_to_a_selection_is_the_softmax_without_the_rest(
    step: Step, what: str, seed: int
) -> None:
    """The logits of what stays, and of a sink, are as they were; only their sum is less."""
    rng = np.random.default_rng(seed)
    n_item = step.pages.n_page * (step.pages.size if what == "tokens" else 1)
    kept = None if what == "everything" else rng.random((step.n_head_kv, n_item)) < 0.5
    found = step.weights.copy()
    attend_to(found, kept, step.pages, has_sink=step.sink)

    start = step.pages.first * step.pages.size
    for kv_head in range(step.n_head_kv):
        for head in step.heads(kv_head):
            before = [float(weight) for weight in step.weights[head]]
            visible = []
            for token in range(len(before)):
                item = token - start
                if what != "tokens":
                    item //= step.pages.size
                eligible = 0 <= item < n_item
                visible.append(not eligible or kept is None or bool(kept[kv_head, item]))
            sink = 1 - sum(before) if step.sink else 0.0
            total = sum(weight for weight, seen in zip(before, visible, strict=True) if seen) + sink
            for token, (weight, seen) in enumerate(zip(before, visible, strict=True)):
                assert found[head, token] == pytest.approx(
                    weight / total if seen else 0.0, rel=1e-4, abs=1e-7
                )
            assert found[head].sum() + sink / total == pytest.approx(1, abs=1e-5)


@given(steps())
def test_attention_to_all_pages_or_tokens_is_that_to_everything(step: Step) -> None:
    alone, by_page, by_token = (step.weights.copy() for _ in range(3))
    n_page, size = step.pages.n_page, step.pages.size
    attend_to(alone, None, step.pages, has_sink=step.sink)
    attend_to(by_page, np.ones((step.n_head_kv, n_page), bool), step.pages, has_sink=step.sink)
    ones = np.ones((step.n_head_kv, n_page * size), bool)
    attend_to(by_token, ones, step.pages, has_sink=step.sink)
    np.testing.assert_array_equal(by_page, alone)
    np.testing.assert_array_equal(by_token, alone)
    np.testing.assert_allclose(alone, step.weights, rtol=1e-5)


def test_a_view_of_the_engines_memory_is_changed_in_place() -> None:
    """The softmax is a slice of ``[n_head, 1, n_cell]``, padded beyond the last position."""
    memory = np.full((2, 1, 8), 0.125, dtype=np.float32)
    memory[:, :, 6:] = 0
    memory /= memory.sum(axis=2, keepdims=True)
    pages = StepPages(2, 1, 3, 1)
    attend_to(memory[:, 0], np.array([[True, False], [False, True]]), pages, has_sink=False)
    quarter = [0.25] * 2
    assert memory[0, 0].tolist() == [*quarter, *quarter, 0, 0, 0, 0]
    assert memory[1, 0].tolist() == [*quarter, 0, 0, *quarter, 0, 0]


def test_nothing_left_with_a_weight_is_refused_but_not_beside_a_sink() -> None:
    pages, nothing = StepPages(2, 0, 2, 0), np.zeros((1, 2), dtype=bool)
    weights = np.full((1, 4), 0.25, dtype=np.float32)
    with pytest.raises(ZeroDivisionError):
        attend_to(weights.copy(), nothing, pages, has_sink=False)
    half = weights * np.float32(0.5)
    attend_to(half, nothing, pages, has_sink=True)
    assert not half.any()
