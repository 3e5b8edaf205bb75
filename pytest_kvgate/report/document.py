"""The machine-readable report, ``kvgate-report/1``: plain JSON values, aggregates only."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
from numpy.typing import NDArray

from pytest_kvgate.analysis import Profile, UndefinedError
from pytest_kvgate.gate import GateResult, distrust_reason
from pytest_kvgate.trace import Trace

SCHEMA = "kvgate-report/1"

#: Coverages whose required budget every report states, beside each gate's threshold.
REQUIRED_COVERAGES = (0.5, 0.9, 0.95)

Document = dict[str, Any]
T = TypeVar("T")


def profile_document(
    subject: str, pooled: Profile, alone: Sequence[Profile], thresholds: Iterable[float]
) -> Document:
    """Return what the traces of one model say, pooled, and each alone where there are several.

    ``thresholds`` are coverages to state required budgets for. Numbers that are undefined, and
    those that are not measured, are None; lists of things not measured are empty. Traces that
    failed their verification give no numbers at all.
    """
    document: Document = {
        "subject": subject,
        "settings": {
            "page_size": pooled.grid.page_size,
            "sinks": pooled.grid.sinks,
            "recent": pooled.grid.recent,
            "budgets": list(pooled.budgets),
            "selectors": list(pooled.selectors),
        },
        "traces": [_trace_row(profile, detailed=len(alone) > 1) for profile in alone],
        "coverage": _coverage_rows(pooled),
        "required_budget": [
            {
                "selector": selector,
                "coverage": coverage,
                "budget": pooled.required_budget(selector, coverage),
            }
            for selector in pooled.selectors
            for coverage in sorted({*REQUIRED_COVERAGES, *thresholds})
        ],
        "layers": _layer_rows(pooled),
        "attention": {
            "support": _mean(pooled.support),
            "hottest": _mean(pooled.hottest),
            "eligible_mass": _mean(pooled.eligible_mass),
        },
        "skipped_units": pooled.skipped_units,
    }
    return document if distrust_reason(pooled) is None else _without_numbers(document)


def _without_numbers(document: Document) -> Document:
    """Return the document of traces that cannot be believed: what they are, and no number."""
    unknown = dict.fromkeys(document["attention"])
    traces = [{**trace, "coverage": []} for trace in document["traces"]]
    empty: Document = {"coverage": [], "required_budget": [], "layers": []}
    return {**document, **empty, "traces": traces, "attention": unknown}


def gate_row(result: GateResult) -> Document:
    """Return one gate's verdict; selector and observed are those of the deciding check."""
    deciding = result.deciding
    return {
        "id": result.gate_id,
        "subject": result.subject,
        "budget": result.gate.budget,
        "page_size": result.page_size,
        "selector": deciding.selector,
        "required": deciding.required,
        "observed": deciding.observed,
        "verdict": result.verdict,
        "reason": result.reason,
        "checks": [
            {
                "selector": check.selector,
                "required": check.required,
                "observed": check.observed,
                "margin": check.margin,
            }
            for check in result.checks
        ],
        "others": dict(result.others),
        "worst_layers": [
            {"layer": layer, "coverage": coverage} for layer, coverage in result.worst_layers
        ],
        "notes": list(result.notes),
    }


def report_document(
    settings: Mapping[str, Any],
    documents: Iterable[Document],
    gates: Sequence[Document],
) -> Document:
    """Join the documents of all models and the gates into one ``kvgate-report/1``.

    Every row names its ``subject``. Rows are those at the settings' page size; documents at other
    page sizes, which gates may name, follow whole in ``other_page_sizes``. ``attention`` stands for
    a single model; with several it is None throughout, and ``attention_by_subject`` has each.
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
        "coverage": _rows(documents, "coverage"),
        "required_budget": _rows(documents, "required_budget"),
        "paging": [],
        "layers": _rows(documents, "layers"),
        "dim_ablation": [],
        "attention": only or unknown,
        "attention_by_subject": {item["subject"]: item["attention"] for item in documents},
        "skipped_units": sum(document["skipped_units"] for document in documents),
        "closed_loop": [],
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
    verification = trace.verification
    row: Document = {
        "model": dict(trace.model),
        "workload": dict(trace.workload),
        "capture": dict(trace.capture),
        "n_context": trace.n_context,
        "n_steps": len(trace.steps),
        "verification": None if verification is None else verification.as_json(),
        "paged_layers": [layer.index for layer in trace.paged_layers],
        "windowed_layers": [
            {"layer": layer.index, "window": layer.window}
            for layer in trace.layers
            if layer.window is not None
        ],
    }
    if detailed:
        row["coverage"] = [
            {key: item[key] for key in ("budget", "selector", "coverage", "total_mass")}
            for item in _coverage_rows(profile)
        ]
    return row


def _coverage_rows(profile: Profile) -> list[Document]:
    return [
        {
            "budget": budget,
            "selector": selector,
            "pages": _pages(profile, budget),
            "coverage": _defined(profile.coverage, selector, budget),
            "ci": None,
            "total_mass": _defined(profile.total_mass, selector, budget),
            "global_coverage": None,
            "jaccard": None,
            "stale_coverage": None,
            "output_error": None,
        }
        for budget in profile.budgets
        for selector in profile.selectors
    ]


def _pages(profile: Profile, budget: float) -> list[int]:
    """Return the fewest and the most pages per KV head that a budget buys at a sampled step."""
    counts = [
        profile.grid.pages_for(budget, step.n_visible)
        for trace in profile.traces
        for step in (trace.steps[0], trace.steps[-1])
    ]
    return [min(counts), max(counts)]


def _layer_rows(profile: Profile) -> list[Document]:
    rows = []
    for budget in profile.budgets:
        for selector in profile.selectors:
            coverage = _defined(profile.layer_coverage, selector, budget)
            for layer in np.unique(profile.layer):
                own = profile.layer == layer
                rows.append(
                    {
                        "layer": int(layer),
                        "budget": budget,
                        "selector": selector,
                        "coverage": None if coverage is None else coverage[int(layer)],
                        "support": _mean(profile.support[own]),
                        "hottest": _mean(profile.hottest[own]),
                        "eligible_mass": _mean(profile.eligible_mass[own]),
                    }
                )
    return rows


def _defined(number: Callable[[str, float], T], selector: str, budget: float) -> T | None:
    try:
        return number(selector, budget)
    except UndefinedError:
        return None


def _mean(values: NDArray[np.float64]) -> float | None:
    return float(values.mean()) if len(values) else None
