"""The basis and the rounding in which the engine multiplies q and K."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from pytest_kvgate.capture.errors import CaptureError


def rotate(vectors: NDArray[Any], rotation: NDArray[np.float32]) -> NDArray[np.float32]:
    """Multiply ``[..., head_dim]`` by an orthonormal ``[r, r]`` matrix in blocks of r dims.

    llama.cpp rotates q and K so before a quantized cache. Its matrix is symmetric, so the same call
    rotates and rotates back; q·k does not change.
    """
    block = len(rotation)
    blocks = np.asarray(vectors, dtype=np.float32).reshape(*vectors.shape[:-1], -1, block)
    rotated: NDArray[np.float32] = (blocks @ rotation.T).reshape(vectors.shape)
    return rotated


def round_like_product(queries: NDArray[np.float32], key_type: str) -> NDArray[np.float32]:
    """Round q ``[..., head_dim]`` as llama.cpp's CPU product does for a K cache of this type.

    The product converts q to the type that K's dot product is written for: itself for f32, f16 and
    bf16, blocks of 32 signed bytes with one half-precision scale for the quantized ones.
    """
    if key_type == "f32":
        return queries
    if key_type == "f16":
        return queries.astype(np.float16).astype(np.float32)
    from gguf import GGMLQuantizationType, quants  # noqa: PLC0415 - only an extra brings it

    kind = GGMLQuantizationType.BF16 if key_type == "bf16" else GGMLQuantizationType.Q8_0
    rounded: NDArray[np.float32] = quants.dequantize(quants.quantize(queries, kind), kind)
    return rounded


def require_whole_blocks(head_dim: int, key_type: str) -> None:
    """Raise CaptureError where a quantized type rounds more dims together than divide a head.

    llama.cpp then lets blocks run from one head into the next, and multiplies too few dims.
    """
    from gguf import GGML_QUANT_SIZES, GGMLQuantizationType  # noqa: PLC0415 - only an extra has it

    block, _ = GGML_QUANT_SIZES[GGMLQuantizationType[key_type.upper()]]
    if head_dim % block:
        raise CaptureError(
            f"a head of this model has {head_dim} dims, and a {key_type} K cache rounds {block} of "
            f"them together, which does not divide {head_dim}, so llama.cpp's attention would be "
            "wrong. Capture with --kvgate-cache-type-k=f16, f32 or bf16."
        )


def alibi_slopes(n_head: int, max_bias: float) -> tuple[float, ...] | None:
    """Return the ALiBi slope per query head (Press et al., 2022), None where max_bias is 0.

    For a head count that is no power of two, the remaining heads take every other slope of the next
    power, as llama.cpp does.
    """
    if max_bias <= 0:
        return None
    power = 1 << (n_head.bit_length() - 1)
    base, half = 2.0 ** (-max_bias / power), 2.0 ** (-max_bias / 2 / power)
    return tuple(
        base ** (head + 1) if head < power else half ** (2 * (head - power) + 1)
        for head in range(n_head)
    )
