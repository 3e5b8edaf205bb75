"""Gates: what must hold of a profile, and the verdict whether it does."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from numbers import Real
from typing import Any, Literal

import numpy as np

from pytest_kvgate.analysis import SELECTORS, SOFTMAX_REFERENCE, SOFTMAX_TOLERANCE, Profile
from pytest_kvgate.analysis.pages import BUDGET_GRID
from pytest_kvgate.analysis.selectors import LANDMARK, ORACLE, TOKEN_ORACLE
from pytest_kvgate.analysis.wording import percent, share

#: INVALID: the question cannot be answered from these traces, so the gate does not pass.
Verdict = Literal["GO", "NO-GO", "INVALID", "NOT EVALUATED"]

#: A verified error above this is passed on to the reader of a verdict.
UNUSUAL_ERROR = 1e-5

ACCEPTED_ARGUMENTS = ("budget", "min_coverage", "selector", "page_size")


class GateError(ValueError):
    """A gate that is not well-formed; the message says which argument and what is accepted."""


@dataclass(frozen=True)
class Gate:
    """At ``budget``, a fraction of the context, coverage must reach ``min_coverage``.

    ``selector`` None asks for the ceiling (oracle) and for landmark. ``page_size`` None takes the
    session's, in tokens.
    """

    budget: float
    min_coverage: float
    selector: str | None = None
    page_size: int | None = None

    @property
    def checked_selectors(self) -> tuple[str, ...]:
        """The selectors that must reach the threshold, the ceiling first."""
        return (ORACLE, LANDMARK) if self.selector is None else (self.selector,)

    @property
    def needed_selectors(self) -> tuple[str, ...]:
        """The selectors a verdict needs: those checked, and the ceiling to give the reason."""
        return tuple(dict.fromkeys((ORACLE, *self.checked_selectors)))


@dataclass(frozen=True)
class Check:
    """One selector's coverage against the threshold."""

    selector: str
    required: float
    observed: float | None

    @property
    def passed(self) -> bool:
        """Whether the threshold is reached; an undefined observation never is."""
        return self.observed is not None and self.observed >= self.required

    @property
    def margin(self) -> float | None:
        """Observed minus required."""
        return None if self.observed is None else self.observed - self.required


@dataclass(frozen=True)
class GateResult:
    """A gate's verdict on one model, with the reason in words.

    ``others`` is the coverage of the other measured selectors at the gate's budget,
    ``worst_layers`` the layers where the deciding selector holds least, and ``notes`` what a reader
    must know beside the verdict.
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
    notes: tuple[str, ...] = ()

    @property
    def deciding(self) -> Check:
        """The first check that missed, else the tightest one."""
        missed = [check for check in self.checks if not check.passed]
        return missed[0] if missed else min(self.checks, key=lambda check: check.margin or 0.0)


def gate_from_arguments(arguments: tuple[object, ...], keywords: Mapping[str, Any]) -> Gate:
    """Build a gate from the arguments of ``@kvgate(...)``.

    Raises:
        GateError: an argument is positional, unknown, missing, or outside its range.
    """
    accepted = ", ".join(ACCEPTED_ARGUMENTS)
    if arguments:
        raise GateError(
            f"kvgate() got the positional argument {arguments[0]!r}; name every argument, "
            f"as in kvgate(budget=0.02, min_coverage=0.95). Accepted: {accepted}."
        )
    unknown = [name for name in keywords if name not in ACCEPTED_ARGUMENTS]
    if unknown:
        raise GateError(f"kvgate() got an unknown argument {unknown[0]!r}. Accepted: {accepted}.")
    missing = [name for name in ("budget", "min_coverage") if name not in keywords]
    if missing:
        raise GateError(
            f"kvgate() needs {' and '.join(missing)}, as in kvgate(budget=0.02, min_coverage=0.95)."
        )
    selector = keywords.get("selector")
    if selector is not None and not (isinstance(selector, str) and selector in SELECTORS):
        raise GateError(
            f"kvgate(selector={selector!r}): there is no such selector. Accepted: "
            f"{', '.join(SELECTORS)}."
        )
    page_size = keywords.get("page_size")
    whole = isinstance(page_size, int) and not isinstance(page_size, bool) and page_size > 0
    if page_size is not None and not whole:
        raise GateError(
            f"kvgate(page_size={page_size!r}): a page is a whole number of tokens, 1 or more."
        )
    return Gate(
        budget=_fraction("budget", keywords["budget"], "a fraction of the context"),
        min_coverage=_fraction("min_coverage", keywords["min_coverage"], "a share of the mass"),
        selector=selector,
        page_size=page_size,
    )


def decide(gate_id: str, subject: str, gate: Gate, profile: Profile) -> GateResult:
    """Judge one gate on the pooled profile of one model.

    The profile must hold the gate's budget and `Gate.needed_selectors`, at the gate's page size.
    """
    page_size = profile.grid.page_size
    notes = tuple(_notes(gate, profile))
    invalid = _invalid_reason(gate, profile)
    if invalid is not None:
        return unanswered(gate_id, subject, gate, "INVALID", invalid, page_size, notes)
    observed = {name: profile.coverage(name, gate.budget) for name in profile.selectors}
    checks = tuple(
        Check(name, gate.min_coverage, observed[name]) for name in gate.checked_selectors
    )
    missed = [check for check in checks if not check.passed]
    others = {name: value for name, value in observed.items() if name not in gate.checked_selectors}
    result = GateResult(
        gate_id=gate_id,
        subject=subject,
        gate=gate,
        page_size=page_size,
        checks=checks,
        verdict="NO-GO" if missed else "GO",
        reason="",
        others=others,
        notes=notes,
    )
    layers = profile.layer_coverage(result.deciding.selector, gate.budget)
    worst = sorted(layers.items(), key=lambda item: (item[1], item[0]))[:3]
    reason = _missed_reason(gate, profile, observed, missed[0]) if missed else _go_reason(result)
    return replace(result, reason=reason, worst_layers=tuple(worst))


def unanswered(
    gate_id: str,
    subject: str,
    gate: Gate,
    verdict: Verdict,
    reason: str,
    page_size: int | None = None,
    notes: tuple[str, ...] = (),
) -> GateResult:
    """Return the result of a gate that could not be judged, with nothing observed."""
    checks = tuple(Check(name, gate.min_coverage, None) for name in gate.checked_selectors)
    return GateResult(
        gate_id, subject, gate, page_size, checks, verdict, reason, others={}, notes=notes
    )


def _fraction(name: str, value: object, meaning: str) -> float:
    number = isinstance(value, Real) and not isinstance(value, bool)
    # "not (0 < x <= 1)" also turns away NaN
    if not number or not 0 < value <= 1:  # type: ignore[operator]
        raise GateError(
            f"kvgate({name}={value!r}): {name} is {meaning}, a number above 0 and up to 1."
        )
    # float32 0.95 is meant as 0.95, not as the 0.949999988 that it is in binary
    exactly = float(str(value)) if isinstance(value, np.floating) else float(value)  # type: ignore[arg-type]
    if not exactly:
        raise GateError(f"kvgate({name}={value!r}): {name} is too small to be told from 0.")
    return exactly


def distrust_reason(profile: Profile) -> str | None:
    """Say which trace failed its verification, or return None where none did."""
    for trace in profile.traces:
        verification = trace.verification
        if verification is None:
            continue
        # a trace may bring a wider tolerance along, but buys nothing with it
        tolerance = min(verification.tolerance, SOFTMAX_TOLERANCE)
        if verification.status == "failed" or verification.max_abs_error > tolerance:
            return (
                f"the capture of {trace.label} failed its verification: recomputed "
                f"{verification.reference} and the model's own differ by up to "
                f"{verification.max_abs_error:.2g}, where {tolerance:g} is tolerated. "
                "None of its numbers can be believed; report it with the model's architecture, the "
                "cache type and the llama-cpp-python version."
            )
    return None


def _invalid_reason(gate: Gate, profile: Profile) -> str | None:
    distrust = distrust_reason(profile)
    if distrust is not None:
        return distrust
    reason = profile.undefined_reason(gate.budget)
    if reason is None:
        return None
    enough = next((budget for budget in BUDGET_GRID if profile.is_defined(budget)), None)
    smallest = "" if enough is None else f" (from {percent(enough)} on it buys one)"
    return f"{reason}. Raise the budget{smallest}, lengthen the prompt, or use smaller pages."


def _notes(gate: Gate, profile: Profile) -> Iterable[str]:
    if all(
        profile.grid.pages_for(gate.budget, step.n_visible) >= end - first
        for trace in profile.traces
        for step in trace.steps
        for first, end in [profile.grid.eligible(step.n_visible)]
    ):
        yield "the budget buys every eligible page, so nothing was selected"
    references = {trace.verification.reference for trace in profile.traces if trace.verification}
    for reference in sorted(references - {SOFTMAX_REFERENCE}):
        yield f"compared with {reference!r}, not with the model's own softmax"
    checked = [trace.verification for trace in profile.traces if trace.verification is not None]
    if len(checked) < len(profile.traces):
        yield "unverified trace: never compared with the model's own softmax"
    worst = max((verification.max_abs_error for verification in checked), default=0.0)
    if UNUSUAL_ERROR < worst <= SOFTMAX_TOLERANCE:
        yield (
            f"verified to {worst:.1e} only; right reads lie near 1e-6 on the CPU, so look into it "
            "unless this ran on a GPU"
        )


def _missed_reason(
    gate: Gate, profile: Profile, observed: Mapping[str, float], missed: Check
) -> str:
    at = f"at a budget of {percent(gate.budget)}"
    ceiling = observed[ORACLE]
    if missed.selector == TOKEN_ORACLE:
        return (
            f"attention is too diffuse: even the best tokens, picked one by one, hold "
            f"{share(missed.observed)} of the eligible mass {at}, so no selector of pages or "
            f"tokens can pass. {_enough(profile, TOKEN_ORACLE, gate.min_coverage)}"
        )
    if ceiling < gate.min_coverage:
        return (
            f"the ceiling is below the threshold: even a perfect selector of "
            f"{profile.grid.page_size}-token pages holds {share(ceiling)} of the eligible mass "
            f"{at}, so no selector can pass. {_enough(profile, ORACLE, gate.min_coverage)}"
        )
    others = ", ".join(
        f"{name} {share(value)}" for name, value in observed.items() if name != missed.selector
    )
    return (
        f"the selector is the problem: {missed.selector} holds {share(missed.observed)} of the "
        f"eligible mass {at}; the others: {others}. "
        f"{_enough(profile, missed.selector, gate.min_coverage)}"
    )


def _enough(profile: Profile, selector: str, coverage: float) -> str:
    budget = profile.required_budget(selector, coverage)
    subject = "the ceiling" if selector == ORACLE else selector
    if budget is None:
        return f"No budget lets {subject} reach {coverage}."
    return f"The smallest budget at which {subject} reaches {coverage} is {percent(budget)}."


def _go_reason(result: GateResult) -> str:
    tightest = result.deciding
    return (
        f"{tightest.selector} holds {share(tightest.observed)} of the eligible mass at a budget of "
        f"{percent(result.gate.budget)}, {share(tightest.margin)} above the threshold."
    )
