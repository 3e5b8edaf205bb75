"""The output of attention, found in a graph of any batch, to be carried into another graph."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from pytest_kvgate.engine.ggml import Ggml, Tensor, source
from pytest_kvgate.engine.reads import OutputNode
from pytest_kvgate.engine.rotary import rotation_matrix


def find_output(ggml: Ggml, node: Tensor) -> OutputNode | None:
    """Return the output of attention that a node computes; None where it computes another thing.

    It is what ``FLASH_ATTN_EXT`` puts out, and once more the product that brings this back from the
    basis of a quantized V cache; or else the product of V and a softmax with a mask.
    """
    if ggml.op(node) == "FLASH_ATTN_EXT":
        return _token_by_token(ggml, node, node.ne[2], again=False)
    operand = source(node, 1) if ggml.op(node) == "MUL_MAT" else None
    made_by = None if operand is None else ggml.behind_moves(operand)
    if made_by is None:
        return None
    if ggml.op(made_by) == "FLASH_ATTN_EXT" and rotation_matrix(node) is not None:
        return _token_by_token(ggml, node, made_by.ne[2], again=True)
    if ggml.op(made_by) == "SOFT_MAX" and source(made_by, 1) is not None:
        return _head_by_head(ggml, node)
    return None


def _token_by_token(ggml: Ggml, node: Tensor, n_token: int, *, again: bool) -> OutputNode:
    def read() -> NDArray[np.float32]:
        return np.asarray(ggml.read(node), dtype=np.float32).reshape(n_token, -1)

    return OutputNode(again, read, lambda output: ggml.write(node, output))


def _head_by_head(ggml: Ggml, node: Tensor) -> OutputNode:
    value_dim, n_token, n_head = node.ne[:3]

    def read() -> NDArray[np.float32]:
        heads = np.asarray(ggml.read(node), dtype=np.float32)
        return heads.transpose(1, 0, 2).reshape(n_token, -1)

    def write(output: NDArray[np.float32]) -> None:
        ggml.write(node, output.reshape(n_token, n_head, value_dim).transpose(1, 0, 2))

    return OutputNode(False, read, write)
