"""Recurrent layers, alone and between layers that attend."""

from __future__ import annotations

import gguf
import numpy as np

from tests.models.parts import (
    EPSILON,
    N_FF,
    ROPE_BASE,
    Shape,
    Weights,
    attention,
    blocks,
    embeddings,
    gated_ffn,
    heads,
    qk_norms,
)

N_STATE, N_RANK, N_CONV, N_GROUP = 16, 8, 4, 1
N_SSM_HEAD = 4

#: Gated delta net (qwen35): dims of a state, its value heads and its key heads.
DELTA_STATE, DELTA_HEADS, DELTA_KEY_HEADS = 32, 4, 2

SHORT_CONV = 3

#: rwkv6: the dim of a head and of what the low-rank mixers pass through.
WKV_HEAD_DIM, MIX_DIM = 32, 8


def mamba(writer: gguf.GGUFWriter, weights: Weights, shape: Shape) -> None:
    """No attention at all."""
    writer.add_head_count(0)
    writer.add_feed_forward_length(0)
    _first_mamba(writer, shape)
    embeddings(weights, shape)
    for block in blocks(shape.n_layer):
        weights.vector(f"{block}.attn_norm.weight", shape.n_embd, 1.0)
        _mamba_mixer(weights, block, shape)


def rwkv6(writer: gguf.GGUFWriter, weights: Weights, shape: Shape) -> None:
    """No attention at all, in another way."""
    n_embd = shape.n_embd
    writer.add_head_count(0)
    writer.add_feed_forward_length(N_FF)
    writer.add_layer_norm_eps(EPSILON)
    writer.add_wkv_head_size(WKV_HEAD_DIM)
    writer.add_time_mix_extra_dim(MIX_DIM)
    writer.add_time_decay_extra_dim(MIX_DIM)
    embeddings(weights, shape)
    weights.vector("output_norm.bias", n_embd)
    weights.vector("token_embd_norm.weight", n_embd, 1.0)
    weights.vector("token_embd_norm.bias", n_embd)
    for block in blocks(shape.n_layer):
        for norm in ("attn_norm", "attn_norm_2", "time_mix_ln"):
            weights.vector(f"{block}.{norm}.weight", n_embd, 1.0)
            weights.vector(f"{block}.{norm}.bias", n_embd)
        weights.matrix(f"{block}.time_mix_w1.weight", 5 * MIX_DIM, n_embd)
        weights.matrix(f"{block}.time_mix_w2.weight", 5 * n_embd, MIX_DIM)
        weights.reshape(f"{block}.time_mix_w2.weight", (5, n_embd, MIX_DIM))
        for mixed in "xwkvrg":
            weights.vector(f"{block}.time_mix_lerp_{mixed}.weight", n_embd, 0.5)
            weights.reshape(f"{block}.time_mix_lerp_{mixed}.weight", (1, 1, n_embd))
        weights.matrix(f"{block}.time_mix_first.weight", n_embd // WKV_HEAD_DIM, WKV_HEAD_DIM)
        weights.vector(f"{block}.time_mix_decay.weight", n_embd)
        weights.matrix(f"{block}.time_mix_decay_w1.weight", MIX_DIM, n_embd)
        weights.matrix(f"{block}.time_mix_decay_w2.weight", n_embd, MIX_DIM)
        for name in ("key", "value", "receptance", "gate", "output"):
            weights.matrix(f"{block}.time_mix_{name}.weight", n_embd, n_embd)
        for mixed in "kr":
            weights.vector(f"{block}.channel_mix_lerp_{mixed}.weight", n_embd, 0.5)
            weights.reshape(f"{block}.channel_mix_lerp_{mixed}.weight", (1, 1, n_embd))
        weights.matrix(f"{block}.channel_mix_key.weight", N_FF, n_embd)
        weights.matrix(f"{block}.channel_mix_value.weight", n_embd, N_FF)
        weights.matrix(f"{block}.channel_mix_receptance.weight", n_embd, n_embd)


def jamba(writer: gguf.GGUFWriter, weights: Weights, shape: Shape) -> None:
    """Mamba layers; the second attends, without RoPE."""
    _attending(writer, shape)
    _first_mamba(writer, shape)
    embeddings(weights, shape)
    for index, block in enumerate(blocks(shape.n_layer)):
        weights.vector(f"{block}.attn_norm.weight", shape.n_embd, 1.0)
        if index == 1:
            attention(weights, block, shape)
        else:
            _mamba_mixer(weights, block, shape)
            weights.vector(f"{block}.ssm_dt_norm.weight", N_RANK, 1.0)
            weights.vector(f"{block}.ssm_b_norm.weight", N_STATE, 1.0)
            weights.vector(f"{block}.ssm_c_norm.weight", N_STATE, 1.0)
        weights.vector(f"{block}.ffn_norm.weight", shape.n_embd, 1.0)
        gated_ffn(weights, block, shape)


def granitehybrid(writer: gguf.GGUFWriter, weights: Weights, shape: Shape) -> None:
    """Mamba-2 layers; the second attends."""
    _attending(writer, shape)
    _second_mamba(writer, shape)
    writer.add_layer_norm_rms_eps(EPSILON)
    writer.add_rope_dimension_count(shape.head_dim)
    writer.add_rope_freq_base(ROPE_BASE)
    embeddings(weights, shape)
    for index, block in enumerate(blocks(shape.n_layer)):
        weights.vector(f"{block}.attn_norm.weight", shape.n_embd, 1.0)
        if index == 1:
            attention(weights, block, shape)
        else:
            _second_mamba_mixer(weights, block, shape)
        weights.vector(f"{block}.ffn_norm.weight", shape.n_embd, 1.0)
        gated_ffn(weights, block, shape)


def nemotron_h(writer: gguf.GGUFWriter, weights: Weights, shape: Shape) -> None:
    """Each layer is one thing: Mamba-2, attention, or an FFN; then Mamba-2 again."""
    _attending(writer, shape, ffn=[0, 0, N_FF, 0])
    _second_mamba(writer, shape)
    writer.add_layer_norm_eps(EPSILON)
    writer.add_layer_norm_rms_eps(EPSILON)
    embeddings(weights, shape)
    for index, block in enumerate(blocks(shape.n_layer)):
        weights.vector(f"{block}.attn_norm.weight", shape.n_embd, 1.0)
        if index == 1:
            attention(weights, block, shape)
        elif index == 2:
            weights.matrix(f"{block}.ffn_up.weight", N_FF, shape.n_embd)
            weights.matrix(f"{block}.ffn_down.weight", shape.n_embd, N_FF, 0.5)
        else:
            _second_mamba_mixer(weights, block, shape)


def lfm2(writer: gguf.GGUFWriter, weights: Weights, shape: Shape) -> None:
    """Short convolutions; the second layer attends, with QK-norm."""
    _attending(writer, shape)
    writer.add_layer_norm_rms_eps(EPSILON)
    writer.add_rope_dimension_count(shape.head_dim)
    writer.add_rope_freq_base(ROPE_BASE)
    writer.add_shortconv_l_cache(SHORT_CONV)
    embeddings(weights, shape, tied=True)
    weights.tensors["token_embd_norm.weight"] = weights.tensors.pop("output_norm.weight")
    for index, block in enumerate(blocks(shape.n_layer)):
        weights.vector(f"{block}.attn_norm.weight", shape.n_embd, 1.0)
        if index == 1:
            attention(weights, block, shape)
            qk_norms(weights, block, shape)
        else:
            weights.matrix(f"{block}.shortconv.in_proj.weight", 3 * shape.n_embd, shape.n_embd)
            weights.matrix(f"{block}.shortconv.conv.weight", shape.n_embd, SHORT_CONV)
            weights.matrix(f"{block}.shortconv.out_proj.weight", shape.n_embd, shape.n_embd)
        weights.vector(f"{block}.ffn_norm.weight", shape.n_embd, 1.0)
        gated_ffn(weights, block, shape)


def qwen35(writer: gguf.GGUFWriter, weights: Weights, shape: Shape) -> None:
    """Gated delta nets; every second layer attends, with QK-norm and a gate on its output."""
    heads(writer, shape)
    writer.add_layer_norm_rms_eps(EPSILON)
    writer.add_rope_dimension_count(shape.head_dim)
    writer.add_rope_dimension_sections([16, 16, 0, 0])
    writer.add_rope_freq_base(ROPE_BASE)
    writer.add_full_attention_interval(2)
    n_value = DELTA_STATE * DELTA_HEADS
    n_mixed = 2 * DELTA_STATE * DELTA_KEY_HEADS + n_value
    writer.add_ssm_conv_kernel(N_CONV)
    writer.add_ssm_inner_size(n_value)
    writer.add_ssm_state_size(DELTA_STATE)
    writer.add_ssm_time_step_rank(DELTA_HEADS)
    writer.add_ssm_group_count(DELTA_KEY_HEADS)
    embeddings(weights, shape)
    for index, block in enumerate(blocks(shape.n_layer)):
        weights.vector(f"{block}.attn_norm.weight", shape.n_embd, 1.0)
        weights.vector(f"{block}.post_attention_norm.weight", shape.n_embd, 1.0)
        if index % 2:
            attention(weights, block, shape)
            n_gated = 2 * shape.n_head * shape.head_dim
            weights.matrix(f"{block}.attn_q.weight", n_gated, shape.n_embd, 1.4)
            qk_norms(weights, block, shape)
        else:
            weights.matrix(f"{block}.attn_qkv.weight", n_mixed, shape.n_embd)
            weights.matrix(f"{block}.attn_gate.weight", n_value, shape.n_embd)
            weights.matrix(f"{block}.ssm_conv1d.weight", n_mixed, N_CONV)
            weights.vector(f"{block}.ssm_dt.bias", DELTA_HEADS)
            weights.vector(f"{block}.ssm_a", DELTA_HEADS, -1.0)
            weights.matrix(f"{block}.ssm_beta.weight", DELTA_HEADS, shape.n_embd)
            weights.matrix(f"{block}.ssm_alpha.weight", DELTA_HEADS, shape.n_embd)
            weights.vector(f"{block}.ssm_norm.weight", DELTA_STATE, 1.0)
            weights.matrix(f"{block}.ssm_out.weight", shape.n_embd, n_value)
        gated_ffn(weights, block, shape)


def _attending(writer: gguf.GGUFWriter, shape: Shape, ffn: list[int] | None = None) -> None:
    """Say that the second layer attends and no other does."""
    writer.add_head_count(shape.n_head)
    writer.add_head_count_kv([shape.n_head_kv if i == 1 else 0 for i in range(shape.n_layer)])
    writer.add_key_length(shape.head_dim)
    writer.add_value_length(shape.head_dim)
    writer.add_feed_forward_length(N_FF if ffn is None else ffn)


def _first_mamba(writer: gguf.GGUFWriter, shape: Shape) -> None:
    writer.add_layer_norm_rms_eps(EPSILON)
    writer.add_ssm_conv_kernel(N_CONV)
    writer.add_ssm_inner_size(2 * shape.n_embd)
    writer.add_ssm_state_size(N_STATE)
    writer.add_ssm_time_step_rank(N_RANK)


def _mamba_mixer(weights: Weights, block: str, shape: Shape) -> None:
    n_inner = 2 * shape.n_embd
    weights.matrix(f"{block}.ssm_in.weight", 2 * n_inner, shape.n_embd)
    weights.matrix(f"{block}.ssm_conv1d.weight", n_inner, N_CONV)
    weights.vector(f"{block}.ssm_conv1d.bias", n_inner)
    weights.matrix(f"{block}.ssm_x.weight", N_RANK + 2 * N_STATE, n_inner)
    weights.matrix(f"{block}.ssm_dt.weight", n_inner, N_RANK)
    weights.vector(f"{block}.ssm_dt.bias", n_inner)
    weights.tensors[f"{block}.ssm_a"] = np.full((n_inner, N_STATE), -1.0, dtype=np.float32)
    weights.vector(f"{block}.ssm_d", n_inner, 1.0)
    weights.matrix(f"{block}.ssm_out.weight", shape.n_embd, n_inner)


def _second_mamba(writer: gguf.GGUFWriter, shape: Shape) -> None:
    writer.add_ssm_conv_kernel(N_CONV)
    writer.add_ssm_inner_size(2 * shape.n_embd)
    writer.add_ssm_state_size(N_STATE)
    writer.add_ssm_time_step_rank(N_SSM_HEAD)
    writer.add_ssm_group_count(N_GROUP)


def _second_mamba_mixer(weights: Weights, block: str, shape: Shape) -> None:
    n_inner = 2 * shape.n_embd
    n_mixed = n_inner + 2 * N_GROUP * N_STATE
    weights.matrix(f"{block}.ssm_in.weight", n_inner + n_mixed + N_SSM_HEAD, shape.n_embd)
    weights.matrix(f"{block}.ssm_conv1d.weight", n_mixed, N_CONV)
    weights.vector(f"{block}.ssm_conv1d.bias", n_mixed)
    weights.vector(f"{block}.ssm_dt.bias", N_SSM_HEAD)
    for name, centre in (("ssm_a", -1.0), ("ssm_d", 1.0)):
        weights.vector(f"{block}.{name}", N_SSM_HEAD, centre)
        weights.reshape(f"{block}.{name}", (N_SSM_HEAD, 1))
    weights.vector(f"{block}.ssm_norm.weight", n_inner, 1.0)
    weights.reshape(f"{block}.ssm_norm.weight", (N_GROUP, n_inner // N_GROUP))
    weights.matrix(f"{block}.ssm_out.weight", shape.n_embd, n_inner)
