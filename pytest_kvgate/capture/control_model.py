"""The control model: a tiny GGUF file that attends as `Controls` says.

A token's embedding points along a dim of its own, so the weights of q and K are tables by token id.
The output projections are zero, so every layer sees the embeddings. Level and strength stand on one
dim of a head, which RoPE practically never turns.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from pytest_kvgate.capture.controls import Controls, HeadKeys
from pytest_kvgate.capture.prompts import Prompt

HEAD_DIM = 64
N_FF = 32

#: RoPE turns the pair of dims 2i by ``position · FREQ_BASE^(-2i/HEAD_DIM)``: on dim 32 by 1e-15 of
#: a radian per token.
FREQ_BASE = 1e30

#: The dim that carries level and strength. A quantized cache rotates q and K by a Hadamard matrix,
#: whose row 32 has one sign throughout each block of 32 dims that is quantized together.
DIM = 32

#: The key of level 1. Levels are powers of two, so that a key has 7 significant bits, which bf16
#: holds, and is 127 or 8 or 16 times a half-precision scale, which the quantized types hold.
UNIT = 127 / 128


@dataclass(frozen=True)
class ControlModel:
    """What the control model knows, by token id.

    ``levels`` are ``[n_vocab, n_layer, n_head_kv]`` and ``strengths`` ``[n_vocab, n_layer,
    n_head]`` float64; after the token t comes ``following[t]``, ``[n_vocab]``. ``prompt`` are the
    token ids of the prompt.
    """

    levels: NDArray[np.float64]
    strengths: NDArray[np.float64]
    following: NDArray[np.int64]
    prompt: tuple[int, ...]


def control_model(controls: Controls) -> ControlModel:
    """Give every combination of levels a token id of its own, and every decode step one."""
    patterns = controls.patterns()
    heads = [keys for pattern in patterns for keys in pattern.keys]
    by_position = np.stack([_levels(keys, controls) for keys in heads], axis=1)
    distinct, prompt = np.unique(by_position, axis=0, return_inverse=True)
    n_decode = controls.steps[-1] + 1
    # the tokens of the decode steps come last; they are like the background
    background = np.tile([keys.background for keys in heads], (n_decode, 1))
    levels = np.concatenate([distinct, background]).reshape(-1, len(patterns), controls.n_head_kv)
    first = len(distinct)
    following = np.full(len(levels), first)
    following[first:-1] = np.arange(first + 1, len(levels))
    strengths = np.zeros((len(levels), len(patterns), controls.n_head))
    for row, step in enumerate(controls.steps):
        for layer, pattern in enumerate(patterns):
            strengths[first + step, layer] = [
                controls.strength(pattern, head, row) for head in range(controls.n_head)
            ]
    return ControlModel(levels, strengths, following, tuple(map(int, prompt.ravel())))


def _levels(keys: HeadKeys, controls: Controls) -> NDArray[np.float64]:
    """Return the level of every token of the prompt."""
    levels = np.full(controls.n_prompt, keys.background)
    size = controls.page_size
    for position, level in keys.free:
        levels[position] = level
    for kind in keys.kinds:
        page = [level for level, count in kind.levels for _ in range(count)]
        for number in range(kind.count):
            start = (kind.first + number) * size
            levels[start : start + size] = np.roll(page, kind.turn * number)
    return levels


def control_prompt(model: ControlModel) -> Prompt:
    """Return the prompt of a control model."""
    return Prompt("controls", model.prompt)


def write_control_model(path: Path, model: ControlModel) -> None:
    """Write a control model as a GGUF file of the llama architecture, of a few MB.

    Raises:
        OSError: it cannot be written there.
    """
    import gguf  # noqa: PLC0415 - only an extra brings it

    n_vocab, n_layer, n_head = model.strengths.shape
    n_embd = _width(n_vocab)
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_name("control")
    writer.add_file_type(gguf.LlamaFileType.ALL_F32)
    writer.add_context_length(len(model.prompt) + n_vocab)
    writer.add_embedding_length(n_embd)
    writer.add_block_count(n_layer)
    writer.add_feed_forward_length(N_FF)
    writer.add_head_count(n_head)
    writer.add_head_count_kv(model.levels.shape[2])
    writer.add_key_length(HEAD_DIM)
    writer.add_value_length(HEAD_DIM)
    writer.add_rope_dimension_count(HEAD_DIM)
    writer.add_rope_freq_base(FREQ_BASE)
    writer.add_layer_norm_rms_eps(1e-12)
    writer.add_tokenizer_model("none")
    writer.add_vocab_size(n_vocab)
    for name, values in _tensors(model, n_embd):
        writer.add_tensor(name, values)
    try:
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_tensors_to_file()
    finally:
        writer.close()


def _width(n_vocab: int) -> int:
    """Return an embedding length with a dim for every token, and a square root in binary."""
    width = 64
    while width < n_vocab:
        width *= 4
    return width


def _tensors(model: ControlModel, n_embd: int) -> Iterator[tuple[str, NDArray[np.float32]]]:
    """Yield the weights by name, ``[n_out, n_in]``."""
    n_vocab, n_layer, n_head = model.strengths.shape
    n_head_kv = model.levels.shape[2]
    # of length sqrt(n_embd), which the norms leave as it is
    size = float(np.sqrt(n_embd))
    yield "token_embd.weight", (np.eye(n_vocab, n_embd) * size).astype(np.float32)
    output = np.zeros((n_vocab, n_embd), dtype=np.float32)
    output[model.following, np.arange(n_vocab)] = 1
    yield "output.weight", output
    yield "output_norm.weight", np.ones(n_embd, dtype=np.float32)
    values = np.zeros((n_head_kv, HEAD_DIM, n_embd), dtype=np.float32)
    values[:, np.arange(n_vocab) % HEAD_DIM, np.arange(n_vocab)] = 1
    for layer in range(n_layer):
        keys = np.zeros((n_head_kv, HEAD_DIM, n_embd), dtype=np.float32)
        keys[:, DIM, :n_vocab] = model.levels[:, layer].T * UNIT / size
        queries = np.zeros((n_head, HEAD_DIM, n_embd), dtype=np.float32)
        # times sqrt(HEAD_DIM), which the scale of the logits takes away
        queries[:, DIM, :n_vocab] = model.strengths[:, layer].T * (HEAD_DIM**0.5 / UNIT / size)
        block = f"blk.{layer}"
        yield f"{block}.attn_norm.weight", np.ones(n_embd, dtype=np.float32)
        yield f"{block}.attn_q.weight", queries.reshape(-1, n_embd)
        yield f"{block}.attn_k.weight", keys.reshape(-1, n_embd)
        yield f"{block}.attn_v.weight", values.reshape(-1, n_embd)
        yield f"{block}.attn_output.weight", _zeros(n_embd, n_head * HEAD_DIM)
        yield f"{block}.ffn_norm.weight", np.ones(n_embd, dtype=np.float32)
        yield f"{block}.ffn_gate.weight", _zeros(N_FF, n_embd)
        yield f"{block}.ffn_up.weight", _zeros(N_FF, n_embd)
        yield f"{block}.ffn_down.weight", _zeros(n_embd, N_FF)


def _zeros(n_out: int, n_in: int) -> NDArray[np.float32]:
    return np.zeros((n_out, n_in), dtype=np.float32)
