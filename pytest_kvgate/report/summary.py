"""The terminal summary: what was measured on each model, and every gate's verdict."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

from pytest_kvgate.analysis.wording import UNDEFINED, distinct, percent, share
from pytest_kvgate.report.document import Document
from pytest_kvgate.report.tables import shorten, table, wrap


def summary_lines(
    documents: Iterable[Document], gates: Sequence[Document], problems: Sequence[str]
) -> Iterator[str]:
    """Yield the whole summary, its blocks set apart by empty lines."""
    blocks = [profile_lines(document) for document in documents]
    if gates:
        blocks.append(gate_lines(gates))
    blocks += [iter(wrap(problem)) for problem in problems]
    for position, block in enumerate(blocks):
        if position:
            yield ""
        yield from block


def profile_lines(document: Document) -> Iterator[str]:
    """Yield what was measured on one model: its traces, and coverage by budget and selector."""
    settings, traces = document["settings"], document["traces"]
    model = traces[0]["model"]
    about = ", ".join(str(model[key]) for key in ("architecture", "quantization") if model.get(key))
    yield f"{document['subject']} ({about})"
    for trace in traces:
        yield f"  {_trace_line(trace)}"
    yield (
        f"  {settings['page_size']}-token pages; free: first {settings['sinks']} tokens and last "
        f"{_recent(settings['recent'])}; eligible mass "
        f"{share(document['attention']['eligible_mass'])}"
    )
    if not document["coverage"]:
        yield "  A trace failed its verification, so no number of this model is shown."
        return
    yield ""
    selectors = settings["selectors"]
    yield from table(
        list(_coverage_rows(document["coverage"], settings)),
        ["budget", "pages", *selectors, f"{selectors[0]} total"],
        ("right",) * (3 + len(selectors)),
    )
    if len(traces) > 1:
        yield ""
        yield from _alone(traces, settings)
    yield ""
    yield from _required(document["required_budget"], selectors)
    if document["skipped_units"]:
        yield f"  {document['skipped_units']} units without eligible mass were skipped."


def gate_lines(gates: Sequence[Mapping[str, Any]]) -> Iterator[str]:
    """Yield one block per gate: its verdict and name, then the numbers or the reason."""
    width = max((len(gate["verdict"]) for gate in gates), default=0)
    indent = " " * (width + 2)
    for gate in gates:
        yield f"{gate['verdict']:<{width}}  {gate['id']}"
        if gate["observed"] is None:
            yield from wrap(gate["reason"], indent)
        else:
            checks = ", ".join(
                f"{check['selector']} {share(check['observed'])}" for check in gate["checks"]
            )
            yield from wrap(
                f"{gate['subject']}, budget {percent(gate['budget'])}, {gate['page_size']}-token "
                f"pages: {checks}; required {share(gate['required'])}",
                indent,
            )
        for note in gate["notes"]:
            yield from wrap(note, indent)


def _trace_line(trace: Mapping[str, Any]) -> str:
    verification = trace["verification"]
    if verification is None:
        checked = "UNVERIFIED"
    elif verification["status"] == "failed":
        error = verification["max_abs_error"]
        found = "not a number" if error is None else f"{error:.2g}"
        checked = f"verification FAILED, error {found}"
    else:
        checked = f"{verification['reference']} verified to {verification['max_abs_error']:.1e}"
    windowed = len(trace["windowed_layers"])
    layers = _count(len(trace["paged_layers"]), "layer")
    if windowed:
        layers += f" (and {windowed} with a sliding window, left out)"
    return (
        f"{trace['workload']['name']}: {trace['n_context']} tokens, "
        f"{_count(trace['n_steps'], 'step')}, "
        f"{layers}; {checked}"
    )


def _coverage_rows(
    coverage: Iterable[Mapping[str, Any]], settings: Mapping[str, Any]
) -> Iterator[list[str]]:
    found = {(row["budget"], row["selector"]): row for row in coverage}
    for budget in settings["budgets"]:
        rows = [found[budget, selector] for selector in settings["selectors"]]
        fewest, most = rows[0]["pages"]
        yield [
            percent(budget),
            str(fewest) if fewest == most else f"{fewest}-{most}",
            *(share(row["coverage"]) for row in rows),
            share(rows[0]["total_mass"]),
        ]


def _alone(traces: Sequence[Mapping[str, Any]], settings: Mapping[str, Any]) -> Iterator[str]:
    """Yield the coverage of each pooled trace, a row per selector and a column per budget."""
    budgets = settings["budgets"]
    rows = []
    names = distinct([shorten(trace["workload"]["name"], 30) for trace in traces])
    for name, trace in zip(names, traces, strict=True):
        found = {(row["budget"], row["selector"]): row["coverage"] for row in trace["coverage"]}
        for selector in settings["selectors"]:
            values = [share(found[budget, selector]) for budget in budgets]
            rows.append([f"{name}: {selector}", *values])
    headers = ["each alone", *(percent(budget) for budget in budgets)]
    yield from table(rows, headers, ("left", *("right" for _ in budgets)))


def _required(rows: Sequence[Mapping[str, Any]], selectors: Sequence[str]) -> Iterator[str]:
    found = {(row["selector"], row["coverage"]): row["budget"] for row in rows}
    coverages = sorted({row["coverage"] for row in rows})
    needed = [
        [
            str(coverage),
            *(
                UNDEFINED if found[name, coverage] is None else percent(found[name, coverage])
                for name in selectors
            ),
        ]
        for coverage in coverages
    ]
    headers = ["budget for", *selectors]
    yield from table(needed, headers, ("right",) * len(headers))


def _count(number: int, noun: str) -> str:
    return f"{number} {noun}{'' if number == 1 else 's'}"


def _recent(recent: float) -> str:
    return percent(recent) if recent < 1 else f"{int(recent)} tokens"
