"""What a selection has in common with the one before, and what the one before holds now."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray


def overlap_with_step_before(
    orders: NDArray[np.int64],
    masses: NDArray[np.float32],
    chosen: NDArray[np.int64],
    counted: NDArray[np.bool_],
) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """Return Jaccard overlap and stale coverage of all steps but the first.

    Args:
        orders: ``[H, n_step, widest]``, the best pages from the best down.
        masses: ``[H, n_step - 1, N]`` of all steps but the first, 0 where not eligible.
        chosen: ``[n_step, n_budget]``, how many pages are selected.
        counted: ``[H, n_step]``, which units count.

    Returns:
        Both ``[n_budget, H, n_step - 1]``: ``|A∩B| / |A∪B|`` of the pages selected now and at the
        step before, and the share of the eligible mass now on the pages selected then. NaN where
        one of the two units does not count or selects nothing.
    """
    widest = orders.shape[-1]
    places = np.full((*orders[:, :-1].shape[:2], masses.shape[-1]), widest, dtype=np.int32)
    np.put_along_axis(places, orders[:, :-1], np.arange(widest, dtype=np.int32), axis=-1)
    place_before = np.take_along_axis(places, orders[:, 1:], axis=-1)
    held = np.take_along_axis(masses, orders[:, :-1], axis=-1)
    stale = np.zeros((*held.shape[:2], widest + 1))
    np.cumsum(held, axis=-1, dtype=np.float64, out=stale[..., 1:])
    with np.errstate(invalid="ignore", divide="ignore"):
        stale /= masses.sum(axis=-1, dtype=np.float64)[..., None]
    both = counted[:, 1:] & counted[:, :-1]
    jaccard = np.empty((chosen.shape[1], *both.shape))
    kept = np.empty_like(jaccard)
    for column, (then, now) in enumerate(zip(chosen[:-1].T, chosen[1:].T, strict=True)):
        shared = (place_before < then[:, None]) & (np.arange(widest) < now[:, None])
        common = shared.sum(axis=-1)
        valid = both & (now > 0) & (then > 0)
        union = np.maximum(now + then - common, 1)
        jaccard[column] = np.where(valid, common / union, np.nan)
        steps = np.arange(len(then))
        kept[column] = np.where(valid, stale[:, steps, then], np.nan)
    return jaccard, kept
