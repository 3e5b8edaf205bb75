"""Tiny GGUF models with random weights, written when a test asks for one.

Head dim is 64, so that a quantized K cache is rotated. Weights are scaled so that attention logits
have a standard deviation of about 2. The vocabulary is three special tokens and the 256 bytes, and
the end-of-text token has no output weights, so greedy decoding never ends by chance.
"""

from tests.models.parts import (
    BEGIN_OF_TEXT,
    END_OF_TEXT,
    EPSILON,
    FIRST_BYTE,
    HEAD_DIM,
    LATENT,
    MLA_PLAIN,
    MLA_ROPE,
    MLA_VALUE,
    N_EMBD,
    N_LAYER,
    N_VOCAB,
    PARTIAL_ROPE,
    ROPE_BASE,
    SOFTCAP,
    WINDOW,
    WINDOWED_HEAD_DIM,
    Array,
    Shape,
)
from tests.models.writing import ARCHITECTURES, tiny_model, token_ids

__all__ = [
    "ARCHITECTURES",
    "BEGIN_OF_TEXT",
    "END_OF_TEXT",
    "EPSILON",
    "FIRST_BYTE",
    "HEAD_DIM",
    "LATENT",
    "MLA_PLAIN",
    "MLA_ROPE",
    "MLA_VALUE",
    "N_EMBD",
    "N_LAYER",
    "N_VOCAB",
    "PARTIAL_ROPE",
    "ROPE_BASE",
    "SOFTCAP",
    "WINDOW",
    "WINDOWED_HEAD_DIM",
    "Array",
    "Shape",
    "tiny_model",
    "token_ids",
]
