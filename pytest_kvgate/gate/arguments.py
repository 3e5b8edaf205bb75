"""From the arguments of ``@kvgate(...)`` to a gate."""

from __future__ import annotations

import sys
from collections.abc import Collection, Mapping, Sequence
from numbers import Real
from typing import Any

import numpy as np

from pytest_kvgate.analysis import SCOPES, SELECTORS, Scope
from pytest_kvgate.analysis.pages import BUDGET_GRID
from pytest_kvgate.analysis.selectors import TOKEN_ORACLE
from pytest_kvgate.gate.model import Gate

#: Arguments that are a fraction, with what it is a fraction of.
FRACTIONS = {
    "budget": "a fraction of the context",
    "min_coverage": "a share of the mass",
    "min_total_mass": "a share of the mass",
    "min_hit_rate": "a share of the page accesses",
    "min_top1": "a share of the predicted tokens",
    "max_budget": "a fraction of the context",
    "coverage": "a share of the mass",
}
#: Arguments that are a number above 0, with what it is.
POSITIVES = {
    "max_output_error": ("‖o'−o‖/‖o‖", 0.1),
    "max_kl": ("the KL divergence of next-token distributions in nats", 0.05),
    "max_nll_increase": ("a rise of the negative log-likelihood in nats per token", 0.05),
}
EFFECTS = ("max_kl", "min_top1", "max_nll_increase")
AT_BUDGET = ("min_coverage", "min_total_mass", "max_output_error", "min_hit_rate", *EFFECTS)
ACCEPTED_ARGUMENTS = (
    "budget",
    *AT_BUDGET,
    "max_budget",
    "coverage",
    "selector",
    "page_size",
    "scope",
    "layers",
    "dense_layers",
    "confidence",
)
EXAMPLE = "kvgate(budget=0.02, min_coverage=0.95)"


class GateError(ValueError):
    """A gate that is not well-formed; the message says which argument and what is accepted."""


def gate_from_arguments(
    arguments: tuple[object, ...],
    keywords: Mapping[str, Any],
    selectors: Collection[str] = SELECTORS,
) -> Gate:
    """Build a gate from the arguments of ``@kvgate(...)``; ``selectors`` are the known names.

    Raises:
        GateError: an argument is positional, unknown, missing, or outside its range.
    """
    accepted = ", ".join(ACCEPTED_ARGUMENTS)
    if arguments:
        raise GateError(
            f"kvgate() got the positional argument {arguments[0]!r}; name every argument, "
            f"as in {EXAMPLE}. Accepted: {accepted}."
        )
    unknown = [name for name in keywords if name not in ACCEPTED_ARGUMENTS]
    if unknown:
        raise GateError(f"kvgate() got an unknown argument {unknown[0]!r}. Accepted: {accepted}.")
    # None stands for the default of these alone: a threshold that is None by mistake is no gate
    optional = ("selector", "page_size", "layers", "dense_layers", "confidence")
    given = {
        name: value for name, value in keywords.items() if value is not None or name not in optional
    }
    _check_combination(given)
    numbers = {
        name: _fraction(name, given[name], meaning)
        for name, meaning in FRACTIONS.items()
        if name in given
    }
    if numbers.get("max_budget", 1.0) < BUDGET_GRID[0]:
        raise GateError(
            f"kvgate(max_budget={given['max_budget']!r}): required budgets are looked for in steps "
            f"of 0.1%; {BUDGET_GRID[0]} or more is accepted."
        )
    for name in POSITIVES:
        if name in given:
            numbers[name] = _positive(name, given[name])
    if "confidence" in given:
        numbers["confidence"] = _confidence(given["confidence"])
    return Gate(
        **numbers,
        selector=_selector(given, selectors),
        page_size=_page_size(given.get("page_size")),
        scope=_scope(given.get("scope", "mean")),
        layers=_layers("layers", given.get("layers")),
        dense_layers=_dense_layers(given),
    )


def _check_combination(given: Mapping[str, Any]) -> None:
    demands = [name for name in (*AT_BUDGET, "max_budget") if name in given]
    if not demands:
        missing = "min_coverage" if "budget" in given else "budget and min_coverage"
        raise GateError(
            f"kvgate() needs {missing}, as in {EXAMPLE}; or another demand: "
            f"{', '.join((*AT_BUDGET[1:], 'max_budget'))}."
        )
    at_budget = [name for name in demands if name in AT_BUDGET]
    if at_budget and "budget" not in given:
        raise GateError(f"kvgate() needs budget for its {at_budget[0]}, as in {EXAMPLE}.")
    if "budget" in given and not at_budget:
        raise GateError(
            "kvgate(budget=…) has no effect on max_budget; give one of "
            f"{', '.join(AT_BUDGET)}, or leave budget out."
        )
    alone = [name for name in ("layers", "scope") if name in given]
    if alone and not set(demands) - set(EFFECTS):
        raise GateError(
            f"kvgate({alone[0]}={given[alone[0]]!r}) has no effect on {demands[0]}, which is about "
            "the whole model's next token. dense_layers=[…] keeps layers out of the paging."
        )
    if ("max_budget" in given) != ("coverage" in given):
        raise GateError(
            "kvgate() needs max_budget and coverage together, as in "
            "kvgate(max_budget=0.05, coverage=0.9): the smallest budget that reaches this coverage "
            "must not be larger."
        )


def _number(value: object, largest: float) -> float | None:
    """Return the number that was written; None unless it is above 0 and up to ``largest``."""
    if not isinstance(value, Real) or isinstance(value, bool):
        return None
    if not 0 < value <= largest:  # type: ignore[operator] # turns away NaN, too
        return None
    # float32 0.95 is meant as 0.95, not as the 0.949999988 that it is in binary
    return float(str(value)) if isinstance(value, np.floating) else float(value)


def _fraction(name: str, value: object, meaning: str) -> float:
    number = _number(value, 1)
    if number is None:
        raise GateError(
            f"kvgate({name}={value!r}): {name} is {meaning}, a number above 0 and up to 1."
        )
    if not number:
        raise GateError(f"kvgate({name}={value!r}): {name} is too small to be told from 0.")
    return number


def _positive(name: str, value: object) -> float:
    meaning, example = POSITIVES[name]
    number = _number(value, sys.float_info.max)
    if not number:
        raise GateError(
            f"kvgate({name}={value!r}): {name} is {meaning}, a number above 0, such as {example}."
        )
    return number


def _confidence(value: object) -> float:
    number = _number(value, 1)
    if number is None or not 0.5 <= number < 1:
        raise GateError(
            f"kvgate(confidence={value!r}): the share of intervals that hold the truth is needed, "
            "from 0.5 and below 1, such as 0.95."
        )
    return number


def _selector(given: Mapping[str, Any], selectors: Collection[str]) -> str | None:
    selector = given.get("selector")
    if selector is None:
        return None
    if not (isinstance(selector, str) and selector in selectors):
        raise GateError(
            f"kvgate(selector={selector!r}): there is no such selector. Accepted: "
            f"{', '.join(selectors)}."
        )
    pages_only = [name for name in ("max_output_error", "min_hit_rate") if name in given]
    if selector == TOKEN_ORACLE and pages_only:
        raise GateError(
            f"kvgate({pages_only[0]}={given[pages_only[0]]!r}) is about pages, and "
            f"{TOKEN_ORACLE!r} selects tokens; name another selector."
        )
    return str(selector)  # plain text, not an enum


def _page_size(value: object) -> int | None:
    whole = isinstance(value, int) and not isinstance(value, bool) and value > 0
    if value is not None and not whole:
        raise GateError(
            f"kvgate(page_size={value!r}): a page is a whole number of tokens, 1 or more."
        )
    return int(value) if isinstance(value, int) else None


def _scope(value: object) -> Scope:
    for scope in SCOPES:
        if isinstance(value, str) and value == scope:
            return scope
    raise GateError(f"kvgate(scope={value!r}): accepted: {', '.join(SCOPES)}.")


def _layers(name: str, value: object) -> tuple[int, ...] | None:
    if value is None:
        return None
    layers = tuple(value) if isinstance(value, Sequence | range | set | frozenset) else ()
    whole = all(isinstance(layer, int) and not isinstance(layer, bool) for layer in layers)
    if not layers or isinstance(value, str | bytes) or not whole or min(layers) < 0:
        raise GateError(
            f"kvgate({name}={value!r}): layer indices are needed, whole numbers from 0, such as "
            f"{name}=[3, 7] or {name}=range(8, 16)."
        )
    return tuple(sorted({int(layer) for layer in layers}))


def _dense_layers(given: Mapping[str, Any]) -> tuple[int, ...]:
    dense = _layers("dense_layers", given.get("dense_layers")) or ()
    both = sorted(set(dense) & set(_layers("layers", given.get("layers")) or ()))
    if both:
        raise GateError(
            f"kvgate(): layer {both[0]} is in layers and in dense_layers. A dense layer is "
            "resident as a whole, so nothing of it is selected that could count."
        )
    return dense
