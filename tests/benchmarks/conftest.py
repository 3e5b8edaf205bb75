"""Benchmarks run only where they are asked for: ``pytest tests/benchmarks``."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

HERE = Path(__file__).parent


@dataclass
class Figures:
    """The figures that are asked for, with what was measured."""

    lines: list[str] = field(default_factory=list)

    def state(self, what: str, measured: float, asked: float, unit: str, *, most: bool) -> bool:
        """Keep a figure for the end of the run; return whether it is met."""
        met = measured <= asked if most else measured >= asked
        bound = "≤" if most else "≥"
        self.lines.append(
            f"{what:<58} {measured:7.2f} {unit:<9} asked {bound} {asked:g}"
            f"{'' if met else '   MISSED'}"
        )
        return met


FIGURES = pytest.StashKey[Figures]()


def pytest_configure(config: pytest.Config) -> None:
    config.stash[FIGURES] = Figures()


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    asked = [
        (config.invocation_params.dir / argument.partition("::")[0]).resolve()
        for argument in config.args
    ]
    if any(path.is_relative_to(HERE) for path in asked):
        return
    ours = [item for item in items if item.path.is_relative_to(HERE)]
    config.hook.pytest_deselected(items=ours)
    items[:] = [item for item in items if item not in ours]


@pytest.fixture
def figures(request: pytest.FixtureRequest) -> Figures:
    """What the benchmarks of this run have measured so far."""
    return request.config.stash[FIGURES]


@dataclass
class Timing:
    """The best time of a function in seconds, those of others in the same rounds, its result."""

    best: float
    beside: dict[str, float]
    result: Any


@pytest.fixture
def best_time(benchmark: Any) -> Callable[..., Timing]:  # noqa: ANN401 - it has no types
    """Time a function by pytest-benchmark; before each round, others for comparison.

    Times of one round are close together, so that a machine that becomes slower or faster meanwhile
    does not change their ratio much.
    """

    def timed(
        function: Callable[[], object], rounds: int, **others: Callable[[], object]
    ) -> Timing:
        times: dict[str, list[float]] = {name: [] for name in others}

        def time_others() -> None:
            for name, other in others.items():
                start = time.perf_counter()
                other()
                times[name].append(time.perf_counter() - start)

        time_others()
        for found in times.values():  # that was to warm up
            found.clear()
        result = benchmark.pedantic(function, setup=time_others, rounds=rounds, warmup_rounds=0)
        beside = {name: min(found) for name, found in times.items()}
        return Timing(float(benchmark.stats.stats.min), beside, result)

    return timed


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    figures = terminalreporter.config.stash[FIGURES]
    if figures.lines:
        terminalreporter.section("speed, from the best times above")
        for line in figures.lines:
            terminalreporter.line(line)
