"""What is made once and shared, by one process or by the workers of pytest-xdist."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any


def once(folder: Path, name: str, make: Callable[[], dict[str, Any]]) -> dict[str, Any]:
    """Return what ``make`` returns, JSON values, made by the first process that asks for it.

    The processes share ``folder``; the others wait. An exception is not remembered.
    """
    from filelock import FileLock  # noqa: PLC0415 - the llama extra brings it

    outcome = folder / f"{name}.json"
    with FileLock(folder / f"{name}.lock"):
        if not outcome.exists():
            outcome.write_text(json.dumps(make()), encoding="utf-8")
        known: dict[str, Any] = json.loads(outcome.read_text(encoding="utf-8"))
    return known


def key_of(*parts: str) -> str:
    """Return a short name for what is made of these."""
    return hashlib.sha256("\0".join(parts).encode("utf-8", "surrogateescape")).hexdigest()[:16]
