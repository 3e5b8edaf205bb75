"""Why a demand on attention is met or not, in sentences; `effects` has those on next tokens."""

from __future__ import annotations

import math

from pytest_kvgate.analysis import Interval, Profile, UndefinedError
from pytest_kvgate.analysis.findings import paging_cost, strides
from pytest_kvgate.analysis.selectors import ORACLE, TOKEN_ORACLE
from pytest_kvgate.analysis.wording import UNDEFINED, cost, multiple, part, percent, share
from pytest_kvgate.gate.model import Check, Gate, on_grid
from pytest_kvgate.gate.observation import observe

_SCOPES = {
    "mean": "",
    "worst-layer": " in the worst layer",
    "p05": " in the worst twentieth of the units",
}


#: How numbers are written that are no shares.
_WRITTEN = {"required_budget": percent, "output_error": cost}


def go_reason(gate: Gate, profile: Profile, check: Check) -> str:
    """Say how much room the tightest check leaves."""
    if check.demand.measure == "required_budget":
        room = percent(round(check.margin or 0.0, 3))
        return f"{_found(gate, profile, check)}, {room} below what is allowed."
    side = "above" if check.demand.is_floor else "below"
    return f"{_found(gate, profile, check)}, {share(check.margin)} {side} the threshold."


def open_reason(gate: Gate, profile: Profile, check: Check) -> str:
    """Say why the interval does not decide, and what more data would."""
    found = check.interval
    if found is None:
        return (
            f"{_found(gate, profile, check)}, but one sampled step gives no interval. Sample more "
            "steps (--kvgate-steps) or give more prompts."
        )
    assert check.interval_required is not None
    inside = found.low <= check.interval_required <= found.high
    what = "holds the threshold" if inside else "lies on the other side of the threshold"
    of = ""
    if check.demand.measure == "required_budget":
        of = f"of its coverage at {percent(on_grid(check.required))} "
    return (
        f"{_found(gate, profile, check)}, but the {percent(found.confidence)} interval {of}"
        f"[{part(found.low)}, {part(found.high)}] over {found.n} {found.drawn} {what} "
        f"{check.interval_required:g}. {_more_data(gate, profile, check, found)}"
    )


def missed_reason(gate: Gate, profile: Profile, check: Check) -> str:
    """Say what the problem is: the attention, the selector, or the pool."""
    found = _found(gate, profile, check)
    measure = check.demand.measure
    if measure == "output_error":
        return (
            f"attention to a selection is too far from attention to everything: {found}, where "
            f"{check.required:g} is allowed; {_others(gate, profile, check)}."
        )
    if measure == "hit_rate":
        return (
            f"the pool misses too often: {found}, where {check.required:g} is required. "
            f"{_pool_sizes(gate, profile, check)}"
        )
    if check.selector == TOKEN_ORACLE:
        perfect = "even a perfect selector of single tokens"
        phrase = _phrase(gate, profile, check, perfect, check.observed)
        return (
            f"attention is too diffuse: {phrase}, so no selector of pages or tokens can pass. "
            f"{_enough(gate, profile, check, TOKEN_ORACLE)}"
        )
    ceiling = observe(gate, profile, None, check.demand, ORACLE)
    if ceiling is None or not _meets(check, ceiling):
        perfect = f"even a perfect selector of {profile.grid.page_size}-token pages"
        side = "too costly" if measure == "required_budget" else "below the threshold"
        return (
            f"the ceiling is {side}: {_phrase(gate, profile, check, perfect, ceiling)}, so no "
            f"selector can pass. {_enough(gate, profile, check, ORACLE)}"
        )
    return (
        f"the selector is the problem: {found}; {_others(gate, profile, check)}. "
        f"{_enough(gate, profile, check, check.selector)}"
    )


def _meets(check: Check, value: float) -> bool:
    return value >= check.required if check.demand.is_floor else value <= check.required


def _found(gate: Gate, profile: Profile, check: Check) -> str:
    return _phrase(gate, profile, check, check.selector, check.observed)


def _phrase(gate: Gate, profile: Profile, check: Check, subject: str, value: float | None) -> str:
    """Say what was found of a selector."""
    where = _SCOPES[gate.scope]
    if gate.layers is not None:
        where += f" of {len(gate.layers)} chosen layers" if where else " in the chosen layers"
    elif gate.dense_layers:
        where += f" {'of' if where else 'in'} the layers that are not dense"
    at = "" if gate.budget is None else f" at a budget of {percent(gate.budget)}"
    measure = check.demand.measure
    if measure == "required_budget":
        if value is None:
            return f"{subject} reaches a coverage of {gate.coverage}{where} at no budget"
        return (
            f"{subject} needs a budget of {percent(value)} for a coverage of {gate.coverage}{where}"
        )
    if measure == "output_error":
        return f"{subject} has an attention-output error of {cost(value)}{where}{at}"
    if measure == "hit_rate":
        return (
            f"{subject} finds {share(value)} of its pages in a pool of "
            f"{multiple(profile.plan.pool)} a step's pages{where}{at}"
        )
    what = "the eligible mass" if measure == "coverage" else "all mass"
    return f"{subject} holds {share(value)} of {what}{where}{at}"


def _others(gate: Gate, profile: Profile, check: Check) -> str:
    values = []
    for name in profile.selectors:
        if name == check.selector:
            continue
        try:
            value = observe(gate, profile, None, check.demand, name)
        except UndefinedError:
            continue
        written = _WRITTEN.get(check.demand.measure, share)
        values.append(f"{name} {UNDEFINED if value is None else written(value)}")
    return f"the others: {', '.join(values)}"


def _enough(gate: Gate, profile: Profile, check: Check, selector: str) -> str:
    """Say from which budget on a selector would meet the demand."""
    subject = "the ceiling" if selector == ORACLE else selector
    if check.demand.measure == "required_budget":
        return f"{percent(check.required)} is allowed."
    if check.demand.measure != "coverage":
        return f"Required: {check.required:g}."
    layers = gate.counted_layers(profile.layers)
    budget = profile.required_budget(selector, check.required, gate.scope, layers)
    if budget is None:
        return f"No budget lets {subject} reach {check.required}."
    return f"The smallest budget at which {subject} reaches {check.required} is {percent(budget)}."


def _pool_sizes(gate: Gate, profile: Profile, check: Check) -> str:
    """Say what pool would serve nearly all accesses, and that a stride overstates misses."""
    assert gate.budget is not None
    cost = paging_cost(profile, check.selector, gate.budget)
    if cost.pool_for_most is None:
        text = (
            "No pool serves 99%: "
            f"{percent(round(cost.first_selections, 3))} of the accesses are to pages never "
            "selected before."
        )
    else:
        text = f"A pool of {multiple(cost.pool_for_most)} would serve 99%."
    stride = strides(profile)
    if stride and stride[-1] > 1:
        up_to = "up to " if len(stride) > 1 else ""
        text += (
            f" Steps were sampled {up_to}{stride[-1]} apart, which overstates misses; a capture "
            "with a stride of 1, such as --kvgate-steps=0:33:1, does not."
        )
    return text


def _more_data(gate: Gate, profile: Profile, check: Check, found: Interval) -> str:
    """Say how many steps or traces would put the threshold outside the interval."""
    assert check.interval_required is not None
    middle = (found.low + found.high) / 2
    if check.demand.measure != "required_budget" and check.observed is not None:
        middle = check.observed
    distance = abs(middle - check.interval_required)
    half = max(found.high - middle, middle - found.low)
    advice = "More prompts tell more than more steps of one." if found.drawn == "steps" else ""
    if distance < 1e-9:
        return f"It lies on the threshold, which no amount of data settles. {advice}".strip()
    wanted = max(found.n + 1, two_digits(found.n * (half / distance) ** 2))
    return (
        f"If the number stays where it is, about {wanted} {found.drawn} would settle it. {advice}"
    ).strip()


def two_digits(number: float) -> int:
    """Round up to two digits: more would say more than is known."""
    unit = int(10 ** max(0, math.floor(math.log10(max(number, 1))) - 1))
    return int(math.ceil(number / unit) * unit)
