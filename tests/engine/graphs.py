"""Graph nodes made by libggml itself, without data."""

from __future__ import annotations

import ctypes
from pathlib import Path
from typing import ClassVar

from pytest_kvgate.engine.ggml import load_ggml


def base_library() -> ctypes.CDLL:
    import llama_cpp  # noqa: PLC0415
    from llama_cpp._ctypes_extensions import load_shared_library  # noqa: PLC0415

    library: ctypes.CDLL = load_shared_library("ggml-base", Path(llama_cpp.__file__).parent / "lib")
    return library


class InitParams(ctypes.Structure):
    """``struct ggml_init_params``."""

    _fields_: ClassVar = [
        ("mem_size", ctypes.c_size_t),
        ("mem_buffer", ctypes.c_void_p),
        ("no_alloc", ctypes.c_bool),
    ]


class Graph:
    """Graph nodes that the library itself makes; their addresses stay good until `free`."""

    def __init__(self) -> None:
        self._library = base_library()
        self._library.ggml_init.restype = ctypes.c_void_p
        self._library.ggml_init.argtypes = [InitParams]
        self._context = ctypes.c_void_p(self._library.ggml_init(InitParams(2**20, None, True)))

    def new_tensor(self, *lengths: int, kind: str = "f32") -> int:
        """Return the address of a tensor."""
        return self.node(
            "ggml_new_tensor",
            ctypes.c_int(load_ggml().type_number(kind)),
            ctypes.c_int(len(lengths)),
            (ctypes.c_int64 * len(lengths))(*lengths),
        )

    def node(self, function: str, *arguments: object) -> int:
        """Call a function of the library that makes a node, and return the node's address."""
        call = getattr(self._library, function)
        call.restype = ctypes.c_void_p
        passed = [ctypes.c_void_p(a) if isinstance(a, int) else a for a in arguments]
        return int(call(self._context, *passed))

    def free(self) -> None:
        self._library.ggml_free(self._context)
