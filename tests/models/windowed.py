"""Sliding windows, alone and between layers that attend to the whole context."""

from __future__ import annotations

import gguf
import numpy as np

from tests.models.parts import (
    EPSILON,
    HEAD_DIM,
    ROPE_BASE,
    SOFTCAP,
    WINDOW,
    WINDOWED_HEAD_DIM,
    Shape,
    Weights,
    attention,
    blocks,
    embeddings,
    gated_ffn,
    heads,
    qk_norms,
)


def gemma2(writer: gguf.GGUFWriter, weights: Weights, shape: Shape) -> None:
    """Softcapped logits; every second layer, from the first on, has a sliding window."""
    heads(writer, shape)
    writer.add_layer_norm_rms_eps(EPSILON)
    writer.add_attn_logit_softcapping(SOFTCAP)
    writer.add_final_logit_softcapping(30.0)
    writer.add_sliding_window(WINDOW)
    embeddings(weights, shape, tied=True)
    for block in blocks(shape.n_layer):
        for norm in ("attn_norm", "post_attention_norm", "ffn_norm", "post_ffw_norm"):
            weights.vector(f"{block}.{norm}.weight", shape.n_embd, 1.0)
        attention(weights, block, shape)
        gated_ffn(weights, block, shape)


def gemma3(writer: gguf.GGUFWriter, weights: Weights, shape: Shape) -> None:
    """QK-norm, and a sliding window in the layers that ``shape.windowed`` names."""
    heads(writer, shape)
    writer.add_layer_norm_rms_eps(EPSILON)
    writer.add_rope_freq_base(ROPE_BASE)
    writer.add_sliding_window(WINDOW)
    writer.add_sliding_window_pattern(shape.windowed)
    embeddings(weights, shape, tied=True)
    for block in blocks(shape.n_layer):
        for norm in ("attn_norm", "post_attention_norm", "ffn_norm", "post_ffw_norm"):
            weights.vector(f"{block}.{norm}.weight", shape.n_embd, 1.0)
        attention(weights, block, shape)
        qk_norms(weights, block, shape)
        gated_ffn(weights, block, shape)


def gemma4(writer: gguf.GGUFWriter, weights: Weights, shape: Shape) -> None:
    """Narrower heads in the windowed layers; the last two layers read the cache of the first."""
    windowed = [index % 2 == 0 for index in range(shape.n_layer)]
    heads(writer, shape)
    writer.add_key_length_swa(WINDOWED_HEAD_DIM)
    writer.add_value_length_swa(WINDOWED_HEAD_DIM)
    writer.add_layer_norm_rms_eps(EPSILON)
    writer.add_sliding_window(WINDOW)
    writer.add_sliding_window_pattern(windowed)
    writer.add_shared_kv_layers(2)
    writer.add_embedding_length_per_layer_input(0)
    writer.add_rope_dimension_count(HEAD_DIM)
    writer.add_rope_dimension_count_swa(WINDOWED_HEAD_DIM)
    embeddings(weights, shape, tied=True)
    weights.tensors["rope_freqs.weight"] = np.ones(HEAD_DIM // 2, dtype=np.float32)
    for block, narrow in zip(blocks(shape.n_layer), windowed, strict=True):
        head_dim = WINDOWED_HEAD_DIM if narrow else HEAD_DIM
        for norm in ("attn_norm", "post_attention_norm", "ffn_norm", "post_ffw_norm"):
            weights.vector(f"{block}.{norm}.weight", shape.n_embd, 1.0)
        for name, n_head in (("q", shape.n_head), ("k", shape.n_head_kv), ("v", shape.n_head_kv)):
            weights.matrix(f"{block}.attn_{name}.weight", n_head * head_dim, shape.n_embd)
        for name in ("q", "k"):
            weights.vector(f"{block}.attn_{name}_norm.weight", head_dim, 0.5)
        weights.matrix(f"{block}.attn_output.weight", shape.n_embd, shape.n_head * head_dim, 0.5)
        gated_ffn(weights, block, shape)
