"""ALiBi: a bias by distance in place of RoPE."""

from __future__ import annotations

import gguf

from tests.models.parts import (
    EPSILON,
    HEAD_DIM,
    MPT_MAX_BIAS,
    N_FF,
    Shape,
    Weights,
    blocks,
    embeddings,
    heads,
    layer_norms,
)


def _fused_without_rope(writer: gguf.GGUFWriter, weights: Weights, shape: Shape) -> None:
    """One matrix for q, k and v, and a plain FFN: the body of the ALiBi architectures."""
    heads(writer, shape)
    writer.add_layer_norm_eps(EPSILON)
    embeddings(weights, shape)
    weights.vector("output_norm.bias", shape.n_embd)
    for block in blocks(shape.n_layer):
        layer_norms(weights, block, shape)
        n_qkv = (shape.n_head + 2 * shape.n_head_kv) * HEAD_DIM
        weights.matrix(f"{block}.attn_qkv.weight", n_qkv, shape.n_embd, 1.4)
        weights.vector(f"{block}.attn_qkv.bias", n_qkv)
        weights.matrix(f"{block}.attn_output.weight", shape.n_embd, shape.n_embd, 0.5)
        weights.vector(f"{block}.attn_output.bias", shape.n_embd)
        weights.matrix(f"{block}.ffn_up.weight", N_FF, shape.n_embd)
        weights.vector(f"{block}.ffn_up.bias", N_FF)
        weights.matrix(f"{block}.ffn_down.weight", shape.n_embd, N_FF, 0.5)
        weights.vector(f"{block}.ffn_down.bias", shape.n_embd)


def bloom(writer: gguf.GGUFWriter, weights: Weights, shape: Shape) -> None:
    """ALiBi with the usual maximal bias of 8."""
    _fused_without_rope(writer, weights, shape)
    weights.vector("token_embd_norm.weight", shape.n_embd, 1.0)
    weights.vector("token_embd_norm.bias", shape.n_embd)


def mpt(writer: gguf.GGUFWriter, weights: Weights, shape: Shape) -> None:
    """ALiBi with another maximal bias, and a head count that is no power of two."""
    _fused_without_rope(writer, weights, shape)
    writer.add_max_alibi_bias(MPT_MAX_BIAS)
