"""The basis and the rounding in which the engine multiplies q and K."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

#: How q is rounded for a product: as plain code does it, and as vector instructions do.
PLAIN, VECTOR = "as K", "as K, by vector instructions"

#: Dims of a q8_0 block, which share a scale.
BYTES_PER_BLOCK = 32


def model_basis(vectors: NDArray[Any], rotation: NDArray[np.float32] | None) -> NDArray[Any]:
    """Bring ``[..., head_dim]`` out of the cache's basis into the model's own."""
    return vectors if rotation is None else rotate(vectors, rotation)


def rotate(vectors: NDArray[Any], rotation: NDArray[np.float32]) -> NDArray[np.float32]:
    """Multiply ``[..., head_dim]`` by an orthonormal ``[r, r]`` matrix in blocks of r dims.

    llama.cpp rotates q and K so before a quantized cache. Its matrix is symmetric, so the same call
    rotates and rotates back; q·k does not change.
    """
    block = len(rotation)
    blocks = np.asarray(vectors, dtype=np.float32).reshape(*vectors.shape[:-1], -1, block)
    rotated: NDArray[np.float32] = (blocks @ rotation.T).reshape(vectors.shape)
    return rotated


def product_roundings(
    queries: NDArray[np.float32], key_type: str
) -> dict[str, NDArray[np.float32]]:
    """Round q ``[..., head_dim]`` in the ways of llama.cpp's CPU product for this type of K cache.

    The product converts q to the type that K's dot product is written for: itself for f32, f16 and
    bf16, blocks of 32 signed bytes with one half-precision scale for the quantized ones. Those are
    rounded half away from zero in plain code, and half to even in vector instructions, which also
    come to the factor in one division less; a few bytes in a model differ by that.
    """
    if key_type in ("f32", "f16"):
        dtype = np.float32 if key_type == "f32" else np.float16
        return {PLAIN: queries.astype(dtype).astype(np.float32)}
    from gguf import GGMLQuantizationType, quants  # noqa: PLC0415 - only an extra brings it

    kind = GGMLQuantizationType.BF16 if key_type == "bf16" else GGMLQuantizationType.Q8_0
    plain: NDArray[np.float32] = quants.dequantize(quants.quantize(queries, kind), kind)
    if key_type == "bf16":
        return {PLAIN: plain}
    return {PLAIN: plain, VECTOR: _rounded_to_bytes(queries)}


def _rounded_to_bytes(vectors: NDArray[np.float32]) -> NDArray[np.float32]:
    blocks = vectors.reshape(*vectors.shape[:-1], -1, BYTES_PER_BLOCK)
    largest = np.abs(blocks).max(axis=-1, keepdims=True)
    scale = (largest / np.float32(127)).astype(np.float16).astype(np.float32)
    factor = np.divide(np.float32(127), largest, out=np.zeros_like(largest), where=largest > 0)
    rounded: NDArray[np.float32] = (np.rint(blocks * factor) * scale).reshape(vectors.shape)
    return rounded


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
