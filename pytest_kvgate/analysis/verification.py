"""Check a capture against what the model itself computed before any number is believed."""

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

#: Worst relative error of one head's attention output that is tolerated. The product rounds the
#: softmax to V's half precision. Done likewise, right reads on the CPU lie below 3e-5 (tiny models)
#: and near 1e-4 (SmolLM2); without it, below 5e-4. Shifted heads or positions lie above 1e-1, but a
#: wrong row that no head gives a hundredth of its mass can hide below the tolerance.
OUTPUT_TOLERANCE = 1e-2

#: The smallest step between two weights in half precision. Where learned sinks leave so little mass
#: that an output consists of such steps, it is compared no closer than a step in each weight moves
#: it: the last digit of a softmax decides which way a weight is rounded.
WEIGHT_STEP = 2.0**-24

#: What a verification names as its reference where V is what failed.
OUTPUT_REFERENCE = "attention output"


def verify_softmax(trace: Trace, reference: Reference) -> Verification:
    """Recompute the softmax of every KV layer, and its product with V where V was captured.

    Engines round q to the type that K is stored in before the product, and not all in the same
    way, so the reference brings the roundings that are possible; the one that fits best over all
    layers and steps counts. A wrong read fits none of them.

    Returns:
        The worst absolute error of the softmax over layers, steps, query heads and positions.
        Positions that the engine masks and the trace does not, or the reverse, count as errors; so
        does a q in the trace that is not the one the engine multiplied. Where the softmax is right
        and the attention output lies beyond its tolerance, the worst relative error of the output
        over layers and query heads, which has failed; V without an output to compare with has too.
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
    best = min(errors, key=errors.__getitem__)
    softmax = Verification.of(errors[best], SOFTMAX_TOLERANCE, SOFTMAX_REFERENCE)
    if softmax.status == "failed":
        return softmax
    output = Verification.of(
        _output_error(trace, reference, reference.queries[best]), OUTPUT_TOLERANCE, OUTPUT_REFERENCE
    )
    return output if output.status == "failed" else softmax


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
                    layer, kv_head, queries[row : row + 1, heads], keys, [n_visible], step
                )
            except TraceError:
                return float("inf")
            difference = np.abs(masses[0] - expected[heads]).max()
            if not np.isfinite(difference):
                return float("inf")
            worst = max(worst, float(difference))
    return worst


def _output_error(
    trace: Trace, reference: Reference, queries: tuple[NDArray[np.float32], ...]
) -> float:
    """Return the worst relative error of one head's output; 0 where no V was captured.

    The product may round the softmax to the type of V first; as for q, what fits best over all
    layers counts.
    """
    captured = {layer.v is not None for layer in trace.layers}
    if captured != {reference.outputs is not None}:
        return float("inf")
    if reference.outputs is None:
        return 0.0
    n_visible = trace.steps[reference.steps[-1]].n_visible
    errors = [
        _layer_output_errors(layer, q[-1:], n_visible, reference.steps[-1], output)
        for layer, q, output in zip(trace.layers, queries, reference.outputs, strict=True)
    ]
    return float(np.max(errors, axis=0).min())


def _layer_output_errors(
    layer: Layer,
    queries: NDArray[np.float32],
    n_visible: int,
    step: int,
    output: NDArray[np.float32],
) -> tuple[float, float]:
    """Return the worst error of a head with the softmax as it is, and rounded to the type of V."""
    assert layer.v is not None
    broken = (float("inf"), float("inf"))
    n_head, value_dim = output.shape
    n_row, row_length = layer.v.shape[1:]
    if n_head != layer.n_head or n_row < n_visible or row_length != value_dim:
        return broken
    worst = [0.0, 0.0]
    for kv_head in range(layer.n_head_kv):
        heads = layer.query_heads(kv_head)
        keys = head_keys(layer, kv_head, n_visible)
        values = np.asarray(layer.v[kv_head, :n_visible], dtype=np.float64)  # nothing overflows
        expected = np.asarray(output[heads], dtype=np.float64)
        masses = group_masses(layer, kv_head, queries[:, heads], keys, [n_visible], step)[0]
        rounded = masses.astype(layer.v.dtype)
        if not (np.isfinite(values).all() and np.isfinite(expected).all()):
            return broken
        resolved = WEIGHT_STEP / OUTPUT_TOLERANCE * np.linalg.norm(values)
        size = np.maximum(np.linalg.norm(expected, axis=1), resolved)
        for position, weights in enumerate((masses, rounded)):
            distance = np.linalg.norm(weights @ values - expected, axis=1)
            # only a V of zeros has no size; its output must be zero, too
            relative = np.where(distance == 0, 0.0, np.inf)
            np.divide(distance, size, out=relative, where=size > 0)
            worst[position] = max(worst[position], float(relative.max()))
    return worst[0], worst[1]
