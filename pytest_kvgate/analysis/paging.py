"""Paging simulation: what an LRU pool of resident pages would have to fetch.

One pool per unit line (trace, layer, KV head), for one selector and one budget.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

#: Pool sizes that 99% hits are looked for in: 0.1, 0.2, … 100 times the pages of a step.
POOL_STEP, LARGEST_POOL = 0.1, 100
N_POOL = round(LARGEST_POOL / POOL_STEP)


class LruPool:
    """The LRU pool of one KV head, empty at first.

    A page's recency is the step it was last selected in; within a step the lower page counts as
    less recent. Whatever the pool holds is then a first part of all pages ever selected, the most
    recent first. ``n_page`` bounds the page numbers.
    """

    def __init__(self, n_page: int) -> None:
        self._recent = np.empty(0, dtype=np.int64)
        self._n_resident = 0
        # per page: how many pages are as recent or more so; 0 for what was never selected
        self._depth = np.zeros(n_page, dtype=np.int64)

    @property
    def is_new(self) -> bool:
        """Whether nothing was selected yet."""
        return not len(self._recent)

    def access(self, pages: NDArray[np.int64], capacity: int) -> tuple[int, NDArray[np.int64]]:
        """Select pages at the next step and evict down to ``capacity`` pages.

        Args:
            pages: ``[k]``, what is selected, no page twice.
            capacity: pages that the pool holds, k or more.

        Returns:
            The hits, and ``[k]``: the smallest pool in pages that would have held each page; 0
            where none would, because the page is selected for the first time.
        """
        needed = self._depth[pages]
        hits = int(np.count_nonzero((needed > 0) & (needed <= self._n_resident)))
        self._depth[pages] = 0
        others = self._recent[self._depth[self._recent] > 0]
        self._recent = np.concatenate([np.sort(pages)[::-1], others])
        self._depth[self._recent] = np.arange(1, len(self._recent) + 1)
        self._n_resident = min(self._n_resident + len(pages) - hits, capacity)
        return hits, needed


def pool_histogram(needed: NDArray[np.int64], k: NDArray[np.int64]) -> NDArray[np.int64]:
    """Count accesses by the pool they need, ``[N_POOL + 2]``; both arguments are ``[n_access]``.

    Entry 0 counts first selections, which no pool serves; entry i those that ``i · POOL_STEP · k``
    pages serve and fewer do not; the last one those that need more than `LARGEST_POOL` times k.
    """
    steps = -(-needed * round(1 / POOL_STEP) // k)
    return np.bincount(np.minimum(steps, N_POOL + 1), minlength=N_POOL + 2)
