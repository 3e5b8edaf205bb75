"""The machine-readable report, ``kvgate-report/1``: plain JSON values, aggregates only."""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from pytest_kvgate.analysis import Profile
from pytest_kvgate.analysis.findings import strides
from pytest_kvgate.analysis.verification import is_smoke_tested
from pytest_kvgate.gate import GateResult, distrust_reason
from pytest_kvgate.report import rows
from pytest_kvgate.trace import Trace

SCHEMA = "kvgate-report/1"

#: The lists of rows that a document of one model holds.
TABLES = (
    "coverage",
    "required_budget",
    "paging",
    "metadata",
    "layers",
    "dense_layers",
    "dim_ablation",
    "gap",
    "sweep",
    "closed_loop",
)

Document = dict[str, Any]


def profile_document(
    subject: str,
    pooled: Profile,
    alone: Sequence[Profile],
    sweep: Sequence[Profile] = (),
    link: float | None = None,
) -> Document:
    """Return what the traces of one model say, pooled, and each alone where there are several.

    ``sweep`` are pooled profiles at several page sizes, ``link`` the speed of the link to host
    memory in GB/s. Numbers that are undefined or not measured are None. Traces that failed their
    verification give no numbers at all.
    """
    coverages = pooled.plan.coverages
    units = pooled.numbers.units
    document: Document = {
        "subject": subject,
        "settings": {
            "page_size": pooled.grid.page_size,
            "sinks": pooled.grid.sinks,
            "recent": pooled.grid.recent,
            "budgets": list(pooled.budgets),
            "selectors": list(pooled.selectors),
            "pool": pooled.plan.pool,
            "link": link,
        },
        "traces": [_trace_row(profile, detailed=len(alone) > 1) for profile in alone],
        "coverage": rows.coverage_rows(pooled),
        "required_budget": rows.required_rows(pooled, coverages),
        "paging": rows.paging_rows(pooled, link),
        "metadata": rows.metadata_rows(pooled),
        "layers": rows.layer_rows(pooled),
        "dense_layers": rows.dense_rows(pooled, coverages),
        "dim_ablation": rows.ablation_rows(pooled),
        "gap": rows.gap_rows(pooled),
        "sweep": rows.sweep_rows(sweep),
        "closed_loop": [],
        "strides": list(strides(pooled)),
        "attention": {
            "support": rows.mean(units.support),
            "hottest": rows.mean(units.hottest),
            "eligible_mass": rows.mean(units.eligible_mass),
        },
        "skipped_units": pooled.numbers.skipped_units,
    }
    return document if distrust_reason(pooled) is None else _without_numbers(document)


def _without_numbers(document: Document) -> Document:
    """Return the document of traces that cannot be believed: what they are, and no number."""
    unknown = dict.fromkeys(document["attention"])
    traces = [{**trace, "coverage": []} for trace in document["traces"]]
    empty: Document = {key: [] for key in TABLES}
    return {**document, **empty, "traces": traces, "attention": unknown}


def gate_row(result: GateResult) -> Document:
    """Return one gate's verdict."""
    gate, deciding = result.gate, result.deciding
    answered = result.verdict in ("GO", "NO-GO", "INCONCLUSIVE")
    return {
        "id": result.gate_id,
        "subject": result.subject,
        "budget": gate.main_budget,
        "page_size": result.page_size,
        "selector": deciding.selector,
        "measure": deciding.demand.measure,
        "scope": gate.scope,
        "layers": None if gate.layers is None else list(gate.layers),
        "kept_dense": list(gate.dense_layers),
        "confidence": gate.confidence,
        "coverage": gate.coverage,
        "required": deciding.required,
        "observed": deciding.observed,
        "verdict": result.verdict,
        "reason": result.reason,
        "checks": [
            {
                "measure": check.demand.measure,
                "selector": check.selector,
                "required": check.required,
                "observed": check.observed,
                "margin": check.margin,
                "state": check.state if answered else None,
                "interval": (
                    None if check.interval is None else [check.interval.low, check.interval.high]
                ),
            }
            for check in result.checks
        ],
        "others": dict(result.others),
        "worst_layers": [
            {"layer": layer, deciding.demand.measure: value} for layer, value in result.worst_layers
        ],
        "dense_layers": list(result.dense_layers),
        "notes": list(result.notes),
    }


def report_document(
    settings: Mapping[str, Any],
    documents: Iterable[Document],
    gates: Sequence[Document],
    calibration: Document | None = None,
) -> Document:
    """Join the documents of all models and the gates into one ``kvgate-report/1``.

    Every row names its ``subject``. Rows are those at the settings' page size; documents at other
    page sizes, which gates may name, follow whole in ``other_page_sizes``. ``attention`` stands for
    a single model; with several it is None throughout, and ``attention_by_subject`` has each.
    ``calibration`` is None where nobody asked for one.
    """
    page_size = settings["page_size"]
    documents = list(documents)
    others = [item for item in documents if item["settings"]["page_size"] != page_size]
    documents = [item for item in documents if item["settings"]["page_size"] == page_size]
    only = documents[0]["attention"] if len(documents) == 1 else None
    unknown = {"support": None, "hottest": None, "eligible_mass": None}
    return {
        "schema": SCHEMA,
        "settings": dict(documents[0]["settings"] if documents else settings),
        "traces": _rows(documents, "traces"),
        **{key: _rows(documents, key) for key in TABLES},
        "attention": only or unknown,
        "attention_by_subject": {item["subject"]: item["attention"] for item in documents},
        "skipped_units": sum(document["skipped_units"] for document in documents),
        "closed_loop_runs": {
            item["subject"]: item["closed_loop_run"]
            for item in documents
            if "closed_loop_run" in item
        },
        "closed_loop_problems": {
            item["subject"]: item["closed_loop_problem"]
            for item in documents
            if "closed_loop_problem" in item
        },
        "calibration": calibration,
        "other_page_sizes": others,
        "gates": list(gates),
    }


def write_report(path: Path, document: Document) -> None:
    """Write the report in one step, so that an interrupted run leaves the old one whole.

    Raises:
        OSError: it cannot be written there.
    """
    text = json.dumps(document, indent=1, allow_nan=False) + "\n"
    target = path.resolve()  # a link stays a link
    if target.exists() and not target.is_file():  # a pipe or a device, which stays one too
        target.write_text(text, encoding="utf-8")
        return
    partial = target.with_name(f".kvgate-{os.getpid()}.partial")
    try:
        partial.write_text(text, encoding="utf-8")
        partial.replace(target)
    finally:
        partial.unlink(missing_ok=True)


def _rows(documents: Sequence[Document], key: str) -> list[Document]:
    return [
        {**row, "subject": document["subject"]} for document in documents for row in document[key]
    ]


def _trace_row(profile: Profile, *, detailed: bool) -> Document:
    trace: Trace = profile.traces[0]
    verification, sparsity = trace.verification, trace.native_sparsity
    row: Document = {
        "model": dict(trace.model),
        "workload": dict(trace.workload),
        "capture": dict(trace.capture),
        "n_context": trace.n_context,
        "n_steps": len(trace.steps),
        "strides": list(strides(profile)),
        "verification": None if verification is None else verification.as_json(),
        "native_sparse": None if sparsity is None else sparsity.as_json(),
        "smoke_tested": is_smoke_tested(trace),
        "all_layers": [layer.index for layer in trace.layers],
        "paged_layers": [layer.index for layer in trace.paged_layers],
        "windowed_layers": [
            {"layer": layer.index, "window": layer.window}
            for layer in trace.layers
            if layer.window is not None
        ],
        "unpaged_layers": [
            {"layer": layer.index, "reason": layer.reason} for layer in trace.unpaged_layers
        ],
    }
    if detailed:
        row["coverage"] = rows.short_coverage_rows(profile)
    return row
