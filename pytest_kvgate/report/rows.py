"""Rows of the machine-readable report: what a profile says, as plain JSON values.

Undefined numbers are None.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any, TypeVar

import numpy as np
from numpy.typing import NDArray

from pytest_kvgate.analysis import Profile, Scope, UndefinedError
from pytest_kvgate.analysis.findings import (
    dense_layers,
    dim_ablation,
    gap,
    metadata_bytes,
    paging_cost,
)
from pytest_kvgate.analysis.selectors import LANDMARK, ORACLE, TOKEN_ORACLE
from pytest_kvgate.analysis.units import SHARES

Row = dict[str, Any]
T = TypeVar("T")

#: Measures of a coverage row, beside coverage and its interval.
_BESIDE = (*SHARES[1:], "lag_one_coverage")


def coverage_rows(profile: Profile) -> list[Row]:
    """Return every measure of every selector at every budget."""
    return [
        {
            "budget": budget,
            "selector": selector,
            "pages": _pages(profile, budget),
            "coverage": defined(profile.coverage, selector, budget),
            "ci": _interval(profile, selector, budget),
            **{name: defined(profile.measure, name, selector, budget) for name in _BESIDE},
        }
        for budget in profile.budgets
        for selector in profile.selectors
    ]


def short_coverage_rows(profile: Profile) -> list[Row]:
    """Return coverage and total mass of every selector at every budget."""
    return [
        {
            "budget": budget,
            "selector": selector,
            "coverage": defined(profile.coverage, selector, budget),
            "total_mass": defined(profile.total_mass, selector, budget),
        }
        for budget in profile.budgets
        for selector in profile.selectors
    ]


def required_rows(profile: Profile, coverages: Iterable[float]) -> list[Row]:
    """Return the required budget of every selector for each coverage."""
    return [
        {
            "selector": selector,
            "coverage": coverage,
            "budget": profile.required_budget(selector, coverage),
        }
        for selector in profile.selectors
        for coverage in coverages
    ]


def paging_rows(profile: Profile, link: float | None) -> list[Row]:
    """Return what an LRU pool fetches; ``link`` in GB/s turns bytes into milliseconds per token."""
    rows = []
    for budget in profile.budgets:
        for selector in _page_selectors(profile):
            cost = defined(paging_cost, profile, selector, budget)
            if cost is None:
                continue
            rows.append(
                {
                    "budget": budget,
                    "selector": selector,
                    "pool": profile.plan.pool,
                    "hit_rate": cost.hit_rate,
                    "missed_pages": cost.missed_pages,
                    "missed_bytes": cost.missed_bytes,
                    "ms_per_token": None if link is None else cost.missed_bytes / (link * 1e6),
                    "pool_for_99": cost.pool_for_most,
                    "first_selections": cost.first_selections,
                }
            )
    return rows


def metadata_rows(profile: Profile) -> list[Row]:
    """Return what every selector stores beside the pages of the longest trace, in bytes."""
    return [
        {"selector": selector, "metadata_bytes": metadata_bytes(profile, selector)}
        for selector in profile.selectors
    ]


def layer_rows(profile: Profile) -> list[Row]:
    """Return coverage per layer, and the shape of its attention."""
    units = profile.numbers.units
    shapes = {
        layer: {
            "support": mean(units.support[units.layer == layer]),
            "hottest": mean(units.hottest[units.layer == layer]),
            "eligible_mass": mean(units.eligible_mass[units.layer == layer]),
        }
        for layer in profile.layers
    }
    rows = []
    for budget in profile.budgets:
        for selector in profile.selectors:
            coverage = defined(profile.layer_coverage, selector, budget)
            for layer, shape in shapes.items():
                found = None if coverage is None else coverage[layer]
                key = {"layer": layer, "budget": budget, "selector": selector}
                rows.append({**key, "coverage": found, **shape})
    return rows


def dense_rows(profile: Profile, coverages: Sequence[float]) -> list[Row]:
    """Return the layers to keep resident for each coverage, and what the others then reach."""
    rows: list[Row] = []
    if ORACLE not in profile.selectors:
        return rows
    for budget in profile.budgets:
        for coverage in coverages:
            dense = defined(dense_layers, profile, budget, coverage)
            if dense is None:
                continue
            others = [layer for layer in profile.layers if layer not in dense]
            row: Row = {"budget": budget, "coverage": coverage, "layers": list(dense)}
            for name in (ORACLE, LANDMARK):
                held = None
                if others and name in profile.selectors:
                    held = profile.coverage(name, budget, others)
                row[f"{name}_of_others"] = held
            rows.append(row)
    return rows


def ablation_rows(profile: Profile) -> list[Row]:
    """Return landmark without the dims that RoPE turns, against all dims in the same layers."""
    rows = []
    for budget in profile.budgets:
        found = defined(dim_ablation, profile, budget)
        rows.append(
            {
                "budget": budget,
                "unrotated_coverage": None if found is None else found.unrotated,
                "all_dims_coverage": None if found is None else found.all_dims,
                "layers": [] if found is None else list(found.layers),
            }
        )
    return rows


def gap_rows(profile: Profile) -> list[Row]:
    """Return where the mass is lost that each selector's pages do not hold."""
    if not {ORACLE, TOKEN_ORACLE} <= set(profile.selectors):
        return []
    rows = []
    for budget in profile.budgets:
        for selector in _page_selectors(profile):
            found = defined(gap, profile, selector, budget)
            if found is None or selector == ORACLE:
                continue
            rows.append(
                {
                    "budget": budget,
                    "selector": selector,
                    "diffuse": found.diffuse,
                    "granularity": found.granularity,
                    "selection": found.selector,
                    "staleness": found.staleness,
                    "shortfall": found.shortfall,
                }
            )
    return rows


def sweep_rows(profiles: Iterable[Profile]) -> list[Row]:
    """Return coverage and total mass at several page sizes."""
    return [
        {"page_size": profile.grid.page_size, **row}
        for profile in profiles
        for row in short_coverage_rows(profile)
    ]


def defined(number: Callable[..., T], *arguments: object) -> T | None:
    """Return a number, or None where the definitions leave it undefined."""
    try:
        return number(*arguments)
    except UndefinedError:
        return None


def mean(values: NDArray[np.float64]) -> float | None:
    """Return the mean of what is known, None where nothing is."""
    known = values[~np.isnan(values)]
    return float(known.mean()) if len(known) else None


def _interval(profile: Profile, selector: str, budget: float) -> list[float] | None:
    scope: Scope = "mean"
    found = defined(profile.interval, "coverage", selector, budget, scope)
    return None if found is None else [found.low, found.high]


def _page_selectors(profile: Profile) -> list[str]:
    return [name for name in profile.selectors if name != TOKEN_ORACLE]


def _pages(profile: Profile, budget: float) -> list[int]:
    """Return the fewest and the most pages per KV head that a budget buys at a sampled step."""
    counts = [
        profile.grid.pages_for(budget, step.n_visible)
        for trace in profile.traces
        for step in (trace.steps[0], trace.steps[-1])
    ]
    return [min(counts), max(counts)]
