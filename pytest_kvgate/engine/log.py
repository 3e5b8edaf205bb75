"""What llama.cpp says, kept for error messages instead of printed."""

from __future__ import annotations

import ctypes
from collections import deque
from types import ModuleType


class LogTail:
    """Keeps llama.cpp's last log lines instead of printing them; active as a context manager."""

    def __init__(self, llama: ModuleType, n_lines: int = 12) -> None:
        self._llama = llama
        self._chunks: deque[str] = deque(maxlen=n_lines)
        self._callback = llama.llama_log_callback(self._keep)

    def __enter__(self) -> None:
        self._llama.llama_log_set(self._callback, ctypes.c_void_p(0))

    def __exit__(self, *_exception: object) -> None:
        from llama_cpp import _logger  # noqa: PLC0415

        self._llama.llama_log_set(_logger.llama_log_callback, ctypes.c_void_p(0))

    def tail(self) -> str:
        """Return the last lines."""
        return "".join(self._chunks).strip() or "(nothing)"

    def _keep(self, _level: int, text: bytes, _user_data: object) -> None:
        self._chunks.append(text.decode(errors="replace"))
