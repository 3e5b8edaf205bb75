"""The ``kvgate`` command: capture a trace and profile saved ones, without pytest around it."""

from __future__ import annotations

import argparse
import io
import os
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from pytest_kvgate.cli.arguments import add_option, parse_layers, parse_limit, parse_runs
from pytest_kvgate.cli.loops import run_closed_loop, run_plan
from pytest_kvgate.cli.traces import run_calibrate, run_capture, run_profile, run_verify
from pytest_kvgate.options import OPTIONS

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
LOOP_OPTIONS = (
    "continuation",
    "ctx",
    *ENGINE_OPTIONS,
    "loop-tokens",
    "sparse-tail",
    "ignore-eos",
    "page-size",
    "sinks",
    "recent",
    "budgets",
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
    _add_workload(capture)
    capture.add_argument("directory", type=Path, help="the trace becomes a folder below this one")
    capture.set_defaults(run=run_capture)
    verify = commands.add_parser(
        "verify",
        help="prove a capture with flash attention by a second run without it, layer by layer",
    )
    _add_workload(verify)
    verify.add_argument(
        "directory", type=Path, nargs="?", help="keep the trace as a folder below this one"
    )
    verify.set_defaults(run=run_verify)
    profile = commands.add_parser("profile", help="measure saved traces and print the tables")
    profile.add_argument("traces", type=Path, nargs="+", help="trace folders, pooled per model")
    profile.set_defaults(run=run_profile)
    calibrate = commands.add_parser(
        "calibrate", help="check on control models that what is measured is right"
    )
    calibrate.set_defaults(run=run_calibrate)
    loop = commands.add_parser(
        "closed-loop",
        help="run a model with only the selected pages visible, and compare its next tokens",
    )
    _add_workload(loop)
    loop.add_argument(
        "--dense-layers",
        metavar="N,N,…",
        type=parse_layers,
        default=(),
        help="layers that attend to everything, by index",
    )
    loop.set_defaults(run=run_closed_loop)
    plan = commands.add_parser(
        "plan",
        help="look for the cheapest dense layers and budget whose KL meets a limit",
    )
    _add_workload(plan)
    plan.add_argument(
        "--max-kl",
        metavar="X",
        type=parse_limit,
        required=True,
        help="limit of the mean KL(dense‖sparse), in nats",
    )
    plan.add_argument(
        "--selector", metavar="S", default="landmark", help="who picks the pages [landmark]"
    )
    plan.add_argument(
        "--max-runs",
        metavar="N",
        type=parse_runs,
        default=40,
        help="sparse runs to make at most [40]",
    )
    plan.set_defaults(run=run_plan)
    for option in OPTIONS:
        if option.name in ENGINE_OPTIONS:
            add_option(calibrate, option)
        if option.name in CAPTURE_OPTIONS:
            single = replace(option, repeatable=False)  # there is one prompt
            add_option(capture, single)
            add_option(verify, single)
        if option.name in PROFILE_OPTIONS:
            add_option(profile, option)
        if option.name in LOOP_OPTIONS:
            single = replace(option, repeatable=False)
            add_option(loop, single)
            add_option(plan, single)
        if option.name == "pool":
            add_option(plan, option)
        if option.name == "selectors":
            add_option(loop, replace(option, help="selectors to compare [oracle,landmark]"))
        if option.name == "report":
            add_option(loop, option)
    verify.set_defaults(flash_attn=True)
    return parser


def _add_workload(parser: argparse.ArgumentParser) -> None:
    """Add the model, and what it reads first."""
    parser.add_argument("model", type=Path, help="GGUF model")
    parser.add_argument(
        "prompt",
        type=Path,
        help="UTF-8 text, or .json file with a chat or token ids, that the model reads first",
    )
