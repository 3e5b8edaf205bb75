"""From an attention node back to what it was made of: the product of q and K, and the layer."""

from __future__ import annotations

import re

from pytest_kvgate.engine.errors import EngineError
from pytest_kvgate.engine.ggml import MOVES, Ggml, Tensor, float_params, source, walk_back

#: Among how many nodes the number of a layer is looked for.
LONGEST_WALK = 64

#: Names such as ``Qcur-3`` and ``Qcur-3 (view) (permuted)``.
LAYER = re.compile(rb"[^ ]*-(\d+)(?: \(|$)")


def find_product(ggml: Ggml, node: Tensor) -> tuple[Tensor | None, float, float | None]:
    """Walk from a softmax to its ``MUL_MAT(k, q)``.

    Returns:
        The product, and scale and cap such that the logit is ``cap·tanh(scale·q·k/cap)``, or
        ``scale·q·k`` where cap is None.
    """
    outer, inner = float(float_params(node)[0]), 1.0
    capped = False
    current = source(node, 0)
    while current is not None:
        operation = ggml.op(current)
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
        elif operation == "UNARY" and ggml.unary_op(current) == "TANH" and not capped:
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


def multiplies_cache(ggml: Ggml, node: Tensor) -> bool:
    """Whether a ``MUL_MAT`` may be that of K and q; that of V and a softmax is not."""
    keys, operand = source(node, 0), source(node, 1)
    if keys is None or operand is None or not keys.view_src:
        return False
    return ggml.op(operand) != "SOFT_MAX"


def layer_index(node: Tensor, ordinal: int) -> int:
    """Return the layer's number, which llama.cpp appends to the names of nodes, else the ordinal.

    A node that fuses the whole attention has no such name; then q has, or the nearest of what it
    was made of.
    """
    found = LAYER.match(node.name)
    queries = source(node, 0)
    looked_at = 0

    def look(current: Tensor) -> bool:
        nonlocal found, looked_at
        looked_at += 1
        found = found or LAYER.match(current.name)
        return found is None and looked_at < LONGEST_WALK

    if queries is not None:
        walk_back(queries, look)
    return int(found.group(1)) if found else ordinal
