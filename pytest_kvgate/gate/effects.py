"""Why a demand on the next token is met or not, and what it says of a demand on coverage."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from pytest_kvgate.analysis import Profile
from pytest_kvgate.analysis.effects import ClosedLoop, EffectMeasure, LoopRun
from pytest_kvgate.analysis.selectors import ORACLE, TOKEN_ORACLE
from pytest_kvgate.analysis.wording import nats, part, percent, share, which_layers
from pytest_kvgate.gate.model import Check, Demand, Gate
from pytest_kvgate.gate.observation import observe
from pytest_kvgate.gate.reasons import two_digits

#: A closed loop of fewer predicted tokens is pointed out.
FEW_TOKENS = 32
#: Layers that lose the most mass, to name.
NAMED_LAYERS = 3


def effect_go_reason(gate: Gate, profile: Profile, loop: ClosedLoop, check: Check) -> str:
    """Say how much room the tightest check leaves."""
    assert check.margin is not None
    side = "above the threshold" if check.demand.is_floor else "below what is allowed"
    return f"{_found(gate, profile, loop, check)}, {share(check.margin)} {side}."


def effect_open_reason(gate: Gate, profile: Profile, loop: ClosedLoop, check: Check) -> str:
    """Say why the interval does not decide, and what more data would."""
    found = check.interval
    text = _found(gate, profile, loop, check)
    if found is None:
        return (
            f"{text}, but one predicted token gives no interval. Compare more "
            "(--kvgate-loop-tokens) or give more prompts."
        )
    drawn = "tokens" if found.drawn == "steps" else found.drawn
    half = max(found.high - found.low, 0.0) / 2
    distance = abs(check.margin or 0.0)
    advice = ""
    if distance > 1e-9:
        wanted = max(found.n + 1, two_digits(found.n * (half / distance) ** 2))
        advice = f" If the number stays where it is, about {wanted} {drawn} would settle it."
    inside = found.low <= check.required <= found.high
    what = "holds the threshold" if inside else "lies on the other side of the threshold"
    return (
        f"{text}, but the {percent(found.confidence)} interval [{part(found.low)}, "
        f"{part(found.high)}] over {found.n} {drawn} {what} "
        f"{check.required:g}.{advice}"
    )


def effect_missed_reason(gate: Gate, profile: Profile, loop: ClosedLoop, check: Check) -> str:
    """Say whether the budget or the selector is the problem, and where the mass is lost."""
    effect = _effect(check.demand)
    found = _found(gate, profile, loop, check)
    bound = f"{check.required:g} is {'required' if check.demand.is_floor else 'allowed'}"
    ideal = observe(gate, profile, loop, check.demand, ORACLE)
    assert ideal is not None
    met = ideal >= check.required if check.demand.is_floor else ideal <= check.required
    text = f"next tokens change too much: {found}, where {bound}."
    if check.selector not in (ORACLE, TOKEN_ORACLE):
        of_oracle = f"{_measured(effect, ideal)} with the pages of most mass (oracle)"
        if met:
            text = f"the selector is the problem: {found}, where {bound}, and {of_oracle}."
        else:
            text += f" It is {of_oracle}, so no better selector of mass would do at this budget."
    lost = _lossy_layers(_run(gate, profile, loop, check.selector))
    if len(lost) > 1:
        layers = ", ".join(f"{layer} ({share(value)})" for layer, value in lost)
        text += (
            f" The layers that lose the most of their mass: {layers}. dense_layers=[…] keeps "
            "layers resident; kvgate plan looks for the cheapest that will do."
        )
    return text


def noise_problem(gate: Gate, loop: ClosedLoop) -> str | None:
    """Say which threshold asks for less than an edit that changes nothing does, or return None."""
    for demand in gate.demands:
        if demand.effect is None:
            continue
        noise = loop.noise_level(demand.effect)
        tighter = demand.threshold > noise if demand.is_floor else demand.threshold < noise
        if tighter:
            return (
                f"{_NAMES[demand.effect]} of {demand.threshold:g} cannot be judged here: an edit "
                f"that changes nothing already comes to {_measured(demand.effect, noise)} over "
                f"{loop.n_token} tokens, since it splits the graph and last bits are amplified. "
                f"{_more_than_noise(demand.effect)}"
            )
    return None


def _more_than_noise(effect: EffectMeasure) -> str:
    if effect == "kl":  # a mean of what is never negative, which more tokens do not lower
        return "Allow more."
    return "Allow more, or compare more tokens (--kvgate-loop-tokens)."


def effect_notes(
    gate: Gate, profile: Profile, loop: ClosedLoop, checks: Sequence[Check]
) -> Iterator[str]:
    """Say what lies within the noise, and where coverage and the next token disagree."""
    for check in checks:
        effect = check.demand.effect
        if effect in ("kl", "nll_increase") and check.observed is not None:
            noise = loop.noise_level(effect)
            if abs(check.observed) <= noise:
                yield (
                    f"{_NAMES[effect]} of {check.selector} lies within the noise of "
                    f"{_measured(effect, noise)}, so it cannot be told from none"
                )
    coverages = [check for check in checks if check.demand.measure == "coverage"]
    effects = [check for check in checks if check.demand.effect is not None]
    if effects and loop.n_token < FEW_TOKENS:
        yield f"the closed loop compared {loop.n_token} predicted tokens only"
    if effects and loop.eos_ignored_from is not None:
        yield (
            f"end of text ignored in the closed loop from decode step {loop.eos_ignored_from} on: "
            "what follows is text that the model would not have written"
        )
    if effects and loop.sparse_tail == 0 and all(check.passed for check in effects):
        yield (
            "the prompt was read densely; --kvgate-sparse-tail reads its end under the selection, "
            "too"
        )
    if not coverages or not effects:
        return
    missed = [check for check in coverages if not check.passed]
    if missed and all(check.passed for check in effects):
        yield (
            f"coverage of {missed[0].selector} is {share(missed[0].observed)} where "
            f"{missed[0].required:g} is required, and yet next tokens change by no more than is "
            "allowed: the coverage threshold may be too strict for this model"
        )
    harmful = [check for check in effects if check.state == "missed"]
    if harmful and not missed:
        yield (
            f"the coverage threshold of {coverages[0].required:g} is met, and yet next tokens "
            "change by more than is allowed: it may be too lax for this model"
        )


def _effect(demand: Demand) -> EffectMeasure:
    assert demand.effect is not None
    return demand.effect


_NAMES: dict[EffectMeasure, str] = {
    "kl": "a KL",
    "top1": "a top-1 agreement",
    "nll_increase": "an NLL increase",
}


def _measured(effect: EffectMeasure, value: float) -> str:
    return share(value) if effect == "top1" else nats(value)


def _run(gate: Gate, profile: Profile, loop: ClosedLoop, selector: str) -> LoopRun:
    return loop.run(gate.variant(selector, profile.grid.page_size))


def _found(gate: Gate, profile: Profile, loop: ClosedLoop, check: Check) -> str:
    """Say what a selector does to the next token, and what its pages held meanwhile."""
    effect = _effect(check.demand)
    assert check.observed is not None
    value = _measured(effect, check.observed)
    what = {
        "kl": f"{check.selector} moves the next token by a KL of {value}",
        "top1": f"{check.selector} leaves the likeliest token as it is in {value} of the cases",
        "nll_increase": f"{check.selector} makes the text less likely, by {value} nats per token,",
    }[effect]
    run = _run(gate, profile, loop, check.selector)
    held = "" if run.coverage is None else f" (coverage {share(run.coverage)} in the same run)"
    assert gate.budget is not None
    dense = f", {which_layers(gate.dense_layers)} dense" if gate.dense_layers else ""
    return f"{what} at a budget of {percent(gate.budget)}{dense}{held}"


def _lossy_layers(run: LoopRun) -> list[tuple[int, float]]:
    """Return the layers of which the largest share of all mass is not attended to."""
    lost = {layer: part.lost / part.n_step for layer, part in run.layers.items() if part.n_step}
    return sorted(lost.items(), key=lambda item: (-item[1], item[0]))[:NAMED_LAYERS]
