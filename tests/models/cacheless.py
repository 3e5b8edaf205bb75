"""Models that attend, but not causally to a cache: encoders and diffusion models."""

from __future__ import annotations

import gguf

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
)

N_BUCKET = 8


def bert(writer: gguf.GGUFWriter, weights: Weights, shape: Shape) -> None:
    """An encoder: every token sees every other one, and there is nothing to predict."""
    n_embd = shape.n_embd
    heads(writer, shape)
    writer.add_layer_norm_eps(EPSILON)
    writer.add_causal_attention(False)
    writer.add_token_type_count(2)
    embeddings(weights, shape)
    for name in ("output.weight", "output_norm.weight"):
        del weights.tensors[name]
    weights.matrix("token_types.weight", 2, n_embd)
    weights.matrix("position_embd.weight", shape.n_context, n_embd)
    weights.vector("token_embd_norm.weight", n_embd, 1.0)
    weights.vector("token_embd_norm.bias", n_embd)
    for block in blocks(shape.n_layer):
        attention(weights, block, shape)
        for norm in ("attn_output_norm", "layer_output_norm"):
            weights.vector(f"{block}.{norm}.weight", n_embd, 1.0)
            weights.vector(f"{block}.{norm}.bias", n_embd)
        weights.matrix(f"{block}.ffn_up.weight", N_FF, n_embd)
        weights.matrix(f"{block}.ffn_down.weight", n_embd, N_FF)


def t5encoder(writer: gguf.GGUFWriter, weights: Weights, shape: Shape) -> None:
    """The encoder of T5 alone."""
    _t5(writer, weights, shape, ("enc",))


def t5(writer: gguf.GGUFWriter, weights: Weights, shape: Shape) -> None:
    """An encoder and a decoder; positions are a bias on the logits."""
    writer.add_decoder_start_token_id(0)
    _t5(writer, weights, shape, ("enc", "dec"))


def _t5(writer: gguf.GGUFWriter, weights: Weights, shape: Shape, sides: tuple[str, ...]) -> None:
    heads(writer, shape)
    writer.add_layer_norm_rms_eps(EPSILON)
    writer.add_relative_attn_buckets_count(N_BUCKET)
    embeddings(weights, shape)
    del weights.tensors["output_norm.weight"]
    for side in sides:
        weights.vector(f"{side}.output_norm.weight", shape.n_embd, 1.0)
        for block in blocks(shape.n_layer):
            _t5_layer(weights, f"{side}.{block}", shape, crossed=side == "dec")


def _t5_layer(weights: Weights, block: str, shape: Shape, *, crossed: bool) -> None:
    n_embd = shape.n_embd
    for kind in ("attn", "cross_attn") if crossed else ("attn",):
        weights.vector(f"{block}.{kind}_norm.weight", n_embd, 1.0)
        for name in "qkvo":
            weights.matrix(f"{block}.{kind}_{name}.weight", n_embd, n_embd)
    weights.matrix(f"{block}.attn_rel_b.weight", N_BUCKET, shape.n_head)
    weights.vector(f"{block}.ffn_norm.weight", n_embd, 1.0)
    weights.matrix(f"{block}.ffn_up.weight", N_FF, n_embd)
    weights.matrix(f"{block}.ffn_down.weight", n_embd, N_FF)


def dream(writer: gguf.GGUFWriter, weights: Weights, shape: Shape) -> None:
    """A diffusion model: it fills in a whole text at once."""
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
