"""From numbers per unit to one number: a mean, the worst layer, the worst twentieth; and how sure.

Intervals are percentile bootstrap intervals (Efron, 1979) over traces, or over sampled steps where
there are too few traces. Each replicate draws n - 1 of n, which makes up for the bootstrap being
too narrow on few samples (Rao and Wu, 1988). Steps of one text resemble each other more than texts
do, so an interval over steps is the narrower one; it says nothing of other texts.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from typing import Literal

import numpy as np
from numpy.typing import NDArray

#: How the units of a measure become one number.
Scope = Literal["mean", "worst-layer", "p05"]
SCOPES: tuple[Scope, ...] = ("mean", "worst-layer", "p05")

#: Fewer traces than this are not resampled; their steps are.
FEWEST_TRACES = 5
REPLICATES = 2000
SEED = 1

#: The share of units that the scope p05 leaves behind.
TAIL = 0.05


@dataclass(frozen=True)
class Samples:
    """One measure of every unit where it is defined.

    ``value`` and ``weight`` are ``[n]`` float64: the mean is ``Σ w·v / Σ w``. ``layer``, ``trace``
    and ``decode_index`` say whose they are. ``ascending`` is whether more is better.
    """

    value: NDArray[np.float64]
    weight: NDArray[np.float64]
    layer: NDArray[np.int64]
    trace: NDArray[np.int64]
    decode_index: NDArray[np.int64]
    ascending: bool = True

    def by_layer(self) -> dict[int, float]:
        """Return the mean per layer index."""
        layers, rows = np.unique(self.layer, return_inverse=True)
        total = np.bincount(rows, self.weight * self.value)
        means = total / np.bincount(rows, self.weight)
        return {int(layer): float(mean) for layer, mean in zip(layers, means, strict=True)}


@dataclass(frozen=True)
class Interval:
    """A confidence interval, and the ``n`` ``drawn`` (traces or steps) that it rests on."""

    low: float
    high: float
    confidence: float
    n: int
    drawn: Literal["traces", "steps"]


def estimate(samples: Samples, scope: Scope) -> float:
    """Return one number: the mean over units, the worst layer's mean, or the worst twentieth.

    p05 is the unit at position ``floor(0.05 · (n - 1))`` from the worst one on.
    """
    if scope == "worst-layer":
        worst = min if samples.ascending else max
        return worst(samples.by_layer().values())
    if scope == "p05":
        ranked = np.sort(samples.value)
        place = int(TAIL * (len(ranked) - 1))
        return float(ranked[place if samples.ascending else len(ranked) - 1 - place])
    return float((samples.weight * samples.value).sum() / samples.weight.sum())


def interval(samples: Samples, scope: Scope, confidence: float) -> Interval | None:
    """Return the bootstrap interval of `estimate`, seeded; None where one sample is all there is.

    ``confidence`` is the share of intervals that hold the truth, such as 0.95.
    """
    cluster, n_cluster, drawn = _clusters(samples)
    if n_cluster < 2:
        return None
    counts = _draws(n_cluster)
    if scope == "p05":
        replicates = _resampled_tail(samples, cluster, counts)
    else:
        replicates = _resampled_means(samples, cluster, counts, by_layer=scope == "worst-layer")
    outside = (1 - confidence) / 2
    low, high = np.nanquantile(replicates, [outside, 1 - outside])
    return Interval(float(low), float(high), confidence, n_cluster, drawn)


@lru_cache(maxsize=4)  # every row of a report asks for the same
def _draws(n: int) -> NDArray[np.float64]:
    """Return how often each replicate draws each of n clusters, ``[REPLICATES, n]``."""
    rng = np.random.default_rng(SEED)
    return rng.multinomial(n - 1, np.full(n, 1 / n), size=REPLICATES).astype(np.float64)


def _clusters(samples: Samples) -> tuple[NDArray[np.int64], int, Literal["traces", "steps"]]:
    """Return what is drawn as a whole: traces, or the steps of all traces."""
    traces, cluster = np.unique(samples.trace, return_inverse=True)
    if len(traces) >= FEWEST_TRACES:
        return cluster, len(traces), "traces"
    places = np.stack([samples.trace, samples.decode_index])
    steps, cluster = np.unique(places, axis=1, return_inverse=True)
    return cluster.ravel(), steps.shape[1], "steps"


def _resampled_means(
    samples: Samples, cluster: NDArray[np.int64], counts: NDArray[np.float64], *, by_layer: bool
) -> NDArray[np.float64]:
    """Return the mean, or the worst layer's, of each replicate."""
    layers, row = np.unique(samples.layer, return_inverse=True)
    if not by_layer:
        layers, row = layers[:1], np.zeros_like(row)
    shape = (counts.shape[1], len(layers))
    cell, n_cell = cluster * len(layers) + row, shape[0] * shape[1]
    total = np.bincount(cell, samples.weight * samples.value, minlength=n_cell).reshape(shape)
    weight = np.bincount(cell, samples.weight, minlength=n_cell).reshape(shape)
    with np.errstate(invalid="ignore", divide="ignore"):  # a layer may be missing from a replicate
        means = (counts @ total) / (counts @ weight)
    worst = np.fmin if samples.ascending else np.fmax
    replicates: NDArray[np.float64] = worst.reduce(means, axis=1)
    return replicates


def _resampled_tail(
    samples: Samples, cluster: NDArray[np.int64], counts: NDArray[np.float64]
) -> NDArray[np.float64]:
    """Return the worst twentieth of each replicate."""
    order = np.argsort(samples.value if samples.ascending else -samples.value)
    replicates = np.empty(len(counts))
    for row, drawn in enumerate(counts):
        below = np.cumsum(drawn[cluster[order]])
        place = int(TAIL * (below[-1] - 1))
        replicates[row] = samples.value[order[np.searchsorted(below, place, side="right")]]
    return replicates
