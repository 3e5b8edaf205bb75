from __future__ import annotations

import ctypes

import pytest

from pytest_kvgate.engine.ggml import Tensor, load_ggml
from pytest_kvgate.engine.sparsity import gathers_from_cache, mask_top_k
from tests.engine.graphs import Graph

N_CELL, TOP_K, HEAD_DIM = 256, 48, 64


def number(value: int) -> ctypes.c_int:
    return ctypes.c_int(value)


def length(value: int) -> ctypes.c_int64:
    return ctypes.c_int64(value)


def found(mask: int) -> int | None:
    return mask_top_k(load_ggml(), Tensor.from_address(mask))


def scores(graph: Graph) -> int:
    """Return the product of an indexer's keys and its query, one score per cell."""
    return graph.node("ggml_mul_mat", graph.new_tensor(8, N_CELL), graph.new_tensor(8, 1))


def opened(graph: Graph, cells: int) -> int:
    """Return a mask that hides all but some cells, added to the causal one."""
    causal = graph.new_tensor(N_CELL, 1)
    hidden = graph.node("ggml_fill", causal, ctypes.c_float(float("-inf")))
    rows = graph.node("ggml_reshape_2d", hidden, length(1), length(N_CELL))
    n_cell = Tensor.from_address(cells).ne[0]
    open_rows = graph.node("ggml_set_rows", rows, graph.new_tensor(1, n_cell), cells)
    mask = graph.node("ggml_reshape_2d", open_rows, length(N_CELL), length(1))
    return graph.node("ggml_add", mask, causal)


def test_an_ordinary_mask_is_shaped_by_no_top_k(graph: Graph) -> None:
    mask = graph.new_tensor(N_CELL, 1)
    assert found(mask) is None
    half = graph.node("ggml_cast", mask, number(load_ggml().type_number("f16")))
    assert found(half) is None


def test_a_mask_that_a_top_k_opens_is_known_by_it(graph: Graph) -> None:
    mask = opened(graph, graph.node("ggml_top_k", scores(graph), number(TOP_K)))
    assert found(mask) == TOP_K
    half = graph.node("ggml_cast", mask, number(load_ggml().type_number("f16")))
    assert found(half) == TOP_K


def test_a_top_k_as_large_as_the_context_is_still_one(graph: Graph) -> None:
    assert found(opened(graph, graph.node("ggml_top_k", scores(graph), number(N_CELL)))) == N_CELL


def test_the_first_of_a_sorted_order_are_a_top_k(graph: Graph) -> None:
    assert found(opened(graph, graph.node("ggml_argsort_top_k", scores(graph), number(TOP_K)))) == (
        TOP_K
    )


def test_what_the_scores_were_computed_from_does_not_count(graph: Graph) -> None:
    # a mixture of experts further up sorts, too
    experts = graph.node("ggml_argsort_top_k", graph.new_tensor(N_CELL, 1), number(8))
    floats = graph.node("ggml_cast", experts, number(0))
    product = graph.node("ggml_mul_mat", graph.new_tensor(8, N_CELL), floats)
    assert found(product) is None


@pytest.fixture
def cache_view(graph: Graph) -> int:
    """K of one KV head in a cache."""
    cache = graph.new_tensor(HEAD_DIM, N_CELL)
    return graph.node(
        "ggml_view_2d",
        cache,
        length(HEAD_DIM),
        length(128),
        ctypes.c_size_t(256),
        ctypes.c_size_t(0),
    )


def gathered(keys: int) -> bool:
    return gathers_from_cache(load_ggml(), Tensor.from_address(keys))


def test_rows_that_a_selection_picks_are_gathered(graph: Graph, cache_view: int) -> None:
    cells = graph.new_tensor(TOP_K, kind="i32")
    rows = graph.node("ggml_get_rows", cache_view, cells)
    assert gathered(graph.node("ggml_cont", rows))


def test_a_cache_joined_with_compressed_keys_is_gathered(graph: Graph, cache_view: int) -> None:
    other = graph.new_tensor(HEAD_DIM, 32)
    compressed = graph.node(
        "ggml_view_2d", other, length(HEAD_DIM), length(8), ctypes.c_size_t(256), ctypes.c_size_t(0)
    )
    joined = graph.node("ggml_concat", cache_view, compressed, number(1))
    assert gathered(graph.node("ggml_transpose", joined))


def test_keys_of_the_own_batch_are_not_gathered(graph: Graph) -> None:
    keys = graph.node("ggml_mul_mat", graph.new_tensor(8, HEAD_DIM), graph.new_tensor(8, 5))
    assert not gathered(keys)
    assert not gathered(graph.node("ggml_concat", keys, keys, number(0)))
