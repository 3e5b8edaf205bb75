"""Latent attention (MLA)."""

from __future__ import annotations

import gguf

from tests.models.parts import (
    EPSILON,
    LATENT,
    MLA_PLAIN,
    MLA_ROPE,
    MLA_VALUE,
    N_FF,
    ROPE_BASE,
    Shape,
    Weights,
    blocks,
    embeddings,
    gated_ffn,
)


def _latent(writer: gguf.GGUFWriter, shape: Shape) -> None:
    writer.add_head_count(shape.n_head)
    writer.add_feed_forward_length(N_FF)
    writer.add_layer_norm_rms_eps(EPSILON)
    writer.add_kv_lora_rank(LATENT)
    writer.add_rope_dimension_count(MLA_ROPE)
    writer.add_rope_freq_base(ROPE_BASE)


def _latent_attention(weights: Weights, block: str, shape: Shape) -> None:
    n_head, n_embd = shape.n_head, shape.n_embd
    weights.vector(f"{block}.attn_norm.weight", n_embd, 1.0)
    weights.matrix(f"{block}.attn_kv_a_mqa.weight", LATENT + MLA_ROPE, n_embd, 1.4)
    weights.vector(f"{block}.attn_kv_a_norm.weight", LATENT, 1.0)
    weights.matrix(f"{block}.attn_output.weight", n_embd, n_head * MLA_VALUE, 0.5)
    weights.vector(f"{block}.ffn_norm.weight", n_embd, 1.0)


def deepseek2(writer: gguf.GGUFWriter, weights: Weights, shape: Shape) -> None:
    """MLA as it is cached today: one KV head holds the latent K and V and the turned dims."""
    n_query = 24
    _latent(writer, shape)
    writer.add_head_count_kv(1)
    writer.add_q_lora_rank(n_query)
    writer.add_key_length(LATENT + MLA_ROPE)
    writer.add_value_length(LATENT)
    writer.add_key_length_mla(MLA_PLAIN + MLA_ROPE)
    writer.add_value_length_mla(MLA_VALUE)
    writer.add_leading_dense_block_count(shape.n_layer)
    writer.add_expert_count(0)
    writer.add_expert_used_count(0)
    writer.add_expert_feed_forward_length(N_FF)
    writer.add_expert_shared_count(0)
    embeddings(weights, shape)
    for block in blocks(shape.n_layer):
        _latent_attention(weights, block, shape)
        weights.matrix(f"{block}.attn_q_a.weight", n_query, shape.n_embd)
        weights.vector(f"{block}.attn_q_a_norm.weight", n_query, 1.0)
        n_out = shape.n_head * (MLA_PLAIN + MLA_ROPE)
        weights.matrix(f"{block}.attn_q_b.weight", n_out, n_query, 1.4)
        for name, lengths in (
            ("attn_k_b", (shape.n_head, LATENT, MLA_PLAIN)),
            ("attn_v_b", (shape.n_head, MLA_VALUE, LATENT)),
        ):
            key = f"{block}.{name}.weight"
            weights.matrix(key, lengths[0] * lengths[1], lengths[2])
            weights.tensors[key] = weights.tensors[key].reshape(lengths)
        gated_ffn(weights, block, shape)


def plm(writer: gguf.GGUFWriter, weights: Weights, shape: Shape) -> None:
    """MLA that is spelled out before the cache: RoPE turns the last dims, and V is narrower."""
    n_head, head_dim = shape.n_head, MLA_PLAIN + MLA_ROPE
    _latent(writer, shape)
    writer.add_head_count_kv(n_head)
    writer.add_key_length(head_dim)
    writer.add_value_length(MLA_VALUE)
    embeddings(weights, shape, tied=True)
    for block in blocks(shape.n_layer):
        _latent_attention(weights, block, shape)
        weights.matrix(f"{block}.attn_q.weight", n_head * head_dim, shape.n_embd, 1.4)
        weights.matrix(f"{block}.attn_kv_b.weight", n_head * (MLA_PLAIN + MLA_VALUE), LATENT)
        weights.matrix(f"{block}.ffn_up.weight", N_FF, shape.n_embd)
        weights.matrix(f"{block}.ffn_down.weight", shape.n_embd, N_FF, 0.5)
