"""The plugin's options under their short names, and what they say of the engine and a capture."""

from __future__ import annotations

import argparse
import math
from collections.abc import Callable, Collection
from typing import TYPE_CHECKING, Any

from pytest_kvgate.options import OPTIONS, Option
from pytest_kvgate.options.values import (
    ReportTarget,
    engine_problem,
    report_problem,
    whole_number,
)

if TYPE_CHECKING:
    from pytest_kvgate.capture import CaptureSettings
    from pytest_kvgate.engine import EngineSettings


def add_option(parser: argparse.ArgumentParser, option: Option) -> None:
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


def engine_settings(parsed: argparse.Namespace) -> EngineSettings:
    """Return how to run the engine.

    Raises:
        EngineError: the options contradict each other.
    """
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


def capture_settings(parsed: argparse.Namespace, *, prove: bool = False) -> CaptureSettings:
    """Return how to capture; what a command has no option for is as usual."""
    from pytest_kvgate.capture import CaptureSettings  # noqa: PLC0415

    given = vars(parsed)
    return CaptureSettings(
        steps=given.get("steps", range(1)),
        n_context=parsed.ctx,
        engine=engine_settings(parsed),
        values=given.get("values", False),
        prove=prove,
        ignore_eos=parsed.ignore_eos,
        allow_native_sparse=given.get("allow_native_sparse", False),
    )


def parse_layers(text: str) -> tuple[int, ...]:
    """Parse comma-separated layer indices."""
    try:
        layers = tuple(sorted({int(part) for part in text.split(",")}))
    except ValueError:
        layers = (-1,)
    if layers[0] < 0:
        raise argparse.ArgumentTypeError(
            f"{text!r} needs comma-separated layer indices from 0, such as 0,3"
        )
    return layers


def parse_limit(text: str) -> float:
    """Parse a limit of a KL, a number above 0."""
    try:
        limit = float(text)
    except ValueError:
        limit = math.nan
    if not 0 < limit < math.inf:
        raise argparse.ArgumentTypeError(f"{text!r} needs a number above 0, such as 0.05")
    return limit


def parse_runs(text: str) -> int:
    """Parse how many runs to make, a whole number from 1."""
    try:
        return whole_number(1, "runs")(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(f"{text!r} {error}") from None


def changed_options(parsed: argparse.Namespace, names: Collection[str]) -> list[str]:
    """Return the options among ``names`` that are not as usual, as pytest takes them."""
    changed = []
    for option in OPTIONS:
        if option.name not in names:
            continue
        value = getattr(parsed, option.name.replace("-", "_"))
        if option.switch and value:
            changed.append(option.flag)
        elif option.default is not None and value != option.parse(option.default):
            text = "on" if value is True else value
            changed.append(f"{option.flag}={text}")
    return changed
