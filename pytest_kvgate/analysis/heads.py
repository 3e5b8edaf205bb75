"""One KV head at a block of sampled steps, cut into pages: masses, ranks and what they hold.

Arrays run over the steps of the block and over the N pages from the first eligible page to the last
one that any step of the trace may select; pages that are not eligible yet have no mass and rank
last.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from pytest_kvgate.analysis.masses import GroupAttention
from pytest_kvgate.analysis.outputs import output_errors
from pytest_kvgate.analysis.pages import BlockPages
from pytest_kvgate.analysis.selectors import ORACLE, TOKEN_ORACLE, rank
from pytest_kvgate.trace import FloatArray


@dataclass(frozen=True)
class Held:
    """The share of the eligible mass that a selector's pages hold.

    ``at_budgets`` is ``[n_step, n_budget]``, NaN where the budget is below one page; ``on_grid`` is
    ``[n_step, 1000]`` on the grid of budgets, where such a budget holds nothing; ``needed`` is
    ``[n_step, n_coverage]``, the smallest budget of the grid that reaches a coverage.
    """

    at_budgets: NDArray[np.float64]
    on_grid: NDArray[np.float64]
    needed: NDArray[np.float64]


@dataclass(frozen=True)
class HeadPages:
    """One KV head: how its group's mass lies on pages, and how selectors rank them.

    ``page_mass`` is ``[n_step, N]`` float32, summed over the group's query heads, as are
    ``eligible`` and ``total``, ``[n_step]`` float64; ``total`` counts real tokens only.
    ``eligible_share``, ``support`` and ``hottest`` are ``[n_step]``, means over query heads.
    ``scores`` have ``[n_step, N]`` per selector of pages and ``orders`` the best pages of them,
    ``[n_step, widest]``, as page numbers less the first. ``held`` has every selector.
    ``output_errors`` are ``[n_step, n_budget]``, means over query heads, empty without values.
    """

    page_mass: NDArray[np.float32]
    eligible: NDArray[np.float64]
    total: NDArray[np.float64]
    eligible_share: NDArray[np.float64]
    support: NDArray[np.float64]
    hottest: NDArray[np.float64]
    scores: Mapping[str, NDArray[np.float32]]
    orders: Mapping[str, NDArray[np.int64]]
    held: Mapping[str, Held]
    output_errors: Mapping[str, NDArray[np.float64]]


def head_pages(
    attention: GroupAttention,
    token_mass: NDArray[np.float32],
    pages: BlockPages,
    selectors: tuple[str, ...],
    coverages: tuple[float, ...],
    page_scores: Mapping[str, NDArray[np.float32]],
    values: FloatArray | None,
) -> HeadPages:
    """Cut the attention of one KV head into pages and rank them.

    ``token_mass`` is ``[n_step, n_token]``; ``coverages`` are those to find budgets for;
    ``page_scores`` are ``[n_step, N]`` of every selector but the oracles; ``values`` is
    ``[n_token, d_v]`` or None.
    """
    eligible = pages.is_eligible
    by_page = _eligible_masses(token_mass, pages)
    # a product with ones is the fastest sum over a short axis
    page_mass = by_page @ np.ones(pages.grid.page_size, dtype=np.float32)
    inside = attention.inside(pages.positions.start, pages.ends)
    everything = attention.inside(0, np.full(len(eligible), attention.edges[-1]))
    eligible_heads, total_heads = attention.mass(inside), attention.mass(everything)
    support, hottest = attention.shape(inside)
    with np.errstate(invalid="ignore"):  # a learned sink can leave a head no mass at all
        share = eligible_heads / total_heads
    scores = {
        name: page_mass if name == ORACLE else page_scores[name]
        for name in selectors
        if name != TOKEN_ORACLE
    }
    orders, held = {}, {}
    for name, found in scores.items():
        order = rank(np.where(eligible, found, np.float32(-np.inf)))
        held[name] = _held(np.take_along_axis(page_mass, order, axis=1), pages, coverages)
        orders[name] = order[:, : pages.widest].copy()
    if TOKEN_ORACLE in selectors:
        held[TOKEN_ORACLE] = _held(_best_tokens(by_page), pages, coverages)
    errors: Mapping[str, NDArray[np.float64]] = {}
    if values is not None:
        errors = output_errors(attention, inside, everything, pages, orders, values)
    return HeadPages(
        page_mass=page_mass,
        eligible=eligible_heads.sum(axis=1),
        total=total_heads.sum(axis=1),
        eligible_share=_head_mean(share),
        support=_head_mean(support),
        hottest=_head_mean(hottest),
        scores=scores,
        orders=orders,
        held=held,
        output_errors=errors,
    )


def _eligible_masses(token_mass: NDArray[np.float32], pages: BlockPages) -> NDArray[np.float32]:
    """Return ``[n_step, N, page_size]`` masses, 0 where a page is not eligible."""
    size = pages.grid.page_size
    masses = np.empty((len(token_mass), pages.n_page * size), dtype=np.float32)
    for step, n_eligible in enumerate(pages.n_eligible):
        end = n_eligible * size
        masses[step, :end] = token_mass[step, pages.positions][:end]
        masses[step, end:] = 0
    return masses.reshape(len(token_mass), pages.n_page, size)


def _best_tokens(by_page: NDArray[np.float32]) -> NDArray[np.float32]:
    """Return the mass of the best page_size tokens, of the next ones, and so on; sorts in place."""
    n_step, _, page_size = by_page.shape
    by_page.reshape(n_step, -1).sort(axis=1)
    return (by_page @ np.ones(page_size, dtype=np.float32))[:, ::-1]


def _held(ranked: NDArray[np.float32], pages: BlockPages, coverages: tuple[float, ...]) -> Held:
    """Return what the first of ``[n_step, N]`` masses hold.

    A step without any mass holds nothing; it is not counted.
    """
    curve = np.zeros((len(ranked), ranked.shape[1] + 1))
    np.cumsum(ranked, axis=1, dtype=np.float64, out=curve[:, 1:])
    whole = curve[:, -1:].copy()
    np.divide(curve, whole, out=curve, where=whole > 0)  # ends at exactly 1
    at_budgets = np.take_along_axis(curve, pages.chosen, axis=1)
    needed = []
    for coverage in coverages:
        k = (curve < coverage).sum(axis=1)
        budgets = pages.grid.budgets_for(k, pages.n_visible)
        needed.append(np.where(k < curve.shape[1], budgets, np.nan))
    return Held(
        at_budgets=np.where(pages.asked > 0, at_budgets, np.nan),
        on_grid=np.take_along_axis(curve, pages.on_grid, axis=1),
        needed=np.array(needed).reshape(len(coverages), len(ranked)).T,
    )


def _head_mean(values: NDArray[np.float64]) -> NDArray[np.float64]:
    """Return the mean over heads of ``[n_step, G]``, leaving out those that are NaN."""
    known = ~np.isnan(values)
    count = known.sum(axis=1)
    total = np.where(known, values, 0.0).sum(axis=1)
    mean: NDArray[np.float64] = np.full(len(values), np.nan)
    np.divide(total, count, out=mean, where=count > 0)
    return mean
