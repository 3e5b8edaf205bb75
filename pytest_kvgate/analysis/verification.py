"""Check a capture against what the model itself computed before any number is believed."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from pytest_kvgate.analysis.masses import group_masses, head_keys
from pytest_kvgate.trace import (
    UNROUNDED,
    FloatArray,
    Layer,
    Reference,
    Trace,
    TraceError,
    Verification,
)

#: Worst absolute difference of one attention weight that is tolerated. Right reads lie near 1e-6 on
#: the CPU; other backends round q in ways that are not modelled. Shifted heads or positions lie
#: above 1e-1, but two swapped rows of little mass can hide below the tolerance.
SOFTMAX_TOLERANCE = 1e-3

#: What a verification by `verify_capture` names as its reference.
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

#: The same with flash attention, by the type of the V cache. On the CPU an f16 V, and an f32 one,
#: which is cast, is added up in half precision: right reads lie near 2e-2 at 1,000 tokens and 6e-2
#: at 6,500. With other types they lie below 1e-3. Shifted heads lie near 1.
FLASH_TOLERANCES = {"f16": 0.25, "f32": 0.25}

#: What a verification names as its reference where the attention output is what was judged: it
#: failed, or flash attention left no softmax.
OUTPUT_REFERENCE = "attention output"

#: What a verification names where flash attention was proved by a run without it.
UNFUSED_REFERENCE = "softmax without flash attention"


def verify_capture(trace: Trace, reference: Reference) -> Verification:
    """Recompute the attention of every KV layer and compare it with the model's own.

    Engines round q to the type that K is stored in before the product, and not all in the same
    way, so the reference brings the roundings that are possible; the one that fits best over all
    layers and steps counts. A wrong read fits none of them.

    Returns:
        The worst absolute error of the softmax over layers, steps, query heads and positions.
        Positions that the engine masks and the trace does not, or the reverse, count as errors; so
        does a q in the trace that is not the one the engine multiplied. Where the softmax is right
        and the attention output lies beyond its tolerance, the worst relative error of the output
        over layers, steps and query heads, which has failed; V without an output to compare with
        has too. Where flash attention left no softmax, the output alone is judged.
    """
    for position, layer in enumerate(trace.layers):
        stored = layer.q[list(reference.steps)]
        if not np.array_equal(stored, reference.queries[UNROUNDED][position]):
            name = SOFTMAX_REFERENCE if reference.softmax else OUTPUT_REFERENCE
            return Verification.of(float("inf"), SOFTMAX_TOLERANCE, name)
    tolerance = output_tolerance(trace)
    if not reference.softmax:
        return _judge_outputs(trace, reference, reference.outputs, reference.queries, tolerance)
    errors = {
        rounding: [
            _softmax_error(trace, reference, position, queries[position])
            for position in range(len(trace.layers))
        ]
        for rounding, queries in reference.queries.items()
    }
    best = min(errors, key=lambda rounding: max(errors[rounding]))
    name = UNFUSED_REFERENCE if trace.flash_attention else SOFTMAX_REFERENCE
    softmax = Verification.of(max(errors[best]), SOFTMAX_TOLERANCE, name, errors[best])
    if softmax.status == "failed":
        return softmax
    best_queries = {best: reference.queries[best]}
    output = _judge_outputs(trace, reference, reference.outputs, best_queries, tolerance)
    if output.status == "passed" and reference.unfused_outputs is not None:
        output = _judge_outputs(
            trace, reference, reference.unfused_outputs, best_queries, OUTPUT_TOLERANCE
        )
    return output if output.status == "failed" else softmax


def accepted_tolerance(trace: Trace) -> float:
    """Return the largest error that a trace's verification may show, whatever it tolerated."""
    checked = trace.verification
    if checked is not None and checked.reference == OUTPUT_REFERENCE and is_smoke_tested(trace):
        return output_tolerance(trace)
    return SOFTMAX_TOLERANCE


def is_smoke_tested(trace: Trace) -> bool:
    """Whether flash attention was verified, but not by the softmax of a run without it."""
    checked = trace.verification
    return trace.flash_attention and checked is not None and checked.reference != UNFUSED_REFERENCE


def output_tolerance(trace: Trace) -> float:
    """Return the worst relative error of an attention output that is tolerated."""
    if not trace.flash_attention:
        return OUTPUT_TOLERANCE
    return FLASH_TOLERANCES.get(str(trace.capture.get("cache_type_v")), OUTPUT_TOLERANCE)


def _softmax_error(
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


def _judge_outputs(
    trace: Trace,
    reference: Reference,
    outputs: tuple[FloatArray, ...] | None,
    roundings: Mapping[str, tuple[FloatArray, ...]],
    tolerance: float,
) -> Verification:
    """Judge the attention outputs, by the rounding of q and of the softmax that fits them best.

    The product with V may round the softmax to the type of V first. Without V and outputs the error
    is 0; with one of them alone it is infinite.
    """
    values = _values(trace, reference)
    if values is None and outputs is None and reference.softmax:
        return Verification.of(0.0, tolerance, OUTPUT_REFERENCE)
    if values is None or outputs is None:
        return Verification.of(float("inf"), tolerance, OUTPUT_REFERENCE)
    n_visible = [trace.steps[step].n_visible for step in reference.steps]
    candidates: list[list[float]] = []
    for queries in roundings.values():
        per_layer = [
            _output_errors(layer, v, q, reference.steps, n_visible, output)
            for layer, v, q, output in zip(trace.layers, values, queries, outputs, strict=True)
        ]
        candidates += [list(errors) for errors in zip(*per_layer, strict=True)]
    best = min(candidates, key=max)
    return Verification.of(max(best), tolerance, OUTPUT_REFERENCE, best)


def _values(trace: Trace, reference: Reference) -> list[FloatArray] | None:
    """Return V of every layer, from the trace or from beside it; None where one is missing."""
    if reference.values is not None:
        return [np.load(path, mmap_mode="r", allow_pickle=False) for path in reference.values]
    values = [layer.v for layer in trace.layers if layer.v is not None]
    return values if len(values) == len(trace.layers) else None


def _output_errors(
    layer: Layer,
    v: FloatArray,
    queries: FloatArray,
    steps: Sequence[int],
    n_visible: Sequence[int],
    outputs: FloatArray,
) -> tuple[float, float]:
    """Return the worst error of a head with the softmax as it is, and rounded to the type of V."""
    broken = (float("inf"), float("inf"))
    _, n_head, value_dim = outputs.shape
    n_row, row_length = v.shape[1:]
    if n_head != layer.n_head or n_row < n_visible[-1] or row_length != value_dim:
        return broken
    worst = [0.0, 0.0]
    for kv_head in range(layer.n_head_kv):
        heads = layer.query_heads(kv_head)
        keys = head_keys(layer, kv_head, n_visible[-1])
        all_values = np.asarray(v[kv_head, : n_visible[-1]], dtype=np.float64)  # nothing overflows
        expected = np.asarray(outputs[:, heads], dtype=np.float64)
        if not (np.isfinite(all_values).all() and np.isfinite(expected).all()):
            return broken
        for row, (step, n) in enumerate(zip(steps, n_visible, strict=True)):
            values = all_values[:n]
            try:
                (masses,) = group_masses(
                    layer, kv_head, queries[row : row + 1, heads], keys[:n], [n], step
                )
            except TraceError:
                return broken
            for position, weights in enumerate((masses, masses.astype(v.dtype))):
                error = worst_output_error(weights @ values, expected[row], values)
                worst[position] = max(worst[position], error)
    return worst[0], worst[1]


def worst_output_error(output: NDArray[Any], expected: NDArray[Any], values: NDArray[Any]) -> float:
    """Return the largest ``‖output - expected‖ / ‖expected‖`` of a head, both ``[n_head, d_v]``.

    An output much smaller than ``values``, those it is made of, counts as large as can be resolved.
    """
    resolved = WEIGHT_STEP / OUTPUT_TOLERANCE * np.linalg.norm(values)
    size = np.maximum(np.linalg.norm(expected, axis=1), resolved)
    distance = np.linalg.norm(output - expected, axis=1)
    # only a V of zeros has no size; its output must be zero, too
    relative = np.where(distance == 0, 0.0, np.inf)
    np.divide(distance, size, out=relative, where=size > 0)
    return float(relative.max())
