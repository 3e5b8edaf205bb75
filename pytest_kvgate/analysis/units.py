"""The numbers of units, side by side in arrays."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields

import numpy as np
from numpy.typing import NDArray

#: Shares that are measured per selector, budget and unit.
SHARES = (
    "coverage",
    "total_mass",
    "global_coverage",
    "starved",
    "jaccard",
    "stale_coverage",
    "output_error",
)
#: All that is measured so.
PER_BUDGET = (*SHARES, "hits", "accesses")


@dataclass(frozen=True)
class Units:
    """Arrays over units, one (trace, step, layer, KV head) each, those skipped left out.

    ``trace`` is the position of the trace, ``layer`` the layer index, ``decode_index`` the step,
    ``lag`` the decode steps since the sampled step before (0 where there is none), ``n_head`` the
    query heads. ``eligible_mass`` (the eligible share of the mass on real tokens), ``support`` (in
    tokens) and ``hottest`` are means over those heads. ``numbers`` has ``[n_selector, n_budget,
    n_unit]`` float64 for each of `PER_BUDGET`, NaN where undefined or not measured. ``unrotated``
    is ``[n_budget, n_unit]``: coverage of landmark over the dims RoPE never turns. ``needed`` is
    ``[n_selector, n_coverage, n_unit]``: the smallest budget of the grid at which the unit reaches
    a coverage.
    """

    trace: NDArray[np.int64]
    layer: NDArray[np.int64]
    decode_index: NDArray[np.int64]
    lag: NDArray[np.int64]
    n_head: NDArray[np.int64]
    eligible_mass: NDArray[np.float64]
    support: NDArray[np.float64]
    hottest: NDArray[np.float64]
    numbers: Mapping[str, NDArray[np.float64]]
    unrotated: NDArray[np.float64]
    needed: NDArray[np.float64]

    @classmethod
    def joined(cls, parts: Sequence[Units]) -> Units:
        """Join the units of several parts, in order."""
        if len(parts) == 1:
            return parts[0]
        arrays = {
            field.name: np.concatenate([getattr(part, field.name) for part in parts], axis=-1)
            for field in fields(cls)
            if field.name != "numbers"
        }
        numbers = {
            name: np.concatenate([part.numbers[name] for part in parts], axis=-1)
            for name in PER_BUDGET
        }
        return cls(numbers=numbers, **arrays)


@dataclass(frozen=True)
class LayerNumbers:
    """Units with what is only kept in sums.

    ``layers`` are layer indices, ``[n_layer]``, and ``n_unit`` how many units each has;
    ``covered`` and ``total`` are ``[n_layer, n_selector, 1000]``: coverage and total mass summed
    over these units at each budget of the grid, where a budget below one page selects nothing.
    ``reuse`` is ``[n_selector, n_budget, N_POOL + 2]``, see `pool_histogram`.
    """

    units: Units
    layers: NDArray[np.int64]
    n_unit: NDArray[np.int64]
    covered: NDArray[np.float64]
    total: NDArray[np.float64]
    reuse: NDArray[np.int64]
    skipped_units: int

    @classmethod
    def joined(cls, parts: Sequence[LayerNumbers]) -> LayerNumbers:
        """Join what was measured of several layers or traces, in order."""
        if len(parts) == 1:
            return parts[0]
        return cls(
            units=Units.joined([part.units for part in parts]),
            layers=np.concatenate([part.layers for part in parts]),
            n_unit=np.concatenate([part.n_unit for part in parts]),
            covered=np.concatenate([part.covered for part in parts]),
            total=np.concatenate([part.total for part in parts]),
            reuse=np.sum([part.reuse for part in parts], axis=0),
            skipped_units=sum(part.skipped_units for part in parts),
        )
