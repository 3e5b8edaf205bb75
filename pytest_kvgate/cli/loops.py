"""The commands that run the model with only the selected pages visible."""

from __future__ import annotations

import argparse
import sys
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING

from pytest_kvgate.cli.arguments import capture_settings, changed_options

if TYPE_CHECKING:
    from pytest_kvgate.analysis.effects import Variant
    from pytest_kvgate.closedloop import LoopSettings


#: Options that a plan depends on and that its gate cannot name.
PLANNED_WITH = (
    "cache-type-k",
    "cache-type-v",
    "flash-attn",
    "loop-tokens",
    "sparse-tail",
    "ignore-eos",
    "sinks",
    "recent",
)


def run_closed_loop(parsed: argparse.Namespace) -> int:
    """Compare the next tokens of sparse runs with those of the dense one."""
    from pytest_kvgate.analysis import SELECTORS  # noqa: PLC0415
    from pytest_kvgate.analysis.effects import Variant  # noqa: PLC0415
    from pytest_kvgate.analysis.selectors import LANDMARK, ORACLE  # noqa: PLC0415
    from pytest_kvgate.options.values import check_selectors  # noqa: PLC0415
    from pytest_kvgate.pipeline import LoopEvidence, model_subjects  # noqa: PLC0415
    from pytest_kvgate.report.document import report_document, write_report  # noqa: PLC0415
    from pytest_kvgate.report.loops import loop_lines, loop_only_document  # noqa: PLC0415

    selectors = parsed.selectors or (ORACLE, LANDMARK)
    try:
        check_selectors(selectors, SELECTORS)
    except ValueError as error:
        print(f"kvgate: --selectors {','.join(selectors)!r} {error}.", file=sys.stderr)
        return 2
    variants = tuple(
        Variant(parsed.page_size, budget, selector, parsed.dense_layers)
        for budget in parsed.budgets
        for selector in selectors
    )
    (subject,) = model_subjects(
        (parsed.model,), (parsed.prompt,), (parsed.continuation,) if parsed.continuation else ()
    )
    with tempfile.TemporaryDirectory(prefix="kvgate-") as folder:
        evidence = LoopEvidence(
            capture=capture_settings(parsed),
            settings=_loop_settings(parsed),
            variants=variants,
            folder=Path(folder),
            announce=lambda message: print(message, file=sys.stderr, flush=True),
        )
        loop = evidence.loop(subject)
    settings = {
        "page_size": parsed.page_size,
        "sinks": parsed.sinks,
        "recent": parsed.recent,
        "budgets": list(parsed.budgets),
        "selectors": list(selectors),
    }
    document = loop_only_document(subject.label, settings, loop)
    for line in loop_lines(document):
        print(line)
    for target in parsed.report or ():
        write_report(target.path, report_document(settings, [document], []))
    return 0 if loop.runs else 1


def run_plan(parsed: argparse.Namespace) -> int:
    """Look for the cheapest dense layers and budget whose KL meets a limit."""
    from pytest_kvgate.analysis.selectors import SELECTORS  # noqa: PLC0415
    from pytest_kvgate.analysis.wording import percent, which_layers  # noqa: PLC0415
    from pytest_kvgate.closedloop import propose  # noqa: PLC0415
    from pytest_kvgate.engine import Engine, require_llama  # noqa: PLC0415
    from pytest_kvgate.options.values import check_selectors  # noqa: PLC0415
    from pytest_kvgate.pipeline import Source, prompt_of, start_loop  # noqa: PLC0415
    from pytest_kvgate.report.plan import plan_document, plan_lines  # noqa: PLC0415

    try:
        check_selectors([parsed.selector], SELECTORS)
    except ValueError as error:
        print(f"kvgate: --selector {error}.", file=sys.stderr)
        return 2
    require_llama()
    source = Source("", model=parsed.model, prompt=parsed.prompt, continuation=parsed.continuation)
    prompt, capture = prompt_of(source), capture_settings(parsed)

    def announce(variant: Variant, number: int, most: int) -> None:
        dense = variant.dense_layers
        kept = f"{which_layers(dense)} dense" if dense else "no layer dense"
        budget = percent(variant.budget)
        print(f"run {number} of at most {most}: {budget}, {kept}", file=sys.stderr, flush=True)

    print("reading the prompt, and decoding it densely", file=sys.stderr, flush=True)
    with Engine(parsed.model, capture.engine) as engine:
        settings = _loop_settings(parsed)
        started = start_loop(engine, parsed.model.name, prompt, capture, settings)
        found = propose(
            started.loop,
            parsed.selector,
            parsed.page_size,
            parsed.budgets,
            parsed.max_kl,
            max_runs=parsed.max_runs,
            pool=parsed.pool,
            before_run=announce,
        )
    for line in plan_lines(plan_document(found)):
        print(line)
    changed = changed_options(parsed, PLANNED_WITH)
    if found.best is not None and changed:
        print(f"It was measured with {' '.join(changed)}.")
    if started.eos_ignored_from is not None:
        print(f"END OF TEXT IGNORED from decode step {started.eos_ignored_from} on.")
    return 0 if found.best is not None else 1


def _loop_settings(parsed: argparse.Namespace) -> LoopSettings:
    from pytest_kvgate.closedloop import LoopSettings  # noqa: PLC0415

    return LoopSettings(
        n_token=parsed.loop_tokens,
        sparse_tail=parsed.sparse_tail,
        sinks=parsed.sinks,
        recent=parsed.recent,
    )
