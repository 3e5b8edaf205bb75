"""What the pages held in a sparse run, added up a step at a time."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from pytest_kvgate.analysis.coverage import LEAST_ELIGIBLE_MASS
from pytest_kvgate.analysis.effects import LayerShare


@dataclass
class Tally:
    """Adds up coverage and lost mass by layer; the layers of a step are taken together, for speed.

    ``shares`` is what was added up so far, by layer index.
    """

    shares: dict[int, LayerShare] = field(default_factory=dict)
    _layers: list[int] = field(default_factory=list)
    _masses: list[NDArray[np.float32]] = field(default_factory=list)
    _kept: list[NDArray[np.bool_]] = field(default_factory=list)
    _totals: list[NDArray[np.float32]] = field(default_factory=list)

    def add(
        self,
        layer: int,
        masses: NDArray[np.float32],
        kept: NDArray[np.bool_],
        totals: NDArray[np.float32],
    ) -> None:
        """Take one layer of the open step.

        ``masses`` is ``[n_head_kv, n_item]`` of the eligible pages or tokens, ``kept`` which of
        them are kept, and ``totals`` the mass of each group on all tokens, ``[n_head_kv]``.
        """
        self._layers += [layer] * len(masses)
        self._masses.append(masses)
        self._kept.append(kept)
        self._totals.append(totals)

    def close_step(self) -> None:
        """Add up what was taken since the last call."""
        if not self._layers:
            return
        masses = np.concatenate(self._masses)
        held = (masses * np.concatenate(self._kept)).sum(axis=1, dtype=np.float64)
        eligible = masses.sum(axis=1, dtype=np.float64)
        total = np.concatenate(self._totals)
        counted = eligible >= LEAST_ELIGIBLE_MASS
        coverage = np.divide(held, eligible, out=np.zeros_like(held), where=counted)
        lost = np.divide(eligible - held, total, out=np.zeros_like(held), where=total > 0)
        for layer, *sums in zip(
            self._layers, coverage.tolist(), counted.tolist(), lost.tolist(), strict=True
        ):
            share = LayerShare(sums[0], int(sums[1]), sums[2], 1)
            self.shares[layer] = self.shares.get(layer, LayerShare()) + share
        for taken in (self._layers, self._masses, self._kept, self._totals):
            taken.clear()
