"""Global top-B: the KV heads of a layer share their budget instead of having one each."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from pytest_kvgate.analysis.pages import BlockPages
from pytest_kvgate.analysis.selectors import rank


def shared_budget(
    scores: NDArray[np.float32], masses: NDArray[np.float32], pages: BlockPages
) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """Return coverage with a shared budget, and which units are starved by it.

    Per step, the ``k · H`` best of all (page, KV head) pairs by raw score are selected; ties go to
    the lower page, then to the lower head.

    Args:
        scores: ``[H, n_step, N]`` of one selector.
        masses: ``[H, n_step, N]``, 0 where not eligible.
        pages: what the budgets buy per head.

    Returns:
        Both ``[n_budget, H, n_step]``: the unit's covered share of its own eligible mass, and 1
        where it gets no page, else 0; NaN where the budget is below one page.
    """
    n_head, n_step, _ = scores.shape
    eligible = np.where(pages.is_eligible, scores, np.float32(-np.inf))
    widest = int(pages.chosen.max(initial=0)) * n_head
    # (page, head) in the order of ties
    order = rank(np.moveaxis(eligible, 0, -1).reshape(n_step, -1))[:, :widest]
    by_pair = np.moveaxis(masses, 0, -1).reshape(n_step, -1)
    held = np.take_along_axis(by_pair, order, axis=1).astype(np.float64)
    unit = np.arange(n_step)[:, None] * n_head + order % n_head
    whole = masses.sum(axis=-1, dtype=np.float64)
    coverage = np.empty((pages.chosen.shape[1], n_head, n_step))
    starved = np.empty_like(coverage)
    for column, chosen in enumerate(pages.chosen.T):
        taken = np.arange(widest) < chosen[:, None] * n_head
        count = np.bincount(unit[taken], minlength=n_step * n_head)
        mass = np.bincount(unit[taken], held[taken], minlength=n_step * n_head)
        with np.errstate(invalid="ignore", divide="ignore"):
            coverage[column] = mass.reshape(n_step, n_head).T / whole
        starved[column] = (count == 0).reshape(n_step, n_head).T
    below = (pages.asked == 0).T[:, None]
    return np.where(below, np.nan, coverage), np.where(below, np.nan, starved)
