"""Tiny GGUF models with random weights, written when a test asks for one.

Head dim is 64, so that a quantized K cache is rotated. Weights are scaled so that attention logits
have a standard deviation of about 2. The vocabulary is three special tokens and the 256 bytes, and
the end-of-text token has no output weights, so greedy decoding never ends by chance.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

import gguf
import numpy as np
from numpy.typing import NDArray

Array = NDArray[np.float32]

N_EMBD = 128
HEAD_DIM = 64
N_FF = 96
N_LAYER = 2
ROPE_BASE = 10000.0
EPSILON = 1e-5

BEGIN_OF_TEXT = 1
END_OF_TEXT = 2
FIRST_BYTE = 3
N_VOCAB = FIRST_BYTE + 256

#: Logit softcap, sliding window and partial RoPE where an architecture has them.
SOFTCAP = 5.0
WINDOW = 32
PARTIAL_ROPE = 16
MPT_MAX_BIAS = 4.0

#: Latent attention (MLA): what K and V are compressed to, and the dims of a head that RoPE turns
#: and that it does not.
LATENT = 64
MLA_ROPE = 32
MLA_PLAIN = 40
MLA_VALUE = 48

#: Head dims of the windowed layers where an architecture has two kinds.
WINDOWED_HEAD_DIM = 32


@dataclass(frozen=True)
class Shape:
    """What a tiny model looks like; ``n_embd`` must be ``64 * n_head`` for some architectures.

    ``sink`` is the mean logit of learned sinks, where there are any.
    """

    n_head: int = 4
    n_head_kv: int = 2
    n_embd: int = N_EMBD
    n_context: int = 4096
    n_layer: int = N_LAYER
    sink: float = 3.0


@dataclass
class Weights:
    """Draws tensors by name and keeps them."""

    generator: np.random.Generator
    tensors: dict[str, Array] = field(default_factory=dict)

    def matrix(self, name: str, n_out: int, n_in: int, gain: float = 1.0) -> None:
        """Add ``[n_out, n_in]`` weights that turn unit variance into variance gain²."""
        values = self.generator.normal(0.0, gain / np.sqrt(n_in), (n_out, n_in))
        self.tensors[name] = values.astype(np.float32)

    def vector(self, name: str, length: int, centre: float = 0.0, spread: float = 0.1) -> None:
        """Add a norm's weights (``centre`` 1) or a bias."""
        values = self.generator.normal(centre, spread, length)
        self.tensors[name] = values.astype(np.float32)


Build = Callable[[gguf.GGUFWriter, Weights, Shape], None]


def tiny_model(
    path: Path,
    architecture: str = "llama",
    *,
    shape: Shape | None = None,
    countdown: bool = False,
    chat_template: str | None = None,
    tokenizer: bool = True,
    seed: int = 0,
) -> Path:
    """Write a model of about 1 MB to ``path`` and return it.

    ``countdown`` (llama only) makes a model that follows each byte by the byte before it in the
    alphabet, and "a" by the end of the text. Without ``tokenizer`` it reads token ids alone.
    """
    build, usual = ARCHITECTURES[architecture]
    shape = shape or usual
    weights = Weights(np.random.default_rng(seed))
    writer = gguf.GGUFWriter(path, architecture)
    writer.add_name("tiny")
    writer.add_file_type(gguf.LlamaFileType.ALL_F32)
    writer.add_context_length(shape.n_context)
    writer.add_embedding_length(shape.n_embd)
    writer.add_block_count(shape.n_layer)
    if tokenizer:
        _add_vocabulary(writer)
    else:
        writer.add_tokenizer_model("none")
        writer.add_vocab_size(N_VOCAB)
    if chat_template is not None:
        writer.add_chat_template(chat_template)
    build(writer, weights, shape)
    if countdown:
        _count_down(weights)
    for name, values in weights.tensors.items():
        writer.add_tensor(name, values)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def token_ids(text: str) -> list[int]:
    """Return the tokens of a text: the leading special one, then its bytes."""
    return [BEGIN_OF_TEXT, *(FIRST_BYTE + byte for byte in text.replace(" ", "▁").encode())]


def _add_vocabulary(writer: gguf.GGUFWriter) -> None:
    kinds = gguf.TokenType
    writer.add_tokenizer_model("llama")
    writer.add_token_list(["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256))])
    writer.add_token_scores([0.0] * N_VOCAB)
    writer.add_token_types([kinds.UNKNOWN, kinds.CONTROL, kinds.CONTROL, *[kinds.BYTE] * 256])
    writer.add_bos_token_id(BEGIN_OF_TEXT)
    writer.add_eos_token_id(END_OF_TEXT)
    writer.add_unk_token_id(0)
    writer.add_add_bos_token(True)
    writer.add_add_space_prefix(False)


def _count_down(weights: Weights) -> None:
    embedding = weights.tensors["token_embd.weight"]
    output = weights.tensors["output.weight"]
    output[:] = 0.0
    first, last = FIRST_BYTE + ord("b"), FIRST_BYTE + ord("z")
    output[first - 1 : last] = embedding[first : last + 1]
    output[END_OF_TEXT] = embedding[first - 1]


def _embeddings(weights: Weights, shape: Shape, *, tied: bool = False) -> None:
    weights.matrix("token_embd.weight", N_VOCAB, shape.n_embd, np.sqrt(shape.n_embd))
    if not tied:
        weights.matrix("output.weight", N_VOCAB, shape.n_embd)
    weights.tensors["token_embd.weight" if tied else "output.weight"][END_OF_TEXT] = 0.0
    weights.vector("output_norm.weight", shape.n_embd, 1.0)


def _heads(writer: gguf.GGUFWriter, shape: Shape) -> None:
    writer.add_head_count(shape.n_head)
    writer.add_head_count_kv(shape.n_head_kv)
    writer.add_key_length(HEAD_DIM)
    writer.add_value_length(HEAD_DIM)
    writer.add_feed_forward_length(N_FF)


def _attention(weights: Weights, block: str, shape: Shape) -> None:
    weights.matrix(f"{block}.attn_q.weight", shape.n_head * HEAD_DIM, shape.n_embd, 1.4)
    weights.matrix(f"{block}.attn_k.weight", shape.n_head_kv * HEAD_DIM, shape.n_embd, 1.4)
    weights.matrix(f"{block}.attn_v.weight", shape.n_head_kv * HEAD_DIM, shape.n_embd)
    weights.matrix(f"{block}.attn_output.weight", shape.n_embd, shape.n_head * HEAD_DIM, 0.5)


def _gated_ffn(weights: Weights, block: str, shape: Shape) -> None:
    weights.matrix(f"{block}.ffn_gate.weight", N_FF, shape.n_embd)
    weights.matrix(f"{block}.ffn_up.weight", N_FF, shape.n_embd)
    weights.matrix(f"{block}.ffn_down.weight", shape.n_embd, N_FF, 0.5)


def _blocks(n_layer: int = N_LAYER) -> list[str]:
    return [f"blk.{index}" for index in range(n_layer)]


def _llama(writer: gguf.GGUFWriter, weights: Weights, shape: Shape) -> None:
    _heads(writer, shape)
    writer.add_layer_norm_rms_eps(EPSILON)
    writer.add_rope_dimension_count(HEAD_DIM)
    writer.add_rope_freq_base(ROPE_BASE)
    _embeddings(weights, shape)
    for block in _blocks():
        weights.vector(f"{block}.attn_norm.weight", shape.n_embd, 1.0)
        _attention(weights, block, shape)
        weights.vector(f"{block}.ffn_norm.weight", shape.n_embd, 1.0)
        _gated_ffn(weights, block, shape)


def _layer_norms(weights: Weights, block: str, shape: Shape) -> None:
    for norm in ("attn_norm", "ffn_norm"):
        weights.vector(f"{block}.{norm}.weight", shape.n_embd, 1.0)
        weights.vector(f"{block}.{norm}.bias", shape.n_embd)


def _stablelm(writer: gguf.GGUFWriter, weights: Weights, shape: Shape) -> None:
    """RoPE turns a quarter of the dims only; llama.cpp refuses that for the llama architecture."""
    _heads(writer, shape)
    writer.add_layer_norm_eps(EPSILON)
    writer.add_rope_dimension_count(PARTIAL_ROPE)
    writer.add_rope_freq_base(ROPE_BASE)
    _embeddings(weights, shape)
    weights.vector("output_norm.bias", shape.n_embd)
    for block in _blocks():
        _layer_norms(weights, block, shape)
        _attention(weights, block, shape)
        _gated_ffn(weights, block, shape)


def _gemma2(writer: gguf.GGUFWriter, weights: Weights, shape: Shape) -> None:
    """Softcapped logits; every second layer, from the first on, has a sliding window."""
    _heads(writer, shape)
    writer.add_layer_norm_rms_eps(EPSILON)
    writer.add_attn_logit_softcapping(SOFTCAP)
    writer.add_final_logit_softcapping(30.0)
    writer.add_sliding_window(WINDOW)
    _embeddings(weights, shape, tied=True)
    for block in _blocks():
        for norm in ("attn_norm", "post_attention_norm", "ffn_norm", "post_ffw_norm"):
            weights.vector(f"{block}.{norm}.weight", shape.n_embd, 1.0)
        _attention(weights, block, shape)
        _gated_ffn(weights, block, shape)


def _fused_without_rope(writer: gguf.GGUFWriter, weights: Weights, shape: Shape) -> None:
    """One matrix for q, k and v, and a plain FFN: the body of the ALiBi architectures."""
    _heads(writer, shape)
    writer.add_layer_norm_eps(EPSILON)
    _embeddings(weights, shape)
    weights.vector("output_norm.bias", shape.n_embd)
    for block in _blocks():
        _layer_norms(weights, block, shape)
        n_qkv = (shape.n_head + 2 * shape.n_head_kv) * HEAD_DIM
        weights.matrix(f"{block}.attn_qkv.weight", n_qkv, shape.n_embd, 1.4)
        weights.vector(f"{block}.attn_qkv.bias", n_qkv)
        weights.matrix(f"{block}.attn_output.weight", shape.n_embd, shape.n_embd, 0.5)
        weights.vector(f"{block}.attn_output.bias", shape.n_embd)
        weights.matrix(f"{block}.ffn_up.weight", N_FF, shape.n_embd)
        weights.vector(f"{block}.ffn_up.bias", N_FF)
        weights.matrix(f"{block}.ffn_down.weight", shape.n_embd, N_FF, 0.5)
        weights.vector(f"{block}.ffn_down.bias", shape.n_embd)


def _bloom(writer: gguf.GGUFWriter, weights: Weights, shape: Shape) -> None:
    """ALiBi with the usual maximal bias of 8."""
    _fused_without_rope(writer, weights, shape)
    weights.vector("token_embd_norm.weight", shape.n_embd, 1.0)
    weights.vector("token_embd_norm.bias", shape.n_embd)


def _mpt(writer: gguf.GGUFWriter, weights: Weights, shape: Shape) -> None:
    """ALiBi with another maximal bias, and a head count that is no power of two."""
    _fused_without_rope(writer, weights, shape)
    writer.add_max_alibi_bias(MPT_MAX_BIAS)


def _gpt_oss(writer: gguf.GGUFWriter, weights: Weights, shape: Shape) -> None:
    """Learned sinks, sliding windows in every second layer, and a mixture of experts."""
    n_expert = 4
    _heads(writer, shape)
    writer.add_layer_norm_rms_eps(EPSILON)
    writer.add_rope_dimension_count(HEAD_DIM)
    writer.add_rope_freq_base(ROPE_BASE)
    writer.add_sliding_window(WINDOW)
    writer.add_expert_count(n_expert)
    writer.add_expert_used_count(2)
    writer.add_expert_feed_forward_length(N_FF)
    _embeddings(weights, shape)
    for block in _blocks():
        weights.vector(f"{block}.attn_norm.weight", shape.n_embd, 1.0)
        weights.vector(f"{block}.post_attention_norm.weight", shape.n_embd, 1.0)
        _attention(weights, block, shape)
        weights.vector(f"{block}.attn_output.bias", shape.n_embd)
        weights.vector(f"{block}.attn_sinks.weight", shape.n_head, shape.sink, 1.0)
        weights.matrix(f"{block}.ffn_gate_inp.weight", n_expert, shape.n_embd)
        weights.vector(f"{block}.ffn_gate_inp.bias", n_expert)
        for name, n_out, n_in in (
            ("ffn_gate_exps", N_FF, shape.n_embd),
            ("ffn_up_exps", N_FF, shape.n_embd),
            ("ffn_down_exps", shape.n_embd, N_FF),
        ):
            weights.matrix(f"{block}.{name}.weight", n_expert * n_out, n_in)
            weights.vector(f"{block}.{name}.bias", n_expert * n_out)
            for suffix, lengths in (
                ("weight", (n_expert, n_out, n_in)),
                ("bias", (n_expert, n_out)),
            ):
                key = f"{block}.{name}.{suffix}"
                weights.tensors[key] = weights.tensors[key].reshape(lengths)


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


def _deepseek2(writer: gguf.GGUFWriter, weights: Weights, shape: Shape) -> None:
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
    _embeddings(weights, shape)
    for block in _blocks():
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
        _gated_ffn(weights, block, shape)


def _plm(writer: gguf.GGUFWriter, weights: Weights, shape: Shape) -> None:
    """MLA that is spelled out before the cache: RoPE turns the last dims, and V is narrower."""
    n_head, head_dim = shape.n_head, MLA_PLAIN + MLA_ROPE
    _latent(writer, shape)
    writer.add_head_count_kv(n_head)
    writer.add_key_length(head_dim)
    writer.add_value_length(MLA_VALUE)
    _embeddings(weights, shape, tied=True)
    for block in _blocks():
        _latent_attention(weights, block, shape)
        weights.matrix(f"{block}.attn_q.weight", n_head * head_dim, shape.n_embd, 1.4)
        weights.matrix(f"{block}.attn_kv_b.weight", n_head * (MLA_PLAIN + MLA_VALUE), LATENT)
        weights.matrix(f"{block}.ffn_up.weight", N_FF, shape.n_embd)
        weights.matrix(f"{block}.ffn_down.weight", shape.n_embd, N_FF, 0.5)


def _gemma4(writer: gguf.GGUFWriter, weights: Weights, shape: Shape) -> None:
    """Narrower heads in the windowed layers; the last two layers read the cache of the first."""
    windowed = [index % 2 == 0 for index in range(shape.n_layer)]
    _heads(writer, shape)
    writer.add_key_length_swa(WINDOWED_HEAD_DIM)
    writer.add_value_length_swa(WINDOWED_HEAD_DIM)
    writer.add_layer_norm_rms_eps(EPSILON)
    writer.add_sliding_window(WINDOW)
    writer.add_sliding_window_pattern(windowed)
    writer.add_shared_kv_layers(2)
    writer.add_embedding_length_per_layer_input(0)
    writer.add_rope_dimension_count(HEAD_DIM)
    writer.add_rope_dimension_count_swa(WINDOWED_HEAD_DIM)
    _embeddings(weights, shape, tied=True)
    weights.tensors["rope_freqs.weight"] = np.ones(HEAD_DIM // 2, dtype=np.float32)
    for block, narrow in zip(_blocks(shape.n_layer), windowed, strict=True):
        head_dim = WINDOWED_HEAD_DIM if narrow else HEAD_DIM
        for norm in ("attn_norm", "post_attention_norm", "ffn_norm", "post_ffw_norm"):
            weights.vector(f"{block}.{norm}.weight", shape.n_embd, 1.0)
        for name, n_head in (("q", shape.n_head), ("k", shape.n_head_kv), ("v", shape.n_head_kv)):
            weights.matrix(f"{block}.attn_{name}.weight", n_head * head_dim, shape.n_embd)
        for name in ("q", "k"):
            weights.vector(f"{block}.attn_{name}_norm.weight", head_dim, 0.5)
        weights.matrix(f"{block}.attn_output.weight", shape.n_embd, shape.n_head * head_dim, 0.5)
        _gated_ffn(weights, block, shape)


def _mamba(writer: gguf.GGUFWriter, weights: Weights, shape: Shape) -> None:
    """No attention at all."""
    n_inner, n_state, n_rank, n_conv = 2 * shape.n_embd, 8, 8, 4
    writer.add_head_count(0)
    writer.add_feed_forward_length(0)
    writer.add_layer_norm_rms_eps(EPSILON)
    writer.add_ssm_conv_kernel(n_conv)
    writer.add_ssm_inner_size(n_inner)
    writer.add_ssm_state_size(n_state)
    writer.add_ssm_time_step_rank(n_rank)
    _embeddings(weights, shape)
    for block in _blocks():
        weights.vector(f"{block}.attn_norm.weight", shape.n_embd, 1.0)
        weights.matrix(f"{block}.ssm_in.weight", 2 * n_inner, shape.n_embd)
        weights.matrix(f"{block}.ssm_conv1d.weight", n_inner, n_conv)
        weights.vector(f"{block}.ssm_conv1d.bias", n_inner)
        weights.matrix(f"{block}.ssm_x.weight", n_rank + 2 * n_state, n_inner)
        weights.matrix(f"{block}.ssm_dt.weight", n_inner, n_rank)
        weights.vector(f"{block}.ssm_dt.bias", n_inner)
        weights.tensors[f"{block}.ssm_a"] = np.full((n_inner, n_state), -1.0, dtype=np.float32)
        weights.vector(f"{block}.ssm_d", n_inner, 1.0)
        weights.matrix(f"{block}.ssm_out.weight", shape.n_embd, n_inner)


def _square(n_head: int) -> Shape:
    return Shape(n_head=n_head, n_head_kv=n_head, n_embd=n_head * HEAD_DIM)


#: How to write an architecture, and the shape it has unless a test asks for another.
ARCHITECTURES: dict[str, tuple[Build, Shape]] = {
    "llama": (_llama, Shape()),
    "stablelm": (_stablelm, Shape(n_head=2, n_head_kv=1)),
    "gemma2": (_gemma2, Shape()),
    "bloom": (_bloom, _square(2)),
    "mpt": (_mpt, _square(3)),
    "gpt-oss": (_gpt_oss, Shape()),
    "deepseek2": (_deepseek2, Shape()),
    "plm": (_plm, Shape()),
    "gemma4": (_gemma4, Shape(n_layer=4)),
    "mamba": (_mamba, Shape()),
}
