from __future__ import annotations

import ctypes
import subprocess
import sys
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any, cast

import gguf
import numpy as np
import pytest
from numpy.typing import NDArray

from pytest_kvgate.engine import EngineError
from pytest_kvgate.engine.ggml import (
    OBJECT_SIZE,
    Ggml,
    Tensor,
    decode_rows,
    float_params,
    load_ggml,
    source,
)
from tests.engine.graphs import Graph, base_library

TYPE_NAMES = ("f32", "f16", "bf16", "q8_0", "q4_0", "q4_1", "q5_0", "q5_1", "iq4_nl")


class Memory:
    """Bytes of this process that ggml takes for a backend buffer."""

    def __init__(self, content: bytes) -> None:
        self._library = base_library()
        self._library.ggml_backend_cpu_buffer_from_ptr.restype = ctypes.c_void_p
        self._library.ggml_backend_cpu_buffer_from_ptr.argtypes = [
            ctypes.c_void_p,
            ctypes.c_size_t,
        ]
        alignment = 64
        self._bytes = ctypes.create_string_buffer(len(content) + alignment)
        self.address = -(-ctypes.addressof(self._bytes) // alignment) * alignment
        ctypes.memmove(self.address, content, len(content))
        self.buffer = self._library.ggml_backend_cpu_buffer_from_ptr(self.address, len(content))

    def tensor(
        self, type_name: str, lengths: Sequence[int], strides: Sequence[int], offset: int = 0
    ) -> Tensor:
        """Return a view: lengths in elements and strides in bytes, fastest dimension first."""
        return Tensor(
            type=load_ggml().type_number(type_name),
            buffer=self.buffer,
            ne=(*lengths, *[1] * (4 - len(lengths))),
            nb=(*strides, *[strides[-1] * lengths[-1]] * (4 - len(strides))),
            data=self.address + offset,
            name=b"view",
        )

    def __del__(self) -> None:
        self._library.ggml_backend_buffer_free.argtypes = [ctypes.c_void_p]
        self._library.ggml_backend_buffer_free(self.buffer)


def numbers(*shape: int) -> NDArray[np.float32]:
    values = np.random.default_rng(1).normal(size=shape)
    return values.astype(np.float32)


def library_with_overhead(overhead: int) -> ctypes.CDLL:
    def ggml_tensor_overhead() -> int:
        return overhead

    return cast(ctypes.CDLL, SimpleNamespace(ggml_tensor_overhead=ggml_tensor_overhead))


@pytest.mark.parametrize("difference", [-8, 8, 16])
def test_another_tensor_layout_is_refused(difference: int) -> None:
    known = ctypes.sizeof(Tensor) + OBJECT_SIZE
    with pytest.raises(EngineError) as refusal:
        Ggml(library_with_overhead(known + difference))
    assert str(refusal.value) == (
        f"this llama-cpp-python keeps {known + difference} bytes per ggml tensor where 368 are "
        "known, so its tensors would be misread. Install a version that pytest-kvgate supports: "
        "pip install 'pytest-kvgate[llama]'"
    )


def test_the_installed_library_has_the_known_layout() -> None:
    assert base_library().ggml_tensor_overhead() == 368
    assert isinstance(load_ggml(), Ggml)


@pytest.mark.parametrize("name", TYPE_NAMES)
def test_type_names_are_looked_up_both_ways(name: str) -> None:
    ggml = load_ggml()
    number = ggml.type_number(name)
    assert ggml.type_name(number) == name
    assert number == gguf.GGMLQuantizationType[name.upper()]


def test_an_unknown_type_name_is_refused() -> None:
    # In a process of its own, because a lookup beyond the library's table may end the process.
    code = (
        "from pytest_kvgate.engine import EngineError\n"
        "from pytest_kvgate.engine.ggml import load_ggml\n"
        "try:\n"
        "    load_ggml().type_number('q9_9')\n"
        "except EngineError as error:\n"
        "    print(error)\n"
    )
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert (run.returncode, run.stdout) == (
        0,
        "this llama-cpp-python knows no data type 'q9_9'.\n",
    ), run.stderr


def test_nodes_built_by_the_library_are_read_field_by_field(graph: Graph) -> None:
    ggml = load_ggml()
    keys, queries = graph.new_tensor(64, 10), graph.new_tensor(64, 4)
    product = graph.node("ggml_mul_mat", keys, queries)
    scaled = graph.node("ggml_scale", product, ctypes.c_float(0.25))
    capped = graph.node("ggml_tanh", scaled)
    mask = graph.new_tensor(10, 4)
    softmax = Tensor.from_address(
        graph.node("ggml_soft_max_ext", capped, mask, ctypes.c_float(0.5), ctypes.c_float(8.0))
    )
    chain = [softmax]
    while (operand := source(chain[-1], 0)) is not None:
        chain.append(operand)
    assert [ggml.op(node) for node in chain] == ["SOFT_MAX", "UNARY", "SCALE", "MUL_MAT", "NONE"]
    assert ggml.unary_op(chain[1]) == "TANH"
    assert float_params(softmax)[:2].tolist() == [0.5, 8.0]
    assert float_params(chain[2])[:2].tolist() == [0.25, 0.0]
    assert [list(node.ne) for node in chain[3:]] == [[10, 4, 1, 1], [64, 10, 1, 1]]
    assert list(chain[4].nb) == [4, 256, 2560, 2560]
    assert ctypes.addressof(chain[4]) == keys
    found_mask, nothing = source(softmax, 1), source(softmax, 2)
    assert found_mask is not None
    assert ctypes.addressof(found_mask) == mask
    assert nothing is None


def test_views_know_what_they_are_a_view_of(graph: Graph) -> None:
    cache = graph.new_tensor(64, 10)
    view = Tensor.from_address(
        graph.node(
            "ggml_view_2d",
            cache,
            ctypes.c_int64(32),
            ctypes.c_int64(5),
            ctypes.c_size_t(512),
            ctypes.c_size_t(128),
        )
    )
    assert load_ggml().op(view) == "VIEW"
    assert (view.view_src, view.view_offs) == (cache, 128)
    assert (list(view.ne), list(view.nb)[:2]) == ([32, 5, 1, 1], [4, 512])
    assert b"view" in view.name


@pytest.mark.parametrize("dtype", [np.float32, np.float16])
def test_contiguous_tensors_are_read_as_they_are(dtype: type[np.floating[Any]]) -> None:
    values = numbers(3, 5, 8).astype(dtype)
    size = values.itemsize
    memory = Memory(values.tobytes())
    tensor = memory.tensor("f32" if size == 4 else "f16", (8, 5, 3), (size, 8 * size, 40 * size))
    found = load_ggml().read(tensor)
    assert found.dtype == dtype
    np.testing.assert_array_equal(found, values)


@pytest.mark.parametrize("dtype", [np.float32, np.float16])
def test_views_of_a_cache_are_read_head_by_head(dtype: type[np.floating[Any]]) -> None:
    n_cell, n_head, head_dim = 7, 3, 8
    cells = numbers(n_cell, n_head, head_dim).astype(dtype)
    size = cells.itemsize
    memory = Memory(cells.tobytes())
    tensor = memory.tensor(
        "f32" if size == 4 else "f16",
        (head_dim, n_cell, n_head),
        (size, n_head * head_dim * size, head_dim * size),
    )
    found = load_ggml().read(tensor)
    np.testing.assert_array_equal(found, cells.transpose(1, 0, 2))


@pytest.mark.parametrize("n_row", [1, 4, 7])
def test_only_the_first_rows_are_read_where_asked(n_row: int) -> None:
    cells = numbers(7, 3, 8)
    memory = Memory(cells.tobytes())
    tensor = memory.tensor("f32", (8, 7, 3), (4, 96, 32))
    found = load_ggml().read(tensor, n_row)
    np.testing.assert_array_equal(found, cells[:n_row].transpose(1, 0, 2))


def test_a_view_is_read_from_its_own_first_byte() -> None:
    values = numbers(4, 8)
    memory = Memory(values.tobytes())
    tensor = memory.tensor("f32", (8, 2), (4, 32), offset=64)
    np.testing.assert_array_equal(load_ggml().read(tensor)[0], values[2:])


@pytest.mark.parametrize("name", ["q8_0", "q4_0", "q5_0", "bf16"])
def test_quantized_views_are_read_as_single_precision(name: str) -> None:
    n_cell, n_head, head_dim = 5, 2, 64
    kind = gguf.GGMLQuantizationType[name.upper()]
    values = numbers(n_cell, n_head, head_dim)
    packed = gguf.quants.quantize(values, kind)
    row = packed.shape[2] * packed.itemsize
    block, block_size = gguf.GGML_QUANT_SIZES[kind]
    assert row == head_dim // block * block_size
    memory = Memory(packed.tobytes())
    tensor = memory.tensor(name, (head_dim, n_cell, n_head), (block_size, n_head * row, row))
    found = load_ggml().read(tensor, 4)
    assert found.dtype == np.float32
    expected = gguf.quants.dequantize(packed, kind)[:4].transpose(1, 0, 2)
    np.testing.assert_array_equal(found, expected)
    assert np.abs(found - values[:4].transpose(1, 0, 2)).max() < 0.3


def test_rows_that_are_not_contiguous_are_refused() -> None:
    memory = Memory(numbers(4, 8).tobytes())
    with pytest.raises(EngineError, match="tensor 'view' has rows that are not contiguous"):
        load_ggml().read(memory.tensor("f32", (4, 8), (32, 4)))


def test_several_streams_are_refused() -> None:
    memory = Memory(numbers(2, 2, 2, 8).tobytes())
    with pytest.raises(EngineError, match="tensor 'view' holds 2 streams; 1 is supported"):
        load_ggml().read(memory.tensor("f32", (8, 2, 2, 2), (4, 32, 64, 128)))


def test_reading_copies_the_data() -> None:
    memory = Memory(numbers(2, 8).tobytes())
    found = load_ggml().read(memory.tensor("f32", (8, 2), (4, 32)))
    before = found.copy()
    ctypes.memset(memory.address, 0, 64)
    np.testing.assert_array_equal(found, before)


def test_rows_decode_to_the_precision_they_are_stored_in() -> None:
    values = numbers(3, 32)
    single = decode_rows(values.view(np.uint8), "f32")
    half = decode_rows(values.astype(np.float16).view(np.uint8), "f16")
    np.testing.assert_array_equal(single, values)
    np.testing.assert_array_equal(half, values.astype(np.float16))
    assert (single.dtype.name, half.dtype.name) == ("float32", "float16")
