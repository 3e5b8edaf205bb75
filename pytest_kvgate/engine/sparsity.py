"""Attention that selects for itself: a mask that a top-k shaped, or keys gathered from a cache."""

from __future__ import annotations

from pytest_kvgate.engine.ggml import MOVES, Ggml, Tensor, source, walk_back

GATHERED = (
    "this model's attention is natively sparse in a way that is not measured: it reads keys that "
    "were compressed, or gathered by a selection of its own, not the KV cache position by "
    "position. There are no pages of the cache that its masses could be of."
)

#: Operations that put keys of a cache together anew, in an order of their own.
GATHERS = frozenset({"CONCAT", "GET_ROWS"})

#: Beyond a product lies what the mask is scored with, not how it is made.
PRODUCTS = frozenset({"MUL_MAT", "MUL_MAT_ID", "SOFT_MAX", "FLASH_ATTN_EXT", "LIGHTNING_INDEXER"})


def mask_top_k(ggml: Ggml, mask: Tensor) -> int | None:
    """Return the largest number of cells that a top-k lets a mask show; None where there is none.

    Natively sparse models score the cells with an indexer, and open a mask that hides everything at
    the best of them. While the context is shorter than the top-k, the number is that of all cells,
    and the mask hides nothing, yet it would hide something of a longer one.
    """
    found: list[int] = []

    def look(node: Tensor) -> bool:
        operation = ggml.op(node)
        if operation == "TOP_K":
            found.append(node.ne[0])
        elif operation == "VIEW":
            sorted_cells = source(node, 0)
            if sorted_cells is not None and ggml.op(sorted_cells) == "ARGSORT":
                found.append(node.ne[0])
        return not found and operation not in PRODUCTS

    walk_back(mask, look)
    return found[0] if found else None


def gathers_from_cache(ggml: Ggml, keys: Tensor) -> bool:
    """Whether keys that are no view of a cache were gathered, or put together, from one.

    So are the compressed keys of DeepSeek V4, and the selected ones of GLM 5 Next and MiniMax M3.
    """
    caches: list[Tensor] = []

    def look(node: Tensor) -> bool:
        if node.view_src and ggml.op(Tensor.from_address(node.view_src)) == "NONE":
            caches.append(node)
        return not caches and ggml.op(node) in MOVES | GATHERS

    walk_back(keys, look)
    return bool(caches)
