"""The numbers of a report, from the units of one trace directory.

A number that is undefined is None.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import NamedTuple

from .layer import PlainLayer, head_masses, read_layer
from .pages import (
    PAGE_SELECTORS,
    TOKEN_ORACLE,
    UNROTATED,
    budget_pages,
    decimal,
    eligible_pages,
    positions,
    summarise,
)
from .unit import PlainUnit


def mean(values: Iterable[float]) -> float | None:
    listed = list(values)
    return math.fsum(listed) / len(listed) if listed else None


class PlainPaging(NamedTuple):
    hit_rate: float
    missed_pages: float
    accesses: int


class PlainGap(NamedTuple):
    """What keeps a stale selection from all of the eligible mass; the four add up to it."""

    diffuse: float
    granularity: float
    selector: float
    staleness: float


@dataclass(frozen=True)
class PlainProfile:
    page_size: int
    n_visible: list[int]
    all_units: list[PlainUnit]
    """The skipped ones too, in the order of steps within each (layer, KV head)."""

    @cached_property
    def units(self) -> list[PlainUnit]:
        return [unit for unit in self.all_units if not unit.is_skipped]

    @property
    def skipped_units(self) -> int:
        return len(self.all_units) - len(self.units)

    @property
    def followers(self) -> list[PlainUnit]:
        """The units that have a previous step."""
        return [unit for unit in self.units if unit.previous is not None]

    def k(self, budget: float | str, unit: PlainUnit) -> int:
        return budget_pages(budget, unit.n, self.page_size)

    def is_defined(self, budget: float | str) -> bool:
        """Whether the budget buys a page at every sampled step."""
        return all(budget_pages(budget, n, self.page_size) > 0 for n in self.n_visible)

    def _is_defined_for_pages(self, selector: str, budget: float | str) -> bool:
        """Whether, besides, the selector takes pages: the token-oracle has no page set."""
        return selector in PAGE_SELECTORS and self.is_defined(budget)

    def _coverages(
        self, selector: str, budget: float | str, units: Sequence[PlainUnit]
    ) -> list[float]:
        return [unit.coverage(selector, self.k(budget, unit)) for unit in units]

    def coverage(self, selector: str, budget: float | str) -> float | None:
        if not self.is_defined(budget):
            return None
        return mean(self._coverages(selector, budget, self.units))

    def total_mass(self, selector: str, budget: float | str) -> float | None:
        if not self.is_defined(budget):
            return None
        return mean(unit.total_mass(selector, self.k(budget, unit)) for unit in self.units)

    def coverage_with_nothing_as_zero(self, selector: str, budget: float | str) -> float:
        return math.fsum(self._coverages(selector, budget, self.units)) / len(self.units)

    def required_budget(self, selector: str, coverage: float) -> str | None:
        if not self.units:
            return None
        for step in range(1, 1001):
            budget = f"{step / 1000:.3f}"
            if self.coverage_with_nothing_as_zero(selector, budget) >= coverage:
                return budget
        return None

    def layer_coverage(self, selector: str, budget: float | str) -> dict[int, float] | None:
        """Return the mean of each layer that has a counted unit."""
        if not self.is_defined(budget):
            return None
        means = {}
        for layer in sorted({unit.layer for unit in self.units}):
            own = [unit for unit in self.units if unit.layer == layer]
            means[layer] = math.fsum(self._coverages(selector, budget, own)) / len(own)
        return means

    def worst_layer_coverage(self, selector: str, budget: float | str) -> float | None:
        layers = self.layer_coverage(selector, budget)
        return min(layers.values()) if layers else None

    def quantile_coverage(self, selector: str, budget: float | str) -> float | None:
        """Return the unit coverage at position ``floor(0.05·(n−1))``, counted from the lowest."""
        if not self.is_defined(budget) or not self.units:
            return None
        ascending = sorted(self._coverages(selector, budget, self.units))
        return ascending[math.floor(decimal("0.05") * (len(ascending) - 1))]

    def _global_sets(self, selector: str, budget: float | str) -> list[tuple[PlainUnit, set[int]]]:
        """Return every counted unit with the pages it gets from the pool of its (step, layer)."""
        pools: dict[tuple[int, int], list[PlainUnit]] = {}
        for unit in self.all_units:
            pools.setdefault((unit.step, unit.layer), []).append(unit)
        sets = []
        for units in pools.values():
            # what a pool holds and buys does not hang on which of its heads are skipped
            pairs = sorted(
                (-score, page, unit.kv_head)
                for unit in units
                for page, score in unit.scores[selector].items()
            )
            bought = pairs[: self.k(budget, units[0]) * len(units)]
            for unit in units:
                if not unit.is_skipped:
                    own = {page for _, page, kv_head in bought if kv_head == unit.kv_head}
                    sets.append((unit, own))
        return sets

    def global_coverage(self, selector: str, budget: float | str) -> float | None:
        if not self._is_defined_for_pages(selector, budget):
            return None
        return mean(unit.coverage_of(own) for unit, own in self._global_sets(selector, budget))

    def starved(self, selector: str, budget: float | str) -> float | None:
        """Return the share of units that get no page of the global pool."""
        if not self._is_defined_for_pages(selector, budget):
            return None
        return mean(float(not own) for _, own in self._global_sets(selector, budget))

    def jaccard(self, selector: str, budget: float | str) -> float | None:
        if not self._is_defined_for_pages(selector, budget):
            return None
        overlaps = []
        for unit in self.units:
            if unit.previous is not None:
                now = unit.chosen(selector, self.k(budget, unit))
                before = unit.previous.chosen(selector, self.k(budget, unit.previous))
                overlaps.append(len(now & before) / len(now | before))
        return mean(overlaps)

    def _stale_coverage(
        self, selector: str, budget: float | str, units: Sequence[PlainUnit]
    ) -> float | None:
        if not self._is_defined_for_pages(selector, budget):
            return None
        return mean(
            unit.coverage_of(unit.previous.chosen(selector, self.k(budget, unit.previous)))
            for unit in units
            if unit.previous is not None
        )

    def stale_coverage(self, selector: str, budget: float | str) -> float | None:
        return self._stale_coverage(selector, budget, self.units)

    def lag_one_coverage(self, selector: str, budget: float | str) -> float | None:
        """Return the stale coverage where the previous step is the decode step before."""
        units = [
            unit
            for unit in self.units
            if unit.previous is not None and unit.decode_index - unit.previous.decode_index == 1
        ]
        return self._stale_coverage(selector, budget, units)

    def gap(self, selector: str, budget: float | str) -> PlainGap | None:
        stale = self.stale_coverage(selector, budget)
        if stale is None:
            return None
        tokens, oracle, own = (
            math.fsum(self._coverages(name, budget, self.followers)) / len(self.followers)
            for name in (TOKEN_ORACLE, "oracle", selector)
        )
        return PlainGap(1 - tokens, tokens - oracle, oracle - own, own - stale)

    def output_error(self, selector: str, budget: float | str) -> float | None:
        """Return the mean over query heads; None if any layer that counts has no V."""
        if not self._is_defined_for_pages(selector, budget):
            return None
        if any(unit.values is None for unit in self.units):
            return None
        return mean(
            error
            for unit in self.units
            for error in unit.output_errors(selector, self.k(budget, unit))
        )

    def paging(self, selector: str, budget: float | str, pool: float | str) -> PlainPaging | None:
        """Run each (layer, KV head) through a pool of ``pool·k`` pages.

        A skipped unit touches no page; the first that counts fills the pool and is not counted.
        """
        if not self._is_defined_for_pages(selector, budget):
            return None
        lines: dict[tuple[int, int], list[PlainUnit]] = {}
        for unit in self.units:
            lines.setdefault((unit.layer, unit.kv_head), []).append(unit)
        hits = misses = counted = 0
        for units in lines.values():
            last_used: dict[int, int] = {}
            for unit in units:
                k = self.k(budget, unit)
                chosen = unit.chosen(selector, k)
                if unit is not units[0]:
                    hits += len(chosen & last_used.keys())
                    misses += len(chosen - last_used.keys())
                    counted += 1
                last_used |= dict.fromkeys(chosen, unit.step)
                while len(last_used) > math.floor(decimal(pool) * k):
                    del last_used[min(last_used, key=lambda page: (last_used[page], page))]
        if not counted:
            return None
        return PlainPaging(hits / (hits + misses), misses / counted, hits + misses)

    @property
    def _partly_rotated(self) -> list[PlainUnit]:
        return [unit for unit in self.units if unit.is_partly_rotated]

    def unrotated_coverage(self, budget: float | str) -> float | None:
        """Return what landmark covers with the dimensions that rotation leaves alone."""
        if not self.is_defined(budget):
            return None
        return mean(self._coverages(UNROTATED, budget, self._partly_rotated))

    def rotated_reference(self, budget: float | str) -> float | None:
        """Return what landmark covers with all dimensions, over the same units."""
        if not self.is_defined(budget):
            return None
        return mean(self._coverages("landmark", budget, self._partly_rotated))

    @property
    def support(self) -> float | None:
        return mean(unit.support for unit in self.units)

    @property
    def hottest(self) -> float | None:
        return mean(unit.hottest for unit in self.units)

    @property
    def eligible_mass(self) -> float | None:
        return mean(unit.eligible_mass for unit in self.units)


def plain_profile(directory: Path, page_size: int, sinks: int, recent: float | str) -> PlainProfile:
    """Measure a trace directory; layers with a sliding window are left out."""
    document = json.loads((directory / "trace.json").read_text(encoding="utf-8"))
    eligible = [
        eligible_pages(page_size, sinks, recent, at["n_visible"]) for at in document["steps"]
    ]
    units = []
    for fields in document["layers"]:
        if fields["window"] is not None:
            continue
        layer = read_layer(directory, fields)
        for kv_head in range(layer.n_head_kv):
            units.extend(
                _line(layer, fields["index"], kv_head, page_size, eligible, document["steps"])
            )
    return PlainProfile(page_size, [at["n_visible"] for at in document["steps"]], units)


def _line(
    layer: PlainLayer,
    index: int,
    kv_head: int,
    page_size: int,
    eligible: Sequence[list[int]],
    steps: Sequence[dict[str, int]],
) -> list[PlainUnit]:
    """Return the units of one KV head, step after step."""
    group = layer.n_head // layer.n_head_kv
    heads = range(kv_head * group, (kv_head + 1) * group)
    summaries = {
        page: summarise([layer.k[kv_head][j] for j in positions(page, page_size)])
        for page in sorted({page for pages in eligible for page in pages})
    }
    units: list[PlainUnit] = []
    for step, (at, pages) in enumerate(zip(steps, eligible, strict=True)):
        unit = PlainUnit(
            layer=index,
            step=step,
            decode_index=at["decode_index"],
            kv_head=kv_head,
            n=at["n_visible"],
            page_size=page_size,
            n_rot=layer.n_rot,
            rotated_last=layer.rotated_last,
            head_dim=layer.head_dim,
            has_sink=layer.sinks is not None,
            pages=pages,
            masses=[head_masses(layer, step, head, at["n_visible"]) for head in heads],
            queries=[layer.q[step][head] for head in heads],
            summaries=summaries,
            values=None if layer.v is None else layer.v[kv_head],
            previous=units[-1] if units and not units[-1].is_skipped else None,
        )
        units.append(unit)
    return units
