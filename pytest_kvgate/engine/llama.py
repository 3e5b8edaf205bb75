"""One model loaded in this process: tokenize, prefill, decode."""

from __future__ import annotations

import ctypes
import importlib.util
import os
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from types import ModuleType, TracebackType
from typing import Any, Self

import numpy as np
from numpy.typing import NDArray

from pytest_kvgate.engine.attention import AttentionHook
from pytest_kvgate.engine.errors import EngineError, EngineMissingError
from pytest_kvgate.engine.ggml import load_ggml
from pytest_kvgate.engine.worker import Worker

#: Logits of one prefill batch (context × batch × heads, float32) are kept below this many bytes.
PREFILL_BYTES = 256 * 2**20
LARGEST_BATCH = 512
SMALLEST_BATCH = 32


@dataclass(frozen=True)
class EngineSettings:
    """How to run the model: GPU layers, CPU threads, and the K cache's data type."""

    n_gpu_layers: int = 0
    n_threads: int | None = None
    cache_type_k: str = "f16"


def require_llama() -> None:
    """Raise EngineMissingError unless everything that a capture imports is installed."""
    for module in ("llama_cpp", "gguf", "filelock"):
        try:
            found = importlib.util.find_spec(module) is not None
        except ValueError:  # sys.modules says that it is not to be imported
            found = False
        if not found:
            raise EngineMissingError(module)


def check_model_file(path: Path) -> None:
    """Raise EngineError unless ``path`` is a file that begins like a GGUF model."""
    if not path.is_file():
        found = "is a folder" if path.is_dir() else "does not exist"
        raise EngineError(f"model {path} {found}; a GGUF file is needed.")
    try:
        with path.open("rb") as file:
            magic = file.read(4)
    except OSError as error:
        raise EngineError(f"model {path} cannot be read: {error.strerror}.") from error
    if magic != b"GGUF":
        raise EngineError(
            f"model {path} begins with {magic!r} and not with b'GGUF', so it is not a GGUF file. "
            "Convert it with llama.cpp's convert_hf_to_gguf.py, or check the download."
        )


class Engine:
    """A loaded model with one sequence in its KV cache; use it as a context manager."""

    def __init__(self, path: Path, settings: EngineSettings) -> None:
        check_model_file(path)
        self._llama = _import_llama()
        self._ggml = load_ggml()
        self._settings = settings
        self._log = _LogTail(self._llama)
        self._context: Any = None
        self._path = path
        self.hook = AttentionHook(self._ggml)
        self._callback = self._llama.ggml_backend_sched_eval_callback(self.hook)
        self._cancelled = False
        self._worker: Worker | None = None
        self._abort = self._llama.ggml_abort_callback(lambda _user_data: self._cancelled)
        with self._log:
            params = self._llama.llama_model_default_params()
            params.n_gpu_layers = settings.n_gpu_layers
            self._model = self._llama.llama_model_load_from_file(os.fsencode(path), params)
        if not self._model:
            raise EngineError(
                f"llama.cpp could not load {path}; the file may be truncated or of an architecture "
                f"this version does not know. Its last words:\n{self._log.tail()}"
            )
        self._vocab = self._llama.llama_model_get_vocab(self._model)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        value: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.close()

    def close(self) -> None:
        """Free the context and the model."""
        if self._worker is not None:
            self._worker.close()
            self._worker = None
        with self._log:
            if self._context:
                self._llama.llama_free(self._context)
                self._context = None
            if self._model:
                self._llama.llama_model_free(self._model)
                self._model = None

    @property
    def version(self) -> str:
        """The version of llama-cpp-python."""
        return str(self._llama.__version__)

    @property
    def n_threads(self) -> int:
        """CPU threads in use."""
        return self._settings.n_threads or _available_cpus()

    @property
    def cache_type_v(self) -> str:
        """The V cache's data type: llama.cpp's own choice."""
        return self._ggml.type_name(self._llama.llama_context_default_params().type_v)

    @property
    def trained_context(self) -> int:
        """The context the model was trained with, in tokens."""
        return int(self._llama.llama_model_n_ctx_train(self._model))

    @property
    def sliding_window(self) -> int:
        """The sliding window that some of the layers have, in tokens; 0 for none."""
        return int(self._llama.llama_model_n_swa(self._model))

    @property
    def is_causal_decoder(self) -> bool:
        """Whether the model decodes token by token over a cache."""
        llama = self._llama
        return bool(
            llama.llama_model_has_decoder(self._model)
            and not llama.llama_model_has_encoder(self._model)
            and not llama.llama_model_is_diffusion(self._model)
        )

    def metadata(self, key: str) -> str | None:
        """Return one metadata value as text, or None."""
        buffer = ctypes.create_string_buffer(256)
        length = self._llama.llama_model_meta_val_str(
            self._model, key.encode(), buffer, len(buffer)
        )
        return buffer.value.decode(errors="replace") if length >= 0 else None

    @property
    def n_vocab(self) -> int:
        """How many tokens the vocabulary has; ids count from 0."""
        return int(self._llama.llama_vocab_n_tokens(self._vocab))

    @property
    def chat_template(self) -> str | None:
        """The model's own chat template, in jinja2; None where it has none."""
        template = self._llama.llama_model_chat_template(self._model, None)
        return None if template is None else template.decode(errors="replace")

    @property
    def begin_text(self) -> str:
        """The token that begins a text as it is written, empty where there is none."""
        return self._written(self._llama.llama_vocab_bos(self._vocab))

    @property
    def end_text(self) -> str:
        """The token that ends a text as it is written, empty where there is none."""
        return self._written(self._llama.llama_vocab_eos(self._vocab))

    def tokenize(self, text: str) -> list[int]:
        """Turn plain text into token ids, with the model's own leading token."""
        return self._tokens(text, add_special=True, parse_special=False)

    def tokenize_following(self, text: str) -> list[int]:
        """Turn plain text that follows other tokens into token ids, with none added."""
        return self._tokens(text, add_special=False, parse_special=False)

    def tokenize_rendered(self, text: str) -> list[int]:
        """Turn what a chat template wrote into token ids, special tokens parsed.

        The leading token is there once, whether the template wrote it or not.
        """
        tokens = self._tokens(text, add_special=False, parse_special=True)
        begin = self._llama.llama_vocab_bos(self._vocab)
        if self._llama.llama_vocab_get_add_bos(self._vocab) and tokens[:1] != [begin]:
            tokens.insert(0, begin)
        return tokens

    def is_end_of_text(self, token: int) -> bool:
        """Whether the model ends its turn with this token."""
        return bool(self._llama.llama_vocab_is_eog(self._vocab, token))

    def start(self, n_context: int) -> None:
        """Make an empty cache of ``n_context`` cells, attention unfused so that softmax shows."""
        llama = self._llama
        params = llama.llama_context_default_params()
        params.n_ctx = n_context
        params.n_batch = LARGEST_BATCH
        params.n_ubatch = self._batch_size(n_context)
        params.n_threads = params.n_threads_batch = self.n_threads
        params.flash_attn_type = 0  # LLAMA_FLASH_ATTN_TYPE_DISABLED
        params.type_k = self._ggml.type_number(self._settings.cache_type_k)
        params.swa_full = True  # windowed layers keep every row, so that row j is position j
        params.cb_eval = self._callback
        params.abort_callback = self._abort
        with self._log:
            self._context = llama.llama_init_from_model(self._model, params)
        if not self._context:
            raise EngineError(
                f"llama.cpp could not make a context of {n_context} tokens for {self._path} with "
                f"a {self._settings.cache_type_k} K cache. Its last words:\n{self._log.tail()}"
            )

    def decode(self, tokens: Sequence[int]) -> NDArray[np.float32]:
        """Append tokens to the sequence; return the logits ``[n_vocab]`` after the last one."""
        llama = self._llama
        self._cancelled = False
        if self._worker is None:
            self._worker = Worker(self._cancel)
        for start in range(0, len(tokens), LARGEST_BATCH):
            part = tokens[start : start + LARGEST_BATCH]
            array = (llama.llama_token * len(part))(*part)  # the batch points into it
            batch = llama.llama_batch_get_one(array, len(part))
            with self._log:
                status = self._worker.run(partial(self._llama.llama_decode, self._context, batch))
            self.hook.raise_pending()
            if status:
                raise EngineError(
                    f"llama.cpp could not decode ({status}). Its last words:\n{self._log.tail()}"
                )
        logits = llama.llama_get_logits_ith(self._context, -1)
        return np.ctypeslib.as_array(logits, shape=(self.n_vocab,)).copy()

    def _tokens(self, text: str, *, add_special: bool, parse_special: bool) -> list[int]:
        if self._llama.llama_vocab_type(self._vocab) == self._llama.LLAMA_VOCAB_TYPE_NONE:
            raise EngineError(
                f"model {self._path} has no tokenizer, so it cannot read a text. Give token ids."
            )
        data = text.encode()
        room = len(data) + 8
        while True:
            tokens = (self._llama.llama_token * room)()
            with self._log:
                count = self._llama.llama_tokenize(
                    self._vocab, data, len(data), tokens, room, add_special, parse_special
                )
            # a negative count is the room that is needed: a space may become several tokens
            if count >= 0 or -count <= room:
                break
            room = -count
        if count < 0:
            raise EngineError(f"llama.cpp could not tokenize the prompt ({count}).")
        return list(tokens[:count])

    def _written(self, token: int) -> str:
        if token < 0:  # there is no such token
            return ""
        text: bytes = self._llama.llama_vocab_get_text(self._vocab, token)
        return text.decode(errors="replace")

    def _cancel(self) -> None:
        self._cancelled = True  # seen by the abort callback between two graph nodes

    def _batch_size(self, n_context: int) -> int:
        """Return the largest power of two whose attention logits stay within `PREFILL_BYTES`."""
        n_head = max(1, self._llama.llama_model_n_head(self._model))
        fitting = PREFILL_BYTES // (4 * n_head * max(1, n_context))
        size = 1 << max(0, int(fitting).bit_length() - 1)
        return min(LARGEST_BATCH, max(SMALLEST_BATCH, size))


class _LogTail:
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


def _available_cpus() -> int:
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def _import_llama() -> ModuleType:
    try:
        import llama_cpp  # noqa: PLC0415
    except ModuleNotFoundError as error:
        raise EngineMissingError(error.name or "llama_cpp") from error
    module: ModuleType = llama_cpp
    return module
