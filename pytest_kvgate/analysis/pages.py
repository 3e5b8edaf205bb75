"""The page grid: which pages compete for the budget, and how many a budget buys.

All arithmetic is exact. A budget is the decimal fraction the user wrote, so 2% of 1600 tokens is
32 tokens, whatever binary floating point makes of 0.02.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from pytest_kvgate.analysis.wording import exact, percent

#: Budgets 0.001, 0.002, … 1.000: where a required budget is looked for.
BUDGET_GRID = tuple(step / 1000 for step in range(1, 1001))
_BUDGETS = np.array((math.nan, *BUDGET_GRID, math.nan))


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

    def pages_for_all(
        self, budgets: Sequence[float], n_visible: Sequence[int]
    ) -> NDArray[np.int64]:
        """Return ``[n_step, n_budget]`` pages, as `pages_for` does for each."""
        fractions = [exact(budget) for budget in budgets]
        pages = [
            [part.numerator * n // (part.denominator * self.page_size) for part in fractions]
            for n in n_visible
        ]
        return np.array(pages, dtype=np.int64).reshape(len(n_visible), len(budgets))

    def budgets_for(
        self, pages: NDArray[np.int64], n_visible: NDArray[np.int64]
    ) -> NDArray[np.float64]:
        """Return the smallest budgets of `BUDGET_GRID` that buy so many pages; NaN: none does.

        Both arguments have the shape of the result.
        """
        steps = -(-pages * len(BUDGET_GRID) * self.page_size // n_visible)
        steps = np.maximum(steps, 1)
        budgets: NDArray[np.float64] = _BUDGETS[np.minimum(steps, len(BUDGET_GRID) + 1)]
        return budgets

    def pages_on_grid(self, n_visible: Sequence[int]) -> NDArray[np.int64]:
        """Return ``[n_step, 1000]`` pages, as `pages_for` does for each budget of `BUDGET_GRID`."""
        steps = np.arange(1, len(BUDGET_GRID) + 1)
        tokens = np.asarray(n_visible, dtype=np.int64)[:, None] * steps
        return tokens // (len(BUDGET_GRID) * self.page_size)

    def shortfall(self, budget: float, n_visible: int) -> str:
        """Say why a budget is below one page."""
        tokens = int(exact(budget) * n_visible)
        return (
            f"{percent(budget)} of {n_visible} tokens is {tokens} tokens, "
            f"less than one {self.page_size}-token page"
        )


@dataclass(frozen=True)
class BlockPages:
    """What a block of steps may select on one page grid.

    ``first`` is the first eligible page and ``n_page`` is N; ``widest`` is the largest number of
    pages that any step of the trace selects. ``n_visible`` and ``n_eligible`` are ``[n_step]``, in
    tokens and pages. ``asked`` is ``[n_step, n_budget]``, the pages that each budget buys, and
    ``chosen`` the same but no more than are eligible; ``on_grid`` is ``[n_step, 1000]``, like
    ``chosen`` on the grid of budgets.
    """

    grid: PageGrid
    first: int
    n_page: int
    widest: int
    n_visible: NDArray[np.int64]
    n_eligible: NDArray[np.int64]
    asked: NDArray[np.int64]
    chosen: NDArray[np.int64]
    on_grid: NDArray[np.int64]

    @property
    def positions(self) -> slice:
        """The token positions of the N pages."""
        size = self.grid.page_size
        return slice(self.first * size, (self.first + self.n_page) * size)

    @property
    def ends(self) -> NDArray[np.int64]:
        """The position after the last eligible page, ``[n_step]``."""
        return (self.first + self.n_eligible) * self.grid.page_size

    @property
    def is_eligible(self) -> NDArray[np.bool_]:
        """Which pages each step may select, ``[n_step, N]``."""
        return np.arange(self.n_page) < self.n_eligible[:, None]


def block_pages(
    grid: PageGrid, budgets: tuple[float, ...], n_visible: Sequence[int], n_last: int
) -> BlockPages:
    """Return what these steps may select; ``n_last`` is what the trace's last step sees."""
    first, last = grid.eligible(n_last)
    n_eligible = np.array([grid.eligible(n)[1] - first for n in n_visible], dtype=np.int64)
    asked = grid.pages_for_all(budgets, n_visible)
    widest = int(grid.pages_for_all(budgets, [n_last]).max(initial=0))
    return BlockPages(
        grid=grid,
        first=first,
        n_page=last - first,
        widest=min(widest, last - first),
        n_visible=np.array(n_visible, dtype=np.int64),
        n_eligible=n_eligible,
        asked=asked,
        chosen=np.minimum(asked, n_eligible[:, None]),
        on_grid=np.minimum(grid.pages_on_grid(n_visible), n_eligible[:, None]),
    )
