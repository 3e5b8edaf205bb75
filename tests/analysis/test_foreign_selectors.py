"""A selector of somebody else's cannot change what the others see, nor take a gate along."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from numpy.typing import NDArray

from pytest_kvgate.analysis import (
    PAGE_SELECTORS,
    PageGrid,
    PageKeys,
    Plan,
    Selector,
    SelectorError,
    profile_trace,
)
from pytest_kvgate.analysis.selectors import register
from pytest_kvgate.trace import load_trace
from tests.traces import make_trace, random_layer

Floats = NDArray[np.floating]


def profile_with(path: Path, score: Callable[[Floats, PageKeys], Floats], dtype: str) -> None:
    layer = random_layer(n_token=96, n_step=2, dtype=dtype)
    trace = load_trace(make_trace(path / "trace", [layer]))
    registry = register([Selector("mine", score)], PAGE_SELECTORS)
    plan = Plan((0.25,), ("oracle", "mine", "landmark"), registry)
    profile_trace(trace, PageGrid(8, 8, 8), plan)


def spoil_keys(queries: Floats, pages: PageKeys) -> Floats:
    keys = pages.keys
    keys[:] = 0
    return np.zeros((len(queries), len(keys)))


def spoil_mean(queries: Floats, pages: PageKeys) -> Floats:
    pages.mean[:] = 0
    return np.zeros((len(queries), len(pages.rows)))


def spoil_queries(queries: Floats, pages: PageKeys) -> Floats:
    queries *= 2
    return np.zeros((len(queries), len(pages.rows)))


@pytest.mark.parametrize("dtype", ["float16", "float32"])
@pytest.mark.parametrize("score", [spoil_keys, spoil_mean, spoil_queries])
def test_what_a_selector_is_given_cannot_be_written_to(
    tmp_path: Path, score: Callable[[Floats, PageKeys], Floats], dtype: str
) -> None:
    with pytest.raises(ValueError, match="read-only"):
        profile_with(tmp_path, score, dtype)


@pytest.mark.parametrize("outcome", [pytest.skip, pytest.xfail])
def test_a_selector_cannot_skip_or_excuse_a_gate(
    tmp_path: Path, outcome: Callable[[str], None]
) -> None:
    def score(queries: Floats, pages: PageKeys) -> Floats:
        outcome("no torch here")
        return np.zeros((len(queries), len(pages.rows)))

    with pytest.raises(SelectorError, match=r"selector 'mine' raised .*no torch here"):
        profile_with(tmp_path, score, "float32")


@pytest.mark.parametrize("numbers", ["1", None, -1, float("nan"), float("inf")])
def test_the_numbers_a_selector_stores_are_checked_at_the_door(numbers: object) -> None:
    mine = Selector("mine", spoil_keys, numbers)  # type: ignore[arg-type]

    with pytest.raises(SelectorError, match="numbers_per_dim a number from 0"):
        register([mine], PAGE_SELECTORS)


def test_a_score_must_be_a_function() -> None:
    with pytest.raises(SelectorError, match="score must be a function"):
        register([Selector("mine", "landmark")], PAGE_SELECTORS)  # type: ignore[arg-type]
