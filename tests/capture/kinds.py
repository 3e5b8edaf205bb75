"""Kinds of attention, the tiny model that stands for each, and what a capture of it gives.

``python -m tests.capture.kinds`` prints the README's table as measured now.
"""

from __future__ import annotations

import math
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path

from pytest_kvgate.capture import CaptureError
from tests.capture.captures import Captures
from tests.models import Shape

CACHE_TYPES = ("f32", "f16", "q8_0")
REFUSED = "refused"


@dataclass(frozen=True)
class Kind:
    """A kind of attention, with the tiny model that has it."""

    name: str
    architecture: str
    shape: Shape | None = None


KINDS = (
    Kind("multi-head", "llama", Shape(n_head_kv=4)),
    Kind("grouped-query", "llama"),
    Kind("multi-query", "llama", Shape(n_head_kv=1)),
    Kind("RoPE in a quarter of the dims", "stablelm"),
    Kind("QK-norm", "qwen3"),
    Kind("logit softcap", "gemma2"),
    Kind("ALiBi", "bloom"),
    Kind("ALiBi, 3 heads", "mpt"),
    Kind("learned sinks", "gpt-oss"),
    Kind("mixture of experts", "qwen3moe"),
    Kind("sliding windows in between", "gemma3"),
    Kind("sliding windows alone", "gemma3", Shape(windowed=(True, True))),
    Kind("layers that share a cache", "gemma4"),
    Kind("MLA, latent in the cache", "deepseek2"),
    Kind("MLA, spelled out, 72 dims", "plm"),
    Kind("with gated delta nets", "qwen35"),
    Kind("with Mamba", "jamba"),
    Kind("with Mamba-2", "granitehybrid"),
    Kind("with Mamba-2 and FFNs alone", "nemotron_h"),
    Kind("with short convolutions", "lfm2"),
)


def rounded_up(error: float) -> str:
    """Write an error with one digit, rounded up: 2.1e-7 → 3e-7; an exact 0 counts as 1e-9."""
    power = math.floor(math.log10(max(error, 1e-9)))
    digit = math.ceil(round(max(error, 1e-9) / 10.0**power, 6))
    return f"1e{power + 1}" if digit == 10 else f"{digit}e{power}"


def measured(captures: Captures, kind: Kind, cache_type: str) -> str:
    """Return a cell of the table: the error of a capture, or that it is refused."""
    try:
        captured = captures(kind.architecture, cache_type, shape=kind.shape)
    except CaptureError:
        return REFUSED
    assert captured.verification.status == "passed"
    return rounded_up(captured.verification.max_abs_error)


def table(captures: Captures) -> list[str]:
    """Return the README's table, a row per kind and a column per K cache type."""
    lines = [f"| attention | model | {' | '.join(CACHE_TYPES)} |", "|---|---|---|---|---|"]
    for kind in KINDS:
        cells = [measured(captures, kind, cache_type) for cache_type in CACHE_TYPES]
        lines.append(f"| {kind.name} | {kind.architecture} | {' | '.join(cells)} |")
    return lines


def main() -> None:
    """Print the table."""
    with tempfile.TemporaryDirectory() as folder:
        sys.stdout.write("\n".join(table(Captures(Path(folder)))) + "\n")


if __name__ == "__main__":
    main()
