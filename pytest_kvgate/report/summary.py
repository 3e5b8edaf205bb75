"""The terminal summary: what was measured on each model, and every gate's verdict."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

from pytest_kvgate.analysis.verification import UNFUSED_REFERENCE
from pytest_kvgate.analysis.wording import (
    UNDEFINED,
    distinct,
    native_sparsity_note,
    part,
    percent,
    ranges,
    share,
    which_layers,
)
from pytest_kvgate.report.details import detail_blocks
from pytest_kvgate.report.document import Document
from pytest_kvgate.report.loops import loop_lines
from pytest_kvgate.report.tables import blocks, by_budget, shorten, table, wrap
from pytest_kvgate.report.verification import layer_error_lines
from pytest_kvgate.report.wording import NAMES, NATS, count, gate_scope, measured

#: Columns that the name of a model or a workload may take.
LONGEST_NAME = 80


def summary_lines(
    documents: Iterable[Document],
    gates: Sequence[Document],
    problems: Sequence[str],
    *,
    calibration: Document | None = None,
    verbose: bool = False,
) -> Iterator[str]:
    """Yield the whole summary, its blocks set apart by empty lines."""
    parts = [profile_lines(document, verbose=verbose) for document in documents]
    if calibration is not None:
        parts.append(iter(wrap(calibration["summary"])))
    if gates:
        parts.append(gate_lines(gates))
    parts += [iter(wrap(problem)) for problem in problems]
    yield from blocks(parts)


def profile_lines(document: Document, *, verbose: bool = False) -> Iterator[str]:
    """Yield what was measured on one model: its traces, coverage, and where the mass is lost.

    ``verbose`` adds the tables of details.
    """
    yield from _headline(document)
    verified = [_layer_errors(document, verbose=verbose)]
    if not document["coverage"]:
        yield "  A trace failed its verification, so no number of this model is shown."
        yield ""
        yield from blocks(verified)
        return
    yield ""
    parts = [*verified, _coverage(document)]
    if len(document["traces"]) > 1:
        parts.append(_alone(document))
    parts += [_gap(document), _dense(document), loop_lines(document)]
    if verbose:
        parts += detail_blocks(document)
    if document["skipped_units"]:
        parts.append(
            iter([f"  {count(document['skipped_units'], 'unit')} skipped: no eligible mass."])
        )
    yield from blocks(parts)


def gate_lines(gates: Sequence[Mapping[str, Any]]) -> Iterator[str]:
    """Yield one block per gate: its verdict and name, then the numbers or the reason."""
    width = max((len(gate["verdict"]) for gate in gates), default=0)
    indent = " " * (width + 2)
    for gate in gates:
        yield f"{gate['verdict']:<{width}}  {gate['id']}"
        if gate["observed"] is None:
            yield from wrap(gate["reason"], indent)
        else:
            yield from wrap(
                f"{gate['subject']}, budget {percent(gate['budget'])}, {gate['page_size']}-token "
                f"pages{gate_scope(gate)}: {_checks(gate)}",
                indent,
            )
        if gate["verdict"] == "INCONCLUSIVE":
            yield from wrap(gate["reason"], indent)
        for note in gate["notes"]:
            yield from wrap(note, indent)


def _checks(gate: Mapping[str, Any]) -> str:
    """Return every demand with what each selector has: ``oracle 0.2056; required 0.9500``."""
    texts = []
    for measure in dict.fromkeys(check["measure"] for check in gate["checks"]):
        checks = [check for check in gate["checks"] if check["measure"] == measure]
        values = ", ".join(
            f"{check['selector']} {measured(measure, check['observed'])}" for check in checks
        )
        kind = {"coverage": "", "required_budget": f"budget for {gate['coverage']}: "}
        name = kind.get(measure, f"{NAMES[measure]}: ")
        bound = "required"
        if measure in ("output_error", "required_budget", *NATS):
            bound = "allowed"
        texts.append(f"{name}{values}; {bound} {measured(measure, checks[0]['required'])}")
    return "; ".join(texts)


def _headline(document: Document) -> Iterator[str]:
    settings, traces = document["settings"], document["traces"]
    model, attention = traces[0]["model"], document["attention"]
    about = ", ".join(str(model[key]) for key in ("architecture", "quantization") if model.get(key))
    yield from wrap(f"{shorten(document['subject'], LONGEST_NAME)} ({about})")
    names = _names(traces, LONGEST_NAME)
    for trace, name in zip(traces, names, strict=True):
        yield from wrap(_trace_line(trace, name), "  ")
        if trace["native_sparse"] is not None:
            yield from wrap(native_sparsity_note(**trace["native_sparse"]), "    ")
    for text in _unpaged(traces, names):
        yield from wrap(text, "  ")
    yield (
        f"  {settings['page_size']}-token pages; free: first {settings['sinks']} tokens and last "
        f"{_recent(settings['recent'])}; eligible mass {share(attention['eligible_mass'])}"
    )
    if attention["support"] is not None:
        yield from wrap(
            f"a query head spreads its eligible mass over {attention['support']:.0f} tokens "
            f"(exp of entropy); the hottest holds {share(attention['hottest'])}",
            "  ",
        )


def _names(traces: Sequence[Mapping[str, Any]], width: int) -> list[str]:
    """Return the names of the workloads, numbered where they repeat."""
    return distinct([shorten(trace["workload"]["name"], width) for trace in traces])


def _trace_line(trace: Mapping[str, Any], name: str) -> str:
    verification = trace["verification"]
    if verification is None:
        checked = "UNVERIFIED"
    elif verification["status"] == "failed":
        error = verification["max_abs_error"]
        found = "not a number" if error is None else f"{error:.2g}"
        checked = f"verification FAILED, error {found}"
    elif trace["smoke_tested"]:
        checked = f"SMOKE-TESTED ONLY: attention output to {verification['max_abs_error']:.1e}"
    else:
        checked = f"{verification['reference']} verified to {verification['max_abs_error']:.1e}"
    followed = " of a recording" if trace["workload"].get("forced") is True else ""
    ignored = trace["workload"].get("eos_ignored_from")
    past_end = "" if ignored is None else f"; END OF TEXT IGNORED from decode step {ignored} on"
    return (
        f"{name}: {trace['n_context']} tokens, "
        f"{count(trace['n_steps'], 'step')}{followed}, "
        f"{count(len(trace['paged_layers']), 'layer')}; {checked}{past_end}"
    )


def _unpaged(traces: Sequence[Mapping[str, Any]], names: Sequence[str]) -> Iterator[str]:
    """Yield which layers are not paged and why, once where it is the same for every trace."""
    texts = [_reasons(trace["unpaged_layers"]) for trace in traces]
    if len(set(texts)) == 1:
        texts, names = texts[:1], [""]
    for name, text in zip(names, texts, strict=True):
        if text:
            yield f"{name}{': ' if name else ''}not paged: {text}"


def _reasons(layers: Sequence[Mapping[str, Any]]) -> str:
    """Write layers by reason: layers 0-2, 4 (sliding window); layer 3 (recurrent)."""
    by_reason: dict[str, list[int]] = {}
    for row in layers:
        by_reason.setdefault(row["reason"], []).append(row["layer"])
    return "; ".join(f"{which_layers(indices)} ({reason})" for reason, indices in by_reason.items())


def _layer_errors(document: Document, *, verbose: bool) -> Iterator[str]:
    """Yield the layers' errors of traces that failed, or were proved by a second run."""
    traces = document["traces"]
    for trace, name in zip(traces, _names(traces, 30), strict=True):
        checked = trace["verification"]
        if checked is None:
            continue
        if verbose or checked["status"] == "failed" or checked["reference"] == UNFUSED_REFERENCE:
            yield from layer_error_lines(name, trace["all_layers"], checked)


def _coverage(document: Document) -> Iterator[str]:
    """Yield coverage by selector and budget, and the budgets required for some coverages."""
    budgets, selectors = document["settings"]["budgets"], document["settings"]["selectors"]
    found = {(row["budget"], row["selector"]): row for row in document["coverage"]}
    needed = {
        (row["selector"], row["coverage"]): row["budget"] for row in document["required_budget"]
    }
    coverages = sorted({coverage for _, coverage in needed})
    rows = []
    for selector in selectors:
        held = [share(found[budget, selector]["coverage"]) for budget in budgets]
        required = [needed[selector, coverage] for coverage in coverages]
        rows.append(
            [
                selector,
                *held,
                *(UNDEFINED if value is None else percent(value) for value in required),
            ]
        )
    pages = [found[budget, selectors[0]]["pages"] for budget in budgets]
    counts = [str(few) if few == many else f"{few}-{many}" for few, many in pages]
    rows.append(["pages per KV head", *counts, *("" for _ in coverages)])
    headers = ["coverage at", *map(percent, budgets), *(f"B for {value}" for value in coverages)]
    yield from table(rows, headers, ("left", *("right" for _ in headers[1:])))


def _alone(document: Document) -> Iterator[str]:
    """Yield the coverage of each pooled trace, a row per selector and a column per budget."""
    traces, settings = document["traces"], document["settings"]
    names = _names(traces, 30)
    rows = [
        {**row, "name": f"{name}: {row['selector']}"}
        for name, trace in zip(names, traces, strict=True)
        for row in trace["coverage"]
    ]
    yield from by_budget("each alone", rows, "name", "coverage", settings["budgets"], share)


def _gap(document: Document) -> Iterator[str]:
    """Yield where the mass is lost that the first selector in use does not hold."""
    rows = document["gap"]
    if not rows:
        return
    selector = rows[0]["selector"]
    strides = document["strides"]
    apart = (
        "" if not strides else f", {'-'.join(map(str, strides[:: len(strides) - 1 or 1]))} apart"
    )
    texts = [
        [
            percent(row["budget"]),
            part(row["diffuse"]),
            part(row["granularity"]),
            part(row["selection"]),
            part(row["staleness"]),
            part(row["shortfall"]),
        ]
        for row in rows
        if row["selector"] == selector
    ]
    headers = ["lost at", "diffuse", "page granularity", selector, f"stale{apart}", "sum"]
    yield from table(texts, headers, ("left", *("right" for _ in headers[1:])))


def _dense(document: Document) -> Iterator[str]:
    """Yield which layers should stay resident, for the largest coverage and budget."""
    if not document["dense_layers"]:
        return
    row = document["dense_layers"][-1]
    n_layer = len({row["layer"] for row in document["layers"]})
    dense = row["layers"]
    if not dense:
        text = f"no layer of {n_layer}: the best pages hold {row['coverage']} in each"
    elif len(dense) == n_layer:
        text = f"all {n_layer} layers: in none do the best pages hold {row['coverage']}"
    else:
        text = f"{ranges(dense)} ({len(dense)} of {n_layer}); the others: oracle " + share(
            row["oracle_of_others"]
        )
        if row["landmark_of_others"] is not None:
            text += f", landmark {share(row['landmark_of_others'])}"
    yield from wrap(
        f"Dense at {percent(row['budget'])}, to keep resident for {row['coverage']}: {text}.", "  "
    )


def _recent(recent: float) -> str:
    return percent(recent) if recent < 1 else f"{int(recent)} tokens"
