"""Check a capture against the model's own softmax before any number is believed."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from pytest_kvgate.analysis.masses import group_masses, head_keys
from pytest_kvgate.trace import UNROUNDED, Layer, Reference, Trace, TraceError, Verification

#: Worst absolute difference of one attention weight that is tolerated. Right reads lie near 1e-6 on
#: the CPU; other backends round q in ways that are not modelled. Shifted heads or positions lie
#: above 1e-1, but two swapped rows of little mass can hide below the tolerance.
SOFTMAX_TOLERANCE = 1e-3

#: What a verification by `verify_softmax` names as its reference.
SOFTMAX_REFERENCE = "softmax"


def verify_softmax(trace: Trace, reference: Reference) -> Verification:
    """Recompute the softmax of every KV layer and compare it with the engine's own.

    Engines round q to the type that K is stored in before the product, and not all in the same
    way, so the reference brings the roundings that are possible; the one that fits best over all
    layers and steps counts. A wrong read fits none of them.

    Returns:
        The worst absolute error over layers, steps, query heads and positions. Positions that the
        engine masks and the trace does not, or the reverse, count as errors; so does a q in the
        trace that is not the one the engine multiplied.
    """
    for position, layer in enumerate(trace.layers):
        stored = layer.q[list(reference.steps)]
        if not np.array_equal(stored, reference.queries[UNROUNDED][position]):
            return Verification.of(float("inf"), SOFTMAX_TOLERANCE, SOFTMAX_REFERENCE)
    errors = {
        rounding: max(
            _layer_error(trace, reference, position, queries[position])
            for position in range(len(trace.layers))
        )
        for rounding, queries in reference.queries.items()
    }
    best = min(errors.values())
    return Verification.of(best, SOFTMAX_TOLERANCE, SOFTMAX_REFERENCE)


def _layer_error(
    trace: Trace, reference: Reference, position: int, queries: NDArray[np.float32]
) -> float:
    layer: Layer = trace.layers[position]
    worst = 0.0
    for row, step in enumerate(reference.steps):
        n_visible = trace.steps[step].n_visible
        expected = np.load(reference.softmax[position][row], mmap_mode="r", allow_pickle=False)
        for kv_head in range(layer.n_head_kv):
            heads = layer.query_heads(kv_head)
            keys = head_keys(layer, kv_head, n_visible)
            try:
                masses = group_masses(
                    layer, kv_head, queries[row : row + 1, heads], keys, [n_visible]
                )
            except TraceError:
                return float("inf")
            difference = np.abs(masses[0] - expected[heads]).max()
            if not np.isfinite(difference):
                return float("inf")
            worst = max(worst, float(difference))
    return worst
