"""What the attention nodes of a model are, learned from one decode step that is left as it is."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from pytest_kvgate.analysis import SOFTMAX_TOLERANCE
from pytest_kvgate.analysis.masses import group_masses, single_precision
from pytest_kvgate.analysis.verification import (
    FLASH_TOLERANCES,
    OUTPUT_TOLERANCE,
    worst_output_error,
)
from pytest_kvgate.closedloop.errors import ClosedLoopError
from pytest_kvgate.engine import AttentionRead, Context, ValueRead, visible_span
from pytest_kvgate.engine.basis import alibi_slopes, product_roundings
from pytest_kvgate.trace import FloatArray, Layer, TraceError

READ_WRONGLY = "so the cache is read wrongly and no selection can be believed."
NATIVELY_SPARSE = (
    "this model's attention is natively sparse: for each query an indexer of its own selects what "
    "it attends to. What a pager would do beside that is not defined, so there is no closed loop."
)


@dataclass(frozen=True)
class AttentionLayer:
    """One attention node of every decode step, by its place in the graph.

    ``terms`` hold scale, softcap, ALiBi slopes and sinks; their arrays of q and K are empty.
    ``rotation`` brings q and K out of the basis of the cache, None where that is the model's own.
    ``paged`` is whether the node sees the whole context; others have a sliding window, and are
    never touched. ``cache`` is the place of the first node that reads the same cache, and
    ``shared_keys`` marks a layer that reads another layer's.
    """

    terms: Layer
    key_type: str
    rotation: NDArray[np.float32] | None
    paged: bool
    cache: int
    shared_keys: bool

    @property
    def index(self) -> int:
        """The number of the layer."""
        return self.terms.index

    def product_queries(self, queries: NDArray[np.float32]) -> list[NDArray[np.float32]]:
        """Return q as the engine's matrix product may have rounded it."""
        return list(product_roundings(queries, self.key_type).values())

    def softmax(self, queries: NDArray[np.float32], keys: FloatArray) -> NDArray[np.float32]:
        """Return the attention masses of one step, ``[n_head, n_token]`` float32.

        ``queries`` is ``[n_head, head_dim]`` and ``keys`` ``[n_head_kv, n_token, head_dim]``.

        Raises:
            TraceError: they are no finite numbers.
        """
        terms = self.terms
        masses = [
            group_masses(
                terms,
                kv_head,
                queries[None, terms.query_heads(kv_head)],
                keys[kv_head],
                [keys.shape[1]],
            )[0]
            for kv_head in range(terms.n_head_kv)
        ]
        return np.concatenate(masses)


def learn_layers(
    context: Context, token: int, sliding_window: int, fused_type: str | None
) -> list[AttentionLayer]:
    """Decode one token, and return what its attention nodes are, in the order of the graph.

    Every softmax is recomputed from q and K on the way, as a capture's is. With flash attention
    there is none, so the output is, with V.

    Args:
        context: holds the tokens before this one; the caller rewinds it.
        token: any token.
        sliding_window: that of the model, in tokens; 0 for none.
        fused_type: the data type of the V cache with flash attention; None without.

    Raises:
        ClosedLoopError: the model is natively sparse, has nothing to page, or is read wrongly.
        EngineError: the cache does not hold the positions in order.
    """
    n_visible = context.n_token + 1
    layers: list[AttentionLayer] = []
    reads: list[AttentionRead] = []

    def take(read: AttentionRead) -> None:
        if read.top_k is not None:
            raise ClosedLoopError(NATIVELY_SPARSE)
        layer = _layer(read, paged=visible_span(read, n_visible) == n_visible)
        if layer.paged and read.read_softmax is not None:
            _check(layer, read, n_visible)
        layers.append(layer)
        reads[:] = [read]

    def take_values(values: ValueRead) -> None:  # at once after the node's `take`
        if layers[-1].paged:
            tolerance = FLASH_TOLERANCES.get(str(fused_type), OUTPUT_TOLERANCE)
            _check_output(layers[-1], reads[0], values, n_visible, tolerance)

    context.hook.arm(take, None if fused_type is None else take_values)
    context.decode([token])
    context.hook.disarm()
    if not any(layer.paged for layer in layers):
        raise ClosedLoopError(
            "no layer of this model attends to the whole context, so there is nothing to page."
        )
    if sliding_window and n_visible <= sliding_window:
        raise ClosedLoopError(
            f"{n_visible} tokens fit into this model's sliding window of {sliding_window}, so "
            "layers with a window cannot be told from those without. Use a prompt longer than the "
            "window, not counting its sparse tail (--kvgate-sparse-tail)."
        )
    return layers


def _layer(read: AttentionRead, *, paged: bool) -> AttentionLayer:
    n_head, head_dim = read.queries.shape
    empty = np.empty(0, dtype=np.float32)
    terms = Layer(
        index=read.index,
        n_head=n_head,
        n_head_kv=read.n_head_kv,
        head_dim=head_dim,
        scale=read.scale,
        softcap=read.softcap,
        alibi_slopes=alibi_slopes(n_head, read.max_bias),
        window=None,
        n_rot=read.n_rot,
        k=empty,
        q=empty,
        sinks=read.sinks,
    )
    return AttentionLayer(terms, read.key_type, read.rotation, paged, read.cache, read.shared_keys)


def _check(layer: AttentionLayer, read: AttentionRead, n_visible: int) -> None:
    assert read.read_softmax is not None
    expected = read.read_softmax()[:, :n_visible]
    error = min(
        float(np.abs(weights - expected).max()) for weights in _recomputed(layer, read, n_visible)
    )
    if not error <= SOFTMAX_TOLERANCE:
        raise ClosedLoopError(
            f"layer {layer.index}: the softmax recomputed from q and K and the model's own differ "
            f"by {error:.2g}, where {SOFTMAX_TOLERANCE:g} is tolerated, {READ_WRONGLY}"
        )


def _check_output(
    layer: AttentionLayer,
    read: AttentionRead,
    values: ValueRead,
    n_visible: int,
    tolerance: float,
) -> None:
    """Compare the heads' output with the recomputed one, as `verify_capture` does."""
    cells = single_precision(values.read_values(n_visible))
    expected = values.read_output()
    error = min(
        worst_output_error(
            (weights.reshape(len(cells), -1, n_visible) @ cells).reshape(expected.shape),
            expected,
            cells,
        )
        for weights in _recomputed(layer, read, n_visible)
    )
    if not error <= tolerance:
        raise ClosedLoopError(
            f"layer {layer.index}: the attention output recomputed from q, K and V and the model's "
            f"own differ by {error:.2g} of its length, where {tolerance:g} is tolerated, "
            f"{READ_WRONGLY}"
        )


def _recomputed(
    layer: AttentionLayer, read: AttentionRead, n_visible: int
) -> list[NDArray[np.float32]]:
    """Return the softmax by each way to round q, ``[n_head, n_visible]``."""
    keys = single_precision(read.read_keys(n_visible))
    try:
        return [layer.softmax(queries, keys) for queries in layer.product_queries(read.queries)]
    except TraceError as broken:
        raise ClosedLoopError(f"{broken}") from broken
