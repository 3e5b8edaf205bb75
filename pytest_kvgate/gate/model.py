"""What a gate is and what becomes of it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

from pytest_kvgate.analysis import Interval, Scope
from pytest_kvgate.analysis.effects import EFFECT_MEASURES, EffectMeasure, Variant
from pytest_kvgate.analysis.pages import BUDGET_GRID
from pytest_kvgate.analysis.selectors import LANDMARK, ORACLE

#: INVALID: the question cannot be answered from these traces; INCONCLUSIVE: they are too few to
#: answer it with the confidence asked for. Neither passes.
Verdict = Literal["GO", "NO-GO", "INCONCLUSIVE", "INVALID", "NOT EVALUATED"]

#: What is demanded; ``required_budget`` is the smallest budget that reaches a coverage. The last
#: three are effects on the next token, measured in a closed loop.
DemandedMeasure = Literal[
    "coverage",
    "total_mass",
    "output_error",
    "hit_rate",
    "required_budget",
    "kl",
    "top1",
    "nll_increase",
]


@dataclass(frozen=True)
class Demand:
    """One measure that must reach its threshold, or stay below it."""

    measure: DemandedMeasure
    threshold: float

    @property
    def is_floor(self) -> bool:
        """Whether more is better."""
        return self.measure not in ("output_error", "required_budget", "kl", "nll_increase")

    @property
    def effect(self) -> EffectMeasure | None:
        """The effect on the next token that is demanded, None where attention itself is."""
        return next((name for name in EFFECT_MEASURES if name == self.measure), None)

    @property
    def has_ceiling(self) -> bool:
        """Whether the oracle's number bounds that of every selector of pages."""
        return self.measure in ("coverage", "total_mass", "required_budget")


@dataclass(frozen=True)
class Gate:
    """What a model must hold, as ``@kvgate(...)`` says it.

    At ``budget``, a fraction of the context: coverage of ``min_coverage``, a total mass of
    ``min_total_mass``, an attention-output error up to ``max_output_error``, a share of
    ``min_hit_rate`` page accesses that the pool serves; and in a closed loop, a KL of next-token
    distributions up to ``max_kl`` nats, a share of ``min_top1`` likeliest tokens that stay, a rise
    of the negative log-likelihood up to ``max_nll_increase`` nats per token. And up to
    ``max_budget``: the smallest budget at which ``coverage`` is reached. ``selector`` None asks for
    the ceiling (oracle) and for landmark where there is a ceiling, else for landmark. ``page_size``
    None takes the session's, in tokens. ``scope`` says how units become one number, over ``layers``
    or, None, all of them but ``dense_layers``, which are resident as a whole. ``confidence`` None
    compares the numbers as they are, else their intervals.
    """

    budget: float | None = None
    min_coverage: float | None = None
    min_total_mass: float | None = None
    max_output_error: float | None = None
    min_hit_rate: float | None = None
    max_kl: float | None = None
    min_top1: float | None = None
    max_nll_increase: float | None = None
    max_budget: float | None = None
    coverage: float | None = None
    selector: str | None = None
    page_size: int | None = None
    scope: Scope = "mean"
    layers: tuple[int, ...] | None = None
    dense_layers: tuple[int, ...] = ()
    confidence: float | None = None

    @property
    def demands(self) -> tuple[Demand, ...]:
        """What is demanded, in the order of the arguments."""
        thresholds: dict[DemandedMeasure, float | None] = {
            "coverage": self.min_coverage,
            "total_mass": self.min_total_mass,
            "output_error": self.max_output_error,
            "hit_rate": self.min_hit_rate,
            "required_budget": self.max_budget,
            "kl": self.max_kl,
            "top1": self.min_top1,
            "nll_increase": self.max_nll_increase,
        }
        return tuple(
            Demand(measure, threshold)
            for measure, threshold in thresholds.items()
            if threshold is not None
        )

    @property
    def main_budget(self) -> float:
        """The budget that a table or a title names."""
        budget = self.budget if self.budget is not None else self.max_budget
        assert budget is not None
        return budget

    @property
    def measured_budgets(self) -> tuple[float, ...]:
        """The budgets whose numbers a verdict needs."""
        budgets = [] if self.budget is None else [self.budget]
        if self.max_budget is not None:
            budgets.append(on_grid(self.max_budget))
        return tuple(budgets)

    @property
    def wanted_coverages(self) -> tuple[float, ...]:
        """The coverages whose required budget a verdict names."""
        return tuple(value for value in (self.min_coverage, self.coverage) if value is not None)

    @property
    def needs_values(self) -> bool:
        """Whether V must be captured."""
        return self.max_output_error is not None

    @property
    def needs_closed_loop(self) -> bool:
        """Whether the effect on the next token must be measured."""
        return any(demand.effect is not None for demand in self.demands)

    def variant(self, selector: str, page_size: int) -> Variant:
        """Return the sparse run that tells a selector's effect; pages are of ``page_size`` tokens.

        The page size of the gate, where it names one, comes first.
        """
        assert self.budget is not None
        return Variant(self.page_size or page_size, self.budget, selector, self.dense_layers)

    def variants(self, page_size: int) -> tuple[Variant, ...]:
        """Return the sparse runs that a verdict needs: those checked, and the oracle's beside."""
        checked = [
            name
            for demand in self.demands
            if demand.effect is not None
            for name in self.checked_selectors(demand)
        ]
        names = dict.fromkeys((ORACLE, *checked)) if checked else {}
        return tuple(self.variant(name, page_size) for name in names)

    def counted_layers(self, paged: tuple[int, ...]) -> tuple[int, ...] | None:
        """Return the layers that a measure of attention is taken over, of those that are paged.

        None stands for all of them.
        """
        if self.layers is not None or not self.dense_layers:
            return self.layers
        return tuple(layer for layer in paged if layer not in self.dense_layers)

    def checked_selectors(self, demand: Demand) -> tuple[str, ...]:
        """The selectors that must meet a demand, the ceiling first."""
        if self.selector is not None:
            return (self.selector,)
        return (ORACLE, LANDMARK) if demand.has_ceiling else (LANDMARK,)

    @property
    def needed_selectors(self) -> tuple[str, ...]:
        """The selectors a verdict needs: those checked, and the ceiling to give the reason."""
        checked = [name for demand in self.demands for name in self.checked_selectors(demand)]
        return tuple(dict.fromkeys((ORACLE, *checked)))


def on_grid(budget: float) -> float:
    """Return the largest budget of the grid up to this one; the grid begins at 0.001."""
    return max(step for step in BUDGET_GRID if step <= budget)


@dataclass(frozen=True)
class Check:
    """One selector's number against a demand.

    ``observed`` None is undefined. Where a gate asks for confidence, ``interval`` is that of the
    number compared with ``interval_required``: the observed one, or, for a required budget, the
    coverage at the budget allowed.
    """

    demand: Demand
    selector: str
    observed: float | None
    confident: bool = False
    interval: Interval | None = None
    interval_required: float | None = None

    @property
    def required(self) -> float:
        """The threshold."""
        return self.demand.threshold

    @property
    def margin(self) -> float | None:
        """How far the number is on the right side of the threshold; negative on the wrong one."""
        if self.observed is None:
            return None
        margin = self.observed - self.required
        return margin if self.demand.is_floor else -margin

    @property
    def passed(self) -> bool:
        """Whether the demand is met; an undefined observation never is."""
        return self.state == "ok"

    @property
    def state(self) -> Literal["ok", "missed", "open"]:
        """Whether the demand is met.

        ``open`` where the interval holds the threshold, or lies on one side of it and the number on
        the other: that of the worst of many layers may.
        """
        met = self.margin is not None and self.margin >= 0
        if not self.confident:
            return "ok" if met else "missed"
        if self.interval is None or self.interval_required is None:
            return "open"
        low, high = self.interval.low, self.interval.high
        required = self.interval_required
        # the interval of a required budget is that of a coverage
        if not self.demand.is_floor and self.demand.measure != "required_budget":
            low, high, required = -high, -low, -required
        if met and low >= required:
            return "ok"
        return "missed" if not met and high < required else "open"


@dataclass(frozen=True)
class GateResult:
    """A gate's verdict on one model, with the reason in words.

    ``others`` is the deciding measure of the other measured selectors, ``worst_layers`` the layers
    where the deciding selector does worst, ``dense_layers`` those where even the ceiling is below a
    demanded coverage, ``n_layer`` how many were looked at, and ``notes`` what a reader must know
    beside the verdict.
    """

    gate_id: str
    subject: str
    gate: Gate
    page_size: int | None
    checks: tuple[Check, ...]
    verdict: Verdict
    reason: str
    others: Mapping[str, float]
    worst_layers: tuple[tuple[int, float], ...] = ()
    dense_layers: tuple[int, ...] = ()
    n_layer: int = 0
    notes: tuple[str, ...] = ()

    @property
    def deciding(self) -> Check:
        """The first check that missed, else the first that is open, else the tightest one."""
        for state in ("missed", "open"):
            found = [check for check in self.checks if check.state == state]
            if found:
                return found[0]
        return min(self.checks, key=lambda check: check.margin or 0.0)
