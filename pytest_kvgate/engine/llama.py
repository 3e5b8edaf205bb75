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
    def n_layer(self) -> int:
        """How many layers a decode step runs through; those that predict further ahead do not."""
        return int(self._llama.llama_model_n_layer(self._model))

    @property
    def head_dims(self) -> tuple[int, ...]:
        """The dims of a key: one number, or another one too for layers with a sliding window."""
        stated = (self.model_metadata(f"attention.key_length{kind}") for kind in ("", "_swa"))
        dims = tuple(int(value) for value in stated if value is not None)
        n_head = self._llama.llama_model_n_head(self._model)
        usual = (self._llama.llama_model_n_embd(self._model) // n_head,) if n_head else ()
        return dims or usual

    @property
    def value_dims(self) -> tuple[int, int]:
        """The dims of V in the cache, of a usual layer and of one with a sliding window.

        A latent cache (MLA) holds no V: both are 0 then.
        """
        if self.has_latent_cache:
            return 0, 0
        stated = self.model_metadata("attention.value_length")
        n_head = self._llama.llama_model_n_head(self._model)
        usual = self._llama.llama_model_n_embd(self._model) // max(1, n_head)
        usual = usual if stated is None else int(stated)
        return usual, int(self.model_metadata("attention.value_length_swa") or usual)

    @property
    def has_encoder(self) -> bool:
        """Whether a text is encoded before anything is decoded."""
        return bool(self._llama.llama_model_has_encoder(self._model))

    @property
    def has_decoder(self) -> bool:
        """Whether the model decodes at all."""
        return bool(self._llama.llama_model_has_decoder(self._model))

    @property
    def is_diffusion(self) -> bool:
        """Whether the model fills in a whole text at once."""
        return bool(self._llama.llama_model_is_diffusion(self._model))

    @property
    def is_recurrent(self) -> bool:
        """Whether every layer keeps a state in place of a KV cache."""
        return bool(self._llama.llama_model_is_recurrent(self._model))

    @property
    def architecture(self) -> str:
        """What llama.cpp calls the kind of model."""
        return self.metadata("general.architecture") or "unknown"

    def model_metadata(self, key: str) -> str | None:
        """Return one metadata value that is kept under the architecture's name, or None."""
        return self.metadata(f"{self.architecture}.{key}")

    @property
    def has_latent_cache(self) -> bool:
        """Whether K and V are one latent (MLA), in one cache that has the type of K."""
        return self.model_metadata("attention.key_length_mla") not in (None, "0")

    @property
    def cache_type_k(self) -> str:
        """The data type that K has in the cache."""
        return self._settings.cache_type_k

    @property
    def cache_type_v(self) -> str:
        """The data type that V has in the cache."""
        settings = self._settings
        return settings.cache_type_k if self.has_latent_cache else settings.cache_type_v

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

    def start(self, n_context: int) -> Context:
        """Make an empty cache of ``n_context`` cells."""
        settings = self._settings
        return self._start(
            n_context,
            settings.cache_type_k,
            self.cache_type_v,
            flash_attention=settings.flash_attention,
        )

    def start_unfused(self, n_context: int) -> Context:
        """As `start`, without flash attention, on a K cache that holds what flash attention reads.

        That is f16 for an f32 cache. A quantized V cache, which needs flash attention, is f16, too.

        Raises:
            EngineError: the model cannot run so.
        """
        cache_type_k = self._settings.cache_type_k
        if cache_type_k == "f32":
            cache_type_k = "f16"
        cache_type_v = "bf16" if self.cache_type_v == "bf16" else "f16"
        if self.has_latent_cache:
            cache_type_v = cache_type_k
        return self._start(n_context, cache_type_k, cache_type_v, flash_attention=False)

    def _start(
        self, n_context: int, cache_type_k: str, cache_type_v: str, *, flash_attention: bool
    ) -> Context:
        llama = self._llama
        params = llama.llama_context_default_params()
        params.n_ctx = n_context
        params.n_batch = LARGEST_BATCH
        params.n_ubatch = self._batch_size(n_context)
        params.n_threads = params.n_threads_batch = self.n_threads
        params.flash_attn_type = int(flash_attention)  # never AUTO: it may choose either
        params.type_k = self._ggml.type_number(cache_type_k)
        params.type_v = self._ggml.type_number(cache_type_v)
        params.swa_full = True  # windowed layers keep every row, so that row j is position j
        context = Context(self._ggml, self._log, self._model, params)
        if not context.is_open:
            raise EngineError(
                f"llama.cpp could not make a context of {n_context} tokens for {self._path} with "
                f"a {cache_type_k} K cache and a {cache_type_v} V cache. Its last "
                f"words:\n{self._log.tail()}"
            )
        self._contexts.append(context)
        if not context.has_cache:
            raise EngineError(
                f"{self._path.name} ({self.architecture}) keeps no KV cache, so it does not decode "
                "token by token and there is nothing to page."
            )
        return context

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
