"""Which layers keep a recurrent state, seen in the graph."""

from __future__ import annotations

import re

from pytest_kvgate.engine.ggml import Ggml, Tensor

#: How the names of the tensors that hold a layer's state end: ``cache_r_l3``, ``cache_s_l3``, or,
#: where an architecture renames them, ``mamba_ssm_states-3``.
STATE = re.compile(rb"(?:cache_[rs]_l|-)(\d+)$")


def recurrent_layer(ggml: Ggml, node: Tensor) -> int | None:
    """Return the layer whose next state a node stores, None for every other node.

    A state is copied into a leaf of the graph; rows of a KV cache are set by another operation.
    """
    if not node.view_src or ggml.op(node) != "CPY":
        return None
    state = Tensor.from_address(node.view_src)
    found = STATE.search(state.name) if ggml.op(state) == "NONE" else None
    return int(found.group(1)) if found else None
