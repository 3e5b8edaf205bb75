"""Exact attention masses of one layer at sampled decode steps.

The softmax of scaled dot-product attention (Vaswani et al., 2017) with the terms in use today:
logit softcap (Gemma 2), ALiBi (Press et al., 2022), a sliding window, and a learned sink in the
denominator (gpt-oss).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np
from numpy.typing import NDArray

from pytest_kvgate.trace import Layer, TraceError

#: Logits held at once, in float32 values; bounds the memory of a block of steps to 64 MiB.
BLOCK_LOGITS = 16 * 2**20


def head_keys(layer: Layer, kv_head: int, n_token: int) -> NDArray[np.float32]:
    """Return K of one KV head as ``[n_token, head_dim]`` float32."""
    return np.asarray(layer.k[kv_head, :n_token], dtype=np.float32)


def group_masses(
    layer: Layer,
    kv_head: int,
    queries: NDArray[np.float32],
    keys: NDArray[np.float32],
    n_visible: Sequence[int],
    first_step: int = 0,
) -> NDArray[np.float32]:
    """Return the attention masses ``p[h, j]`` of one GQA group at several steps.

    Args:
        layer: gives scale, softcap, ALiBi slopes, window and sinks.
        kv_head: which KV head, and with it which group of query heads.
        queries: ``[n_step, G, head_dim]`` float32, the group's queries.
        keys: ``[n_token, head_dim]`` float32, with ``n_token >= max(n_visible)``.
        n_visible: visible positions per step, the query's own included.
        first_step: number of the first of these steps in its trace, for errors.

    Returns:
        ``[n_step, G, n_token]`` float32; zero where a position is not visible. A row sums to 1,
        or to less by the share of the learned sink.

    Raises:
        TraceError: q or K hold values that make a logit other than a finite number.
    """
    n_step, group, head_dim = queries.shape
    n_token = len(keys)
    heads = layer.query_heads(kv_head)
    scaled = (queries * np.float32(layer.scale)).reshape(n_step * group, head_dim)
    with np.errstate(over="ignore", invalid="ignore"):
        logits = np.asarray(scaled @ keys.T, dtype=np.float32).reshape(n_step, group, n_token)
    slopes = None
    if layer.alibi_slopes is not None:
        slopes = np.array(layer.alibi_slopes[heads], dtype=np.float32)
    sinks = None if layer.sinks is None else np.asarray(layer.sinks[heads], dtype=np.float32)
    for step, n in enumerate(n_visible):
        row = logits[step]
        first = 0 if layer.window is None else max(0, n - layer.window)
        visible = row[:, first:n]
        if not np.isfinite(visible).all():  # before the softcap, which would hide an infinity
            raise TraceError(
                f"layer {layer.index}, KV head {kv_head}, step {first_step + step}: q·k is not a "
                "finite number, so the trace holds broken values. Capture it again."
            )
        if layer.softcap is not None:
            cap = np.float32(layer.softcap)
            visible /= cap
            np.tanh(visible, out=visible)
            visible *= cap
        if slopes is not None:
            visible -= slopes[:, None] * np.arange(n - 1 - first, -1, -1, dtype=np.float32)
        top = visible.max(axis=1)
        if sinks is not None:
            np.maximum(top, sinks, out=top)
        np.exp(visible - top[:, None], out=visible)
        total = visible.sum(axis=1, dtype=np.float64)
        if sinks is not None:
            total += np.exp(sinks - top, dtype=np.float64)
        if not np.isfinite(total).all():
            raise TraceError(
                f"layer {layer.index}, KV head {kv_head}, step {first_step + step}: the softmax is "
                "not a finite number; look at the softcap, ALiBi slopes and sinks of this layer."
            )
        visible /= total[:, None].astype(np.float32)
        row[:, :first] = 0
        row[:, n:] = 0
    return logits


def step_blocks(n_step: int, group: int, n_token: int) -> Iterator[slice]:
    """Cut the steps into blocks whose logits fit into `BLOCK_LOGITS`."""
    size = max(1, BLOCK_LOGITS // (group * n_token))
    for start in range(0, n_step, size):
        yield slice(start, min(start + size, n_step))
