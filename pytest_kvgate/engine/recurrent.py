"""Which layers keep a recurrent state, seen in the graph."""

from __future__ import annotations

import re

from pytest_kvgate.engine.ggml import Tensor

#: What llama.cpp calls the two tensors that hold a layer's state; they are leaves of the graph.
STATE = re.compile(rb"cache_[rs]_l(\d+)")


def recurrent_layer(node: Tensor) -> int | None:
    """Return the layer whose recurrent state a node is a view of, None for every other node."""
    if not node.view_src:
        return None
    found = STATE.fullmatch(Tensor.from_address(node.view_src).name)
    return int(found.group(1)) if found else None
