"""Attention to the whole context under RoPE."""

from __future__ import annotations

import gguf

from tests.models.parts import (
    EPSILON,
    PARTIAL_ROPE,
    ROPE_BASE,
    Shape,
    Weights,
    attention,
    blocks,
    embeddings,
    gated_ffn,
    heads,
    layer_norms,
    qk_norms,
)


def llama(writer: gguf.GGUFWriter, weights: Weights, shape: Shape) -> None:
    heads(writer, shape)
    writer.add_layer_norm_rms_eps(EPSILON)
    writer.add_rope_dimension_count(shape.head_dim)
    writer.add_rope_freq_base(ROPE_BASE)
    embeddings(weights, shape)
    for block in blocks(shape.n_layer):
        weights.vector(f"{block}.attn_norm.weight", shape.n_embd, 1.0)
        attention(weights, block, shape)
        weights.vector(f"{block}.ffn_norm.weight", shape.n_embd, 1.0)
        gated_ffn(weights, block, shape)


def stablelm(writer: gguf.GGUFWriter, weights: Weights, shape: Shape) -> None:
    """RoPE turns a quarter of the dims only; llama.cpp refuses that for the llama architecture."""
    heads(writer, shape)
    writer.add_layer_norm_eps(EPSILON)
    writer.add_rope_dimension_count(PARTIAL_ROPE)
    writer.add_rope_freq_base(ROPE_BASE)
    embeddings(weights, shape)
    weights.vector("output_norm.bias", shape.n_embd)
    for block in blocks(shape.n_layer):
        layer_norms(weights, block, shape)
        attention(weights, block, shape)
        gated_ffn(weights, block, shape)


def qwen3(writer: gguf.GGUFWriter, weights: Weights, shape: Shape) -> None:
    """QK-norm: q and k of each head are normalised before RoPE."""
    heads(writer, shape)
    writer.add_layer_norm_rms_eps(EPSILON)
    writer.add_rope_dimension_count(shape.head_dim)
    writer.add_rope_freq_base(ROPE_BASE)
    embeddings(weights, shape)
    for block in blocks(shape.n_layer):
        weights.vector(f"{block}.attn_norm.weight", shape.n_embd, 1.0)
        attention(weights, block, shape)
        qk_norms(weights, block, shape)
        weights.vector(f"{block}.ffn_norm.weight", shape.n_embd, 1.0)
        gated_ffn(weights, block, shape)
