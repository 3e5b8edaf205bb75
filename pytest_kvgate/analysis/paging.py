"""Paging simulation: what an LRU pool of resident pages would have to fetch.

One pool per unit line (trace, layer, KV head), for each selector and each budget.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from pytest_kvgate.analysis.pages import BlockPages
from pytest_kvgate.analysis.wording import exact

#: Pool sizes that 99% hits are looked for in: 0.1, 0.2, … 100 times the pages of a step.
POOL_STEP, LARGEST_POOL = 0.1, 100
N_POOL = round(LARGEST_POOL / POOL_STEP)

#: Pools times pages that are simulated at once; bounds the memory of a step to a few MiB.
SIMULATED = 2**18


class LruPools:
    """LRU pools of pages, ``n_pool`` side by side, empty at first.

    A page's recency is the step it was last selected in; within a step the lower page counts as
    less recent. Whatever a pool holds is then a first part of all pages ever selected, the most
    recent first. ``n_page`` bounds the page numbers.
    """

    def __init__(self, n_pool: int, n_page: int) -> None:
        self._n_page = n_page
        self._first = np.arange(n_pool) * (n_page + 1)
        # per pool and page, from `_first` of the pool on: how many pages are as recent or more so;
        # none for what was never selected
        self._depth = np.repeat(self._first, n_page)
        self._n_resident = np.zeros(n_pool, dtype=np.int64)
        # per pool and page: the pool that held it through the steps with fewer pages, in tenths
        self._settled = np.zeros(n_pool * n_page, dtype=np.int64)
        #: Which pools have selected anything yet, ``[n_pool]``.
        self.started = np.zeros(n_pool, dtype=bool)

    def access(
        self, selected: NDArray[np.int64], capacity: NDArray[np.int64], k: NDArray[np.int64]
    ) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """Select pages at the next step and evict down to the capacity.

        Args:
            selected: ``[n]``, ascending: ``pool · n_page + page`` of each selected page. A pool
                that selects nothing stays as it is.
            capacity: ``[n_pool]``, pages that each pool holds, no fewer than it selects.
            k: ``[n_pool]``, pages that were bought at the step before, 1 or more.

        Returns:
            Hits per pool, and ``[n]``: the smallest pool that would have held a page, in tenths of
            the pages ``k`` that were bought at the steps since; 0 where none would, because it was
            never selected before.
        """
        n_pool = len(self._first)
        pool = selected // self._n_page
        at = self._depth[selected]
        depth = at - self._first[pool]
        needed = np.maximum(_tenths(depth, k[pool]), self._settled[selected])
        self._settled[selected] = 0
        n_selected = np.bincount(pool, minlength=n_pool)
        hit = (depth > 0) & (depth <= self._n_resident[pool])
        hits = np.bincount(pool[hit], minlength=n_pool)
        # the others sink by what is selected, less the selected ones that were more recent already
        sinking = np.zeros((n_pool, self._n_page + 1), dtype=np.int64)
        sinking.reshape(-1)[at] = 1
        sinking[:, 0] = 0
        np.cumsum(sinking, axis=1, out=sinking)
        np.subtract(n_selected[:, None], sinking, out=sinking)
        sinking[:, 0] = 0  # never selected
        self._depth += sinking.reshape(-1)[self._depth]
        # the highest page selected is the most recent one
        from_above = np.cumsum(n_selected)[pool] - np.arange(len(selected))
        self._depth[selected] = self._first[pool] + from_above
        self._n_resident = np.minimum(self._n_resident + n_selected - hits, capacity)
        self.started |= n_selected > 0
        return hits, needed

    def settle(self, k: NDArray[np.int64]) -> None:
        """Keep how large a pool had to be so far, before a step buys other numbers of pages."""
        depth = self._depth.reshape(-1, self._n_page) - self._first[:, None]
        np.maximum(self._settled, _tenths(depth, k[:, None]).ravel(), out=self._settled)


def _tenths(pages: NDArray[np.int64], k: NDArray[np.int64]) -> NDArray[np.int64]:
    """Return pages in units of ``POOL_STEP · k``, rounded up."""
    tenths: NDArray[np.int64] = -(-pages * round(1 / POOL_STEP) // k)
    return tenths


def pool_histogram(
    needed: NDArray[np.int64], row: NDArray[np.int64], n_row: int
) -> NDArray[np.int64]:
    """Count accesses by the pool they need, ``[n_row, N_POOL + 2]``.

    The first two arguments are ``[n_access]``: the smallest pool in units of ``POOL_STEP · k``, and
    the row to count in. Entry 0 counts first selections, which no pool serves; the last one those
    that need more than `LARGEST_POOL` times k.
    """
    bins = row * (N_POOL + 2) + np.minimum(needed, N_POOL + 1)
    return np.bincount(bins, minlength=n_row * (N_POOL + 2)).reshape(n_row, N_POOL + 2)


class PagingTally:
    """Runs the pools of one layer over its steps: ``n_selector`` × KV heads × budgets.

    ``pool`` is the capacity as a multiple of the pages that a budget buys. ``reuse`` is
    ``[n_selector, n_budget, N_POOL + 2]``, see `pool_histogram`.
    """

    def __init__(
        self, n_selector: int, n_head_kv: int, n_budget: int, n_page: int, pool: float
    ) -> None:
        self._pool = exact(pool)
        self._shape = (n_head_kv, n_budget, n_page)
        at_once = max(1, SIMULATED // max(1, n_head_kv * n_budget * n_page))
        starts = range(0, n_selector, at_once)
        self._groups = [slice(start, min(start + at_once, n_selector)) for start in starts]
        self._pools = [
            LruPools((group.stop - group.start) * n_head_kv * n_budget, n_page)
            for group in self._groups
        ]
        self._asked_before: NDArray[np.int64] | None = None
        self.reuse = np.zeros((n_selector, n_budget, N_POOL + 2), dtype=np.int64)

    def add(
        self,
        orders: Sequence[NDArray[np.int64]],
        pages: BlockPages,
        counted: NDArray[np.bool_],
    ) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
        """Take the next steps.

        Args:
            orders: per selector, ``[n_head_kv, n_step, widest]``: the best pages, best first.
            pages: what the budgets buy.
            counted: ``[n_head_kv, n_step]``, which units count; the others select nothing.

        Returns:
            Hits and accesses, ``[n_selector, n_budget, n_head_kv, n_step]`` float64, NaN where a
            unit does not count or selects for the first time, which only fills its pool.
        """
        shape = (len(orders), self._shape[1], *counted.shape)
        hits, accesses = np.full(shape, np.nan), np.full(shape, np.nan)
        stacked = [np.stack(orders[group]) for group in self._groups]
        for step in range(counted.shape[1]):
            for group, pools, order in zip(self._groups, self._pools, stacked, strict=True):
                self._step(group, pools, order[:, :, step], step, pages, counted, hits, accesses)
            self._asked_before = np.maximum(pages.asked[step], 1)
        return hits, accesses

    def _step(
        self,
        group: slice,
        pools: LruPools,
        order: NDArray[np.int64],
        step: int,
        pages: BlockPages,
        counted: NDArray[np.bool_],
        hits: NDArray[np.float64],
        accesses: NDArray[np.float64],
    ) -> None:
        """Run one step of a group of selectors; ``order`` is ``[n_selector, n_head, widest]``."""
        n_head, n_budget, n_page = self._shape
        shape = (len(order), n_head, n_budget)
        chosen, asked = pages.chosen[step], pages.asked[step]
        active = np.broadcast_to(counted[:, step, None] & (chosen > 0), shape)
        running = active & pools.started.reshape(shape)
        best = np.arange(order.shape[-1]) < chosen[:, None]
        selector, head, budget, place = np.nonzero(active[..., None] & best)
        pool = np.ravel_multi_index((selector, head, budget), shape)
        selected = np.sort(pool * n_page + order[selector, head, place])
        capacity = asked * self._pool.numerator // self._pool.denominator
        before = np.maximum(asked, 1) if self._asked_before is None else self._asked_before
        k = np.broadcast_to(before, shape).reshape(-1)
        if (before != asked).any():
            pools.settle(k)
        found, needed = pools.access(selected, np.broadcast_to(capacity, shape).reshape(-1), k)
        served = np.where(running, found.reshape(shape), np.nan)
        hits[group, :, :, step] = served.transpose(0, 2, 1)
        accesses[group, :, :, step] = np.where(running, chosen, np.nan).transpose(0, 2, 1)
        kept = running.reshape(-1)[selected // n_page]
        selector, _, budget = np.unravel_index(selected[kept] // n_page, shape)
        self.reuse[group] += pool_histogram(
            needed[kept], selector * n_budget + budget, len(order) * n_budget
        ).reshape(len(order), n_budget, N_POOL + 2)
