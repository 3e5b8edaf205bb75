"""What the families of tiny models are put together from."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

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

    ``sink`` is the mean logit of learned sinks, where there are any, and ``windowed`` says of each
    layer whether it has a sliding window, where an architecture lets its file say so.
    """

    n_head: int = 4
    n_head_kv: int = 2
    n_embd: int = N_EMBD
    n_context: int = 4096
    n_layer: int = N_LAYER
    head_dim: int = HEAD_DIM
    sink: float = 3.0
    windowed: tuple[bool, ...] = (True, False)


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

    def reshape(self, name: str, lengths: tuple[int, ...]) -> None:
        """Give a tensor other dimensions."""
        self.tensors[name] = self.tensors[name].reshape(lengths)


def embeddings(weights: Weights, shape: Shape, *, tied: bool = False) -> None:
    weights.matrix("token_embd.weight", N_VOCAB, shape.n_embd, np.sqrt(shape.n_embd))
    if not tied:
        weights.matrix("output.weight", N_VOCAB, shape.n_embd)
    weights.tensors["token_embd.weight" if tied else "output.weight"][END_OF_TEXT] = 0.0
    weights.vector("output_norm.weight", shape.n_embd, 1.0)


def heads(writer: gguf.GGUFWriter, shape: Shape) -> None:
    writer.add_head_count(shape.n_head)
    writer.add_head_count_kv(shape.n_head_kv)
    writer.add_key_length(shape.head_dim)
    writer.add_value_length(shape.head_dim)
    writer.add_feed_forward_length(N_FF)


def attention(weights: Weights, block: str, shape: Shape) -> None:
    weights.matrix(f"{block}.attn_q.weight", shape.n_head * shape.head_dim, shape.n_embd, 1.4)
    weights.matrix(f"{block}.attn_k.weight", shape.n_head_kv * shape.head_dim, shape.n_embd, 1.4)
    weights.matrix(f"{block}.attn_v.weight", shape.n_head_kv * shape.head_dim, shape.n_embd)
    weights.matrix(f"{block}.attn_output.weight", shape.n_embd, shape.n_head * shape.head_dim, 0.5)


def gated_ffn(weights: Weights, block: str, shape: Shape) -> None:
    weights.matrix(f"{block}.ffn_gate.weight", N_FF, shape.n_embd)
    weights.matrix(f"{block}.ffn_up.weight", N_FF, shape.n_embd)
    weights.matrix(f"{block}.ffn_down.weight", shape.n_embd, N_FF, 0.5)


def blocks(n_layer: int) -> list[str]:
    return [f"blk.{index}" for index in range(n_layer)]


def layer_norms(weights: Weights, block: str, shape: Shape) -> None:
    for norm in ("attn_norm", "ffn_norm"):
        weights.vector(f"{block}.{norm}.weight", shape.n_embd, 1.0)
        weights.vector(f"{block}.{norm}.bias", shape.n_embd)


def qk_norms(weights: Weights, block: str, shape: Shape) -> None:
    """Add norms of q and k that leave logits with a standard deviation of about 2."""
    for name in ("q", "k"):
        weights.vector(f"{block}.attn_{name}_norm.weight", shape.head_dim, 1.4)


def experts(
    writer: gguf.GGUFWriter, weights: Weights, shape: Shape, *, n_expert: int, biased: bool = False
) -> None:
    """Add a mixture of ``n_expert`` gated FFNs with a router to every layer; two are used."""
    writer.add_expert_count(n_expert)
    writer.add_expert_used_count(2)
    writer.add_expert_feed_forward_length(N_FF)
    for block in blocks(shape.n_layer):
        weights.matrix(f"{block}.ffn_gate_inp.weight", n_expert, shape.n_embd)
        for name, n_out, n_in in (
            ("ffn_gate_exps", N_FF, shape.n_embd),
            ("ffn_up_exps", N_FF, shape.n_embd),
            ("ffn_down_exps", shape.n_embd, N_FF),
        ):
            weights.matrix(f"{block}.{name}.weight", n_expert * n_out, n_in)
            weights.reshape(f"{block}.{name}.weight", (n_expert, n_out, n_in))
            if biased:
                weights.vector(f"{block}.{name}.bias", n_expert * n_out)
                weights.reshape(f"{block}.{name}.bias", (n_expert, n_out))
        if biased:
            weights.vector(f"{block}.ffn_gate_inp.bias", n_expert)


Build = Callable[[gguf.GGUFWriter, Weights, Shape], None]
