"""The profile: every number a gate or a report asks of one trace, or of several pooled."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from pytest_kvgate.analysis.coverage import layer_units
from pytest_kvgate.analysis.pages import REQUIRED_BUDGET_GRID, PageGrid, percent
from pytest_kvgate.trace import Trace, TraceError


class UndefinedError(ValueError):
    """A number that the definitions leave undefined; the message says why."""


@dataclass(frozen=True)
class Profile:
    """Coverage per unit, at several budgets, for several selectors.

    Arrays run over units, one (trace, step, layer, KV head) each: ``layer`` is ``[n_unit]``, the
    layer index; ``eligible_mass`` (the eligible share of the mass on real tokens), ``support`` and
    ``hottest`` are means over the unit's query heads. ``covered`` and ``total`` are
    ``[n_selector, n_budget, n_unit]`` float64, NaN where the budget is below one page.
    ``required_curve`` is ``[n_selector, 1000]``: mean coverage on the grid of required budgets.
    """

    traces: tuple[Trace, ...]
    grid: PageGrid
    selectors: tuple[str, ...]
    budgets: tuple[float, ...]
    layer: NDArray[np.int64]
    eligible_mass: NDArray[np.float64]
    support: NDArray[np.float64]
    hottest: NDArray[np.float64]
    covered: NDArray[np.float64]
    total: NDArray[np.float64]
    required_curve: NDArray[np.float64]
    skipped_units: int

    @property
    def n_unit(self) -> int:
        """Units that count: with eligible mass, in layers without a sliding window."""
        return len(self.layer)

    def coverage(self, selector: str, budget: float) -> float:
        """Return coverage@budget of a selector: a mean over units, from 0 to 1.

        Raises:
            KeyError: the selector or the budget was not measured; the message lists what was.
            UndefinedError: the budget is below one page at a sampled step, or no unit counts.
        """
        return self._mean(self.covered, selector, budget)

    def total_mass(self, selector: str, budget: float) -> float:
        """Return (free + selected) / all mass on real tokens: a mean over units, from 0 to 1.

        Raises as `coverage` does.
        """
        return self._mean(self.total, selector, budget)

    def layer_coverage(self, layer: int, selector: str, budget: float) -> float:
        """Return coverage@budget in one layer; raises as `coverage` does."""
        return self._mean(self.covered[:, :, self.layer == layer], selector, budget)

    def required_budget(self, selector: str, coverage: float) -> float | None:
        """Return the smallest budget on the 0.1% grid at which mean coverage reaches ``coverage``.

        A budget below one page counts as 0 here. None: no budget reaches it.

        Raises:
            KeyError: the selector was not measured.
        """
        curve = self.required_curve[self._position(self.selectors, selector, "selector")]
        reached = np.flatnonzero(curve >= coverage)
        return REQUIRED_BUDGET_GRID[reached[0]] if len(reached) else None

    def undefined_reason(self, budget: float) -> str | None:
        """Say why coverage at this budget is undefined, or return None where it is defined."""
        if not self.n_unit:
            return "no sampled step has attention mass on an eligible page"
        shortest = min(self.traces, key=lambda trace: trace.steps[0].n_visible)
        n_visible = shortest.steps[0].n_visible
        if self.grid.pages_for(budget, n_visible):
            return None
        return f"{self.grid.shortfall(budget, n_visible)} ({shortest.label})"

    def _mean(self, values: NDArray[np.float64], selector: str, budget: float) -> float:
        row = self._position(self.selectors, selector, "selector")
        column = self._position(self.budgets, budget, "budget")
        reason = self.undefined_reason(budget)
        if reason is not None:
            raise UndefinedError(f"coverage at a budget of {percent(budget)} is undefined: {reason}.")
        return float(values[row, column].mean())

    @staticmethod
    def _position(measured: tuple[object, ...], wanted: object, kind: str) -> int:
        if wanted not in measured:
            listed = ", ".join(str(item) for item in measured)
            raise KeyError(
                f"{kind} {wanted!r} was not measured; measured: {listed}. "
                f"Add it to --kvgate-{kind}s."
            )
        return measured.index(wanted)


def profile_trace(
    trace: Trace, grid: PageGrid, budgets: Sequence[float], selectors: Sequence[str]
) -> Profile:
    """Measure one trace; layers with a sliding window are left out.

    Raises:
        TraceError: every layer has a sliding window, no page is eligible at any step, or an array
            holds a value that is not finite.
    """
    budgets, selectors = tuple(budgets), tuple(selectors)
    _require_pages(trace, grid)
    pages = {step.n_visible: grid.pages_for_all(budgets, step.n_visible) for step in trace.steps}
    grid_pages = {
        step.n_visible: grid.pages_for_all(REQUIRED_BUDGET_GRID, step.n_visible)
        for step in trace.steps
    }
    layers: list[int] = []
    shapes: list[tuple[float, float, float]] = []
    covered: list[NDArray[np.float64]] = []
    total: list[NDArray[np.float64]] = []
    required = np.zeros((len(selectors), len(REQUIRED_BUDGET_GRID)))
    skipped = 0
    for layer in trace.paged_layers:
        for unit in layer_units(layer, trace.steps, grid, selectors):
            if unit is None:
                skipped += 1
                continue
            k = pages[unit.n_visible]
            shares = np.array([unit.coverage(name, k, grid.page_size) for name in selectors])
            shares[:, k == 0] = np.nan
            covered.append(shares)
            total.append(unit.total_mass(shares))
            for row, name in enumerate(selectors):
                required[row] += unit.coverage(name, grid_pages[unit.n_visible], grid.page_size)
            layers.append(layer.index)
            shapes.append(
                (unit.eligible_share.mean(), np.nanmean(unit.support), np.nanmean(unit.hottest))
            )
    shape = np.array(shapes).reshape(-1, 3)
    by_unit = (len(covered), len(selectors), len(budgets))
    return Profile(
        traces=(trace,),
        grid=grid,
        selectors=selectors,
        budgets=budgets,
        layer=np.array(layers, dtype=np.int64),
        eligible_mass=shape[:, 0],
        support=shape[:, 1],
        hottest=shape[:, 2],
        covered=np.moveaxis(np.array(covered).reshape(by_unit), 0, -1),
        total=np.moveaxis(np.array(total).reshape(by_unit), 0, -1),
        required_curve=required / max(1, len(covered)),
        skipped_units=skipped,
    )


def pool(profiles: Sequence[Profile]) -> Profile:
    """Pool profiles measured with the same settings; every unit weighs the same."""
    first = profiles[0]
    if len(profiles) == 1:
        return first
    weights = [profile.n_unit for profile in profiles]
    curves = np.stack([profile.required_curve for profile in profiles])
    return Profile(
        traces=tuple(trace for profile in profiles for trace in profile.traces),
        grid=first.grid,
        selectors=first.selectors,
        budgets=first.budgets,
        layer=np.concatenate([profile.layer for profile in profiles]),
        eligible_mass=np.concatenate([profile.eligible_mass for profile in profiles]),
        support=np.concatenate([profile.support for profile in profiles]),
        hottest=np.concatenate([profile.hottest for profile in profiles]),
        covered=np.concatenate([profile.covered for profile in profiles], axis=-1),
        total=np.concatenate([profile.total for profile in profiles], axis=-1),
        required_curve=np.tensordot(weights, curves, axes=1) / max(1, sum(weights)),
        skipped_units=sum(profile.skipped_units for profile in profiles),
    )


def _require_pages(trace: Trace, grid: PageGrid) -> None:
    if not trace.paged_layers:
        raise TraceError(
            f"{trace.label}: every layer with a KV cache has a sliding window, so there is nothing "
            "to page. kvgate measures layers that attend to the whole context."
        )
    n_visible = trace.n_context
    first, end = grid.eligible(n_visible)
    if first == end:
        recent = grid.recent_tokens(n_visible)
        raise TraceError(
            f"{trace.label}: no page is eligible: of {n_visible} tokens the first {grid.sinks} "
            f"(sinks) and the last {recent} (recent window) are resident anyway, which leaves no "
            f"whole {grid.page_size}-token page between them. Use a longer prompt, smaller pages "
            "(--kvgate-page-size), or smaller --kvgate-sinks and --kvgate-recent."
        )
