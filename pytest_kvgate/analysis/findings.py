"""What a builder asks of a profile next: where the mass is lost, which layers, at what cost."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType

import numpy as np

from pytest_kvgate.analysis.paging import N_POOL, POOL_STEP
from pytest_kvgate.analysis.profile import Profile
from pytest_kvgate.analysis.selectors import LANDMARK, ORACLE, TOKEN_ORACLE
from pytest_kvgate.trace import Layer, Trace

#: Bytes per number of llama.cpp's cache types; the quantized ones share a scale among 32 numbers.
CACHE_BYTES: Mapping[str, float] = MappingProxyType(
    {
        "f32": 4,
        "f16": 2,
        "bf16": 2,
        "q8_0": 34 / 32,
        "q5_1": 24 / 32,
        "q5_0": 22 / 32,
        "q4_1": 20 / 32,
        "q4_0": 18 / 32,
        "iq4_nl": 18 / 32,
    }
)

#: The share of accesses that a pool is sized for.
WANTED_HITS = 0.99


@dataclass(frozen=True)
class Gap:
    """Where the mass is lost that a selector's pages do not hold, in shares of the eligible mass.

    ``diffuse`` is what no choice of so many tokens holds, ``granularity`` what pages cost against
    tokens, ``selector`` what the selector costs against the best pages, and ``staleness`` what it
    costs to select one sampled step early; None where no unit has a step before it. They sum to
    ``shortfall``. All are means over the same units: those with a step before, else all.
    """

    diffuse: float
    granularity: float
    selector: float
    staleness: float | None

    @property
    def shortfall(self) -> float:
        """The share of the eligible mass that is lost."""
        return self.diffuse + self.granularity + self.selector + (self.staleness or 0.0)


def gap(profile: Profile, selector: str, budget: float) -> Gap:
    """Split what a selector of pages loses at a budget that was asked for.

    Raises:
        NotMeasuredError: the selector, an oracle or the budget was not measured.
        UndefinedError: coverage is undefined.
    """
    tokens, pages, own = (
        profile.samples("coverage", name, budget).value for name in (TOKEN_ORACLE, ORACLE, selector)
    )
    row, column = profile.selectors.index(selector), profile.budgets.index(budget)
    stale = profile.numbers.units.numbers["stale_coverage"][row, column]
    follows = ~np.isnan(stale)
    some = follows if follows.any() else np.ones_like(follows)
    return Gap(
        diffuse=float((1 - tokens[some]).mean()),
        granularity=float((tokens - pages)[some].mean()),
        selector=float((pages - own)[some].mean()),
        staleness=float((own - stale)[follows].mean()) if follows.any() else None,
    )


def dense_layers(profile: Profile, budget: float, coverage: float) -> tuple[int, ...]:
    """Return the layers of which even the best pages hold less than ``coverage``.

    No selector can page them at this budget; they should stay resident. Raises as
    `Profile.layer_coverage` does.
    """
    held = profile.layer_coverage(ORACLE, budget)
    return tuple(layer for layer, value in held.items() if value < coverage)


def strides(profile: Profile) -> tuple[int, ...]:
    """Return the distances between sampled steps, in decode steps, ascending."""
    return tuple(
        sorted(
            {
                after.decode_index - before.decode_index
                for trace in profile.traces
                for before, after in zip(trace.steps[:-1], trace.steps[1:], strict=True)
            }
        )
    )


@dataclass(frozen=True)
class Ablation:
    """Coverage of landmark over the dims RoPE never turns, and over all dims; same units."""

    unrotated: float
    all_dims: float
    layers: tuple[int, ...]


def dim_ablation(profile: Profile, budget: float) -> Ablation | None:
    """Compare landmark with and without the rotated dims in the layers that have both kinds.

    None where there is no such layer or landmark was not measured; raises as `Profile.samples`.
    """
    if LANDMARK not in profile.selectors:
        return None
    profile.samples("coverage", LANDMARK, budget)
    units, column = profile.numbers.units, profile.budgets.index(budget)
    unrotated = units.unrotated[column]
    known = ~np.isnan(unrotated)
    if not known.any():
        return None
    whole = units.numbers["coverage"][profile.selectors.index(LANDMARK), column]
    return Ablation(
        float(unrotated[known].mean()),
        float(whole[known].mean()),
        tuple(int(layer) for layer in np.unique(units.layer[known])),
    )


def page_bytes(trace: Trace, layer: Layer, page_size: int) -> float:
    """Return the bytes of K and V in one page of one KV head, in the cache's types.

    Where a trace does not say them, what it holds counts, and 2 bytes for V that was not captured.
    V is as long as K then; MLA keeps none, so its bytes are overstated.
    """
    key_bytes = CACHE_BYTES.get(str(trace.capture.get("cache_type_k")), layer.k.itemsize)
    value_stored = 2 if layer.v is None else layer.v.itemsize
    value_bytes = CACHE_BYTES.get(str(trace.capture.get("cache_type_v")), value_stored)
    value_dim = layer.head_dim if layer.v is None else layer.v.shape[2]
    return page_size * (layer.head_dim * key_bytes + value_dim * value_bytes)


@dataclass(frozen=True)
class PagingCost:
    """What an LRU pool fetches while a selector's pages come and go.

    ``missed_pages`` is per step and unit; ``missed_bytes`` per step of the whole model, K and V.
    ``pool_for_most`` is the smallest pool, as a multiple of a step's pages, that serves 99% of all
    accesses; None where none does, since ``first_selections`` is the share of accesses to pages
    never selected before.
    """

    hit_rate: float
    missed_pages: float
    missed_bytes: float
    pool_for_most: float | None
    first_selections: float


def paging_cost(profile: Profile, selector: str, budget: float) -> PagingCost:
    """Return what the simulated pool costs; raises as `Profile.measure` does."""
    missed = profile.samples("missed_pages", selector, budget)
    size = {
        (position, layer.index): page_bytes(trace, layer, profile.grid.page_size)
        for position, trace in enumerate(profile.traces)
        for layer in trace.paged_layers
    }
    total = sum(
        pages * size[trace, layer]
        for pages, trace, layer in zip(
            missed.value.tolist(), missed.trace.tolist(), missed.layer.tolist(), strict=True
        )
    )
    n_step = len(set(zip(missed.trace.tolist(), missed.decode_index.tolist(), strict=True)))
    row, column = profile.selectors.index(selector), profile.budgets.index(budget)
    reuse = profile.numbers.reuse[row, column]
    served = np.cumsum(reuse[1 : N_POOL + 1]) / reuse.sum()
    enough = np.flatnonzero(served >= WANTED_HITS)
    return PagingCost(
        hit_rate=profile.measure("hit_rate", selector, budget),
        missed_pages=profile.measure("missed_pages", selector, budget),
        missed_bytes=total / n_step,
        pool_for_most=round((int(enough[0]) + 1) * POOL_STEP, 1) if len(enough) else None,
        first_selections=float(reuse[0] / reuse.sum()),
    )


def metadata_bytes(profile: Profile, selector: str) -> float | None:
    """Return the bytes a selector stores beside all pages of the longest trace.

    In all layers that are paged and all KV heads, at 2 bytes a number; None for the oracles, which
    cannot be built.
    """
    kind = profile.plan.registry.get(selector)
    if kind is None:
        return None
    return max(
        sum(
            kind.page_bytes(layer.head_dim)
            * layer.n_head_kv
            * (trace.n_context // profile.grid.page_size)
            for layer in trace.paged_layers
        )
        for trace in profile.traces
    )
