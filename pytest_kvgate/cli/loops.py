"""The commands that run the model with only the selected pages visible."""

from __future__ import annotations

import argparse
import sys
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING

from pytest_kvgate.cli.arguments import capture_settings

if TYPE_CHECKING:
    from pytest_kvgate.closedloop import LoopSettings


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


def _loop_settings(parsed: argparse.Namespace) -> LoopSettings:
    from pytest_kvgate.closedloop import LoopSettings  # noqa: PLC0415

    return LoopSettings(
        n_token=parsed.loop_tokens,
        sparse_tail=parsed.sparse_tail,
        sinks=parsed.sinks,
        recent=parsed.recent,
    )
