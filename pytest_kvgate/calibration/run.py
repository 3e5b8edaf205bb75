"""Capture a control model, measure it, and compare the numbers with what they must be."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from statistics import fmean

import numpy as np
from numpy.typing import NDArray

from pytest_kvgate.analysis import (
    SELECTORS,
    PageGrid,
    Plan,
    Profile,
    UndefinedError,
    profile_trace,
    verify_capture,
)
from pytest_kvgate.calibration.expected import Unit, expected_unit
from pytest_kvgate.calibration.result import CAPTURE, WHOLE_MODEL, Calibration, Comparison
from pytest_kvgate.capture import (
    CaptureSettings,
    Controls,
    Pattern,
    capture,
    control_model,
    control_prompt,
    write_control_model,
)
from pytest_kvgate.trace import Trace, TraceError

#: Numbers of a unit that need no selector, by the name of the profile's array.
_SHAPES = ("eligible_mass", "support", "hottest")
#: Those of a selector.
_BY_SELECTOR = ("coverage", "total_mass")


def calibrate(settings: CaptureSettings, controls: Controls | None = None) -> Calibration:
    """Return what the instrument makes of the control patterns.

    ``settings`` give the engine; what to sample, the controls say. Whatever goes wrong on the way
    is the outcome's ``problem``.
    """
    controls = controls or Controls()
    described = {**asdict(controls), **asdict(settings.engine)}
    described["steps"] = f"{controls.steps.start}:{controls.steps.stop}:{controls.steps.step}"
    try:
        with tempfile.TemporaryDirectory(prefix="kvgate-") as folder:
            trace = _captured(Path(folder), settings, controls)
            comparisons = tuple(_compare(trace, controls))
    except Exception as error:  # a broken instrument may break anywhere
        text = str(error) or repr(error)
        return Calibration(described, problem=f"{type(error).__name__}: {text}")
    return Calibration(described, comparisons)


def _captured(folder: Path, settings: CaptureSettings, controls: Controls) -> Trace:
    """Capture a control model that is written below ``folder``, as a gate's model is captured."""
    model = control_model(controls)
    path = folder / "control.gguf"
    write_control_model(path, model)
    settings = replace(settings, steps=controls.steps, n_context=None)
    return capture(path, control_prompt(model), settings, folder, verify_capture)


def _compare(trace: Trace, controls: Controls) -> Iterator[Comparison]:
    """Yield every number that is known beforehand beside the one that gates would be judged on."""
    checked = trace.verification
    if checked is None:
        raise TraceError(f"the trace of the control model ({trace.label}) was not verified.")
    yield Comparison(
        CAPTURE,
        f"{checked.reference} error",
        None,
        0.0,
        checked.max_abs_error,
        tolerance=checked.tolerance,
    )
    patterns = controls.patterns()
    profile = _profile(trace, patterns, controls)
    units = [
        [
            [expected_unit(controls, pattern, row, head) for head in range(controls.n_head_kv)]
            for row in range(len(controls.steps))
        ]
        for pattern in patterns
    ]
    for layer, pattern in enumerate(patterns):
        yield from _compare_pattern(profile, layer, pattern, units[layer], controls)
    every = [unit for of_layer in units for heads in of_layer for unit in heads]
    for name in _BY_SELECTOR:
        for selector in SELECTORS:
            expected = [getattr(unit, name).get(selector) for unit in every]
            if None not in expected:
                mean = profile.measure(name, selector, controls.budget)
                yield Comparison(WHOLE_MODEL, name, selector, fmean(expected), mean)


def _profile(trace: Trace, patterns: Sequence[Pattern], controls: Controls) -> Profile:
    """Measure the trace; an error names the pattern it comes from."""
    grid = PageGrid(controls.page_size, controls.sinks, controls.recent)
    plan = Plan((controls.budget,))
    try:
        return profile_trace(trace, grid, plan)
    except Exception:
        for layer, pattern in zip(trace.layers, patterns, strict=False):
            try:
                profile_trace(replace(trace, layers=(layer,)), grid, plan)
            except Exception as error:
                raise TraceError(f"{pattern.name} cannot be measured: {error}") from error
        raise


def _compare_pattern(
    profile: Profile,
    layer: int,
    pattern: Pattern,
    units: Sequence[Sequence[Unit]],
    controls: Controls,
) -> Iterator[Comparison]:
    """Yield the comparisons of one layer; ``units`` are by step and KV head."""
    found = profile.layer == layer
    decoded = profile.numbers.units.decode_index[found]
    for name in _SHAPES:
        expected = [[getattr(unit, name) for unit in heads] for heads in units]
        values = getattr(profile, name)[found]
        measured = _by_step(values, decoded, controls)
        yield _worst(pattern.name, name, None, expected, measured, _mean(values), controls)
    for name in _BY_SELECTOR:
        for selector in SELECTORS:
            if selector not in getattr(units[0][0], name):
                continue
            expected = [[getattr(unit, name)[selector] for unit in heads] for heads in units]
            try:
                samples = profile.samples(name, selector, controls.budget, (layer,))
                measured = _by_step(samples.value, samples.decode_index, controls)
                mean = profile.measure(name, selector, controls.budget, layers=(layer,))
            except UndefinedError:  # every unit was skipped
                measured, mean = [[] for _ in controls.steps], float("nan")
            yield _worst(pattern.name, name, selector, expected, measured, mean, controls)


def _by_step(
    values: NDArray[np.float64], decoded: NDArray[np.int64], controls: Controls
) -> list[list[float]]:
    """Return a layer's numbers by sampled step and KV head, the order in which units come."""
    return [values[decoded == step].tolist() for step in controls.steps]


def _mean(values: NDArray[np.float64]) -> float:
    return float(values.mean()) if len(values) else float("nan")


def _worst(
    pattern: str,
    measure: str,
    selector: str | None,
    expected: list[list[float]],
    measured: list[list[float]],
    mean: float,
    controls: Controls,
) -> Comparison:
    """Compare the mean and every unit; return the worst unit where the mean tells nothing."""
    of_mean = fmean(value for heads in expected for value in heads)
    mean_compared = Comparison(pattern, measure, selector, of_mean, mean)
    units = []
    for step, wanted, got in zip(controls.steps, expected, measured, strict=True):
        complete = got if len(got) == len(wanted) else [float("nan")] * len(wanted)
        for head, (value, number) in enumerate(zip(wanted, complete, strict=True)):
            unit = f"step {step}, KV head {head}"
            units.append(Comparison(pattern, measure, selector, value, number, unit))
    worst = max(units, key=lambda comparison: comparison.difference)
    return mean_compared if worst.ok or not mean_compared.ok else worst
