"""The report of a gate that did not pass: the whole text of the failed test."""

from __future__ import annotations

from collections.abc import Iterator

from pytest_kvgate.analysis.wording import margin, percent, ranges
from pytest_kvgate.gate import Check, GateResult
from pytest_kvgate.gate.model import on_grid
from pytest_kvgate.report.document import gate_row
from pytest_kvgate.report.tables import table, wrap
from pytest_kvgate.report.wording import NAMES, gate_scope, measured


def gate_failure(result: GateResult) -> Iterator[str]:
    """Yield the report of a gate that did not pass: the whole text of the failed test."""
    gate, deciding = result.gate, result.deciding
    pages = "" if result.page_size is None else f", pages of {result.page_size} tokens"
    scope = gate_scope(gate_row(result))
    budget = f"budget {percent(gate.main_budget)}"
    yield from wrap(f"kvgate {result.verdict}: {result.subject}, {budget}{pages}{scope}")
    yield ""
    if any(check.observed is not None for check in result.checks):
        for demand in gate.demands:
            checks = [check for check in result.checks if check.demand == demand]
            yield from _checks(demand.measure, gate.coverage, checks)
            yield ""
    yield from wrap(f"{result.verdict}: {result.reason}")
    measure = deciding.demand.measure
    if result.worst_layers:
        worst = ", ".join(
            f"{layer} ({measured(measure, value)})" for layer, value in result.worst_layers
        )
        yield f"Worst layers of {deciding.selector}: {worst}."
    if 0 < len(result.dense_layers) < result.n_layer:
        yield from wrap(
            f"Dense layers, to keep resident, for even the ceiling is below the threshold there: "
            f"{ranges(result.dense_layers)} ({len(result.dense_layers)} of {result.n_layer})."
        )
    if result.others:
        others = ", ".join(
            f"{name} {measured(measure, value)}" for name, value in result.others.items()
        )
        at = "" if measure == "required_budget" else " at this budget"
        yield from wrap(f"Other selectors{at}: {others}.")
    for note in result.notes:
        yield from wrap(f"Note: {note}.")


def _checks(measure: str, coverage: float | None, checks: list[Check]) -> Iterator[str]:
    """Yield the table of one demand."""
    of = f"budget for {coverage:g} of" if measure == "required_budget" else f"{NAMES[measure]} of"
    floor = checks[0].demand.is_floor
    headers = [of, "observed", "required" if floor else "allowed", "margin", ""]
    align = ["left", "right", "right", "right", "left"]
    rows = [
        [
            check.selector,
            measured(measure, check.observed),
            measured(measure, check.required),
            _margin(measure, check.margin),
            check.state,
        ]
        for check in checks
    ]
    if any(check.interval is not None for check in checks):
        # a required budget has none of its own: that of the coverage at the budget allowed decides
        header = "interval"
        if measure == "required_budget":
            header = f"coverage at {percent(on_grid(checks[0].required))}"
        headers.insert(2, header)
        align.insert(2, "right")
        for row, check in zip(rows, checks, strict=True):
            found = check.interval
            text = "–" if found is None else f"{found.low:.4f}..{found.high:.4f}"
            row.insert(2, text)
    yield from table(rows, headers, align)


def _margin(measure: str, value: float | None) -> str:
    if measure != "required_budget" or value is None:
        return margin(value)
    return ("+" if value >= 0 else "") + percent(round(value, 6))
