"""What sparse runs keep of each cache: page summaries, and with flash attention K and V.

All of it is read once and extended as the context grows; going back to the prompt cuts it.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
from numpy.typing import NDArray

from pytest_kvgate.analysis.masses import single_precision
from pytest_kvgate.analysis.selectors import PageKeys
from pytest_kvgate.analysis.summaries import PageSummaries
from pytest_kvgate.engine.basis import model_basis
from pytest_kvgate.trace import FloatArray

#: Copies cells ``start`` to ``stop`` of a cache, ``[n_head_kv, n, dims]``.
ReadCells = Callable[[int, int], FloatArray]


class LayerPages:
    """The pages of one layer at one page size, with the summaries of its KV heads."""

    def __init__(
        self,
        page_size: int,
        first_page: int,
        capacity: int,
        rotation: NDArray[np.float32] | None,
    ) -> None:
        self._first = first_page
        self._size = page_size
        self._rotation = rotation
        self._summaries = PageSummaries(page_size, first_page, capacity)

    def until(self, end: int, read_keys: ReadCells) -> PageKeys:
        """Return the pages before page ``end``, KV heads first; those that are new are read."""
        known = self._first + self._summaries.n_page
        if known < end:
            rows = read_keys(known * self._size, end * self._size)
            self._summaries.extend(model_basis(rows, self._rotation))
        return self._summaries.pages(end - self._first)

    def rewind(self, n_token: int) -> None:
        """Forget the pages that reach beyond the first ``n_token`` positions."""
        self._summaries.truncate(max(0, n_token // self._size - self._first))


class Mirror:
    """The cells of one cache in float32, read once each."""

    def __init__(self, capacity: int) -> None:
        self._capacity = capacity
        self._cells = np.empty((0, 0, 0), dtype=np.float32)
        self._known = 0

    def cells(self, read: ReadCells, n_token: int) -> NDArray[np.float32]:
        """Return the first cells, ``[n_head_kv, n_token, dims]`` float32."""
        if self._known < n_token:
            new = single_precision(np.ascontiguousarray(read(self._known, n_token)))
            if not self._cells.size:
                shape = (new.shape[0], self._capacity, new.shape[2])
                self._cells = np.empty(shape, dtype=np.float32)
            self._cells[:, self._known : n_token] = new
            self._known = n_token
        return self._cells[:, :n_token]

    def rewind(self, n_token: int) -> None:
        """Forget the cells from ``n_token`` on."""
        self._known = min(self._known, n_token)
