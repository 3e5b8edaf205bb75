"""The hook at the attention operation: what every KV layer read and computed, as it did.

llama.cpp calls the hook for every graph node, before it is computed (``ask``) and, where wanted,
after. Attention is recognised by operation, never by tensor name: a ``SOFT_MAX`` with a mask whose
input leads back to the product of q and a view of the KV cache, and the product of V and that
softmax.
"""

from __future__ import annotations

import ctypes
import re
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from pytest_kvgate.engine.errors import EngineError
from pytest_kvgate.engine.ggml import MOVES, FloatArray, Ggml, Tensor, float_params, source
from pytest_kvgate.engine.rotary import find_rotation, rotary_dims
from pytest_kvgate.engine.sparsity import GATHERED, gathers_from_cache, mask_top_k


@dataclass(frozen=True)
class AttentionRead:
    """What one attention node read and computed for one query position.

    ``queries`` is ``[n_head, head_dim]`` float32 as the product received it. ``read_keys(n)``
    copies the first n cells of the cache, ``[n_head_kv, n, head_dim]``, and ``read_softmax()`` the
    weights ``[n_head, n_cell]`` float32; both work during ``on_read`` only. ``mask`` is
    ``[n_cell]``: minus infinity where hidden. ``rotation`` is the orthonormal ``[r, r]`` matrix
    that q and K were multiplied by in blocks before the cache, or None. ``n_rot`` counts the dims
    that RoPE turns, the first of a head or, where ``rotated_last``, the last. ``shared_keys`` marks
    a layer that reads another layer's cache. ``top_k`` is the number of cells that a top-k of the
    model's own lets the mask show, None where the mask is an ordinary one.
    """

    index: int
    queries: NDArray[np.float32]
    n_head_kv: int
    key_type: str
    read_keys: Callable[[int], FloatArray]
    mask: NDArray[np.float32]
    read_softmax: Callable[[], NDArray[np.float32]]
    scale: float
    softcap: float | None
    max_bias: float
    sinks: NDArray[np.float32] | None
    rotation: NDArray[np.float32] | None
    n_rot: int
    rotated_last: bool
    shared_keys: bool
    top_k: int | None


@dataclass(frozen=True)
class ValueRead:
    """The product of V and the softmax of the attention node with the same ``index``.

    ``read_values(n)`` copies V of the first n cells of the cache, ``[n_head_kv, n, d_v]``, and
    ``read_output()`` what the product gave, ``[n_head, d_v]`` float32; both work during
    ``on_values`` only.
    """

    index: int
    read_values: Callable[[int], FloatArray]
    read_output: Callable[[], NDArray[np.float32]]


class AttentionHook:
    """Calls ``on_read`` for each attention node of a decode step while it is armed.

    ``on_values``, where there is one, is called for the product with V, after the layer's
    ``on_read``; not for layers that read another layer's cache.

    An exception cannot cross the C library; it is kept, stops the graph, and is raised by
    `raise_pending` once the library has returned.
    """

    def __init__(self, ggml: Ggml) -> None:
        self._ggml = ggml
        self._on_read: Callable[[AttentionRead], None] | None = None
        self._on_values: Callable[[ValueRead], None] | None = None
        self._error: BaseException | None = None
        self._queries: dict[int, NDArray[np.float32]] = {}
        self._rotation: NDArray[np.float32] | None = None
        self._caches: set[int] = set()
        self._softmaxes: dict[int, AttentionRead] = {}
        self._count = 0

    def arm(
        self,
        on_read: Callable[[AttentionRead], None],
        on_values: Callable[[ValueRead], None] | None = None,
    ) -> None:
        """Report the attention nodes of the next decode step, and their V where it is asked for."""
        self._on_read = on_read
        self._on_values = on_values
        self._queries.clear()
        self._rotation = None
        self._caches.clear()
        self._softmaxes.clear()
        self._count = 0

    def disarm(self) -> int:
        """Stop reporting; return how many attention nodes were seen."""
        self._on_read = None
        return self._count

    def raise_pending(self) -> None:
        """Raise what went wrong inside a callback, if anything did."""
        error, self._error = self._error, None
        if error is not None:
            raise error

    def __call__(self, address: int, ask: bool, _user_data: object) -> bool:
        """Answer llama.cpp: is this node wanted (``ask``), or may the graph go on."""
        try:
            if self._on_read is None:
                return not ask
            node = Tensor.from_address(address)
            if ask:
                return self._wanted(node)
            self._computed(address, node)
        except BaseException as error:  # handed on by raise_pending()
            self._error = error
            self._on_read = None
            return False
        return True

    def _wanted(self, node: Tensor) -> bool:
        operation = self._ggml.op(node)
        if operation == "MUL_MAT":
            if self._read_of_values(node) is not None:
                return True
            keys, operand = source(node, 0), source(node, 1)
            if keys is None or operand is None or not keys.view_src:
                return False
            return self._ggml.op(operand) != "SOFT_MAX"  # that is the product with V
        if operation == "FLASH_ATTN_EXT":
            raise EngineError(
                "the engine used flash attention although it was turned off, so there is no "
                "softmax to verify the capture against."
            )
        return operation == "SOFT_MAX" and source(node, 1) is not None

    def _computed(self, address: int, node: Tensor) -> None:
        if self._ggml.op(node) == "MUL_MAT":
            attention = self._read_of_values(node)
            if attention is not None:
                self._report_values(node, attention)
                return
            queries = source(node, 1)
            # q is copied here, at its product: the scheduler may reuse its memory right after.
            if queries is not None and queries.ne[1] == 1 and queries.ne[3] == 1:
                values = self._ggml.read(queries)
                self._queries[address] = np.asarray(values[:, 0], dtype=np.float32)
                rotation = find_rotation(self._ggml, queries)
                if rotation is not None and self._rotation is None:
                    self._rotation = self._read_rotation(rotation)
            return
        read = self._attention(node)
        if read is not None and self._on_read is not None:
            self._count += 1
            self._on_read(read)
            if self._on_values is not None and not read.shared_keys:
                self._softmaxes[address] = read

    def _read_of_values(self, node: Tensor) -> AttentionRead | None:
        """Return whose softmax a ``MUL_MAT`` multiplies by V, where V is asked for."""
        operand = source(node, 1) if self._softmaxes else None
        softmax = None if operand is None else self._ggml.behind_moves(operand)
        return None if softmax is None else self._softmaxes.get(ctypes.addressof(softmax))

    def _report_values(self, node: Tensor, attention: AttentionRead) -> None:
        values, ggml = source(node, 0), self._ggml
        assert values is not None
        assert self._on_values is not None
        if values.ne[2] != attention.n_head_kv:
            raise EngineError(
                f"layer {attention.index} reads V of {values.ne[2]} KV heads and K of "
                f"{attention.n_head_kv}, so V cannot be matched to the query heads. Capture "
                "without values."
            )

        def read_values(n_cell: int) -> FloatArray:
            return ggml.read(values)[:, :, :n_cell].transpose(0, 2, 1)  # lies there dim by dim

        self._on_values(
            ValueRead(
                index=attention.index,
                read_values=read_values,
                read_output=lambda: np.asarray(ggml.read(node)[:, 0], dtype=np.float32),
            )
        )

    def _attention(self, node: Tensor) -> AttentionRead | None:
        """Collect one ``SOFT_MAX`` node; None where it is not attention over a cache."""
        product, scale, softcap = self._product(node)
        if product is None:
            return None
        keys, queries = source(product, 0), source(product, 1)
        mask = source(node, 1)
        if keys is None or queries is None or mask is None:
            return None
        root = Tensor.from_address(keys.view_src) if keys.view_src else keys
        if self._ggml.op(root) != "NONE":
            if gathers_from_cache(self._ggml, keys):
                raise EngineError(GATHERED)
            raise EngineError(
                "this model's attention reads keys of its own batch and not a KV cache (an encoder "
                "or a diffusion model), so there is nothing to page."
            )
        read_queries = self._queries.get(ctypes.addressof(product))
        if read_queries is None:
            raise EngineError("attention can be read in a decode step of one token only.")
        address = keys.view_src or 0
        shared = address in self._caches
        self._caches.add(address)
        sinks = source(node, 2)
        rotated = find_rotation(self._ggml, queries) is not None
        n_rot, rotated_last = rotary_dims(self._ggml, queries)
        ggml = self._ggml

        def read_keys(n_cell: int) -> FloatArray:
            return ggml.read(keys, n_cell)

        return AttentionRead(
            index=_layer_index(node, self._count),
            queries=read_queries,
            n_head_kv=keys.ne[2],
            key_type=ggml.type_name(keys.type),
            read_keys=read_keys,
            mask=np.asarray(ggml.read(mask)[0, 0], dtype=np.float32),
            read_softmax=lambda: np.asarray(ggml.read(node)[:, 0], dtype=np.float32),
            scale=scale,
            softcap=softcap,
            max_bias=float(float_params(node)[1]),
            sinks=None if sinks is None else np.asarray(ggml.read(sinks)[0, 0], dtype=np.float32),
            rotation=self._rotation if rotated else None,
            n_rot=n_rot,
            rotated_last=rotated_last,
            shared_keys=shared,
            top_k=mask_top_k(ggml, mask),
        )

    def _product(self, node: Tensor) -> tuple[Tensor | None, float, float | None]:
        """Walk from a softmax to its ``MUL_MAT(k, q)``.

        Returns:
            The product, and scale and cap such that the logit is ``cap·tanh(scale·q·k/cap)``, or
            ``scale·q·k`` where cap is None.
        """
        outer, inner = float(float_params(node)[0]), 1.0
        capped = False
        current = source(node, 0)
        while current is not None:
            operation = self._ggml.op(current)
            if operation == "MUL_MAT":
                if not capped:
                    return current, outer, None
                return current, outer * inner, outer
            if operation == "SCALE":
                factor, bias = (float(value) for value in float_params(current)[:2])
                if bias:
                    raise EngineError("this model adds a bias to its logits; that is not measured.")
                if capped:
                    inner *= factor
                else:
                    outer *= factor
            elif operation == "UNARY" and self._ggml.unary_op(current) == "TANH" and not capped:
                capped = True
            elif operation == "ADD":
                raise EngineError(
                    "this model adds a bias tensor to its attention logits (as T5 does); that is "
                    "not part of what kvgate measures, so its numbers would be wrong."
                )
            elif operation not in MOVES:
                return None, outer, None
            current = source(current, 0)
        return None, outer, None

    def _read_rotation(self, matrix: Tensor) -> NDArray[np.float32]:
        rotation = np.asarray(self._ggml.read(matrix)[0], dtype=np.float32)
        if not np.allclose(rotation @ rotation.T, np.eye(len(rotation)), atol=1e-4):
            raise EngineError(
                "q is multiplied by a matrix that is not orthonormal before the attention product; "
                "K cannot be brought back to the model's own basis."
            )
        return rotation


def _layer_index(node: Tensor, ordinal: int) -> int:
    """Return the layer's number, which llama.cpp appends to a node's name, else the ordinal."""
    found = re.search(rb"-(\d+)$", node.name)
    return int(found.group(1)) if found else ordinal
