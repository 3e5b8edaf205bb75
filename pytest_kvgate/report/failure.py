"""The report of a gate that did not pass: the whole text of the failed test."""

from __future__ import annotations

from collections.abc import Iterator

from pytest_kvgate.analysis.wording import margin, percent, share
from pytest_kvgate.gate import GateResult
from pytest_kvgate.report.tables import table, wrap


def gate_failure(result: GateResult) -> Iterator[str]:
    """Yield the report of a gate that did not pass: the whole text of the failed test."""
    gate = result.gate
    pages = "" if result.page_size is None else f", pages of {result.page_size} tokens"
    yield f"kvgate {result.verdict}: {result.subject}, budget {percent(gate.budget)}{pages}"
    yield ""
    rows = [
        [
            check.selector,
            share(check.observed),
            share(check.required),
            margin(check.margin),
            "ok" if check.passed else "missed",
        ]
        for check in result.checks
    ]
    headers = ["coverage of", "observed", "required", "margin", ""]
    if any(check.observed is not None for check in result.checks):
        yield from table(rows, headers, ("left", "right", "right", "right", "left"))
        yield ""
    yield from wrap(f"{result.verdict}: {result.reason}")
    if result.worst_layers:
        worst = ", ".join(f"{layer} ({share(value)})" for layer, value in result.worst_layers)
        yield f"Worst layers of {result.deciding.selector}: {worst}."
    if result.others:
        others = ", ".join(f"{name} {share(value)}" for name, value in result.others.items())
        yield f"Other selectors at this budget: {others}."
    yield from (f"Note: {note}." for note in result.notes)
