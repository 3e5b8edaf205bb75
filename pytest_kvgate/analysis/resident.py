"""How many bytes of KV cache stay resident under paging, and how many selectors keep beside.

The least for one decode step is what it reads: the free tokens and k pages per KV head in a paged
layer, all of it in a dense one, the window in one with a sliding window. A pager that is to find
some pages of the next step in place needs more, a pool of several times k.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable
from dataclasses import dataclass

from pytest_kvgate.analysis.pages import PageGrid
from pytest_kvgate.analysis.selectors import Selector
from pytest_kvgate.analysis.wording import exact


@dataclass(frozen=True)
class LayerCache:
    """One KV cache and the ``layers`` that read it, ascending indices: one, unless they share it.

    ``head_dim`` is that of K, ``token_bytes`` what K and V of one token take in one KV head, in the
    types of the cache. A cache that is not ``paged`` has a sliding ``window`` in tokens, None where
    that is not known, and stays whole.
    """

    layers: tuple[int, ...]
    n_head_kv: int
    head_dim: int
    token_bytes: float
    paged: bool = True
    window: int | None = None


@dataclass(frozen=True)
class Resident:
    """What stays resident, in bytes: ``kv`` of K and V, and ``metadata`` of the selector.

    ``whole`` is K and V of all layers without paging; layers with a sliding window have their
    window.
    """

    kv: float
    metadata: float
    whole: float

    @property
    def total(self) -> float:
        """K, V and metadata together, in bytes."""
        return self.kv + self.metadata

    @property
    def share(self) -> float:
        """K, V and metadata as a share of the whole cache; 1 or more where paging saves nothing."""
        return self.total / self.whole

    def __add__(self, other: Resident) -> Resident:
        return Resident(
            self.kv + other.kv, self.metadata + other.metadata, self.whole + other.whole
        )


def resident(
    caches: Iterable[LayerCache],
    grid: PageGrid,
    budget: float,
    n_token: int,
    *,
    selector: Selector | None = None,
    dense_layers: Collection[int] = (),
    pool: float = 1.0,
) -> Resident:
    """Return what a model keeps resident at a context of ``n_token`` tokens.

    Args:
        caches: all KV caches of the model.
        grid: the pages, and which tokens are free.
        budget: a fraction of the context; ``k = floor(B·n/P)`` pages per KV head.
        n_token: the length of the context, 1 or more.
        selector: whose metadata is kept beside every whole page, as `Selector.page_bytes` says;
            None for an oracle, which keeps none.
        dense_layers: indices of layers whose cache stays whole.
        pool: how many times k pages stay resident; 1 is one step's pages, an LRU pool has more.
    """
    parts = [
        _of_cache(cache, grid, budget, n_token, selector, dense_layers, pool) for cache in caches
    ]
    return sum(parts, Resident(0.0, 0.0, 0.0))


def _of_cache(
    cache: LayerCache,
    grid: PageGrid,
    budget: float,
    n_token: int,
    selector: Selector | None,
    dense_layers: Collection[int],
    pool: float,
) -> Resident:
    """Return what one cache keeps; what several layers select of it is taken not to overlap."""
    row = cache.n_head_kv * cache.token_bytes
    if not cache.paged:
        window = n_token if cache.window is None else min(cache.window, n_token)
        return Resident(row * window, 0.0, row * window)
    whole = row * n_token
    if any(layer in dense_layers for layer in cache.layers):
        return Resident(whole, 0.0, whole)
    first, end = grid.eligible(n_token)
    pages = int(grid.pages_for(budget, n_token) * exact(pool)) * len(cache.layers)
    out = max(0, end - first - pages) * grid.page_size
    beside = 0.0 if selector is None else selector.page_bytes(cache.head_dim)
    metadata = beside * cache.n_head_kv * (n_token // grid.page_size)
    return Resident(row * (n_token - out), metadata, whole)
