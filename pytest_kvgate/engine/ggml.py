"""ggml tensors as seen from Python: the struct, its operation, and its data.

Tensors are views with strides, and may lie in device memory, so data is read through
``ggml_backend_tensor_get`` and cut up here.
"""

from __future__ import annotations

import ctypes
import math
import os
from collections import deque
from collections.abc import Callable
from functools import cache
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from pytest_kvgate.engine.errors import EngineError, EngineMissingError

MAX_DIMS = 4
MAX_SRC = 10
OBJECT_SIZE = 32  # what ggml_tensor_overhead adds to the tensor itself

#: Operations that only move data; between an operand and what computed it.
MOVES = frozenset({"VIEW", "RESHAPE", "PERMUTE", "TRANSPOSE", "CONT", "CPY"})

FloatArray = NDArray[np.float16] | NDArray[np.float32]


class Tensor(ctypes.Structure):
    """``struct ggml_tensor``; checked against the library before first use."""

    type: int
    buffer: int | None
    ne: ctypes.Array[ctypes.c_int64]
    nb: ctypes.Array[ctypes.c_size_t]
    op: int
    op_params: ctypes.Array[ctypes.c_int32]
    flags: int
    src: ctypes.Array[ctypes.c_void_p]
    view_src: int | None
    view_offs: int
    data: int
    name: bytes


Tensor._fields_ = [
    ("type", ctypes.c_int32),
    ("buffer", ctypes.c_void_p),
    ("ne", ctypes.c_int64 * MAX_DIMS),
    ("nb", ctypes.c_size_t * MAX_DIMS),
    ("op", ctypes.c_int32),
    ("op_params", ctypes.c_int32 * 16),
    ("flags", ctypes.c_int32),
    ("src", ctypes.c_void_p * MAX_SRC),
    ("view_src", ctypes.c_void_p),
    ("view_offs", ctypes.c_size_t),
    ("data", ctypes.c_void_p),
    ("name", ctypes.c_char * 64),
    ("extra", ctypes.c_void_p),
    ("padding", ctypes.c_char * 8),
]


class Ggml:
    """libggml-base: operation names, type names and tensor data."""

    def __init__(self, library: ctypes.CDLL) -> None:
        self._library = library
        library.ggml_tensor_overhead.restype = ctypes.c_size_t
        expected = ctypes.sizeof(Tensor) + OBJECT_SIZE
        found = library.ggml_tensor_overhead()
        if found != expected:
            raise EngineError(
                f"this llama-cpp-python keeps {found} bytes per ggml tensor where {expected} are "
                "known, so its tensors would be misread. Install a version that pytest-kvgate "
                "supports: pip install 'pytest-kvgate[llama]'"
            )
        for function in ("ggml_op_name", "ggml_unary_op_name", "ggml_type_name"):
            getattr(library, function).restype = ctypes.c_char_p
            getattr(library, function).argtypes = [ctypes.c_int]
        library.ggml_get_unary_op.argtypes = [ctypes.c_void_p]
        library.ggml_type_size.restype = ctypes.c_size_t
        library.ggml_type_size.argtypes = [ctypes.c_int]
        library.ggml_row_size.restype = ctypes.c_size_t
        library.ggml_row_size.argtypes = [ctypes.c_int, ctypes.c_int64]
        library.ggml_backend_buffer_is_host.restype = ctypes.c_bool
        library.ggml_backend_buffer_is_host.argtypes = [ctypes.c_void_p]
        library.ggml_backend_tensor_get.restype = None
        library.ggml_backend_tensor_get.argtypes = [
            ctypes.c_void_p,
            ctypes.c_void_p,
            ctypes.c_size_t,
            ctypes.c_size_t,
        ]
        library.ggml_backend_tensor_set.restype = None
        library.ggml_backend_tensor_set.argtypes = library.ggml_backend_tensor_get.argtypes
        self._op_names: dict[int, str] = {}
        self._rows: dict[tuple[int, int], tuple[str, int, int]] = {}

    def op(self, tensor: Tensor) -> str:
        """Return the operation's name; numbers change between versions, names do not."""
        number = tensor.op
        if number not in self._op_names:
            self._op_names[number] = self._library.ggml_op_name(number).decode()
        return self._op_names[number]

    def unary_op(self, tensor: Tensor) -> str:
        """Return which unary operation a ``UNARY`` node applies."""
        number = self._library.ggml_get_unary_op(ctypes.byref(tensor))
        return str(self._library.ggml_unary_op_name(number).decode())

    def behind_moves(self, tensor: Tensor) -> Tensor | None:
        """Return what computed a tensor, or the operand itself, behind what only moves data."""
        current: Tensor | None = tensor
        while current is not None and self.op(current) in MOVES:
            current = source(current, 0)
        return current

    def type_name(self, number: int) -> str:
        """Return a data type's name, such as ``f16`` or ``q8_0``."""
        return str(self._library.ggml_type_name(number).decode())

    def _require_whole(self, tensor: Tensor, size: int) -> None:
        """Raise EngineError unless a tensor is float32, without gaps, and of so many values."""
        name, _, row = self._row(tensor.type, tensor.ne[0])
        length = math.prod(tensor.ne)
        if name != "f32" or tensor.nb[:3] != [4, row, row * tensor.ne[1]] or length != size:
            raise EngineError(
                f"tensor {tensor.name.decode()!r} ({name}, {length} values) "
                f"cannot take {size} float32 values in one piece."
            )

    def _row(self, number: int, length: int) -> tuple[str, int, int]:
        """Return a data type's name, its size and that of a row of so many values, in bytes."""
        if (number, length) not in self._rows:
            self._rows[number, length] = (
                self.type_name(number),
                self._library.ggml_type_size(number),
                self._library.ggml_row_size(number, length),
            )
        return self._rows[number, length]

    def type_number(self, name: str) -> int:
        """Return the number of a data type, looked up by name."""
        from gguf import GGMLQuantizationType  # noqa: PLC0415 - only an extra brings it

        # asking the library about a number beyond its table would read past its end
        known = {kind.name.lower(): int(kind) for kind in GGMLQuantizationType}
        if name not in known or self.type_name(known[name]) != name:
            raise EngineError(f"this llama-cpp-python knows no data type {name!r}.")
        return known[name]

    def read(self, tensor: Tensor, n_row: int | None = None, first_row: int = 0) -> FloatArray:
        """Read a tensor as ``[ne2, ne1, ne0]``: float16 where stored so, else float32.

        ``n_row`` reads only so many along ``ne1``, from ``first_row`` on. Quantized rows are
        dequantized.

        Raises:
            EngineError: the tensor has more than three dimensions, or its rows are scattered.
        """
        name, size, row_size = self._row(tensor.type, tensor.ne[0])
        _, n_rows, n_planes, n_streams = tensor.ne[:]
        value_stride, row_stride, plane_stride, _ = tensor.nb[:]
        if value_stride != size:
            raise EngineError(f"tensor {tensor.name.decode()!r} has rows that are not contiguous.")
        if n_streams != 1:
            raise EngineError(
                f"tensor {tensor.name.decode()!r} holds {n_streams} streams; 1 is supported."
            )
        rows = n_rows - first_row if n_row is None else n_row
        span = (rows - 1) * row_stride + (n_planes - 1) * plane_stride + row_size
        raw = np.empty(span, dtype=np.uint8)
        self._library.ggml_backend_tensor_get(
            ctypes.byref(tensor), raw.ctypes.data, first_row * row_stride, span
        )
        strided: NDArray[np.uint8] = np.ndarray(
            (n_planes, rows, row_size), np.uint8, raw, strides=(plane_stride, row_stride, 1)
        )
        return decode_rows(np.ascontiguousarray(strided), name)

    def open(self, tensor: Tensor) -> NDArray[np.float32]:
        """Return a whole float32 tensor as ``[ne2, ne1, ne0]``, to be changed and given to `write`.

        It is the engine's own memory where that can be written to from here, else a copy.
        """
        if not tensor.buffer or not self._library.ggml_backend_buffer_is_host(tensor.buffer):
            return np.asarray(self.read(tensor), dtype=np.float32)
        self._require_whole(tensor, math.prod(tensor.ne))
        memory = (ctypes.c_char * (4 * math.prod(tensor.ne))).from_address(tensor.data)
        return np.ndarray(tensor.ne[2::-1], np.float32, memoryview(memory))

    def write(self, tensor: Tensor, values: NDArray[np.float32]) -> None:
        """Put other values, in the order of ``[ne2, ne1, ne0]``, into a whole float32 tensor.

        Raises:
            EngineError: the tensor holds another type, has gaps, or another number of values.
        """
        self._require_whole(tensor, values.size)
        data = np.ascontiguousarray(values, dtype=np.float32)
        if data.ctypes.data == tensor.data:  # `open` gave its own memory
            return
        self._library.ggml_backend_tensor_set(
            ctypes.byref(tensor), data.ctypes.data, 0, data.nbytes
        )


def source(tensor: Tensor, position: int) -> Tensor | None:
    """Return an operand of a node, or None."""
    address = tensor.src[position]
    return Tensor.from_address(address) if address else None


def walk_back(start: Tensor, look: Callable[[Tensor], bool]) -> None:
    """Visit a node and what it was computed from, the nearest first.

    What lies behind a node is left out where ``look`` returns False.
    """
    ahead, known = deque([start]), {ctypes.addressof(start)}
    while ahead:
        node = ahead.popleft()
        if not look(node):
            continue
        for position in range(len(node.src)):
            operand = source(node, position)
            if operand is not None and ctypes.addressof(operand) not in known:
                known.add(ctypes.addressof(operand))
                ahead.append(operand)


def float_params(tensor: Tensor) -> NDArray[np.float32]:
    """Return ``op_params`` read as 16 float32 numbers."""
    return np.frombuffer(bytes(tensor.op_params), dtype=np.float32)


def decode_rows(raw: NDArray[np.uint8], type_name: str) -> FloatArray:
    """Turn bytes ``[..., row_size]`` of a ggml type into float16 (where stored so) or float32."""
    if type_name == "f32":
        return raw.view(np.float32)
    if type_name == "f16":
        return raw.view(np.float16)
    from gguf import GGMLQuantizationType, quants  # noqa: PLC0415 - only an extra brings it

    values: NDArray[np.float32] = quants.dequantize(raw, GGMLQuantizationType[type_name.upper()])
    return values


@cache
def load_ggml() -> Ggml:
    """Load libggml-base from the installed llama-cpp-python."""
    try:
        import llama_cpp  # noqa: PLC0415
        from llama_cpp._ctypes_extensions import load_shared_library  # noqa: PLC0415
    except ModuleNotFoundError as error:
        raise EngineMissingError(error.name or "llama_cpp") from error
    override = os.environ.get("LLAMA_CPP_LIB_PATH")  # honoured by llama-cpp-python itself
    folder = Path(override) if override else Path(llama_cpp.__file__).parent / "lib"
    return Ggml(load_shared_library("ggml-base", folder))
