"""One model loaded in this process: its vocabulary, and contexts to decode in."""

from __future__ import annotations

import ctypes
import importlib.util
import os
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType, TracebackType
from typing import Self

from pytest_kvgate.engine.context import LARGEST_BATCH, Context
from pytest_kvgate.engine.errors import EngineError, EngineMissingError
from pytest_kvgate.engine.ggml import load_ggml
from pytest_kvgate.engine.log import LogTail

#: Logits of one prefill batch (context × batch × heads, float32) are kept below this many bytes.
PREFILL_BYTES = 256 * 2**20
SMALLEST_BATCH = 32

#: What a V cache may hold without flash attention.
UNFUSED_TYPES = ("f32", "f16", "bf16")


@dataclass(frozen=True)
class EngineSettings:
    """How to run the model: GPU layers, CPU threads, the caches' data types, flash attention."""

    n_gpu_layers: int = 0
    n_threads: int | None = None
    cache_type_k: str = "f16"
    cache_type_v: str = "f16"
    flash_attention: bool = False


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
    """A loaded model; use it as a context manager, which also closes what `start` has made."""

    def __init__(self, path: Path, settings: EngineSettings) -> None:
        check_model_file(path)
        self._llama = _import_llama()
        self._ggml = load_ggml()
        self._settings = settings
        self._log = LogTail(self._llama)
        self._contexts: list[Context] = []
        self._path = path
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
        """Free the contexts and the model."""
        while self._contexts:
            self._contexts.pop().close()
        if self._model:
            with self._log:
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
    def flash_attention(self) -> bool:
        """Whether `start` makes contexts with flash attention."""
        return self._settings.flash_attention

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

    def tokenize(self, text: str) -> list[int]:
        """Turn plain text into token ids, with the model's own leading token."""
        data = text.encode()
        room = len(data) + 8
        while True:
            tokens = (self._llama.llama_token * room)()
            with self._log:
                count = self._llama.llama_tokenize(
                    self._vocab, data, len(data), tokens, room, True, False
                )
            # a negative count is the room that is needed: a space may become several tokens
            if count >= 0 or -count <= room:
                break
            room = -count
        if count < 0:
            raise EngineError(f"llama.cpp could not tokenize the prompt ({count}).")
        return list(tokens[:count])

    def is_end_of_text(self, token: int) -> bool:
        """Whether the model ends its turn with this token."""
        return bool(self._llama.llama_vocab_is_eog(self._vocab, token))

    def start(self, n_context: int) -> Context:
        """Make an empty cache of ``n_context`` cells."""
        return self._start(
            n_context, self._settings.cache_type_v, flash_attention=self._settings.flash_attention
        )

    def start_unfused(self, n_context: int) -> Context:
        """As `start`, without flash attention; a quantized V cache, which needs it, is f16 then."""
        cache_type_v = self._settings.cache_type_v
        fitting = cache_type_v if cache_type_v in UNFUSED_TYPES else "f16"
        return self._start(n_context, fitting, flash_attention=False)

    def _start(self, n_context: int, cache_type_v: str, *, flash_attention: bool) -> Context:
        llama = self._llama
        params = llama.llama_context_default_params()
        params.n_ctx = n_context
        params.n_batch = LARGEST_BATCH
        params.n_ubatch = self._batch_size(n_context)
        params.n_threads = params.n_threads_batch = self.n_threads
        params.flash_attn_type = int(flash_attention)  # never AUTO: it may choose either
        params.type_k = self._ggml.type_number(self._settings.cache_type_k)
        params.type_v = self._ggml.type_number(cache_type_v)
        params.swa_full = True  # windowed layers keep every row, so that row j is position j
        context = Context(self._ggml, self._log, self._model, params)
        if not context.is_open:
            raise EngineError(
                f"llama.cpp could not make a context of {n_context} tokens for {self._path} with "
                f"a {self._settings.cache_type_k} K cache and a {cache_type_v} V cache. Its last "
                f"words:\n{self._log.tail()}"
            )
        self._contexts.append(context)
        return context

    def _batch_size(self, n_context: int) -> int:
        """Return the largest power of two whose attention logits stay within `PREFILL_BYTES`."""
        n_head = max(1, self._llama.llama_model_n_head(self._model))
        fitting = PREFILL_BYTES // (4 * n_head * max(1, n_context))
        size = 1 << max(0, int(fitting).bit_length() - 1)
        return min(LARGEST_BATCH, max(SMALLEST_BATCH, size))


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
