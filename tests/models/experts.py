"""Mixtures of experts, whose routers are a softmax too."""

from __future__ import annotations

import gguf

from tests.models.parts import (
    EPSILON,
    N_FF,
    ROPE_BASE,
    WINDOW,
    Shape,
    Weights,
    attention,
    blocks,
    embeddings,
    experts,
    heads,
    qk_norms,
)


def gpt_oss(writer: gguf.GGUFWriter, weights: Weights, shape: Shape) -> None:
    """Learned sinks, sliding windows in every second layer; the router's softmax is over two."""
    heads(writer, shape)
    writer.add_layer_norm_rms_eps(EPSILON)
    writer.add_rope_dimension_count(shape.head_dim)
    writer.add_rope_freq_base(ROPE_BASE)
    writer.add_sliding_window(WINDOW)
    embeddings(weights, shape)
    for block in blocks(shape.n_layer):
        weights.vector(f"{block}.attn_norm.weight", shape.n_embd, 1.0)
        weights.vector(f"{block}.post_attention_norm.weight", shape.n_embd, 1.0)
        attention(weights, block, shape)
        weights.vector(f"{block}.attn_output.bias", shape.n_embd)
        weights.vector(f"{block}.attn_sinks.weight", shape.n_head, shape.sink, 1.0)
    experts(writer, weights, shape, n_expert=4, biased=True)


def qwen3moe(writer: gguf.GGUFWriter, weights: Weights, shape: Shape) -> None:
    """QK-norm, and a router whose softmax is over all experts, more than there are heads."""
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
    experts(writer, weights, shape, n_expert=8)


def llama4(writer: gguf.GGUFWriter, weights: Weights, shape: Shape) -> None:
    """Chunked attention in three layers of four: a query sees its own chunk only."""
    heads(writer, shape)
    writer.add_layer_norm_rms_eps(EPSILON)
    writer.add_rope_dimension_count(shape.head_dim)
    writer.add_rope_freq_base(ROPE_BASE)
    writer.add_interleave_moe_layer_step(1)
    embeddings(weights, shape)
    for block in blocks(shape.n_layer):
        weights.vector(f"{block}.attn_norm.weight", shape.n_embd, 1.0)
        attention(weights, block, shape)
        weights.vector(f"{block}.ffn_norm.weight", shape.n_embd, 1.0)
        for name, n_out, n_in in (
            ("ffn_gate_shexp", N_FF, shape.n_embd),
            ("ffn_up_shexp", N_FF, shape.n_embd),
            ("ffn_down_shexp", shape.n_embd, N_FF),
        ):
            weights.matrix(f"{block}.{name}.weight", n_out, n_in)
    experts(writer, weights, shape, n_expert=4)
