"""Selectors: how a pager would rank pages for the current query.

A page selector is a small pure function from queries and page keys to one score per page. The two
oracles rank by the attention masses themselves and cannot be built; they are the ceilings.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cached_property
from types import MappingProxyType

import numpy as np
from numpy.typing import NDArray

ORACLE = "oracle"
LANDMARK = "landmark"
TOKEN_ORACLE = "token-oracle"


@dataclass(frozen=True)
class PageKeys:
    """The keys of one KV head cut into whole pages: ``[n_page, page_size, head_dim]`` float32."""

    keys: NDArray[np.float32]

    @cached_property
    def mean(self) -> NDArray[np.float64]:
        """Mean key per page, ``[n_page, head_dim]`` float64."""
        mean: NDArray[np.float64] = self.keys.mean(axis=1, dtype=np.float64)
        return mean


#: From ``[n_step, G, head_dim]`` queries and page keys to ``[n_step, n_page]`` scores.
PageScore = Callable[[NDArray[np.float32], PageKeys], NDArray[np.float32]]


def landmark(queries: NDArray[np.float32], pages: PageKeys) -> NDArray[np.float32]:
    """Score a page by ``max_h q_h · mean(k)``: one summary key per page.

    The mean-pooled block key of MoBA (Lu et al., 2025), used without training; Landmark Attention
    (Mohtashami and Jaggi, 2023) learns such a key. 2·head_dim bytes per page and KV head at 2 bytes
    a number.
    """
    scores = queries.astype(np.float64) @ pages.mean.T
    # A matrix product may sum equal columns in different orders. Computed in float64 and compared
    # in float32, pages with equal keys tie as the definition says.
    best: NDArray[np.float32] = scores.max(axis=1).astype(np.float32)
    return best


#: Page selectors that a pager could build, by name.
PAGE_SELECTORS: Mapping[str, PageScore] = MappingProxyType({LANDMARK: landmark})

#: Every selector that can be asked for, in the order of the tables.
SELECTORS: tuple[str, ...] = (ORACLE, *PAGE_SELECTORS, TOKEN_ORACLE)


def rank(scores: NDArray[np.floating]) -> NDArray[np.intp]:
    """Return item numbers from the best score down; ties go to the lower number."""
    return np.argsort(-scores, kind="stable")
