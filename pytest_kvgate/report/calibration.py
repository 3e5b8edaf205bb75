"""What a calibration found, as lines and as part of the terminal summary."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from pytest_kvgate.analysis.wording import UNDEFINED, percent
from pytest_kvgate.report.tables import table, wrap


def calibration_lines(calibration: Mapping[str, Any]) -> Iterator[str]:
    """Yield the settings, the table of all comparisons, and the outcome."""
    settings = calibration["settings"]
    recent = settings["recent"]
    window = percent(recent) if recent < 1 else f"{int(recent)} tokens"
    fused = ", flash attention" if settings["flash_attention"] else ""
    yield from wrap(
        f"Control model: {settings['n_prompt']} tokens, {settings['n_head']} query heads on "
        f"{settings['n_head_kv']} KV heads, {settings['cache_type_k']} K cache{fused}; budget "
        f"{percent(settings['budget'])}, {settings['page_size']}-token pages; free: first "
        f"{settings['sinks']} tokens and last {window}. These are fixed; only the engine's options "
        "can be chosen."
    )
    if calibration["comparisons"]:
        yield ""
        yield from _table(calibration)
    yield ""
    yield from wrap(calibration["summary"])


def _table(calibration: Mapping[str, Any]) -> Iterator[str]:
    rows = []
    shown = None
    for row in calibration["comparisons"]:
        of = row["measure"].replace("_", " ")
        if row["unit"] is not None:
            of += f", {row['unit']}"
        rows.append(
            [
                "" if row["pattern"] == shown else row["pattern"],
                of,
                row["selector"] or "",
                _number(row["expected"]),
                _number(row["measured"]),
                UNDEFINED if row["difference"] is None else f"{row['difference']:.1e}",
                "ok" if row["ok"] else "OFF",
            ]
        )
        shown = row["pattern"]
    headers = ["pattern", "measure", "selector", "expected", "measured", "difference", ""]
    yield from table(rows, headers, ("left", "left", "left", "right", "right", "right", "left"))


def _number(value: float | None) -> str:
    return UNDEFINED if value is None else f"{value:.4f}"
