"""The ``kvgate`` command: capture a trace and profile saved ones, without pytest around it."""

from __future__ import annotations

import argparse
import io
import os
import sys
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pytest_kvgate.options import OPTIONS, Option
from pytest_kvgate.options.values import ReportTarget, engine_problem, report_problem

if TYPE_CHECKING:
    from pytest_kvgate.engine import EngineSettings
    from pytest_kvgate.trace import Trace

#: What the model reads first; for two commands.
PROMPT_HELP = "UTF-8 text, or .json file with a chat or token ids, that the model reads first"
ENGINE_OPTIONS = ("ngl", "threads", "cache-type-k", "cache-type-v", "flash-attn")
CAPTURE_OPTIONS = (
    "continuation",
    "ctx",
    "steps",
    *ENGINE_OPTIONS,
    "values",
    "ignore-eos",
    "allow-native-sparse",
)
PROFILE_OPTIONS = (
    "page-size",
    "sinks",
    "recent",
    "budgets",
    "selectors",
    "pool",
    "link",
    "sweep",
    "verbose",
    "report",
)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command; returns the exit status: 0, or 1 where nothing can be believed."""
    from pytest_kvgate.pipeline import EVIDENCE_ERRORS, EvidenceError  # noqa: PLC0415

    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="replace")  # a terminal without "–" shows something else
    parsed = _parser().parse_args(arguments)
    try:
        status: int = parsed.run(parsed)
        sys.stdout.flush()
    except BrokenPipeError:  # the reader of the output has seen enough
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1
    except (*EVIDENCE_ERRORS, EvidenceError, OSError) as error:
        print(f"kvgate: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("kvgate: interrupted", file=sys.stderr)
        return 130
    return status


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="kvgate", description="Capture attention traces and profile KV paging on them."
    )
    commands = parser.add_subparsers(required=True, metavar="COMMAND")
    capture = commands.add_parser("capture", help="capture one prompt on one model into a trace")
    capture.add_argument("model", type=Path, help="GGUF model")
    capture.add_argument("prompt", type=Path, help=PROMPT_HELP)
    capture.add_argument("directory", type=Path, help="the trace becomes a folder below this one")
    capture.set_defaults(run=_capture)
    verify = commands.add_parser(
        "verify",
        help="prove a capture with flash attention by a second run without it, layer by layer",
    )
    verify.add_argument("model", type=Path, help="GGUF model")
    verify.add_argument("prompt", type=Path, help=PROMPT_HELP)
    verify.add_argument(
        "directory", type=Path, nargs="?", help="keep the trace as a folder below this one"
    )
    verify.set_defaults(run=_verify)
    profile = commands.add_parser("profile", help="measure saved traces and print the tables")
    profile.add_argument("traces", type=Path, nargs="+", help="trace folders, pooled per model")
    profile.set_defaults(run=_profile)
    calibrate = commands.add_parser(
        "calibrate", help="check on control models that what is measured is right"
    )
    calibrate.set_defaults(run=_calibrate)
    for option in OPTIONS:
        if option.name in ENGINE_OPTIONS:
            _add(calibrate, option)
        if option.name in CAPTURE_OPTIONS:
            single = replace(option, repeatable=False)  # there is one prompt
            _add(capture, single)
            _add(verify, single)
        if option.name in PROFILE_OPTIONS:
            _add(profile, option)
    verify.set_defaults(flash_attn=True)
    return parser


def _add(parser: argparse.ArgumentParser, option: Option) -> None:
    """Add one of the plugin's options under its short name."""

    def parse(text: str) -> Any:  # noqa: ANN401 - each option has its own type
        try:
            value = option.parse(text)
        except ValueError as error:
            raise argparse.ArgumentTypeError(f"{text!r} {error}") from None
        problem = report_problem(value.path) if isinstance(value, ReportTarget) else None
        if problem is not None:
            raise argparse.ArgumentTypeError(problem)
        return value

    if option.switch:
        parser.add_argument(f"--{option.name}", action="store_true", help=option.help)
        return
    convert: Callable[[str], Any] = parse
    parser.add_argument(
        f"--{option.name}",
        metavar=option.metavar,
        help=option.help,
        type=convert,
        action="append" if option.repeatable else "store",
        default=None if option.default is None else option.parse(option.default),
    )


def _capture(parsed: argparse.Namespace) -> int:
    trace = _captured(parsed, parsed.directory, prove=False)
    print(trace.directory)
    return _report_verification(trace)


def _verify(parsed: argparse.Namespace) -> int:
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
    from pytest_kvgate.capture import (  # noqa: PLC0415
        CaptureSettings,
        capture,
        read_prompt,
        with_continuation,
    )

    settings = CaptureSettings(
        steps=parsed.steps,
        n_context=parsed.ctx,
        engine=_engine(parsed),
        values=parsed.values,
        prove=prove,
        ignore_eos=parsed.ignore_eos,
        allow_native_sparse=parsed.allow_native_sparse,
    )
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


def _engine(parsed: argparse.Namespace) -> EngineSettings:
    from pytest_kvgate.engine import EngineError, EngineSettings  # noqa: PLC0415

    problem = engine_problem(parsed.cache_type_v, flash_attention=parsed.flash_attn)
    if problem is not None:
        raise EngineError(f"--cache-type-v: {problem}.")
    return EngineSettings(
        n_gpu_layers=parsed.ngl,
        n_threads=parsed.threads,
        cache_type_k=parsed.cache_type_k,
        cache_type_v=parsed.cache_type_v,
        flash_attention=parsed.flash_attn,
    )


def _calibrate(parsed: argparse.Namespace) -> int:
    from pytest_kvgate.calibration import calibrate  # noqa: PLC0415
    from pytest_kvgate.capture import CaptureSettings  # noqa: PLC0415
    from pytest_kvgate.engine import require_llama  # noqa: PLC0415
    from pytest_kvgate.report.calibration import calibration_lines  # noqa: PLC0415

    require_llama()
    outcome = calibrate(CaptureSettings(engine=_engine(parsed)))
    for line in calibration_lines(outcome.as_json()):
        print(line)
    return 0 if outcome.calibrated else 1


def _profile(parsed: argparse.Namespace) -> int:
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


if __name__ == "__main__":
    raise SystemExit(main())
