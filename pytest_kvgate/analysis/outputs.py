"""Attention-output error: how far the output of attention to a selection is from the full one."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
from numpy.typing import NDArray

from pytest_kvgate.analysis.masses import GroupAttention, single_precision
from pytest_kvgate.analysis.pages import BlockPages
from pytest_kvgate.trace import FloatArray


def output_errors(
    attention: GroupAttention,
    eligible: NDArray[np.bool_],
    everything: NDArray[np.bool_],
    pages: BlockPages,
    orders: Mapping[str, NDArray[np.int64]],
    values: FloatArray,
) -> dict[str, NDArray[np.float64]]:
    """Return ``‖o' - o‖ / ‖o‖`` per selector, ``[n_step, n_budget]``, a mean over query heads.

    ``o = Σ p·v`` and ``o' = Σ_kept p·v / (Σ_kept p + share of the learned sink)``, where kept is
    free and selected. ``eligible`` and ``everything`` are the tiles of eligible and of all
    positions, ``[n_tile, n_step]``; ``orders`` the best pages, ``[n_step, widest]`` per selector.
    Where nothing that is kept has mass, because a model's own top-k hid it, o' is zero. A head
    whose output is exactly zero has no relative error, and its unit none either.
    """
    whole = attention.outputs(everything)
    resident = everything & ~eligible
    free, free_mass = attention.outputs(resident), attention.mass(resident)
    errors = {name: np.full(pages.chosen.shape, np.nan) for name in orders}
    size = pages.grid.page_size
    for step, chosen in enumerate(pages.chosen):
        masses = attention.masses(step)[:, pages.positions]
        offset = pages.first * size
        for name, order in orders.items():
            kept, kept_mass = free[step].copy(), free_mass[step] + attention.sink_share[step]
            done = 0
            for column in np.argsort(chosen, kind="stable"):
                selected = order[step, done : chosen[column]]
                tokens = (selected[:, None] * size + np.arange(size)).ravel()
                weights = masses[:, tokens]
                kept += weights @ single_precision(values[offset + tokens])
                kept_mass = kept_mass + weights.sum(axis=1, dtype=np.float64)
                done = chosen[column]
                errors[name][step, column] = _relative_error(kept, kept_mass, whole[step]).mean()
    return errors


def _relative_error(
    kept: NDArray[np.float64], mass: NDArray[np.float64], whole: NDArray[np.float64]
) -> NDArray[np.float64]:
    """Return the error per query head of ``[G, d_v]`` outputs."""
    renormalised = np.divide(kept, mass[:, None], out=np.zeros_like(kept), where=mass[:, None] > 0)
    distance = np.linalg.norm(renormalised - whole, axis=1)
    length = np.linalg.norm(whole, axis=1)
    nothing = np.full(len(length), np.nan)
    error: NDArray[np.float64] = np.divide(distance, length, out=nothing, where=length > 0)
    return error
