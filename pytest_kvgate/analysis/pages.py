"""The page grid: which pages compete for the budget, and how many a budget buys.

All arithmetic is exact. A budget is the decimal fraction the user wrote, so 2% of 1600 tokens is
32 tokens, whatever binary floating point makes of 0.02.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from pytest_kvgate.analysis.wording import exact, percent

#: Budgets 0.001, 0.002, … 1.000: where a required budget is looked for.
BUDGET_GRID = tuple(step / 1000 for step in range(1, 1001))


@dataclass(frozen=True)
class PageGrid:
    """Pages of ``page_size`` tokens on absolute positions, with the free ends masked out.

    ``sinks`` is the number of first tokens that are resident anyway; ``recent`` is the recent
    window, a fraction of the context below 1, else tokens.
    """

    page_size: int = 32
    sinks: int = 32
    recent: float = 0.02

    def __post_init__(self) -> None:
        whole = self.recent < 1 or float(self.recent).is_integer()
        if self.page_size < 1 or self.sinks < 0 or not self.recent >= 0 or not whole:
            raise ValueError(
                f"{self}: accepted: page_size from 1, sinks from 0, recent from 0, a fraction "
                "below 1 or a whole number of tokens."
            )

    def recent_tokens(self, n_visible: int) -> int:
        """Return R, the length of the recent window in tokens."""
        if self.recent < 1:
            return math.ceil(exact(self.recent) * n_visible)
        return int(self.recent)

    def eligible(self, n_visible: int) -> tuple[int, int]:
        """Return the eligible pages as a half-open range ``[first, end)``; empty if first == end.

        ``ceil(S/P) <= i < floor((n-R)/P)``: what the rounding leaves over is free.
        """
        first = -(-self.sinks // self.page_size)
        end = max(0, n_visible - self.recent_tokens(n_visible)) // self.page_size
        return first, max(first, end)

    def pages_for(self, budget: float, n_visible: int) -> int:
        """Return k = floor(B·n/P), the pages a budget buys per KV head; 0 is undefined."""
        fraction = exact(budget)
        return fraction.numerator * n_visible // (fraction.denominator * self.page_size)

    def pages_for_all(self, budgets: tuple[float, ...], n_visible: int) -> NDArray[np.int64]:
        """Return ``[n_budget]`` pages, as `pages_for` does for each budget."""
        return np.array([self.pages_for(budget, n_visible) for budget in budgets], dtype=np.int64)

    def shortfall(self, budget: float, n_visible: int) -> str:
        """Say why a budget is below one page."""
        tokens = int(exact(budget) * n_visible)
        return (
            f"{percent(budget)} of {n_visible} tokens is {tokens} tokens, "
            f"less than one {self.page_size}-token page"
        )
