"""A search for the cheapest assignment, as plain values and as lines for the terminal."""

from __future__ import annotations

import json
import textwrap
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from pytest_kvgate.analysis.assignment import Assignment, Search
from pytest_kvgate.analysis.resident import Resident
from pytest_kvgate.analysis.selectors import ORACLE, TOKEN_ORACLE
from pytest_kvgate.analysis.wording import (
    UNDEFINED,
    multiple,
    nats,
    percent,
    ranges,
    share,
    which_layers,
)
from pytest_kvgate.report.tables import INDENT, WIDTH, shorten, table, wrap

MIB = 2**20

#: Columns that a list of layers may take in the table.
LONGEST_LAYERS = 22

ENDINGS = {
    "all-measured": "Nothing cheaper with these budgets meets the limit: all of it was measured.",
    "max-runs": "The search ended because its {max_runs} runs were used up, so a cheaper one may "
    "have been missed.",
    "too-many-left": "More cheaper assignments are left than the remaining runs could measure. "
    "What looked most promising was; KL need not fall with every layer that is kept dense, so a "
    "cheaper one may have been missed.",
}


def plan_document(search: Search) -> dict[str, Any]:
    """Return a search as plain values; what is undefined is None."""
    best = search.best
    return {
        "settings": {
            "selector": search.selector,
            "page_size": search.grid.page_size,
            "sinks": search.grid.sinks,
            "recent": search.grid.recent,
            "max_kl": search.max_kl,
            "max_runs": search.max_runs,
            "pool": search.pool,
        },
        "noise": search.noise,
        "n_token": search.n_token,
        "n_context": search.n_context,
        "paged_layers": list(search.paged_layers),
        "tried": [
            {
                **_assignment_values(item),
                "verdict": _verdict(item, best, search.max_kl),
            }
            for item in search.tried
        ],
        "undefined": [
            {"budget": budget, "reason": why} for budget, why in search.undefined.items()
        ],
        "best": None if best is None else _assignment_values(best),
        "nearest": _assignment_values(search.nearest),
        "resident_with_pool": None if search.roomier is None else _bytes(search.roomier),
        "ending": search.ending,
        "gate": None if best is None else "\n".join(gate_text(best, search.max_kl)),
    }


def gate_text(assignment: Assignment, max_kl: float) -> list[str]:
    """Return the lines of the gate that asks for the KL of an assignment, to be pasted."""
    variant = assignment.variant
    arguments = [
        f"budget={variant.budget!r}",
        f"max_kl={max_kl!r}",
        f"selector={json.dumps(variant.selector)}",
        f"page_size={variant.page_size}",  # an ini file may set another
    ]
    layers = ", ".join(map(str, variant.dense_layers))
    if layers:
        arguments.append(f"dense_layers=[{layers}]")
    line = f"@kvgate({', '.join(arguments)})"
    if len(line) <= WIDTH - len(INDENT):
        return [line]
    lines = [f"    {argument}," for argument in arguments]
    if len(lines[-1]) > WIDTH - len(INDENT):
        wrapped = textwrap.wrap(f"{layers},", WIDTH - len(INDENT) - 8)
        lines[-1:] = ["    dense_layers=[", *(f"        {part}" for part in wrapped), "    ],"]
    return ["@kvgate(", *lines, ")"]


def plan_lines(plan: Mapping[str, Any]) -> Iterator[str]:
    """Yield what `plan_document` returned: what was tried, and the proposal with its gate."""
    settings = plan["settings"]
    recent = settings["recent"]
    window = percent(recent) if recent < 1 else f"{int(recent)} tokens"
    yield from wrap(
        f"Looking for the least that must stay resident at a KL of at most {settings['max_kl']} "
        f"nats: {settings['selector']}, {settings['page_size']}-token pages; free: first "
        f"{settings['sinks']} tokens and last {window}. KL is a mean over {plan['n_token']} "
        f"tokens; an edit that changes nothing has {nats(plan['noise'])}."
    )
    for row in plan["undefined"]:
        why = row["reason"].rstrip(".")
        yield from wrap(f"Budget {percent(row['budget'])} was not run: {why}.", INDENT)
    yield ""
    yield from _table(plan["tried"])
    yield ""
    yield from _nothing(plan) if plan["best"] is None else _proposal(plan)


def _table(rows: Sequence[Mapping[str, Any]]) -> Iterator[str]:
    texts = [
        [
            percent(row["budget"]),
            shorten(ranges(row["dense_layers"]) or "none", LONGEST_LAYERS),
            nats(row["kl"]),
            share(row["top1"]),
            share(row["coverage"]),
            _mib(row["resident"]["bytes"], row["resident"]["whole_bytes"]),
            _share(row["resident"]["share"]),
            row["verdict"],
        ]
        for row in rows
    ]
    headers = ["budget", "dense layers", "KL", "top-1", "coverage", "MiB", "of all", ""]
    align = ("right", "left", *["right"] * 5, "left")
    yield from table(texts, headers, align)


def _proposal(plan: Mapping[str, Any]) -> Iterator[str]:
    best, settings = plan["best"], plan["settings"]
    kept, roomier = best["resident"], plan["resident_with_pool"]
    whole = kept["whole_bytes"]
    yield from wrap(f"Proposal: {_described(best, plan)}.")
    yield from wrap(_ending(plan), INDENT)
    interval = best["kl_ci"]
    if interval is not None and interval[1] > settings["max_kl"]:
        yield from wrap(
            f"The 95% interval of its KL, {_interval(interval)}, reaches beyond the limit: compare "
            "more tokens to be surer.",
            INDENT,
        )
    yield from wrap(
        f"Resident at {plan['n_context']} tokens: {_mib(kept['bytes'], whole)} of "
        f"{_mib(whole, whole)} MiB ({_share(kept['share'])}): {_mib(kept['kv_bytes'], whole)} MiB "
        f"of K and V, {_mib(kept['metadata_bytes'], whole)} MiB of the selector's metadata. That "
        f"is the least, what one step reads; with a pool of {multiple(settings['pool'])} k pages "
        f"it is {_mib(roomier['bytes'], whole)} MiB ({_share(roomier['share'])}).",
        INDENT,
    )
    yield ""
    if settings["selector"] in (ORACLE, TOKEN_ORACLE):
        yield from wrap(
            f"{settings['selector']} cannot be built: this is what a perfect selector would need. "
            "Plan with one that can."
        )
        yield ""
    yield "The gate that asks for it; measured on this prompt alone, it is for others, too:"
    yield ""
    yield from (INDENT + line for line in plan["gate"].splitlines())


def _nothing(plan: Mapping[str, Any]) -> Iterator[str]:
    nearest = plan["nearest"]
    kept = nearest["resident"]
    yield from wrap(
        f"No assignment that was measured meets a KL of {plan['settings']['max_kl']}. Nearest: "
        f"{_described(nearest, plan)}; {_mib(kept['bytes'], kept['whole_bytes'])} MiB "
        f"({_share(kept['share'])}) resident."
    )
    yield from wrap(_ending(plan), INDENT)
    yield from wrap(
        "Allow a larger KL, larger budgets or more runs, or try other selectors and pages.", INDENT
    )


def _ending(plan: Mapping[str, Any]) -> str:
    if plan["best"] is None and plan["ending"] == "all-measured":
        return "Every assignment with these budgets that saves anything was measured."
    return ENDINGS[plan["ending"]].format(max_runs=plan["settings"]["max_runs"])


def _described(row: Mapping[str, Any], plan: Mapping[str, Any]) -> str:
    dense, n_layer = row["dense_layers"], len(plan["paged_layers"])
    if dense:
        layers = f"{which_layers(dense)} dense and {n_layer - len(dense)} of {n_layer} layers paged"
    else:
        layers = f"all {n_layer} layers paged"
    return (
        f"budget {percent(row['budget'])}, {layers}; KL {nats(row['kl'])}, likeliest token kept "
        f"{share(row['top1'])}, coverage {share(row['coverage'])}"
    )


def _assignment_values(item: Assignment) -> dict[str, Any]:
    interval = item.kl_interval
    return {
        "budget": item.variant.budget,
        "dense_layers": list(item.variant.dense_layers),
        "kl": item.kl,
        "kl_ci": None if interval is None else [interval.low, interval.high],
        "top1": item.top1,
        "coverage": item.coverage,
        "resident": _bytes(item.resident),
    }


def _bytes(kept: Resident) -> dict[str, float]:
    return {
        "bytes": kept.total,
        "kv_bytes": kept.kv,
        "metadata_bytes": kept.metadata,
        "whole_bytes": kept.whole,
        "share": kept.share,
    }


def _verdict(item: Assignment, best: Assignment | None, max_kl: float) -> str:
    if item == best:
        return "proposed"
    return "meets" if item.kl <= max_kl else "over"


def _interval(value: Sequence[float] | None) -> str:
    return UNDEFINED if value is None else f"{nats(value[0])}..{nats(value[1])}"


def _mib(value: float, whole: float) -> str:
    return f"{value / MIB:.{1 if whole >= 100 * MIB else 3}f}"


def _share(value: float) -> str:
    return f"{100 * value:.1f}%"
