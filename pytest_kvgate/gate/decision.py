"""The verdict: is a gate met by a profile, and why not."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import replace

from pytest_kvgate.analysis import SOFTMAX_TOLERANCE, Profile, UndefinedError
from pytest_kvgate.analysis.effects import ClosedLoop
from pytest_kvgate.analysis.findings import dense_layers
from pytest_kvgate.analysis.pages import BUDGET_GRID
from pytest_kvgate.analysis.verification import (
    SOFTMAX_REFERENCE,
    UNFUSED_REFERENCE,
    accepted_tolerance,
    is_smoke_tested,
)
from pytest_kvgate.analysis.wording import native_sparsity_note, percent, ranges
from pytest_kvgate.gate.effects import (
    effect_go_reason,
    effect_missed_reason,
    effect_notes,
    effect_open_reason,
    noise_problem,
)
from pytest_kvgate.gate.model import Check, Demand, Gate, GateResult, Verdict
from pytest_kvgate.gate.observation import observe, observed_interval
from pytest_kvgate.gate.reasons import go_reason, missed_reason, open_reason
from pytest_kvgate.trace import Trace

#: A verified error above this is passed on to the reader of a verdict.
UNUSUAL_ERROR = 1e-5
#: An interval that rests on fewer steps or traces than this is passed on, too.
FEW = 10


def decide(
    gate_id: str, subject: str, gate: Gate, profile: Profile, loop: ClosedLoop | None = None
) -> GateResult:
    """Judge one gate on the pooled profile of one model, and on its closed loop.

    The profile must hold the gate's budgets, coverages and `Gate.needed_selectors`, at the gate's
    page size. ``loop`` must hold its `Gate.variants`; None where the gate demands nothing of the
    next token.
    """
    page_size = profile.grid.page_size
    notes = tuple(_notes(gate, profile))
    invalid = _invalid_reason(gate, profile, loop)
    if invalid is not None:
        return unanswered(gate_id, subject, gate, "INVALID", invalid, page_size, notes)
    try:
        checks = tuple(_checks(gate, profile, loop))
    except UndefinedError as error:
        return unanswered(gate_id, subject, gate, "INVALID", str(error), page_size, notes)
    states = {check.state for check in checks}
    verdict: Verdict = "GO"
    if states != {"ok"}:
        verdict = "NO-GO" if "missed" in states else "INCONCLUSIVE"
    result = GateResult(
        gate_id=gate_id,
        subject=subject,
        gate=gate,
        page_size=page_size,
        checks=checks,
        verdict=verdict,
        reason="",
        others={},
        notes=(
            *notes,
            *_notes_on_intervals(checks),
            *(() if loop is None else effect_notes(gate, profile, loop, checks)),
        ),
    )
    deciding = result.deciding
    checked = {check.selector for check in checks if check.demand == deciding.demand}
    others = _others(gate, profile, loop, deciding.demand, checked)
    return replace(
        result,
        reason=_reason(gate, profile, loop, verdict, deciding),
        others=others,
        worst_layers=_worst_layers(gate, profile, deciding),
        dense_layers=_dense_layers(gate, profile),
        n_layer=len(gate.counted_layers(profile.layers) or profile.layers),
    )


def _reason(
    gate: Gate, profile: Profile, loop: ClosedLoop | None, verdict: Verdict, check: Check
) -> str:
    """Explain a verdict by the check that decided."""
    if check.demand.effect is not None:
        assert loop is not None
        explain_effect = {
            "GO": effect_go_reason,
            "NO-GO": effect_missed_reason,
            "INCONCLUSIVE": effect_open_reason,
        }[verdict]
        return explain_effect(gate, profile, loop, check)
    explain = {"GO": go_reason, "NO-GO": missed_reason, "INCONCLUSIVE": open_reason}[verdict]
    return explain(gate, profile, check)


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
    checks = tuple(
        Check(demand, name, None)
        for demand in gate.demands
        for name in gate.checked_selectors(demand)
    )
    return GateResult(
        gate_id, subject, gate, page_size, checks, verdict, reason, others={}, notes=notes
    )


def distrust_reason(profile: Profile) -> str | None:
    """Say which trace failed its verification, or return None where none did."""
    for trace in profile.traces:
        verification = trace.verification
        if verification is None:
            continue
        # a trace may bring a wider tolerance along, but buys nothing with it
        tolerance = verification.tolerance
        if verification.status == "passed":
            tolerance = min(tolerance, accepted_tolerance(trace))
        if verification.status == "failed" or verification.max_abs_error > tolerance:
            return (
                f"the capture of {trace.label} failed its verification: recomputed "
                f"{verification.reference} and the model's own differ by up to "
                f"{verification.max_abs_error:.2g}, where {tolerance:g} is tolerated. "
                "None of its numbers can be believed; report it with the model's architecture, the "
                "cache type and the llama-cpp-python version."
            )
    return None


def _checks(gate: Gate, profile: Profile, loop: ClosedLoop | None) -> Iterator[Check]:
    for demand in gate.demands:
        for selector in gate.checked_selectors(demand):
            check = Check(demand, selector, observe(gate, profile, loop, demand, selector))
            if gate.confidence is None:
                yield check
                continue
            found, required = observed_interval(gate, profile, loop, demand, selector)
            yield replace(check, confident=True, interval=found, interval_required=required)


def _others(
    gate: Gate,
    profile: Profile,
    loop: ClosedLoop | None,
    demand: Demand,
    checked: Iterable[str],
) -> dict[str, float]:
    """Return the deciding measure of the selectors that were not checked, where defined."""
    found = {}
    names: Iterable[str] = profile.selectors
    if demand.effect is not None:  # a sparse run was made for those that were asked for
        assert loop is not None
        names = [
            variant.selector
            for variant in loop.runs
            if variant == gate.variant(variant.selector, profile.grid.page_size)
        ]
    for name in names:
        if name not in checked:
            try:
                value = observe(gate, profile, loop, demand, name)
            except UndefinedError:
                continue
            if value is not None:
                found[name] = value
    return found


def _worst_layers(gate: Gate, profile: Profile, check: Check) -> tuple[tuple[int, float], ...]:
    """Return the layers where the deciding selector does worst; none where a layer has no number.

    Neither a required budget nor an effect on the next token is a layer's.
    """
    measure = check.demand.measure
    if measure == "required_budget" or check.demand.effect is not None or gate.budget is None:
        return ()
    layers_counted = gate.counted_layers(profile.layers)
    samples = profile.samples(measure, check.selector, gate.budget, layers_counted)
    sign = 1 if samples.ascending else -1
    layers = sorted(samples.by_layer().items(), key=lambda item: (sign * item[1], item[0]))
    return tuple(layers[:3])


def _dense_layers(gate: Gate, profile: Profile) -> tuple[int, ...]:
    """Return the layers of which even the best pages hold less than what is demanded."""
    if gate.min_coverage is None or gate.budget is None:
        return ()
    dense = dense_layers(profile, gate.budget, gate.min_coverage)
    counted = gate.counted_layers(profile.layers)
    return tuple(layer for layer in dense if counted is None or layer in counted)


def _invalid_reason(gate: Gate, profile: Profile, loop: ClosedLoop | None) -> str | None:
    distrust = distrust_reason(profile)
    if distrust is not None:
        return distrust
    unknown = _unknown_layers(gate, profile, loop)
    if unknown is not None:
        return unknown
    for budget in gate.measured_budgets:
        reason = profile.undefined_reason(budget)
        if reason is not None:
            enough = next((grid for grid in BUDGET_GRID if profile.is_defined(grid)), None)
            smallest = "" if enough is None else f" (from {percent(enough)} on it buys one)"
            return (
                f"{reason}. Raise the budget{smallest}, lengthen the prompt, or use smaller pages."
            )
    if loop is None:
        return None
    for variant in gate.variants(profile.grid.page_size):
        if variant in loop.undefined:
            return f"the closed loop is not defined: {loop.undefined[variant]}"
    return noise_problem(gate, loop)


def _unknown_layers(gate: Gate, profile: Profile, loop: ClosedLoop | None) -> str | None:
    """Say which layer of the gate's arguments holds no unit, or that none is left to page.

    A closed loop also pages the layers that read another layer's cache, which hold no unit.
    """
    paged = profile.layers if loop is None else loop.paged_layers
    for name, layers, known in (
        ("layers", gate.layers or (), profile.layers),
        ("dense_layers", gate.dense_layers, paged),
    ):
        missing = sorted(set(layers) - set(known))
        if missing and known:
            return (
                f"layer {missing[0]} of {name}={list(layers)} holds no unit that counts: it "
                "is not a layer of this model with a KV cache and without a sliding window. "
                f"Accepted: {ranges(known)}."
            )
    if paged and set(paged) <= set(gate.dense_layers):
        return (
            f"dense_layers={list(gate.dense_layers)} keeps every layer resident as a whole, so "
            "nothing is left to page."
        )
    return None


def _notes(gate: Gate, profile: Profile) -> Iterator[str]:
    if all(
        profile.grid.pages_for(gate.main_budget, step.n_visible) >= end - first
        for trace in profile.traces
        for step in trace.steps
        for first, end in [profile.grid.eligible(step.n_visible)]
    ):
        yield "the budget buys every eligible page, so nothing was selected"
    for trace in profile.traces:
        if trace.eos_ignored_from is not None:
            yield _note_on_ignored_end(trace)
    for sparsity in dict.fromkeys(trace.native_sparsity for trace in profile.traces):
        if sparsity is not None:
            yield native_sparsity_note(sparsity.top_k, sparsity.layers)
    if distrust_reason(profile) is None and any(map(is_smoke_tested, profile.traces)):
        yield (
            "smoke-tested only: flash attention leaves no softmax, so the capture was compared by "
            "the attention output alone, which misses single wrong rows; "
            "--kvgate-verify=reference proves it"
        )
    compared = [trace for trace in profile.traces if not is_smoke_tested(trace)]
    checked = [trace.verification for trace in compared if trace.verification is not None]
    references = {verification.reference for verification in checked}
    for reference in sorted(references - {SOFTMAX_REFERENCE, UNFUSED_REFERENCE}):
        yield f"compared with {reference!r}, not with the model's own softmax"
    if len(checked) < len(compared):
        yield "unverified trace: never compared with the model's own softmax"
    worst = max((verification.max_abs_error for verification in checked), default=0.0)
    if UNUSUAL_ERROR < worst <= SOFTMAX_TOLERANCE:
        yield (
            f"verified to {worst:.1e} only; right reads lie near 1e-6 on the CPU, so look into it "
            "unless this ran on a GPU"
        )


def _note_on_ignored_end(trace: Trace) -> str:
    """Say how much of a trace is of text that the model would not have written."""
    first = trace.eos_ignored_from
    assert first is not None
    beyond = sum(1 for step in trace.steps if step.decode_index >= first)
    return (
        f"end of text ignored in {trace.label} from decode step {first} on, so {beyond} of "
        f"{len(trace.steps)} sampled steps are of text that the model would not have written"
    )


def _notes_on_intervals(checks: Iterable[Check]) -> Iterator[str]:
    first = next((check for check in checks if check.interval is not None), None)
    if first is None or first.interval is None:
        return
    found, drawn = first.interval, str(first.interval.drawn)
    if drawn == "steps" and first.demand.effect is not None:
        drawn = "tokens"
    if found.n < FEW:
        yield f"the interval rests on {found.n} {drawn} only"
    if found.drawn == "steps":
        yield (
            f"the interval is over {drawn} of the captured texts; they resemble each other, so it "
            "says less of other texts than several prompts would"
        )
