"""What the hook hands over: one attention node's operands, its V, and its output."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from pytest_kvgate.engine.errors import EngineError
from pytest_kvgate.engine.ggml import FloatArray


@dataclass(frozen=True)
class AttentionRead:
    """What one attention node read and computed for one query position.

    ``queries`` is ``[n_head, head_dim]`` float32 as the product received it. ``read_keys(n)``
    copies the first n cells of the cache, ``[n_head_kv, n, head_dim]``, and ``read_softmax()`` the
    weights ``[n_head, n_cell]`` float32; both work during ``on_read`` only. With flash attention
    there is no softmax to read. ``mask`` is ``[n_cell]``: minus infinity where hidden. ``rotation``
    is the orthonormal ``[r, r]`` matrix
    that q and K were multiplied by in blocks before the cache, or None. ``n_rot`` counts the dims
    that RoPE turns, the first of a head or, where ``rotated_last``, the last. ``cache`` is
    the place of its cache among those of the step: that of the first attention node that reads it,
    and ``shared_keys`` marks a layer that reads another layer's cache. ``top_k`` is the number of
    cells that a top-k of the model's own lets the mask show, None where the mask is an ordinary
    one.
    """

    index: int
    queries: NDArray[np.float32]
    n_head_kv: int
    key_type: str
    read_keys: Callable[[int], FloatArray]
    mask: NDArray[np.float32]
    read_softmax: Callable[[], NDArray[np.float32]] | None
    scale: float
    softcap: float | None
    max_bias: float
    sinks: NDArray[np.float32] | None
    rotation: NDArray[np.float32] | None
    n_rot: int
    rotated_last: bool
    cache: int
    shared_keys: bool
    top_k: int | None


@dataclass(frozen=True)
class ValueRead:
    """The product of V and the softmax of the attention node with the same ``index``.

    ``read_values(n)`` copies V of the first n cells of the cache, ``[n_head_kv, n, d_v]``, and
    ``read_output()`` what the product gave, ``[n_head, d_v]`` float32; both work during
    ``on_values`` only. ``rotation`` is the matrix that V, and with it the output, was multiplied by
    before the cache, as for K.
    """

    index: int
    rotation: NDArray[np.float32] | None
    read_values: Callable[[int], FloatArray]
    read_output: Callable[[], NDArray[np.float32]]


@dataclass(frozen=True)
class OutputNode:
    """What the heads of one attention node put out, before the output projection.

    ``read()`` copies it, ``[n_token, n_head · d_v]`` float32, and ``write(array)`` puts another in
    its place; both work during ``on_output`` only. ``again`` marks the same output once more, in
    the basis that the model goes on with, where the cache has another.
    """

    again: bool
    read: Callable[[], NDArray[np.float32]]
    write: Callable[[NDArray[np.float32]], None]


@dataclass(frozen=True)
class AttentionNode:
    """One attention node of a decode step, to be changed before the graph goes on.

    ``ordinal`` is its place among the attention nodes of the step, from 0 in the order of the
    graph. ``queries`` is ``[n_head, head_dim]`` float32 as the product received it, None where they
    were not asked for, and ``read_keys(start, stop)`` copies cells of the cache, ``[n_head_kv, stop
    - start, head_dim]``, both in the basis of the cache.

    Without flash attention ``open_softmax()`` returns the weights, ``[n_head, n_cell]`` float32, to
    be changed in place and given to ``write_softmax(weights)``: on the CPU they are the engine's
    own memory, else a copy. With flash attention both are None, and
    ``read_values(start, stop)`` copies cells of V, ``[n_head_kv, stop - start, d_v]``, and
    ``write_output(output)`` replaces what the heads put out, ``[n_head, d_v]`` float32 in the basis
    of that V. All work during ``on_node`` only.
    """

    ordinal: int
    queries: NDArray[np.float32] | None
    read_keys: Callable[[int, int], FloatArray]
    open_softmax: Callable[[], NDArray[np.float32]] | None = None
    write_softmax: Callable[[NDArray[np.float32]], None] | None = None
    read_values: Callable[[int, int], FloatArray] | None = None
    write_output: Callable[[NDArray[np.float32]], None] | None = None


def visible_span(read: AttentionRead, n_visible: int) -> int:
    """Return how many positions the mask shows; they must be the last ones, in order.

    Cell j of the cache holds position j as long as the sequence was decoded front to back into an
    empty cache. The mask proves it: it shows cells up to the query's own and no further.
    """
    shown = np.flatnonzero(np.isfinite(read.mask))
    expected = np.arange(n_visible - len(shown), n_visible)
    distance = (expected - (n_visible - 1)).astype(np.float32)
    wanted = distance if read.max_bias > 0 else np.zeros_like(distance)
    # with flash attention the mask is in half precision
    seen = np.array_equal(shown, expected) and np.allclose(read.mask[shown], wanted, 2**-11, 0)
    if not seen:
        raise EngineError(
            f"layer {read.index} shows {len(shown)} cache cells that are not the last positions "
            f"before {n_visible} in order, so cells cannot be matched to positions."
        )
    return len(shown)
