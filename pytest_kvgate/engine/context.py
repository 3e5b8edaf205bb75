"""One sequence in its KV cache: prefill and decode, with the hook at its attention."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
from numpy.typing import NDArray

from pytest_kvgate.engine.attention import AttentionHook
from pytest_kvgate.engine.errors import EngineError
from pytest_kvgate.engine.ggml import Ggml
from pytest_kvgate.engine.log import LogTail
from pytest_kvgate.engine.worker import Worker

#: Tokens that are decoded in one call.
LARGEST_BATCH = 512


@dataclass(frozen=True)
class Checkpoint:
    """A place to rewind to: how many tokens were decoded, and the state, where it must be kept."""

    n_token: int
    state: ctypes.Array[ctypes.c_uint8] | None


class Context:
    """A llama.cpp context with one sequence in an empty cache; `Engine.start` makes it.

    ``n_token`` is how many tokens the sequence has.
    """

    def __init__(self, ggml: Ggml, log: LogTail, model: object, params: Any) -> None:  # noqa: ANN401
        import llama_cpp  # noqa: PLC0415

        self._llama = llama_cpp
        self._log = log
        self.hook = AttentionHook(ggml, flash_attention=bool(params.flash_attn_type))
        self.n_token = 0
        # a recurrent state cannot be cut back to an earlier token
        self._keeps_state = bool(
            llama_cpp.llama_model_is_hybrid(model) or llama_cpp.llama_model_is_recurrent(model)
        )
        self._cancelled = False
        self._worker: Worker | None = None
        # both are called as long as the context lives
        self._callback = llama_cpp.ggml_backend_sched_eval_callback(self.hook)
        self._abort = llama_cpp.ggml_abort_callback(lambda _user_data: self._cancelled)
        params.cb_eval = self._callback
        params.abort_callback = self._abort
        with log:
            self._context = llama_cpp.llama_init_from_model(model, params)
        if self.is_open:
            vocabulary = llama_cpp.llama_model_get_vocab(model)
            self._n_vocab = llama_cpp.llama_vocab_n_tokens(vocabulary)

    @property
    def is_open(self) -> bool:
        """Whether llama.cpp made the context, and it was not closed."""
        return bool(self._context)

    @property
    def has_cache(self) -> bool:
        """Whether the context keeps anything of the tokens that it has decoded."""
        return bool(self._llama.llama_get_memory(self._context))

    def close(self) -> None:
        """Free the context."""
        if self._worker is not None:
            self._worker.close()
            self._worker = None
        if self._context:
            with self._log:
                self._llama.llama_free(self._context)
            self._context = None

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
                status = self._worker.run(partial(llama.llama_decode, self._context, batch))
            self.hook.raise_pending()
            if status:
                raise EngineError(
                    f"llama.cpp could not decode ({status}). Its last words:\n{self._log.tail()}"
                )
            self.n_token += len(part)
        logits = llama.llama_get_logits_ith(self._context, -1)
        return np.ctypeslib.as_array(logits, shape=(self._n_vocab,)).copy()

    def checkpoint(self) -> Checkpoint:
        """Remember the sequence as it is, to come back to it with `rewind`.

        Raises:
            EngineError: llama.cpp cannot copy the state of this model.
        """
        if not self._keeps_state:
            return Checkpoint(self.n_token, None)
        llama = self._llama
        size = llama.llama_state_seq_get_size(self._context, 0)
        state = (ctypes.c_uint8 * size)()
        with self._log:
            copied = llama.llama_state_seq_get_data(self._context, state, size, 0)
        if not size or copied != size:
            raise EngineError(
                f"llama.cpp could not copy the state of the sequence ({copied} of {size} bytes), "
                "so the same tokens cannot be decoded again from the same prompt."
            )
        return Checkpoint(self.n_token, state)

    def rewind(self, checkpoint: Checkpoint) -> None:
        """Bring the sequence back to what it was.

        Raises:
            EngineError: llama.cpp cannot.
        """
        llama = self._llama
        memory = llama.llama_get_memory(self._context)
        with self._log:
            if checkpoint.state is None:
                done = llama.llama_memory_seq_rm(memory, 0, checkpoint.n_token, -1)
            else:
                size = len(checkpoint.state)
                # what is in the cache is removed first: cells must go on following positions
                done = llama.llama_memory_seq_rm(memory, 0, -1, -1) and (
                    llama.llama_state_seq_set_data(self._context, checkpoint.state, size, 0) == size
                )
        if not done:
            raise EngineError(
                f"llama.cpp could not go back to token {checkpoint.n_token} of the sequence. Its "
                f"last words:\n{self._log.tail()}"
            )
        self.n_token = checkpoint.n_token

    def _cancel(self) -> None:
        self._cancelled = True  # seen by the abort callback between two graph nodes
