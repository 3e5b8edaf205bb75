"""The commands on traces: capture, verify, profile; and the calibration of what makes them."""

from __future__ import annotations

import argparse
import sys
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING

from pytest_kvgate.cli.arguments import capture_settings, engine_settings

if TYPE_CHECKING:
    from pytest_kvgate.trace import Trace


def run_capture(parsed: argparse.Namespace) -> int:
    """Capture one prompt on one model."""
    trace = _captured(parsed, parsed.directory, prove=False)
    print(trace.directory)
    return _report_verification(trace)


def run_verify(parsed: argparse.Namespace) -> int:
    """Capture with flash attention, and prove it by a second run without."""
    from pytest_kvgate.report.verification import layer_error_lines  # noqa: PLC0415

    with tempfile.TemporaryDirectory(prefix="kvgate-") as scratch:
        trace = _captured(parsed, parsed.directory or Path(scratch), prove=True)
        if parsed.directory is not None:
            print(trace.directory)
        assert trace.verification is not None
        layers = [layer.index for layer in trace.layers]
        stated = trace.verification.as_json()
        for line in layer_error_lines(trace.workload["name"], layers, stated):
            print(line)
        return _report_verification(trace)


def _captured(parsed: argparse.Namespace, directory: Path, *, prove: bool) -> Trace:
    from pytest_kvgate.analysis import verify_capture  # noqa: PLC0415
    from pytest_kvgate.capture import capture, read_prompt, with_continuation  # noqa: PLC0415

    settings = capture_settings(parsed, prove=prove)
    prompt = read_prompt(parsed.prompt)
    if parsed.continuation is not None:
        prompt = with_continuation(prompt, parsed.continuation)
    return capture(parsed.model, prompt, settings, directory, verify_capture)


def _report_verification(trace: Trace) -> int:
    """Print what the verification found, and what else to know; return the exit status."""
    from pytest_kvgate.analysis.verification import is_smoke_tested  # noqa: PLC0415
    from pytest_kvgate.analysis.wording import native_sparsity_note  # noqa: PLC0415

    if trace.eos_ignored_from is not None:
        print(f"end of text ignored from decode step {trace.eos_ignored_from} on")
    if trace.native_sparsity is not None:
        print(native_sparsity_note(trace.native_sparsity.top_k, trace.native_sparsity.layers))
    checked = trace.verification
    if checked is None:
        return 1
    print(
        f"verification {checked.status}: the recomputed {checked.reference} and the model's own "
        f"differ by at most {checked.max_abs_error:.2g} (tolerated: {checked.tolerance:g})"
    )
    if is_smoke_tested(trace):
        print(
            "smoke-tested only: flash attention leaves no softmax; kvgate verify proves a capture"
        )
    return 0 if checked.status == "passed" else 1


def run_calibrate(parsed: argparse.Namespace) -> int:
    """Check on control models that what is measured is right."""
    from pytest_kvgate.calibration import calibrate  # noqa: PLC0415
    from pytest_kvgate.capture import CaptureSettings  # noqa: PLC0415
    from pytest_kvgate.engine import require_llama  # noqa: PLC0415
    from pytest_kvgate.report.calibration import calibration_lines  # noqa: PLC0415

    require_llama()
    outcome = calibrate(CaptureSettings(engine=engine_settings(parsed)))
    for line in calibration_lines(outcome.as_json()):
        print(line)
    return 0 if outcome.calibrated else 1


def run_profile(parsed: argparse.Namespace) -> int:
    """Measure saved traces."""
    from pytest_kvgate.analysis import SELECTORS, PageGrid, Plan  # noqa: PLC0415
    from pytest_kvgate.capture import CaptureSettings  # noqa: PLC0415
    from pytest_kvgate.options.values import check_selectors  # noqa: PLC0415
    from pytest_kvgate.pipeline import Evidence, trace_subjects  # noqa: PLC0415
    from pytest_kvgate.report.document import report_document, write_report  # noqa: PLC0415
    from pytest_kvgate.report.summary import summary_lines  # noqa: PLC0415
    from pytest_kvgate.session import GateSession  # noqa: PLC0415

    selectors = parsed.selectors or SELECTORS
    try:
        check_selectors(selectors, SELECTORS)
    except ValueError as error:
        print(f"kvgate: --selectors {','.join(selectors)!r} {error}.", file=sys.stderr)
        return 2
    swept = parsed.sweep if parsed.verbose or parsed.report else ()
    evidence = Evidence(
        settings=CaptureSettings(),
        grid=PageGrid(parsed.page_size, parsed.sinks, parsed.recent),
        page_sizes=tuple(dict.fromkeys((parsed.page_size, *swept))),
        plan=Plan(parsed.budgets, selectors, pool=parsed.pool),
        folder=Path(),
    )
    session = GateSession(evidence, trace_subjects(parsed.traces), sweep=swept, link=parsed.link)
    documents = [session.describe(subject, parsed.page_size) for subject in session.subjects]
    for line in summary_lines(documents, [], [], verbose=parsed.verbose):
        print(line)
    settings = documents[0]["settings"]
    for target in parsed.report or ():
        write_report(target.path, report_document(settings, documents, []))
    believed = all(document["coverage"] for document in documents)
    return 0 if believed else 1
