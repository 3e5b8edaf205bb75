"""How a capture was verified, layer by layer."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from pytest_kvgate.report.tables import table


def layer_error_lines(
    name: str, layers: Sequence[int], verification: Mapping[str, Any]
) -> Iterator[str]:
    """Yield a row per layer with its worst error; nothing where that is not known.

    ``layers`` are the indices of a trace's layers, ``verification`` is what the trace states.
    """
    errors, tolerance = verification.get("layer_errors", ()), verification["tolerance"]
    if not errors:
        return
    rows = []
    for layer, error in zip(layers, errors, strict=True):
        passed = error is not None and error <= tolerance
        found = "not a number" if error is None else f"{error:.1e}"
        rows.append([str(layer), found, f"{tolerance:g}", "ok" if passed else "OFF"])
    yield from table(
        rows,
        [f"{name}: layer", f"error of {verification['reference']}", "tolerated", ""],
        ("right", "right", "right", "left"),
    )
