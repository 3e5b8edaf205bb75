"""The profile: every number a gate or a report asks of one trace, or of several pooled."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from pytest_kvgate.analysis.coverage import layer_units
from pytest_kvgate.analysis.pages import BUDGET_GRID, PageGrid
from pytest_kvgate.analysis.wording import percent
from pytest_kvgate.trace import Trace, TraceError


class UndefinedError(ValueError):
    """A number that the definitions leave undefined; the message says why."""


class NotMeasuredError(LookupError):
    """A selector or a budget that this profile does not hold; the message says how to get it."""


@dataclass(frozen=True, repr=False)
class Profile:
    """Coverage per unit, at several budgets, for several selectors.

    Arrays run over units, one (trace, step, layer, KV head) each: ``layer`` is ``[n_unit]``, the
    layer index; ``eligible_mass`` (the eligible share of the mass on real tokens), ``support`` and
    ``hottest`` are means over the unit's query heads. ``covered`` and ``total`` are
    ``[n_selector, n_budget, n_unit]`` float64, NaN where the budget is below one page.
    ``covered_curve`` and ``total_curve`` are ``[n_selector, 1000]``: the sums over units at each
    budget of ``BUDGET_GRID``, where a budget below one page counts as selecting nothing.
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
    covered_curve: NDArray[np.float64]
    total_curve: NDArray[np.float64]
    skipped_units: int

    def __repr__(self) -> str:
        traces = ", ".join(trace.label for trace in self.traces)
        return f"<Profile of {traces}: {self.n_unit} units, {self.grid.page_size}-token pages>"

    @property
    def n_unit(self) -> int:
        """Units that count: with eligible mass, in layers without a sliding window."""
        return len(self.layer)

    def coverage(self, selector: str, budget: float) -> float:
        """Return coverage@budget of a selector: a mean over units, from 0 to 1.

        Any budget that was asked for can be looked up, and any multiple of 0.1%.

        Raises:
            NotMeasuredError: the selector or the budget was not measured.
            UndefinedError: the budget is below one page at a sampled step, or no unit counts.
        """
        return self._mean(self.covered, self.covered_curve, selector, budget)

    def total_mass(self, selector: str, budget: float) -> float:
        """Return (free + selected) / all mass on real tokens: a mean over units, from 0 to 1.

        Looks up and raises as `coverage` does.
        """
        return self._mean(self.total, self.total_curve, selector, budget)

    def layer_coverage(self, selector: str, budget: float) -> dict[int, float]:
        """Return coverage@budget per layer index.

        Raises:
            NotMeasuredError: the selector was not measured, or the budget was not asked for.
            UndefinedError: as in `coverage`.
        """
        row = self._selector(selector)
        if budget not in self.budgets:
            raise NotMeasuredError(self._unknown_budget(budget, self.budgets))
        self._require_defined(budget)
        units = self.covered[row, self.budgets.index(budget)]
        return {
            int(layer): float(units[self.layer == layer].mean()) for layer in np.unique(self.layer)
        }

    def required_budget(self, selector: str, coverage: float) -> float | None:
        """Return the smallest budget on the 0.1% grid at which mean coverage reaches ``coverage``.

        A budget below one page counts as 0 here. None: no budget reaches it.

        Raises:
            NotMeasuredError: the selector was not measured.
        """
        if not self.n_unit:
            return None
        mean = self.covered_curve[self._selector(selector)] / self.n_unit
        reached = np.flatnonzero(mean >= coverage)
        return BUDGET_GRID[reached[0]] if len(reached) else None

    def undefined_reason(self, budget: float) -> str | None:
        """Say why coverage at this budget is undefined, or return None where it is defined."""
        if not self.n_unit:
            return "no sampled step has attention mass on an eligible page"
        shortest = min(self.traces, key=lambda trace: trace.steps[0].n_visible)
        n_visible = shortest.steps[0].n_visible
        if self.grid.pages_for(budget, n_visible):
            return None
        return f"{self.grid.shortfall(budget, n_visible)} ({shortest.label})"

    def is_defined(self, budget: float) -> bool:
        """Whether coverage at this budget is defined."""
        return self.undefined_reason(budget) is None

    def _mean(
        self,
        units: NDArray[np.float64],
        curve: NDArray[np.float64],
        selector: str,
        budget: float,
    ) -> float:
        row = self._selector(selector)
        # the grid first, so that a required budget and the coverage there agree to the last digit
        if budget in BUDGET_GRID:
            self._require_defined(budget)
            return float(curve[row, BUDGET_GRID.index(budget)]) / self.n_unit
        if budget in self.budgets:
            self._require_defined(budget)
            return float(units[row, self.budgets.index(budget)].mean())
        raise NotMeasuredError(self._unknown_budget(budget, self.budgets))

    def _selector(self, selector: str) -> int:
        if selector not in self.selectors:
            raise NotMeasuredError(
                f"selector {selector!r} was not measured; measured: {', '.join(self.selectors)}. "
                "Add it to --kvgate-selectors."
            )
        return self.selectors.index(selector)

    def _require_defined(self, budget: float) -> None:
        reason = self.undefined_reason(budget)
        if reason is not None:
            raise UndefinedError(
                f"coverage at a budget of {percent(budget)} is undefined: {reason}."
            )

    @staticmethod
    def _unknown_budget(budget: object, budgets: tuple[float, ...]) -> str:
        return (
            f"budget {budget!r} was not measured; measured: multiples of 0.001 up to 1, and "
            f"{', '.join(str(item) for item in budgets)}. Add it to --kvgate-budgets."
        )


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
        step.n_visible: grid.pages_for_all(BUDGET_GRID, step.n_visible) for step in trace.steps
    }
    layers: list[int] = []
    shapes: list[tuple[float, ...]] = []
    covered: list[NDArray[np.float64]] = []
    total: list[NDArray[np.float64]] = []
    covered_curve = np.zeros((len(selectors), len(BUDGET_GRID)))
    total_curve = np.zeros_like(covered_curve)
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
            on_grid = np.array(
                [
                    unit.coverage(name, grid_pages[unit.n_visible], grid.page_size)
                    for name in selectors
                ]
            )
            covered_curve += on_grid
            total_curve += unit.total_mass(on_grid)
            layers.append(layer.index)
            shapes.append(
                tuple(
                    float(np.nanmean(values))
                    for values in (unit.eligible_share, unit.support, unit.hottest)
                )
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
        covered_curve=covered_curve,
        total_curve=total_curve,
        skipped_units=skipped,
    )


def pool(profiles: Sequence[Profile]) -> Profile:
    """Pool profiles measured with the same settings; every unit weighs the same."""
    first = profiles[0]
    if len(profiles) == 1:
        return first
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
        covered_curve=np.sum([profile.covered_curve for profile in profiles], axis=0),
        total_curve=np.sum([profile.total_curve for profile in profiles], axis=0),
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
