"""Values (V) that make the attention-output error meaningless are no error of zero."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from pytest_kvgate.analysis import PageGrid, Plan, Profile, UndefinedError, pool, profile_trace
from pytest_kvgate.trace import TraceError, load_trace
from tests.traces import LayerArrays, make_trace, random_layer

GRID = PageGrid(8, 8, 8)


def layers() -> list[LayerArrays]:
    return [random_layer(seed, n_token=96, n_step=2, index=seed, values=True) for seed in (0, 1)]


def profile_of(path: Path, chosen: list[LayerArrays]) -> Profile:
    return profile_trace(load_trace(make_trace(path, chosen)), GRID, Plan((0.25,)))


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_a_value_that_is_not_finite_is_refused(tmp_path: Path, value: float) -> None:
    broken = layers()
    v = broken[1].v
    assert v is not None
    v[1, 40, 3] = value

    with pytest.raises(TraceError, match=r"layer 1, KV head 1: .* V holds broken values"):
        profile_of(tmp_path / "trace", broken)


def test_an_output_of_exactly_zero_has_no_relative_error(tmp_path: Path) -> None:
    first, second = layers()
    assert second.v is not None
    empty = replace(second, v=np.zeros_like(second.v))

    profile = profile_of(tmp_path / "trace", [first, empty])

    with pytest.raises(UndefinedError, match="output is exactly zero"):
        profile.measure("output_error", "landmark", 0.25)
    assert profile.measure("output_error", "landmark", 0.25, layers=[0]) > 0


def test_values_without_numbers_are_refused(tmp_path: Path) -> None:
    first, second = layers()
    assert second.v is not None

    with pytest.raises(TraceError, match="its values have no numbers"):
        profile_of(tmp_path / "trace", [first, replace(second, v=second.v[..., :0])])


def test_a_trace_with_one_step_leaves_no_hit_rate_of_the_others(tmp_path: Path) -> None:
    several = profile_of(tmp_path / "several", layers())
    one = profile_of(tmp_path / "one", [random_layer(5, n_token=96, n_step=1)])

    assert 0 <= several.measure("hit_rate", "landmark", 0.25) <= 1
    with pytest.raises(UndefinedError, match="a trace has no other"):
        pool([several, one]).measure("hit_rate", "landmark", 0.25)


def test_the_same_capture_given_several_times_says_no_more_than_once(tmp_path: Path) -> None:
    copies = [profile_of(tmp_path / str(number), layers()) for number in range(5)]
    alone = copies[0].interval("coverage", "landmark", 0.25)

    found = pool(copies).interval("coverage", "landmark", 0.25)

    assert alone is not None
    assert found is not None
    assert (found.n, found.drawn) == (2, "steps")
    assert (found.low, found.high) == pytest.approx((alone.low, alone.high))
