"""Exact attention masses of one layer at sampled decode steps.

The softmax of scaled dot-product attention (Vaswani et al., 2017) with the terms in use today:
logit softcap (Gemma 2), ALiBi (Press et al., 2022), a sliding window, a learned sink in the
denominator (gpt-oss), and what a model's own top-k hides (DeepSeek V3.2). The context is streamed
in tiles that fit into the processor's cache, each relative to its own largest logit, and put on one
scale at the end (as in online softmax, Milakov and Gimelshein, 2018).
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from pytest_kvgate.trace import FloatArray, Layer, TraceError

#: Weights held at once in all threads, in float32 values; bounds a block of steps to 256 MiB.
BLOCK_LOGITS = 64 * 2**20
#: Logits of one tile: 1.5 MiB in float32, which stays in the processor's cache.
TILE_LOGITS = 3 * 2**17
SHORTEST_TILE, LONGEST_TILE = 128, 4096
#: The logit of a position that is not seen: its weight is 0, and finite times 0 is 0.
HIDDEN = np.float32(-1.7e38)
#: Values summed in float32 before float64 takes over.
SUM_LENGTH = 256


@dataclass(frozen=True)
class GroupAttention:
    """The attention of one GQA group at several steps, in tiles of the context.

    ``p[s, h, j] = weights[t][s, h, j - edges[t]] · scale[t, s, h]`` for the tile ``t`` that holds
    position j. ``edges`` are the positions where tiles begin, and the end. ``weights[t]`` is
    ``[n_step, G, length]`` float32, 0 where hidden; ``scale`` and the next three are ``[n_tile,
    n_step, G]`` float64, and ``scale`` is 0 where a step sees nothing of the tile. ``top`` is the
    largest logit of a tile, ``sums`` is ``Σ e`` and ``heat`` is ``Σ e·(x - top)`` with e the weight
    and x the logit. ``output`` is ``Σ e·v``, ``[n_tile, n_step, G, d_v]``, where values were given.
    ``sink_share`` is the learned sink's share of the mass, ``[n_step, G]``.
    """

    edges: NDArray[np.int64]
    weights: tuple[NDArray[np.float32], ...]
    scale: NDArray[np.float64]
    top: NDArray[np.float64]
    sums: NDArray[np.float64]
    heat: NDArray[np.float64]
    sink_share: NDArray[np.float64]
    output: NDArray[np.float64] | None

    def masses(self, step: int) -> NDArray[np.float32]:
        """Return ``p[h, j]`` of one step, ``[G, n_token]`` float32."""
        scale = self.scale[:, step].astype(np.float32)
        parts = [
            weights[step] * factor[:, None] if factor.any() else np.zeros_like(weights[step])
            for weights, factor in zip(self.weights, scale, strict=True)
        ]
        return np.concatenate(parts, axis=1)

    def token_masses(self) -> NDArray[np.float32]:
        """Return ``Σ_h p[h, j]``, ``[n_step, n_token]`` float32."""
        n_step = self.scale.shape[1]
        masses = np.empty((n_step, int(self.edges[-1])), dtype=np.float32)
        scale = self.scale.astype(np.float32)
        for tile, weights in enumerate(self.weights):
            inside = slice(self.edges[tile], self.edges[tile + 1])
            masses[:, inside] = np.matmul(scale[tile][:, None, :], weights)[:, 0]
        return masses

    def inside(self, first: int, end: NDArray[np.int64]) -> NDArray[np.bool_]:
        """Return which tiles lie within ``[first, end[s])``, ``[n_tile, n_step]``."""
        return (self.edges[:-1, None] >= first) & (self.edges[1:, None] <= end)

    def mass(self, tiles: NDArray[np.bool_]) -> NDArray[np.float64]:
        """Return the mass per query head on these tiles, ``[n_step, G]``."""
        mass: NDArray[np.float64] = np.where(tiles[..., None], self.scale * self.sums, 0.0).sum(0)
        return mass

    def outputs(self, tiles: NDArray[np.bool_]) -> NDArray[np.float64]:
        """Return ``Σ p·v`` over these tiles, ``[n_step, G, d_v]``."""
        assert self.output is not None
        scale = np.where(tiles[..., None], self.scale, 0.0)
        output: NDArray[np.float64] = np.einsum("tsh,tshd->shd", scale, self.output)
        return output

    def shape(self, tiles: NDArray[np.bool_]) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
        """Return effective support and hottest token of the mass on these tiles.

        Both are ``[n_step, G]``: ``exp(entropy)`` in tokens and the largest share, of the mass
        normalised to 1; NaN where there is none.
        """
        seen = tiles[..., None] & (self.scale > 0)
        top = np.where(seen, self.top, -np.inf)
        highest = top.max(axis=0, initial=-np.inf)
        with np.errstate(invalid="ignore", divide="ignore"):
            distance = np.where(seen, self.top - highest, 0.0)
            factor = np.where(seen, np.exp(distance), 0.0)
            total = (factor * self.sums).sum(axis=0)
            energy = (factor * (self.heat + distance * self.sums)).sum(axis=0) / total
            support = np.exp(np.log(total) - energy)
            return np.where(total > 0, support, np.nan), np.where(total > 0, 1 / total, np.nan)


class GroupSoftmax:
    """Streams the context past the queries of one GQA group at several steps.

    ``queries`` is ``[n_step, G, head_dim]`` float32, ``n_visible`` the visible positions per step,
    the query's own included; ``cuts`` are positions that no tile may straddle, and ``store`` at
    least ``n_step · G · n_token`` float32 values of memory to keep weights in. ``first_step`` is
    the number of the first of these steps in its trace, which follow each other.
    """

    def __init__(
        self,
        layer: Layer,
        kv_head: int,
        queries: NDArray[np.float32],
        n_visible: Sequence[int],
        store: NDArray[np.float32],
        cuts: Iterable[int] = (),
        first_step: int = 0,
    ) -> None:
        self._layer, self._kv_head, self._first_step = layer, kv_head, first_step
        n_step, self._group, _ = queries.shape
        heads = layer.query_heads(kv_head)
        self._n_visible = np.array(n_visible, dtype=np.int64)
        window = layer.window or int(self._n_visible.max())
        self._first_visible = np.maximum(self._n_visible - window, 0)
        self._shown = None
        if layer.visible is not None:
            self._shown = layer.visible[first_step : first_step + n_step]
        self._cuts = sorted(set(cuts))
        self._scaled = (queries * np.float32(layer.scale)).reshape(n_step * self._group, -1)
        self._slopes = None
        if layer.alibi_slopes is not None:
            self._slopes = np.array(layer.alibi_slopes[heads], dtype=np.float32)
        self._sinks = None
        if layer.sinks is not None:
            self._sinks = np.asarray(layer.sinks[heads], dtype=np.float64)
        self._store, self._used = store, 0
        self._scratch = np.empty(0, dtype=np.float32)
        self._edges: list[int] = []
        self._weights: list[NDArray[np.float32]] = []
        self._top: list[NDArray[np.float32]] = []
        self._sums: list[NDArray[np.float64]] = []
        self._heat: list[NDArray[np.float64]] = []
        self._output: list[NDArray[np.float32]] = []

    def add(
        self, start: int, keys: NDArray[np.float32], values: NDArray[np.float32] | None = None
    ) -> None:
        """Take the keys ``[n, head_dim]`` and values ``[n, d_v]`` of positions from ``start`` on.

        Raises:
            TraceError: q or K hold values that make a logit other than a finite number.
        """
        stop = start + len(keys)
        edges = [start, *(cut for cut in self._cuts if start < cut < stop), stop]
        for begin, end in itertools.pairwise(edges):
            part = slice(begin - start, end - start)
            self._add_tile(begin, end, keys[part], None if values is None else values[part])

    def _add_tile(
        self, begin: int, end: int, keys: NDArray[np.float32], values: NDArray[np.float32] | None
    ) -> None:
        n_row, length = len(self._scaled), end - begin
        if len(self._scratch) < n_row * length:
            self._scratch = np.empty(n_row * length, dtype=np.float32)
        logits = self._scratch[: n_row * length].reshape(n_row, length)
        weights = self._store[self._used : self._used + logits.size].reshape(n_row, length)
        self._used += logits.size
        # what is not finite is found below, in the sums of the tile
        with np.errstate(over="ignore", invalid="ignore"):
            np.matmul(self._scaled, keys.T, out=logits)
            if self._layer.softcap is not None:
                self._require_finite(begin, end, logits.sum(axis=1))  # tanh hides an infinity
                cap = np.float32(self._layer.softcap)
                logits /= cap
                np.tanh(logits, out=logits)
                logits *= cap
            if self._slopes is not None:
                distance = (self._n_visible[:, None] - 1 - np.arange(begin, end)).astype(np.float32)
                by_head = logits.reshape(-1, self._group, length)
                by_head -= self._slopes[None, :, None] * distance[:, None, :]
            self._hide(begin, end, logits)
            top = logits.max(axis=1)
            logits -= top[:, None]
            np.exp(logits, out=weights)
            heat = _row_dots(logits, weights)
        self._require_finite(begin, end, heat)  # 0·∞ is not finite either
        shape = (-1, self._group)
        self._edges.append(begin)
        self._weights.append(weights.reshape(-1, self._group, length))
        self._top.append(top.reshape(shape))
        self._sums.append(_row_sums(weights).reshape(shape))
        self._heat.append(heat.reshape(shape))
        if values is not None:
            with np.errstate(over="ignore", invalid="ignore"):  # the caller looks for it
                output = weights @ values
            self._output.append(output.reshape(*self._top[-1].shape, -1))

    def finish(self) -> GroupAttention:
        """Put all tiles on one scale.

        Raises:
            TraceError: the softmax is not a finite number.
        """
        ends = [*self._edges[1:], self._edges[-1] + self._weights[-1].shape[-1]]
        edges = np.array([*self._edges, ends[-1]], dtype=np.int64)
        top = np.array(self._top, dtype=np.float64)
        sums, heat = np.array(self._sums), np.array(self._heat)
        seen = self._seen(edges[:-1], edges[1:])[..., None]
        highest = np.where(seen, top, -np.inf).max(axis=0)
        if self._sinks is not None:
            highest = np.maximum(highest, self._sinks)
        with np.errstate(over="ignore", invalid="ignore"):
            scale = np.where(seen, np.exp(top - highest), 0.0)
            total = (scale * sums).sum(axis=0)
            sink = np.zeros_like(total)
            if self._sinks is not None:
                sink = np.exp(self._sinks - highest)
            total += sink
        broken = ~np.isfinite(total).all(axis=1)
        if broken.any():
            raise TraceError(
                f"{self._place(int(np.flatnonzero(broken)[0]))}: the softmax is not a finite "
                "number; look at the softcap, ALiBi slopes and sinks of this layer."
            )
        return GroupAttention(
            edges=edges,
            weights=tuple(self._weights),
            scale=scale / total,
            top=top,
            sums=sums,
            heat=heat,
            sink_share=sink / total,
            output=np.array(self._output, dtype=np.float64) if self._output else None,
        )

    def _hide(self, begin: int, end: int, logits: NDArray[np.float32]) -> None:
        """Push what a step does not see of a tile below everything it sees."""
        by_step = logits.reshape(len(self._n_visible), -1, end - begin)
        for step in np.flatnonzero((self._n_visible < end) | (self._first_visible > begin)):
            by_step[step, :, max(0, self._n_visible[step] - begin) :] = HIDDEN
            by_step[step, :, : max(0, self._first_visible[step] - begin)] = HIDDEN
        if self._shown is not None:
            np.copyto(by_step, HIDDEN, where=~self._shown[:, None, begin:end])

    def _seen(self, begin: Any, end: Any) -> NDArray[np.bool_]:  # noqa: ANN401 - int or array
        """Return which steps see anything of ``[begin, end)``, ``[…, n_step]``."""
        if self._shown is not None:
            tiles = zip(np.atleast_1d(begin), np.atleast_1d(end), strict=True)
            shown = np.array([self._shown[:, first:last].any(axis=1) for first, last in tiles])
            return shown.reshape(*np.shape(begin), -1)
        begin, end = np.asarray(begin)[..., None], np.asarray(end)[..., None]
        seen: NDArray[np.bool_] = (begin < self._n_visible) & (end > self._first_visible)
        return seen

    def _require_finite(self, begin: int, end: int, rows: NDArray[np.floating]) -> None:
        finite = np.isfinite(rows)
        if finite.all():
            return
        broken = ~finite.reshape(-1, self._group).all(axis=1) & self._seen(begin, end)
        if broken.any():
            raise TraceError(
                f"{self._place(int(np.flatnonzero(broken)[0]))}: q·k is not a finite number, so "
                "the trace holds broken values. Capture it again."
            )

    def _place(self, step: int) -> str:
        return f"layer {self._layer.index}, KV head {self._kv_head}, step {self._first_step + step}"


def _row_dots(left: NDArray[np.float32], right: NDArray[np.float32]) -> NDArray[np.float64]:
    """Return ``Σ_j left·right`` per row, in float64 over sums of `SUM_LENGTH` in float32."""
    whole = left.shape[1] // SUM_LENGTH * SUM_LENGTH
    shape = (len(left), -1, SUM_LENGTH)
    parts = np.vecdot(left[:, :whole].reshape(shape), right[:, :whole].reshape(shape))
    rest = np.vecdot(left[:, whole:], right[:, whole:])
    total: NDArray[np.float64] = parts.sum(axis=1, dtype=np.float64) + rest
    return total


def _row_sums(rows: NDArray[np.float32]) -> NDArray[np.float64]:
    """Return the sum of each row, in float64 over sums of `SUM_LENGTH` in float32."""
    ones = np.ones(SUM_LENGTH, dtype=np.float32)  # a product with ones is the fastest sum
    whole = rows.shape[1] // SUM_LENGTH * SUM_LENGTH
    parts = rows[:, :whole].reshape(len(rows), -1, SUM_LENGTH) @ ones
    rest = rows[:, whole:] @ ones[: rows.shape[1] - whole]
    total: NDArray[np.float64] = parts.sum(axis=1, dtype=np.float64) + rest
    return total


def single_precision(rows: FloatArray) -> NDArray[np.float32]:
    """Return float16 or float32 values as float32.

    numpy converts float16 value by value; shifting the bits of all of them into place and scaling
    is several times faster, and exact, subnormal numbers too.
    """
    if rows.dtype != np.float16:
        return np.asarray(rows, dtype=np.float32)
    bits = rows.view(np.int16).astype(np.int32)
    bits <<= 13  # fraction and exponent where float32 has them, and the sign extended
    bits &= np.int32(-0x70002000)  # one sign bit
    values = bits.view(np.float32)
    values *= np.float32(2**112)  # the difference of the exponent biases
    # infinity and NaN became numbers that float16 does not have
    if values.max(initial=0) >= 2**16 or values.min(initial=0) <= -(2**16):
        return rows.astype(np.float32)
    return values


def head_keys(layer: Layer, kv_head: int, n_token: int) -> NDArray[np.float32]:
    """Return K of one KV head as ``[n_token, head_dim]`` float32."""
    return single_precision(layer.k[kv_head, :n_token])


def group_masses(
    layer: Layer,
    kv_head: int,
    queries: NDArray[np.float32],
    keys: FloatArray,
    n_visible: Sequence[int],
    first_step: int = 0,
) -> NDArray[np.float32]:
    """Return the attention masses ``p[h, j]`` of one GQA group at several steps.

    Args:
        layer: gives scale, softcap, ALiBi slopes, window, sinks and what its own top-k shows.
        kv_head: which KV head, and with it which group of query heads.
        queries: ``[n_step, G, head_dim]`` float32, the group's queries.
        keys: ``[n_token, head_dim]`` float16 or float32, with ``n_token >= max(n_visible)``.
        n_visible: visible positions per step, the query's own included.
        first_step: number of the first of these steps in its trace; the steps follow each other.

    Returns:
        ``[n_step, G, n_token]`` float32; zero where a position is not visible. A row sums to 1,
        or to less by the share of the learned sink.

    Raises:
        TraceError: q or K hold values that make a logit other than a finite number.
    """
    n_step, group, _ = queries.shape
    store = np.empty(n_step * group * len(keys), dtype=np.float32)
    softmax = GroupSoftmax(layer, kv_head, queries, n_visible, store, first_step=first_step)
    for tile in key_tiles(len(keys), n_step * group, 1):
        softmax.add(tile.start, single_precision(keys[tile]))
    attention = softmax.finish()
    return np.stack([attention.masses(step) for step in range(n_step)])


def key_tiles(n_token: int, n_row: int, multiple: int) -> Iterator[slice]:
    """Cut the context into tiles that begin at multiples of ``multiple`` tokens."""
    length = min(max(TILE_LOGITS // n_row, SHORTEST_TILE), LONGEST_TILE)
    length = max(multiple, length // multiple * multiple)
    for start in range(0, n_token, length):
        yield slice(start, min(start + length, n_token))
