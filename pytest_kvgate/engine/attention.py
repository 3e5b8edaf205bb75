"""The hook at the attention operation: what every KV layer read and computed, as it did.

llama.cpp calls the hook for every graph node, before it is computed (``ask``) and, where wanted,
after. Attention is recognised by operation, never by tensor name: a ``SOFT_MAX`` with a mask whose
input leads back to the product of q and a view of the KV cache, and the product of V and that
softmax; or, with flash attention, one ``FLASH_ATTN_EXT`` that does it all.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable

import numpy as np
from numpy.typing import NDArray

from pytest_kvgate.engine.errors import EngineError
from pytest_kvgate.engine.ggml import FloatArray, Ggml, Tensor, float_params, source
from pytest_kvgate.engine.logits import find_product, layer_index, multiplies_cache
from pytest_kvgate.engine.outputs import find_output
from pytest_kvgate.engine.reads import AttentionNode, AttentionRead, OutputNode, ValueRead
from pytest_kvgate.engine.recurrent import recurrent_layer
from pytest_kvgate.engine.rotary import find_rotation, rotary_dims, rotation_matrix
from pytest_kvgate.engine.sparsity import GATHERED, gathers_from_cache, mask_top_k
from pytest_kvgate.engine.steering import Steering

NOT_CAUSAL = (
    "this model's attention reads keys of its own batch and not a KV cache (an encoder or a "
    "diffusion model), so there is nothing to page."
)
ONE_TOKEN = "attention can be read in a decode step of one token only."


class AttentionHook:
    """Calls ``on_read`` for each attention node of a decode step while it is armed.

    ``on_values``, where there is one, is called for the product with V, after the layer's
    ``on_read``; not for layers that read another layer's cache. Armed or not, what `carry` names is
    called for the output of every attention node of every batch. `steer` is for a decode step whose
    attention is to be changed, and takes the place of both.

    An exception cannot cross the C library; it is kept, stops the graph, and is raised by
    `raise_pending` once the library has returned. ``recurrent_layers`` are the layers that kept a
    recurrent state at the steps so far.
    """

    def __init__(self, ggml: Ggml, *, flash_attention: bool) -> None:
        self._ggml = ggml
        self._flash_attention = flash_attention
        self._on_read: Callable[[AttentionRead], None] | None = None
        self._on_values: Callable[[ValueRead], None] | None = None
        self._on_output: Callable[[OutputNode], None] | None = None
        self._error: BaseException | None = None
        self._queries: dict[int, NDArray[np.float32]] = {}
        self._rotations: dict[int, NDArray[np.float32]] = {}
        self._written: dict[int, NDArray[np.float32]] = {}
        self._caches: dict[int, int] = {}
        self._softmaxes: dict[int, AttentionRead] = {}
        self._count = 0
        self._steering: Steering | None = None
        self.recurrent_layers: set[int] = set()

    def arm(
        self,
        on_read: Callable[[AttentionRead], None],
        on_values: Callable[[ValueRead], None] | None = None,
    ) -> None:
        """Report the attention nodes of the next decode step, and their V where it is asked for."""
        self._on_read = on_read
        self._on_values = on_values
        self._queries.clear()
        self._rotations.clear()
        self._written.clear()
        self._caches.clear()
        self._softmaxes.clear()
        self._count = 0

    def disarm(self) -> int:
        """Stop reporting; return how many attention nodes were seen."""
        self._on_read = None
        return self._count

    def carry(self, on_output: Callable[[OutputNode], None]) -> None:
        """Report the output of every attention node from now on, in the order of the graph."""
        self._on_output = on_output

    def steer(self, on_node: Callable[[AttentionNode], None], *, with_queries: bool) -> None:
        """Hand over the attention nodes of the next decode step, to be changed.

        ``with_queries`` is whether their q is needed; with flash attention it comes in any case.
        """
        self._steering = Steering(self._ggml, on_node, with_queries=with_queries)

    def release(self) -> int:
        """Stop handing over; return how many attention nodes were seen."""
        steering, self._steering = self._steering, None
        return 0 if steering is None else steering.count

    def raise_pending(self) -> None:
        """Raise what went wrong inside a callback, if anything did."""
        error, self._error = self._error, None
        if error is not None:
            raise error

    def __call__(self, address: int, ask: bool, _user_data: object) -> bool:
        """Answer llama.cpp: is this node wanted (``ask``), or may the graph go on."""
        try:
            if self._steering is not None:
                node = Tensor.from_address(address)
                if ask:
                    return self._steering.wanted(node)
                self._steering.computed(address, node)
                return True
            if self._on_read is None and self._on_output is None:
                return not ask
            node = Tensor.from_address(address)
            output = None if self._on_output is None else find_output(self._ggml, node)
            if ask:
                layer = recurrent_layer(self._ggml, node)
                if layer is not None:
                    self.recurrent_layers.add(layer)
                wanted = self._on_read is not None and self._wanted(node)
                return wanted or output is not None
            if self._on_read is not None:
                self._computed(address, node)
            if output is not None and self._on_output is not None:
                self._on_output(output)
        except BaseException as error:  # handed on by raise_pending()
            self._error = error
            self._on_read = self._on_output = self._steering = None
            return False
        return True

    def _wanted(self, node: Tensor) -> bool:
        operation = self._ggml.op(node)
        if operation == "MUL_MAT":
            self._keep_rotation(node)
            if self._read_of_values(node) is not None:
                return True
            return multiplies_cache(self._ggml, node)
        if operation == "SET_ROWS":
            self._keep_write(node)
            return False
        if operation == "FLASH_ATTN_EXT":
            if not self._flash_attention:
                raise EngineError(
                    "the engine used flash attention although it was turned off, so there is no "
                    "softmax to verify the capture against."
                )
            return True
        return operation == "SOFT_MAX" and source(node, 1) is not None

    def _computed(self, address: int, node: Tensor) -> None:
        operation = self._ggml.op(node)
        if operation == "MUL_MAT":
            attention = self._read_of_values(node)
            if attention is not None:
                self._report_values(node, attention)
                return
            queries = source(node, 1) if multiplies_cache(self._ggml, node) else None
            # q is copied here, at its product: the scheduler may reuse its memory right after.
            if queries is not None and queries.ne[1] == 1 and queries.ne[3] == 1:
                values = self._ggml.read(queries)
                self._queries[address] = np.asarray(values[:, 0], dtype=np.float32)
            return
        if operation == "FLASH_ATTN_EXT":
            self._report(self._fused_attention(node), node)
            return
        read = self._attention(node) if operation == "SOFT_MAX" else None
        if read is None:
            return
        if self._flash_attention:
            raise EngineError(
                "this model attends without flash attention although it was turned on: llama.cpp "
                "does not have it for this architecture. Leave it off."
            )
        if self._report(read, None):
            self._softmaxes[address] = read

    def _read_of_values(self, node: Tensor) -> AttentionRead | None:
        """Return whose softmax a ``MUL_MAT`` multiplies by V, where V is asked for."""
        operand = source(node, 1) if self._softmaxes else None
        softmax = None if operand is None else self._ggml.behind_moves(operand)
        return None if softmax is None else self._softmaxes.get(ctypes.addressof(softmax))

    def _report(self, read: AttentionRead, fused: Tensor | None) -> bool:
        """Report one attention node, and at once its values where the node did it all.

        Returns:
            Whether its product with V is still to come and wanted.
        """
        assert self._on_read is not None
        self._count += 1
        self._on_read(read)
        if self._on_values is None or read.shared_keys:
            return False
        if fused is None:
            return True
        values, ggml = source(fused, 2), self._ggml
        assert values is not None
        root = ggml.behind_moves(values)
        address = 0 if root is None else ctypes.addressof(root)
        self._hand_over(
            read,
            values,
            lambda n_cell: ggml.read(values, n_cell),
            lambda: np.asarray(ggml.read(fused)[0], dtype=np.float32),
            self._written.get(address),
        )
        return False

    def _report_values(self, node: Tensor, attention: AttentionRead) -> None:
        values, ggml = source(node, 0), self._ggml
        assert values is not None
        self._hand_over(
            attention,
            values,
            # it lies there dim by dim
            lambda n_cell: ggml.read(values)[:, :, :n_cell].transpose(0, 2, 1),
            lambda: np.asarray(ggml.read(node)[:, 0], dtype=np.float32),
            None,
        )

    def _hand_over(
        self,
        attention: AttentionRead,
        values: Tensor,
        read_values: Callable[[int], FloatArray],
        read_output: Callable[[], NDArray[np.float32]],
        rotation: NDArray[np.float32] | None,
    ) -> None:
        assert self._on_values is not None
        if values.ne[2] != attention.n_head_kv:
            raise EngineError(
                f"layer {attention.index} reads V of {values.ne[2]} KV heads and K of "
                f"{attention.n_head_kv}, so V cannot be matched to the query heads. Capture "
                "without values."
            )
        self._on_values(ValueRead(attention.index, rotation, read_values, read_output))

    def _fused_attention(self, node: Tensor) -> AttentionRead:
        """Collect one ``FLASH_ATTN_EXT`` node."""
        scale, max_bias, softcap = (float(value) for value in float_params(node)[:3])
        queries, keys, mask = source(node, 0), source(node, 1), source(node, 3)
        assert queries is not None
        assert keys is not None
        if mask is None:
            raise EngineError(NOT_CAUSAL)
        if queries.ne[1] != 1 or queries.ne[3] != 1:
            raise EngineError(ONE_TOKEN)
        return self._read(
            node,
            (queries, keys, mask, source(node, 4)),
            np.asarray(self._ggml.read(queries)[:, 0], dtype=np.float32),
            None,
            (scale, softcap or None, max_bias),
        )

    def _attention(self, node: Tensor) -> AttentionRead | None:
        """Collect one ``SOFT_MAX`` node; None where it is not attention over a cache."""
        product, scale, softcap = find_product(self._ggml, node)
        if product is None:
            return None
        keys, queries = source(product, 0), source(product, 1)
        mask = source(node, 1)
        if keys is None or queries is None or mask is None:
            return None
        read_queries = self._queries.get(ctypes.addressof(product))
        ggml = self._ggml
        return self._read(
            node,
            (queries, keys, mask, source(node, 2)),
            read_queries,
            lambda: np.asarray(ggml.read(node)[:, 0], dtype=np.float32),
            (scale, softcap, float(float_params(node)[1])),
        )

    def _read(
        self,
        node: Tensor,
        operands: tuple[Tensor, Tensor, Tensor, Tensor | None],
        read_queries: NDArray[np.float32] | None,
        read_softmax: Callable[[], NDArray[np.float32]] | None,
        numbers: tuple[float, float | None, float],
    ) -> AttentionRead:
        """Describe an attention node by its q, K, mask and sinks, and its scale, cap and bias."""
        ggml = self._ggml
        queries, keys, mask, sinks = operands
        cache = ggml.behind_moves(keys)
        if cache is None or ggml.op(cache) != "NONE":
            raise EngineError(GATHERED if gathers_from_cache(ggml, keys) else NOT_CAUSAL)
        if read_queries is None:
            raise EngineError(ONE_TOKEN)
        first_reader = self._caches.setdefault(ctypes.addressof(cache), self._count)
        n_rot, rotated_last = rotary_dims(ggml, queries)
        scale, softcap, max_bias = numbers
        return AttentionRead(
            index=layer_index(node, self._count),
            queries=read_queries,
            n_head_kv=keys.ne[2],
            key_type=ggml.type_name(keys.type),
            read_keys=lambda n_cell: ggml.read(keys, n_cell),
            mask=np.asarray(ggml.read(mask)[0, 0], dtype=np.float32),
            read_softmax=read_softmax,
            scale=scale,
            softcap=softcap,
            max_bias=max_bias,
            sinks=None if sinks is None else np.asarray(ggml.read(sinks)[0, 0], dtype=np.float32),
            rotation=self._rotation_of(queries),
            n_rot=n_rot,
            rotated_last=rotated_last,
            cache=first_reader,
            shared_keys=first_reader != self._count,
            top_k=mask_top_k(ggml, mask),
        )

    def _keep_rotation(self, node: Tensor) -> None:
        """Read the matrix of a rotation before it is used; its memory may be reused later."""
        matrix = rotation_matrix(node)
        if matrix is None or ctypes.addressof(matrix) in self._rotations:
            return
        rotation = np.asarray(self._ggml.read(matrix)[0], dtype=np.float32)
        if not np.allclose(rotation @ rotation.T, np.eye(len(rotation)), atol=1e-4):
            raise EngineError(
                "q, K or V is multiplied by a matrix that is not orthonormal before the attention "
                "product; it cannot be brought back to the model's own basis."
            )
        self._rotations[ctypes.addressof(matrix)] = rotation

    def _rotation_of(self, vectors: Tensor) -> NDArray[np.float32] | None:
        """Return the matrix that q, or a row on its way into a cache, was multiplied by."""
        matrix = find_rotation(self._ggml, vectors)
        return None if matrix is None else self._rotations[ctypes.addressof(matrix)]

    def _keep_write(self, node: Tensor) -> None:
        """Remember how the rows were rotated that a ``SET_ROWS`` writes into a cache."""
        rows = source(node, 0)
        rotation = None if rows is None else self._rotation_of(rows)
        if rotation is not None and node.view_src:
            self._written[node.view_src] = rotation
