"""Attention nodes of a decode step, handed over to be changed while the graph waits.

Unlike a read for a capture, nothing is described here that does not change from step to step, so
that a step costs little more than one that nobody looks at.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable

import numpy as np
from numpy.typing import NDArray

from pytest_kvgate.engine.ggml import FloatArray, Ggml, Tensor, source
from pytest_kvgate.engine.logits import multiplies_cache
from pytest_kvgate.engine.reads import AttentionNode


class Steering:
    """Calls ``on_node`` for each attention node of one decode step, in the order of the graph.

    The graph stops in the same places with and without queries, so that its last bits do not
    depend on what a run needs.
    """

    def __init__(
        self, ggml: Ggml, on_node: Callable[[AttentionNode], None], *, with_queries: bool
    ) -> None:
        self._ggml = ggml
        self._on_node = on_node
        self._with_queries = with_queries
        self._products: dict[int, NDArray[np.float32] | None] = {}
        self.count = 0

    def wanted(self, node: Tensor) -> bool:
        """Whether the graph is to stop after a node."""
        operation = self._ggml.op(node)
        if operation == "MUL_MAT":
            return multiplies_cache(self._ggml, node)
        if operation == "SOFT_MAX":
            return source(node, 1) is not None
        return operation == "FLASH_ATTN_EXT"

    def computed(self, address: int, node: Tensor) -> None:
        """Take a node that was computed; an attention node is handed over."""
        operation = self._ggml.op(node)
        if operation == "MUL_MAT":
            # q is copied here, at its product: the scheduler may reuse its memory right after
            queries = source(node, 1)
            if queries is not None and queries.ne[1] == 1 and queries.ne[3] == 1:
                self._products[address] = self._heads(queries) if self._with_queries else None
        elif operation == "FLASH_ATTN_EXT":
            self._hand_over(self._fused(node))
        else:
            self._hand_over(self._unfused(node))

    def _hand_over(self, attention: AttentionNode | None) -> None:
        if attention is not None:
            self.count += 1
            self._on_node(attention)

    def _unfused(self, node: Tensor) -> AttentionNode | None:
        """Return what a ``SOFT_MAX`` node hands over; None where it is not over a cache."""
        product = source(node, 0)
        while product is not None and ctypes.addressof(product) not in self._products:
            product = source(product, 0)  # behind a scale and a softcap
        keys = None if product is None else source(product, 0)
        if product is None or keys is None:
            return None
        queries = self._products[ctypes.addressof(product)]
        return AttentionNode(
            ordinal=self.count,
            queries=queries,
            read_keys=self._reader(keys),
            open_softmax=lambda: self._ggml.open(node)[:, 0],
            write_softmax=lambda weights: self._ggml.write(node, weights),
        )

    def _fused(self, node: Tensor) -> AttentionNode:
        queries, keys, values = (source(node, position) for position in range(3))
        assert queries is not None
        assert keys is not None
        assert values is not None
        return AttentionNode(
            ordinal=self.count,
            queries=self._heads(queries),
            read_keys=self._reader(keys),
            read_values=self._reader(values),
            write_output=lambda output: self._ggml.write(node, output),
        )

    def _heads(self, tensor: Tensor) -> NDArray[np.float32]:
        """Read the only row of each head."""
        return np.asarray(self._ggml.read(tensor)[:, 0], dtype=np.float32)

    def _reader(self, cells: Tensor) -> Callable[[int, int], FloatArray]:
        ggml = self._ggml
        return lambda start, stop: ggml.read(cells, stop - start, start)
