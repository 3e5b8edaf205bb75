"""The profile: every number a gate or a report asks of one trace, or of several pooled."""

from __future__ import annotations

import hashlib
from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from pytest_kvgate.analysis.estimates import (
    TAIL,
    Interval,
    Samples,
    Scope,
    estimate,
    interval,
)
from pytest_kvgate.analysis.pages import BUDGET_GRID, PageGrid
from pytest_kvgate.analysis.plan import Plan
from pytest_kvgate.analysis.selectors import TOKEN_ORACLE
from pytest_kvgate.analysis.units import SHARES, LayerNumbers
from pytest_kvgate.analysis.wording import percent
from pytest_kvgate.trace import Trace

#: What can be asked of a selector at a budget.
MEASURES = (*SHARES, "lag_one_coverage", "hit_rate", "missed_pages")

#: Measures of which less is better.
COSTS = ("starved", "output_error", "missed_pages")

#: Why a measure has no number although the budget buys a page.
_UNDEFINED = {
    "jaccard": "no unit has a sampled step before it",
    "stale_coverage": "no unit has a sampled step before it",
    "lag_one_coverage": "no two sampled steps follow each other; sample with a stride of 1",
    "output_error": "the trace holds no values (V); capture it with --kvgate-values",
    "hit_rate": "the first sampled step fills the pool, and a trace has no other",
    "missed_pages": "the first sampled step fills the pool, and a trace has no other",
}


class UndefinedError(ValueError):
    """A number that the definitions leave undefined; the message says why."""


class NotMeasuredError(LookupError):
    """A selector or a budget that this profile does not hold; the message says how to get it."""


@dataclass(frozen=True, repr=False)
class Profile:
    """What was measured of ``traces``, pooled, on one page grid; every unit weighs the same."""

    traces: tuple[Trace, ...]
    grid: PageGrid
    plan: Plan
    numbers: LayerNumbers

    def __repr__(self) -> str:
        traces = ", ".join(trace.label for trace in self.traces)
        return f"<Profile of {traces}: {self.n_unit} units, {self.grid.page_size}-token pages>"

    @property
    def selectors(self) -> tuple[str, ...]:
        """The measured selectors."""
        return self.plan.selectors

    @property
    def budgets(self) -> tuple[float, ...]:
        """The budgets that were asked for, fractions of the context."""
        return self.plan.budgets

    @property
    def layers(self) -> tuple[int, ...]:
        """Indices of the layers that units are of."""
        return tuple(int(layer) for layer in np.unique(self.numbers.units.layer))

    @property
    def n_unit(self) -> int:
        """Units that count: with eligible mass, in layers without a sliding window."""
        return len(self.numbers.units.layer)

    @property
    def skipped_units(self) -> int:
        """Units without eligible mass, which count nowhere."""
        return self.numbers.skipped_units

    @property
    def layer(self) -> NDArray[np.int64]:
        """The layer index of each unit, ``[n_unit]``."""
        return self.numbers.units.layer

    @property
    def eligible_mass(self) -> NDArray[np.float64]:
        """The eligible share of the mass on real tokens, ``[n_unit]``."""
        return self.numbers.units.eligible_mass

    @property
    def support(self) -> NDArray[np.float64]:
        """Effective support ``exp(entropy)`` of the eligible mass in tokens, ``[n_unit]``."""
        return self.numbers.units.support

    @property
    def hottest(self) -> NDArray[np.float64]:
        """The hottest token's share of the eligible mass, ``[n_unit]``."""
        return self.numbers.units.hottest

    def coverage(
        self, selector: str, budget: float, layers: Collection[int] | None = None
    ) -> float:
        """Return coverage@budget of a selector: a mean over units, from 0 to 1.

        Any budget that was asked for can be looked up, and any multiple of 0.1%. ``layers`` are the
        indices to average over, None for all.

        Raises:
            NotMeasuredError: the selector or the budget was not measured.
            UndefinedError: the budget is below one page at a sampled step, or no unit counts.
        """
        return self._on_grid("coverage", self.numbers.covered, selector, budget, layers)

    def total_mass(
        self, selector: str, budget: float, layers: Collection[int] | None = None
    ) -> float:
        """Return (free + selected) / all mass on real tokens: a mean over units, from 0 to 1.

        Looks up and raises as `coverage` does.
        """
        return self._on_grid("total_mass", self.numbers.total, selector, budget, layers)

    def layer_coverage(self, selector: str, budget: float) -> dict[int, float]:
        """Return coverage@budget per layer index, of a budget that was asked for.

        Raises:
            NotMeasuredError: the selector was not measured, or the budget was not asked for.
            UndefinedError: as in `coverage`.
        """
        return self.samples("coverage", selector, budget).by_layer()

    def required_budget(
        self,
        selector: str,
        coverage: float,
        scope: Scope = "mean",
        layers: Collection[int] | None = None,
    ) -> float | None:
        """Return the smallest budget on the 0.1% grid at which coverage reaches ``coverage``.

        A budget below one page counts as 0 here. None: no budget reaches it. In the scope p05, only
        coverages of the plan can be asked for.

        Raises:
            NotMeasuredError: the selector or, for p05, the coverage was not measured.
        """
        row = self._selector(selector)
        if not self.n_unit:
            return None
        if scope == "p05":
            return self._required_by_most(row, coverage, layers)
        means = [
            self.numbers.covered[at, row].sum(axis=0) / self.numbers.n_unit[at].sum()
            for at in self._layer_rows(layers, apart=scope == "worst-layer")
        ]
        reached = np.flatnonzero(np.min(means, axis=0) >= coverage)
        return BUDGET_GRID[reached[0]] if len(reached) else None

    def measure(
        self,
        name: str,
        selector: str,
        budget: float,
        scope: Scope = "mean",
        layers: Collection[int] | None = None,
    ) -> float:
        """Return one of `MEASURES` at a budget that was asked for.

        ``coverage`` and ``total_mass`` are as the methods of that name; ``global_coverage`` is
        coverage where a layer's KV heads share their budget and ``starved`` the share of units that
        get no page of it; ``jaccard`` the overlap with the pages of the sampled step before,
        ``stale_coverage`` coverage with those pages, ``lag_one_coverage`` the same where that step
        is one decode step before; ``output_error`` the relative error of the attention output;
        ``hit_rate`` and ``missed_pages`` (per step and unit) those of the LRU pool.

        Raises:
            NotMeasuredError: the selector was not measured, or the budget was not asked for.
            UndefinedError: as in `coverage`, or the measure needs what no unit has.
        """
        if scope == "mean" and name == "coverage":
            return self.coverage(selector, budget, layers)
        if scope == "mean" and name == "total_mass":
            return self.total_mass(selector, budget, layers)
        return estimate(self.samples(name, selector, budget, layers), scope)

    def interval(
        self,
        name: str,
        selector: str,
        budget: float,
        scope: Scope = "mean",
        layers: Collection[int] | None = None,
        confidence: float = 0.95,
    ) -> Interval | None:
        """Return the confidence interval of `measure`; None where one step is all there is.

        Raises as `measure` does.
        """
        samples = self.samples(name, selector, budget, layers)
        # the same capture given several times says no more than once
        distinct = np.array(_first_of_same(self.traces))
        return interval(replace(samples, trace=distinct[samples.trace]), scope, confidence)

    def samples(
        self,
        name: str,
        selector: str,
        budget: float,
        layers: Collection[int] | None = None,
    ) -> Samples:
        """Return one of `MEASURES` per unit; raises as `measure` does."""
        if name not in MEASURES:
            raise NotMeasuredError(
                f"there is no measure {name!r}; accepted: {', '.join(MEASURES)}."
            )
        row = self._selector(selector)
        if budget not in self.budgets:
            raise NotMeasuredError(self._unknown_budget(budget, ()))
        self._require_defined(budget)
        units, column = self.numbers.units, self.budgets.index(budget)

        def found(number: str) -> NDArray[np.float64]:
            of_all: NDArray[np.float64] = units.numbers[number][row, column]
            return of_all

        weight = np.ones(self.n_unit)
        if name in ("hit_rate", "missed_pages"):
            accesses, hits = found("accesses"), found("hits")
            with np.errstate(invalid="ignore"):
                value = hits / accesses if name == "hit_rate" else accesses - hits
            weight = accesses if name == "hit_rate" else weight
        elif name == "lag_one_coverage":
            value = np.where(units.lag == 1, found("stale_coverage"), np.nan)
        else:
            value = found(name)
            weight = units.n_head.astype(np.float64) if name == "output_error" else weight
        chosen = np.ones(self.n_unit, dtype=bool)
        if layers is not None:
            chosen = np.isin(units.layer, list(layers))
        known = chosen & ~np.isnan(value)
        # what some layers or traces lack would leave a mean of the others
        partial = name == "output_error" and (known != chosen).any()
        if name in ("hit_rate", "missed_pages"):
            partial = not np.isin(units.trace[chosen], units.trace[known]).all()
        if not known.any() or partial:
            why = _UNDEFINED.get(name, "no unit of these layers counts")
            if name == "output_error" and known.any():
                why = "some layers have no values (V), or an attention output is exactly zero"
            if selector == TOKEN_ORACLE and name not in ("coverage", "total_mass"):
                why = f"{TOKEN_ORACLE} selects tokens, not pages"
            raise UndefinedError(f"{name} of {selector} is undefined: {why}.")
        return Samples(
            value[known],
            weight[known],
            units.layer[known],
            units.trace[known],
            units.decode_index[known],
            ascending=name not in COSTS,
        )

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

    def _on_grid(
        self,
        name: str,
        curve: NDArray[np.float64],
        selector: str,
        budget: float,
        layers: Collection[int] | None,
    ) -> float:
        row = self._selector(selector)
        # the grid first, so that a required budget and the coverage there agree to the last digit
        if budget in BUDGET_GRID:
            self._require_defined(budget)
            (at,) = self._layer_rows(layers)
            total = curve[at, row].sum(axis=0)[BUDGET_GRID.index(budget)]
            return float(total / self.numbers.n_unit[at].sum())
        if budget not in self.budgets:
            raise NotMeasuredError(self._unknown_budget(budget, BUDGET_GRID))
        return estimate(self.samples(name, selector, budget, layers), "mean")

    def _layer_rows(
        self, layers: Collection[int] | None, *, apart: bool = False
    ) -> list[NDArray[np.int64]]:
        """Return the rows of the sums that belong together: all of them, or layer by layer."""
        known, counts = self.numbers.layers, self.numbers.n_unit
        wanted = (counts > 0) & (np.isin(known, list(layers)) if layers is not None else True)
        if not wanted.any():
            raise UndefinedError("no unit of these layers counts, so they have no coverage.")
        if not apart:
            return [np.flatnonzero(wanted)]
        return [np.flatnonzero(wanted & (known == layer)) for layer in np.unique(known[wanted])]

    def _required_by_most(
        self, row: int, coverage: float, layers: Collection[int] | None
    ) -> float | None:
        """Return the budget at which all but a twentieth of the units reach the coverage."""
        if coverage not in self.plan.coverages:
            raise NotMeasuredError(
                f"coverage {coverage} was not planned for; planned: "
                f"{', '.join(str(item) for item in self.plan.coverages)}."
            )
        needed = self.numbers.units.needed[row, self.plan.coverages.index(coverage)]
        if layers is not None:
            needed = needed[np.isin(self.numbers.units.layer, list(layers))]
        if not len(needed):
            raise UndefinedError("no unit of these layers counts, so they have no coverage.")
        ranked = np.sort(np.nan_to_num(needed, nan=np.inf))
        budget = float(ranked[len(ranked) - 1 - int(TAIL * (len(ranked) - 1))])
        return budget if np.isfinite(budget) else None

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

    def _unknown_budget(self, budget: object, grid: Sequence[float]) -> str:
        also = "multiples of 0.001 up to 1, and " if grid else ""
        return (
            f"budget {budget!r} was not measured; measured: {also}"
            f"{', '.join(str(item) for item in self.budgets)}. Add it to --kvgate-budgets."
        )


def _first_of_same(traces: tuple[Trace, ...]) -> tuple[int, ...]:
    """Return for each trace the position of the first one with the same queries."""
    if len(traces) == 1:
        return (0,)
    seen: dict[bytes, int] = {}
    found = []
    for position, trace in enumerate(traces):
        digest = hashlib.sha256(repr(trace.steps).encode())
        for layer in trace.paged_layers[:1]:
            digest.update(np.ascontiguousarray(layer.q).tobytes())
        found.append(seen.setdefault(digest.digest(), position))
    return tuple(found)
