"""The profile computed step by step and head by head: what the fast one is timed against.

Written as one would at first: K of a KV head is converted once, then every query head of every step
has its own product, softmax and sums. It measures what `BASE` lists and the shape of attention.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from pytest_kvgate.analysis import PageGrid
from pytest_kvgate.trace import Layer, Trace

#: What is timed: two page selectors, and token-oracle.
BASE = ("oracle", "landmark", "token-oracle")


@dataclass
class PlainNumbers:
    """Per-unit values, by (selector, budget); shapes per query head."""

    coverage: dict[tuple[str, float], list[float]] = field(default_factory=dict)
    jaccard: dict[tuple[str, float], list[float]] = field(default_factory=dict)
    support: list[float] = field(default_factory=list)
    hottest: list[float] = field(default_factory=list)


def plain_profile(trace: Trace, grid: PageGrid, budgets: tuple[float, ...]) -> PlainNumbers:
    """Measure the paged layers of a trace without softcap, ALiBi or learned sinks."""
    numbers = PlainNumbers()
    for layer in trace.paged_layers:
        for kv_head in range(layer.n_head_kv):
            _measure_head(numbers, trace, layer, kv_head, grid, budgets)
    return numbers


def _measure_head(
    numbers: PlainNumbers,
    trace: Trace,
    layer: Layer,
    kv_head: int,
    grid: PageGrid,
    budgets: tuple[float, ...],
) -> None:
    size = grid.page_size
    keys = layer.k[kv_head, : trace.n_context].astype(np.float32)
    n_page = len(keys) // size
    means = keys[: n_page * size].reshape(n_page, size, -1).mean(axis=1)
    before: dict[tuple[str, float], set[int]] = {}
    for number, step in enumerate(trace.steps):
        first, end = grid.eligible(step.n_visible)
        token_mass = np.zeros((end - first) * size)
        score = np.full(end - first, -np.inf)
        for head in range(*layer.query_heads(kv_head).indices(layer.n_head)):
            query = np.asarray(layer.q[number, head], dtype=np.float32)
            masses = _softmax(keys[: step.n_visible] @ query * np.float32(layer.scale))
            eligible = masses[first * size : end * size]
            token_mass += eligible
            score = np.maximum(score, means[first:end] @ query)
            share = eligible / eligible.sum()
            numbers.support.append(float(np.exp(-(share * np.log(share)).sum())))
            numbers.hottest.append(float(share.max()))
        page_mass = token_mass.reshape(-1, size).sum(axis=1)
        orders = {
            "oracle": np.argsort(-page_mass, kind="stable"),
            "landmark": np.argsort(-score, kind="stable"),
        }
        hottest = np.sort(token_mass)[::-1]
        for budget in budgets:
            k = grid.pages_for(budget, step.n_visible)
            held = {name: page_mass[order[:k]].sum() for name, order in orders.items()}
            held["token-oracle"] = hottest[: k * size].sum()
            for name, mass in held.items():
                share_held = float(mass / page_mass.sum())
                numbers.coverage.setdefault((name, budget), []).append(share_held)
            for name, order in orders.items():
                chosen = set(order[:k].tolist())
                last = before.get((name, budget))
                if last is not None:
                    overlap = len(chosen & last) / len(chosen | last)
                    numbers.jaccard.setdefault((name, budget), []).append(overlap)
                before[name, budget] = chosen


def _softmax(logits: NDArray[np.float32]) -> NDArray[np.float32]:
    weights = np.exp(logits - logits.max())
    shares: NDArray[np.float32] = weights / weights.sum()
    return shares
