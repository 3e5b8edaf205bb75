"""The control patterns come out as computed, through the real engine."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from pytest_kvgate.calibration import TOLERANCE, Calibration, calibrate
from pytest_kvgate.calibration.expected import expected_unit
from pytest_kvgate.capture import CaptureSettings, Controls, control_model
from pytest_kvgate.engine import EngineSettings

#: A control model that is captured in a fraction of a second.
SMALL = Controls(page_size=16, sinks=20, recent=0.05, budget=0.06, n_prompt=616, scattered=24)


def calibrated(
    controls: Controls | None = None, cache_type_k: str = "f16", *, values: bool = False
) -> Calibration:
    engine = EngineSettings(n_threads=1, cache_type_k=cache_type_k)
    return calibrate(CaptureSettings(engine=engine, values=values), controls)


def require_calibrated(outcome: Calibration) -> None:
    assert outcome.calibrated, outcome.summary
    assert outcome.worst < TOLERANCE / 100


@pytest.mark.parametrize("cache_type_k", ["f32", "f16", "q8_0"])
def test_the_default_controls_are_measured_as_computed(cache_type_k: str) -> None:
    outcome = calibrated(cache_type_k=cache_type_k)
    require_calibrated(outcome)
    assert outcome.settings["cache_type_k"] == cache_type_k
    assert {comparison.pattern for comparison in outcome.comparisons} == {
        *("capture", "clustered", "scattered", "diffuse", "sink", "recent", "decoys", "opposed"),
        *("outliers", "middles", "tails"),
        "whole model",
    }


@pytest.mark.parametrize("cache_type_k", ["bf16", "q5_0", "q4_0", "iq4_nl"])
def test_every_cache_type_holds_the_control_keys_exactly(cache_type_k: str) -> None:
    require_calibrated(calibrated(SMALL, cache_type_k))


def test_captured_values_do_not_disturb_a_calibration() -> None:
    require_calibrated(calibrated(SMALL, values=True))


@pytest.mark.parametrize(("cache_type_k", "cache_type_v"), [("f16", "f16"), ("q8_0", "q8_0")])
@pytest.mark.parametrize("prove", [True, False])
def test_flash_attention_reads_the_same(cache_type_k: str, cache_type_v: str, prove: bool) -> None:
    engine = EngineSettings(
        n_threads=1,
        cache_type_k=cache_type_k,
        cache_type_v=cache_type_v,
        flash_attention=True,
    )
    require_calibrated(calibrate(CaptureSettings(engine=engine, prove=prove), SMALL))


@pytest.mark.parametrize(
    ("cache_type_k", "change"),
    [
        ("f16", {"n_head": 4, "n_head_kv": 4}),  # MHA
        ("q8_0", {"n_head": 4, "n_head_kv": 1}),  # MQA
        ("f32", {"n_head": 6, "n_head_kv": 2}),
        ("f16", {"sharpness": 3.0, "cooling": 1.0}),
        ("q8_0", {"sharpness": 11.0, "cooling": 0.8}),
        ("f32", {"cluster": 5, "scattered": 7}),
        ("f16", {"page_size": 8, "n_prompt": 431, "sinks": 1, "recent": 37.0}),
        ("q8_0", {"page_size": 32, "n_prompt": 1000, "sinks": 64, "budget": 0.05, "scattered": 9}),
        ("f32", {"steps": range(1, 8, 3)}),
        ("f16", {"steps": range(1), "recent": 0.0, "n_prompt": 617}),
    ],
    ids=str,
)
def test_other_shapes_temperatures_and_contexts_are_measured_as_computed(
    cache_type_k: str, change: dict[str, Any]
) -> None:
    require_calibrated(calibrated(replace(SMALL, **change), cache_type_k))


@st.composite
def some_controls(draw: st.DrawFn) -> Controls:
    n_head_kv = draw(st.sampled_from([1, 2, 3, 4]))
    parameters: dict[str, Any] = {
        "n_head_kv": n_head_kv,
        "n_head": n_head_kv * draw(st.integers(1, 4)),
        "page_size": draw(st.sampled_from([8, 16, 32])),
        "sinks": draw(st.integers(1, 80)),
        "recent": draw(st.sampled_from([0.0, 0.01, 0.1, 16.0, 50.0])),
        "budget": draw(st.sampled_from([0.02, 0.03, 0.06, 0.1])),
        "n_prompt": draw(st.integers(300, 1200)),
        "sharpness": draw(st.floats(2.0, 12.0)),
        "cooling": draw(st.floats(0.7, 1.0)),
        "cluster": draw(st.integers(1, 6)),
        "scattered": draw(st.integers(1, 40)),
    }
    try:
        controls = Controls(**parameters)
        for pattern in controls.patterns():
            for head in range(n_head_kv):
                expected_unit(controls, pattern, 0, head)
    except ValueError:
        assume(False)
        raise
    return controls


@pytest.mark.slow
@settings(max_examples=25, deadline=None)
@given(controls=some_controls(), cache_type_k=st.sampled_from(["f32", "f16", "q8_0"]))
def test_any_controls_are_measured_as_computed(controls: Controls, cache_type_k: str) -> None:
    require_calibrated(calibrated(controls, cache_type_k))


def test_what_the_patterns_stand_for_shows_in_the_expected_numbers() -> None:
    controls = Controls()
    found = {
        pattern.name: expected_unit(controls, pattern, 0, 0) for pattern in controls.patterns()
    }
    pages = {name: unit.coverage["oracle"] for name, unit in found.items()}
    tokens = {name: unit.coverage["token-oracle"] for name, unit in found.items()}
    share = 2 / 61  # pages the budget buys, of those eligible at the first step
    assert pages["clustered"] > 0.98
    assert tokens["clustered"] > 0.98
    assert tokens["scattered"] > 0.98
    assert pages["scattered"] == pytest.approx(2 / 48, rel=0.05)
    for name in ("diffuse", "sink", "recent"):
        assert pages[name] == pytest.approx(share)
        assert tokens[name] == pytest.approx(share)
    assert found["sink"].total_mass["oracle"] > 0.97
    assert found["recent"].eligible_mass < 0.3
    # each selector has a favourite of its own among the decoys
    decoys = found["decoys"].coverage
    names = ("landmark", "quest", "mean-std", "cuboid-mean", "recency", "token-oracle")
    assert len({round(decoys[name], 3) for name in names}) == len(names)


def test_the_pages_that_are_eligible_change_between_the_sampled_steps() -> None:
    controls = Controls()
    assert [controls.eligible(n) for n in controls.n_visible] == [(2, 63), (2, 64), (2, 64)]
    assert [controls.budget_pages(n) for n in controls.n_visible] == [2, 2, 2]


def test_the_prompt_of_the_controls_is_as_long_as_they_say() -> None:
    model = control_model(SMALL)
    assert len(model.prompt) == SMALL.n_prompt
    assert model.levels.shape == (len(model.following), 10, SMALL.n_head_kv)
    assert set(model.prompt) == set(range(model.following[0]))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"n_head": 5}, "n_head a multiple of n_head_kv"),
        ({"page_size": 6}, "page_size a multiple of 4 from 8"),
        ({"sinks": 0}, "sinks from 1"),
        ({"budget": 0.001}, "the budget must buy a page"),
        ({"scattered": 500}, "500 pages must fit"),
        ({"recent": 0.0, "n_prompt": 639}, "reach past the last eligible page"),
    ],
)
def test_controls_that_do_not_fit_are_refused_with_a_sentence(
    change: dict[str, Any], message: str
) -> None:
    with pytest.raises(ValueError, match="(?i)" + message):
        replace(SMALL, **change)
