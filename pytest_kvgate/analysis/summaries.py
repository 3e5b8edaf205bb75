"""Page summaries that grow with the context: computed once per page, as a pager keeps them."""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from pytest_kvgate.analysis.selectors import PageKeys, read_only
from pytest_kvgate.trace import FloatArray


@dataclass(frozen=True)
class KeptPageKeys(PageKeys):
    """Page keys whose summaries come from `PageSummaries`, which keeps those of earlier calls."""

    kept: PageSummaries = field(kw_only=True)

    @cached_property
    def mean(self) -> NDArray[np.float32]:
        """As of `PageKeys`."""
        return self.kept.summary("mean", self)

    @cached_property
    def maximum(self) -> NDArray[np.float32]:
        """As of `PageKeys`."""
        return self.kept.summary("maximum", self)

    @cached_property
    def minimum(self) -> NDArray[np.float32]:
        """As of `PageKeys`."""
        return self.kept.summary("minimum", self)

    @cached_property
    def deviation(self) -> NDArray[np.float32]:
        """As of `PageKeys`."""
        return self.kept.summary("deviation", self)

    @cached_property
    def center(self) -> NDArray[np.float32]:
        """As of `PageKeys`."""
        return self.kept.summary("center", self)

    @cached_property
    def radius(self) -> NDArray[np.float32]:
        """As of `PageKeys`."""
        return self.kept.summary("radius", self)


class PageSummaries:
    """The whole pages of a layer's KV heads as they fill.

    ``first_page`` is the number of the first page, ``capacity`` how many pages there will be at
    most. ``n_page`` is how many there are.
    """

    def __init__(self, page_size: int, first_page: int, capacity: int) -> None:
        self._page_size = page_size
        self._first_page = first_page
        self._capacity = capacity
        self._rows: FloatArray = np.empty((0, 0, page_size, 0), dtype=np.float32)
        self._summaries: dict[str, NDArray[np.float32]] = {}
        self._known: dict[str, int] = {}
        self.n_page = 0

    def extend(self, rows: FloatArray) -> None:
        """Append the keys of pages that are full now, ``[n_head_kv, n · page_size, head_dim]``."""
        n_head_kv, _, head_dim = rows.shape
        pages = rows.reshape(n_head_kv, -1, self._page_size, head_dim)
        if not self._rows.size:
            shape = (n_head_kv, self._capacity, self._page_size, head_dim)
            self._rows = np.empty(shape, dtype=rows.dtype)
        self._rows[:, self.n_page : self.n_page + pages.shape[1]] = pages
        self.n_page += pages.shape[1]

    def truncate(self, n_page: int) -> None:
        """Forget all pages but the first ``n_page``, and their summaries."""
        self.n_page = min(self.n_page, n_page)
        self._known = {name: min(known, n_page) for name, known in self._known.items()}

    def pages(self, n_page: int) -> PageKeys:
        """Return the first ``n_page`` pages, KV heads first, for a selector to score."""
        return KeptPageKeys(read_only(self._rows[:, :n_page]), self._first_page, kept=self)

    def summary(self, name: str, pages: PageKeys) -> NDArray[np.float32]:
        """Return one summary of all ``pages``, ``[…, n_page, head_dim]``; only new ones are made.

        ``name`` is that of a summary of `PageKeys`.
        """
        n_page, known = pages.rows.shape[1], self._known.get(name, 0)
        if known < n_page:
            new = PageKeys(pages.rows[:, known:], pages.first_page + known)
            computed: NDArray[np.float32] = getattr(new, name)
            if name not in self._summaries:
                n_head_kv, _, length = computed.shape
                shape = (n_head_kv, self._capacity, length)
                self._summaries[name] = np.empty(shape, dtype=np.float32)
            self._summaries[name][:, known:n_page] = computed
            self._known[name] = n_page
        return read_only(self._summaries[name][:, :n_page])
