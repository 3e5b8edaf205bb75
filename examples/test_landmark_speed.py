"""Track how long it takes to score all pages before a decode step.

Keep a run and compare later ones with it::

    pytest examples --benchmark-autosave
    pytest examples --benchmark-compare --benchmark-compare-fail=min:20%

What is saved holds, in ``extra_info``, the coverage that this selector buys for its time, the pages
it scores per second, and the bytes it stores beside them.
"""

from __future__ import annotations

from collections.abc import Callable

import pytest
from pytest_benchmark.fixture import BenchmarkFixture

from pytest_kvgate.analysis.scoring import PageScorer


@pytest.mark.parametrize("selector", ["landmark", "quest"])
def test_scoring(
    benchmark: BenchmarkFixture, kvgate_scorer: Callable[[str], PageScorer], selector: str
) -> None:
    """Time is kept by pytest-benchmark; a slower selector is no failure by itself."""
    scores = benchmark(kvgate_scorer(selector))

    assert scores
