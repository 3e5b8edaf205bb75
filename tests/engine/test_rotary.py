from __future__ import annotations

import ctypes

import pytest

from pytest_kvgate.engine.ggml import Tensor, load_ggml
from pytest_kvgate.engine.rotary import rotary_dims
from tests.engine.graphs import Graph, base_library

N_HEAD = 2


def heads(graph: Graph, n_dim: int, n_turned: int = 0, offset: int = 0) -> int:
    """Return q of one token, of whose dims RoPE turned so many."""
    queries = graph.new_tensor(n_dim, N_HEAD, 1)
    if not n_turned:
        return queries
    positions = graph.new_tensor(1, kind="i32")
    turned = graph.node("ggml_rope", queries, positions, ctypes.c_int(n_turned), ctypes.c_int(0))
    set_offset = base_library().ggml_rope_set_offset
    set_offset.argtypes = [ctypes.c_void_p, ctypes.c_int]
    set_offset(turned, offset)
    return turned


def joined(graph: Graph, first: int, second: int, dim: int = 0) -> int:
    return graph.node("ggml_concat", first, second, ctypes.c_int(dim))


def found(queries: int) -> tuple[int, bool]:
    return rotary_dims(load_ggml(), Tensor.from_address(queries))


def test_queries_that_rope_never_turned_have_no_rotary_dims(graph: Graph) -> None:
    assert found(heads(graph, 64)) == (0, False)
    assert found(joined(graph, heads(graph, 48), heads(graph, 16))) == (0, False)


@pytest.mark.parametrize("n_turned", [16, 64])
def test_rope_turns_the_first_dims(graph: Graph, n_turned: int) -> None:
    assert found(heads(graph, 64, n_turned)) == (n_turned, False)


def test_rope_with_an_offset_turns_the_last_dims(graph: Graph) -> None:
    assert found(heads(graph, 64, 16, offset=48)) == (16, True)


def test_turned_dims_may_be_joined_behind_the_others(graph: Graph) -> None:
    assert found(joined(graph, heads(graph, 48), heads(graph, 16, 16))) == (16, True)


def test_turned_dims_may_be_joined_before_the_others(graph: Graph) -> None:
    assert found(joined(graph, heads(graph, 16, 16), heads(graph, 48))) == (16, False)


def test_two_turned_parts_leave_nothing_unturned(graph: Graph) -> None:
    assert found(joined(graph, heads(graph, 48, 48), heads(graph, 16, 16))) == (64, False)


def test_heads_joined_one_after_the_other_keep_their_dims(graph: Graph) -> None:
    parts = heads(graph, 64, 16), heads(graph, 64, 16)
    assert found(joined(graph, *parts, dim=1)) == (16, False)


@pytest.mark.parametrize(
    ("offset", "expected"),
    [(8, (24, False)), (40, (24, True))],  # of 64: dims 8 to 23, and dims 40 to 55
)
def test_dims_between_the_turned_ones_and_the_nearer_end_count_as_turned(
    graph: Graph, offset: int, expected: tuple[int, bool]
) -> None:
    assert found(heads(graph, 64, 16, offset=offset)) == expected


def test_partly_turned_dims_that_are_joined_keep_their_place(graph: Graph) -> None:
    assert found(joined(graph, heads(graph, 32), heads(graph, 32, 16))) == (32, True)
    assert found(joined(graph, heads(graph, 32, 16), heads(graph, 32))) == (16, False)


def test_rotary_dims_are_found_behind_scales_and_moves(graph: Graph) -> None:
    turned = joined(graph, heads(graph, 48), heads(graph, 16, 16))
    scaled = graph.node("ggml_scale", turned, ctypes.c_float(0.125))
    order = [ctypes.c_int(axis) for axis in (0, 2, 1, 3)]
    moved = graph.node("ggml_cont", graph.node("ggml_permute", scaled, *order))
    assert found(moved) == (16, True)
