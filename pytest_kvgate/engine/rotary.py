"""What happens to q between its weights and the attention product: RoPE, and a rotation."""

from __future__ import annotations

from pytest_kvgate.engine.ggml import MOVES, Ggml, Tensor, source

#: GGML_TENSOR_FLAG_INPUT
INPUT_FLAG = 1

#: Where ``MUL_MAT`` keeps its hint in ``op_params``, and GGML_HINT_SRC0_IS_HADAMARD.
HINT, HADAMARD = 1, 1

#: Operations that treat every dim of a head by itself.
ELEMENTWISE = frozenset({"SCALE", "MUL", "RMS_NORM", "NORM"})

#: Where ``ROPE`` keeps in its ``op_params`` how many dims it turns, and which of them is the first.
ROPE_LENGTH, ROPE_OFFSET = 1, 15


def find_rotation(ggml: Ggml, vectors: Tensor) -> Tensor | None:
    """Return the matrix that rotates q, K or V for a quantized cache, where there is one."""
    product = ggml.behind_moves(vectors)
    if product is None or ggml.op(product) != "MUL_MAT":
        return None
    return rotation_matrix(product)


def rotation_matrix(product: Tensor) -> Tensor | None:
    """Return the matrix of a ``MUL_MAT`` that rotates; None where it multiplies by something else.

    Unlike a weight, a rotation is an input of the graph. Its copy on another device is not, but
    llama.cpp marks the product.
    """
    matrix = source(product, 0)
    if matrix is None or matrix.ne[0] != matrix.ne[1] or matrix.view_src:
        return None
    marked = product.op_params[HINT] == HADAMARD
    return matrix if marked or matrix.flags & INPUT_FLAG else None


def rotary_dims(ggml: Ggml, queries: Tensor) -> tuple[int, bool]:
    """Find which dims of a head RoPE turned on the way to q.

    Returns:
        How many they are, 0 where RoPE never came by, and whether they are the last dims of the
        head; else they are the first. Where neither holds, the dims between them and the nearer
        end are counted in, so that the rest is certain never to be turned.
    """
    span = _turned(ggml, queries, 16)
    if span is None:
        return 0, False
    head_dim = queries.ne[0]
    begin, end = span[0], min(span[1], head_dim)
    if begin <= head_dim - end:
        return end, False
    return head_dim - begin, True


def _turned(ggml: Ggml, node: Tensor | None, depth: int) -> tuple[int, int] | None:
    """Return the span of turned dims, first and one past the last, at most ``depth`` nodes back."""
    if node is None or depth == 0:
        return None
    operation = ggml.op(node)
    if operation == "ROPE":
        begin = node.op_params[ROPE_OFFSET]
        return begin, min(begin + node.op_params[ROPE_LENGTH], node.ne[0])
    if operation == "MUL_MAT" and find_rotation(ggml, node) is not None:
        return _turned(ggml, source(node, 1), depth - 1)
    if operation in MOVES or operation in ELEMENTWISE:
        return _turned(ggml, source(node, 0), depth - 1)
    if operation == "CONCAT":
        # MLA joins a part that knows no position with one that RoPE turned, in either order.
        first, second = source(node, 0), source(node, 1)
        along_dims = node.op_params[0] == 0
        shift = first.ne[0] if first is not None and along_dims else 0
        found = _turned(ggml, first, depth - 1), _shifted(_turned(ggml, second, depth - 1), shift)
        spans = [span for span in found if span is not None]
        if spans:
            return min(begin for begin, _ in spans), max(end for _, end in spans)
    return None


def _shifted(span: tuple[int, int] | None, shift: int) -> tuple[int, int] | None:
    return None if span is None else (span[0] + shift, span[1] + shift)
