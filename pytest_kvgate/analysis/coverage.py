"""Coverage of every unit of one layer: how much eligible mass each selector's pages hold.

A unit is one (trace, step, layer, KV head).
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from pytest_kvgate.analysis.masses import group_masses, head_keys, step_blocks
from pytest_kvgate.analysis.pages import PageGrid
from pytest_kvgate.analysis.selectors import (
    ORACLE,
    PAGE_SELECTORS,
    TOKEN_ORACLE,
    PageKeys,
    rank,
)
from pytest_kvgate.trace import Layer, Step

#: A unit with less eligible mass than this has nothing to select; it is skipped and counted.
LEAST_ELIGIBLE_MASS = 1e-12


@dataclass(frozen=True)
class Unit:
    """What one unit says, before any budget is applied.

    ``curves[selector]`` is float64 of length ``n + 1``: the share of the eligible mass held by the
    selector's first 0, 1, … n items; an item is a page, for ``token-oracle`` a token.
    ``eligible`` and ``total`` are masses summed over the group's query heads; ``total`` counts real
    tokens only. ``eligible_share``, ``support`` and ``hottest`` are ``[G]``, per query head: the
    eligible share of its mass, and of that part the effective support ``exp(entropy)`` in tokens
    and the share of the hottest token.
    """

    n_visible: int
    eligible: float
    total: float
    eligible_share: NDArray[np.float64]
    support: NDArray[np.float64]
    hottest: NDArray[np.float64]
    curves: dict[str, NDArray[np.float64]]

    def coverage(
        self, selector: str, pages: NDArray[np.int64], page_size: int
    ) -> NDArray[np.float64]:
        """Return the covered share of the eligible mass at each number of pages."""
        curve = self.curves[selector]
        items = pages * page_size if selector == TOKEN_ORACLE else pages
        return curve[np.minimum(items, len(curve) - 1)]

    def total_mass(self, coverage: NDArray[np.float64]) -> NDArray[np.float64]:
        """Return (free + selected) / all for a covered share of the eligible mass."""
        free = self.total - self.eligible
        return (free + coverage * self.eligible) / self.total


def layer_units(
    layer: Layer, steps: tuple[Step, ...], grid: PageGrid, selectors: tuple[str, ...]
) -> Iterator[Unit | None]:
    """Yield every unit of one layer; None stands for a skipped unit.

    Raises:
        TraceError: the layer's q or K hold values that are not finite.
    """
    n_token = steps[-1].n_visible
    n_page = n_token // grid.page_size
    group = layer.group_size
    for kv_head in range(layer.n_head_kv):
        keys = head_keys(layer, kv_head, n_token)
        whole = keys[: n_page * grid.page_size]
        pages = PageKeys(whole.reshape(n_page, grid.page_size, layer.head_dim))
        queries = layer.q[:, layer.query_heads(kv_head)]
        for block in step_blocks(len(steps), group, n_token):
            n_visible = [step.n_visible for step in steps[block]]
            block_queries = np.asarray(queries[block], dtype=np.float32)
            masses = group_masses(layer, kv_head, block_queries, keys, n_visible, block.start)
            scores = {
                name: score(block_queries, pages)
                for name, score in PAGE_SELECTORS.items()
                if name in selectors
            }
            for row, n in enumerate(n_visible):
                yield _unit(
                    n,
                    masses[row, :, :n],
                    grid,
                    {name: score[row] for name, score in scores.items()},
                    selectors,
                )


def _unit(
    n_visible: int,
    masses: NDArray[np.float32],
    grid: PageGrid,
    scores: dict[str, NDArray[np.float32]],
    selectors: tuple[str, ...],
) -> Unit | None:
    """Build one unit from ``[G, n_visible]`` masses and one page score array per selector."""
    first, end = grid.eligible(n_visible)
    eligible_heads = masses[:, first * grid.page_size : end * grid.page_size]
    token_mass = eligible_heads.sum(axis=0, dtype=np.float64)
    page_mass = token_mass.reshape(end - first, grid.page_size).sum(axis=1)
    eligible = float(page_mass.sum())
    if eligible < LEAST_ELIGIBLE_MASS:
        return None
    curves: dict[str, NDArray[np.float64]] = {}
    for name in selectors:
        if name == TOKEN_ORACLE:
            curves[name] = _curve(np.sort(token_mass)[::-1])
        elif name == ORACLE:
            curves[name] = _curve(page_mass[rank(page_mass)])
        else:
            curves[name] = _curve(page_mass[rank(scores[name][first:end])])
    total_heads = masses.sum(axis=1, dtype=np.float64)
    with np.errstate(invalid="ignore"):  # a learned sink can leave a head no mass at all
        eligible_share = eligible_heads.sum(axis=1, dtype=np.float64) / total_heads
    support, hottest = _head_shape(eligible_heads)
    return Unit(
        n_visible=n_visible,
        eligible=eligible,
        total=float(total_heads.sum()),
        eligible_share=eligible_share,
        support=support,
        hottest=hottest,
        curves=curves,
    )


def _curve(ranked: NDArray[np.float64]) -> NDArray[np.float64]:
    """Return the cumulative share of ``[n]`` masses, ``[n + 1]`` from 0 to exactly 1."""
    curve = np.concatenate(([0.0], np.cumsum(ranked)))
    curve /= curve[-1]
    return curve


def _head_shape(masses: NDArray[np.float32]) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """Return effective support and hottest token per query head of ``[G, n]`` eligible masses."""
    share = masses.astype(np.float64)
    total = share.sum(axis=1, keepdims=True)
    # A head without eligible mass has no distribution there; it is left out of the averages.
    with np.errstate(invalid="ignore", divide="ignore"):
        share /= total
        information = share * np.log(share)
    entropy = -np.where(share > 0, information, 0.0).sum(axis=1)
    empty = total[:, 0] <= 0
    support = np.where(empty, np.nan, np.exp(entropy))
    hottest = np.where(empty, np.nan, share.max(axis=1, initial=0.0))
    return support, hottest
