"""A one-layer model whose sparse logits follow from a few numbers per token, on paper.

It is a control model: a logit is the strength of the query's token times the level of the key's.
Each token brings one value for each KV head; a query head writes the mean of what it attends to
onto a dim of its own, beside the token's, and the output weights read those dims.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import gguf
import numpy as np
from numpy.typing import NDArray

from pytest_kvgate.capture.control_model import HEAD_DIM, ControlModel, write_control_model
from tests.closedloop.plain import Reals

N_HEAD, N_HEAD_KV = 4, 2
GROUP = N_HEAD // N_HEAD_KV
#: The embedding length, and the first of the dims that heads write to.
WIDTH, FIRST_DIM = 64, 60


@dataclass(frozen=True)
class Planted:
    """What is planted, by token id.

    ``levels`` and ``values`` are ``[n_vocab, n_head_kv]`` and ``strengths`` ``[n_vocab, n_head]``.
    ``output`` is ``[n_vocab, n_head]``, how a token's logit reads the heads, and ``own``
    ``[n_vocab]``, how it reads that there is a token at all.
    """

    levels: Reals
    values: Reals
    strengths: Reals
    output: Reals
    own: Reals
    prompt: tuple[int, ...]

    def write(self, path: Path) -> Path:
        """Write it as a GGUF file."""
        n_vocab = len(self.levels)
        control = ControlModel(
            self.levels[:, None],
            self.strengths[:, None],
            np.arange(n_vocab, dtype=np.int64),
            self.prompt,
        )
        write_control_model(path, control)
        reader = gguf.GGUFReader(path, "r+")
        tensors = {tensor.name: tensor.data for tensor in reader.tensors}
        values = np.zeros((N_HEAD_KV, HEAD_DIM, WIDTH), dtype=np.float32)
        # the norm makes a token's embedding one of length 8 = sqrt(64)
        values[:, 0, :n_vocab] = self.values.T / 8
        tensors["blk.0.attn_v.weight"][:] = values.reshape(-1, WIDTH)
        for head in range(N_HEAD):
            tensors["blk.0.attn_output.weight"][FIRST_DIM + head, head * HEAD_DIM] = 1
        tensors["output.weight"][:] = 0
        tensors["output.weight"][:, :n_vocab] = self.own[:, None]
        tensors["output.weight"][:, FIRST_DIM : FIRST_DIM + N_HEAD] = self.output
        del tensors, reader
        return path

    def masses(self, tokens: list[int]) -> Reals:
        """Return the softmax of the last of these tokens, ``[n_head, n]``."""
        logits = np.empty((N_HEAD, len(tokens)))
        for head in range(N_HEAD):
            levels = self.levels[tokens, head // GROUP]
            logits[head] = self.strengths[tokens[-1], head] * levels
        weights = np.exp(logits)
        return np.asarray(weights / weights.sum(axis=1, keepdims=True))

    def logits(self, tokens: list[int], visible: NDArray[np.bool_]) -> Reals:
        """Return the logits after these tokens, where a head sees ``visible``, ``[n_head, n]``."""
        weights = self.masses(tokens) * visible
        weights /= weights.sum(axis=1, keepdims=True)
        heads = np.array(
            [weights[head] @ self.values[tokens, head // GROUP] for head in range(N_HEAD)]
        )
        # the token's own 8 and what the heads wrote, brought to length 8 by the last norm
        return np.asarray((self.own * 8 + self.output @ heads) * 8 / np.sqrt(64 + heads @ heads))
