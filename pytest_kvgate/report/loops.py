"""What a closed loop found, as rows of a report and as a table for the terminal."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from pytest_kvgate.analysis.effects import ClosedLoop, TokenEffects, Variant
from pytest_kvgate.analysis.wording import UNDEFINED, nats, part, percent, share, which_layers
from pytest_kvgate.report.document import TABLES
from pytest_kvgate.report.tables import shorten, table, wrap
from pytest_kvgate.report.wording import count

Row = dict[str, Any]

#: Columns that a list of layers may take in the table.
LONGEST_LAYERS = 30


def loop_document(loop: ClosedLoop, page_size: int) -> Row:
    """Return the rows at one page size, in tokens, and how the loop was run."""
    return {
        "closed_loop": [_row(loop, variant) for variant in loop.variants(page_size)],
        "closed_loop_run": {
            "n_tokens": loop.n_token,
            "sparse_tail": loop.sparse_tail,
            "flash_attention": loop.fused,
            "eos_ignored_from": loop.eos_ignored_from,
            "nll_dense": float(loop.noise.nll_dense.mean()),
            "noise_floor": loop.noise.mean("kl"),
            "noise_top1": loop.noise.mean("top1"),
            "noise_nll_increase": loop.noise_level("nll_increase"),
        },
    }


def loop_only_document(subject: str, settings: Mapping[str, Any], loop: ClosedLoop) -> Row:
    """Return the document of a closed loop that no profile stands beside."""
    return {
        "subject": subject,
        "settings": dict(settings),
        **{key: [] for key in ("traces", *TABLES)},
        "attention": {"support": None, "hottest": None, "eligible_mass": None},
        "skipped_units": 0,
        **loop_document(loop, settings["page_size"]),
    }


def _row(loop: ClosedLoop, variant: Variant) -> Row:
    run = loop.runs.get(variant)
    effects = None if run is None else run.effects
    return {
        "budget": variant.budget,
        "selector": variant.selector,
        "page_size": variant.page_size,
        "dense_layers": list(variant.dense_layers),
        "coverage": None if run is None else run.coverage,
        "kl": None if effects is None else effects.mean("kl"),
        "kl_ci": _interval(effects, "kl"),
        "top1": None if effects is None else effects.mean("top1"),
        "top1_ci": _interval(effects, "top1"),
        "nll_dense": None if effects is None else float(effects.nll_dense.mean()),
        "nll_sparse": None if effects is None else float(effects.nll_sparse.mean()),
        "nll_increase": None if effects is None else effects.mean("nll_increase"),
        "nll_increase_ci": _interval(effects, "nll_increase"),
        "noise_floor": loop.noise.mean("kl"),
        "n_tokens": loop.n_token,
        "sparse_tail": loop.sparse_tail,
        "undefined": loop.undefined.get(variant),
    }


def _interval(effects: TokenEffects | None, measure: Any) -> list[float] | None:  # noqa: ANN401
    found = None if effects is None else effects.interval(measure)
    return None if found is None else [found.low, found.high]


def loop_lines(document: Mapping[str, Any]) -> Iterator[str]:
    """Yield how the closed loop was run, its noise, and a row per selection."""
    if "closed_loop_problem" in document:
        yield from wrap(f"{document['closed_loop_problem']}", "  ")
        return
    rows = document["closed_loop"]
    if not rows:
        return
    yield from wrap(_headline(document["closed_loop_run"]), "  ")
    headers = ["closed loop", "coverage", "KL", "95% interval", "top-1", "NLL increase", ""]
    texts = [_cells(row) for row in rows]
    yield from table(texts, headers, ("left", *["right"] * 5, "left"))
    for reason in dict.fromkeys(row["undefined"] for row in rows):
        if reason is not None:
            names = ", ".join(_name(row) for row in rows if row["undefined"] == reason)
            yield from wrap(f"{names}: {reason.rstrip('.')}.", "  ")


def _headline(run: Mapping[str, Any]) -> str:
    since = "the first decode step"
    if run["sparse_tail"]:
        since = f"the last {count(run['sparse_tail'], 'prompt token')}"
    by = "the engine's own flash attention" if run["flash_attention"] else "an edit of nothing"
    past_end = ""
    if run["eos_ignored_from"] is not None:
        past_end = f"; END OF TEXT IGNORED from decode step {run['eos_ignored_from']} on"
    return (
        f"closed loop: {count(run['n_tokens'], 'predicted token')}, sparse from {since} on; dense "
        f"NLL {part(run['nll_dense'])}. Noise, by {by}: KL {nats(run['noise_floor'])}, top-1 "
        f"{share(run['noise_top1'])}, NLL ±{nats(run['noise_nll_increase'])}{past_end}"
    )


def _end(value: float) -> str:
    """Write an end of an interval, rounded: cut upwards, the lower one would move inside."""
    return part(value) if value == 0 or abs(value) >= 1e-3 else nats(value)


def _signed(value: float) -> str:
    return ("+" if value >= 0 else "") + nats(value)


def _name(row: Mapping[str, Any]) -> str:
    dense = ""
    if row["dense_layers"]:
        dense = f", {shorten(which_layers(row['dense_layers']), LONGEST_LAYERS)} dense"
    return f"{percent(row['budget'])} {row['selector']}{dense}"


def _cells(row: Mapping[str, Any]) -> list[str]:
    if row["kl"] is None:
        return [_name(row), *[UNDEFINED] * 5, ""]
    interval = row["kl_ci"]
    return [
        _name(row),
        share(row["coverage"]),
        nats(row["kl"]),
        UNDEFINED if interval is None else f"{_end(interval[0])}..{_end(interval[1])}",
        share(row["top1"]),
        _signed(row["nll_increase"]),
        "noise" if row["kl"] <= row["noise_floor"] else "",
    ]
