"""Layers that must not be paged are listed with the reason."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from pytest_kvgate.analysis import verify_capture
from pytest_kvgate.capture import CaptureSettings, capture
from pytest_kvgate.capture.unpaged import unpaged_layers
from pytest_kvgate.engine import EngineSettings
from pytest_kvgate.trace.unpaged import NO_ATTENTION, RECURRENT, SHARED, WINDOWED
from tests.capture.captures import PROMPT, Captures

UNPAGED = {
    "llama": [],
    "qwen3moe": [],
    "deepseek2": [],
    "gemma2": [(0, WINDOWED)],
    "gemma3": [(0, WINDOWED)],
    "gpt-oss": [(0, WINDOWED)],
    "gemma4": [(0, WINDOWED), (2, SHARED), (3, SHARED)],
    "jamba": [(0, RECURRENT), (2, RECURRENT)],
    "granitehybrid": [(0, RECURRENT), (2, RECURRENT)],
    "lfm2": [(0, RECURRENT), (2, RECURRENT)],
    "qwen35": [(0, RECURRENT), (2, RECURRENT)],
    "nemotron_h": [(0, RECURRENT), (2, NO_ATTENTION), (3, RECURRENT)],
}


@pytest.mark.parametrize("architecture", UNPAGED)
def test_a_layer_that_is_not_paged_has_a_reason(captures: Captures, architecture: str) -> None:
    trace = captures(architecture).trace
    found = [(layer.index, layer.reason) for layer in trace.unpaged_layers]
    assert found == UNPAGED[architecture]
    document = json.loads((trace.directory / "trace.json").read_text(encoding="utf-8"))
    assert document["capture"]["unpaged_layers"] == [
        {"layer": index, "reason": reason} for index, reason in UNPAGED[architecture]
    ]


@pytest.mark.parametrize("architecture", UNPAGED)
def test_a_layer_is_either_paged_or_has_a_reason(captures: Captures, architecture: str) -> None:
    trace = captures(architecture).trace
    paged = [layer.index for layer in trace.paged_layers]
    unpaged = [layer.index for layer in trace.unpaged_layers]
    assert sorted(paged + unpaged) == list(range(len(paged) + len(unpaged)))


def test_a_single_sampled_step_is_enough_to_see_states(captures: Captures) -> None:
    trace = captures("qwen35", steps=range(3, 4)).trace
    assert [(layer.index, layer.reason) for layer in trace.unpaged_layers] == UNPAGED["qwen35"]


@pytest.mark.parametrize("architecture", ["gemma4", "nemotron_h"])
def test_flash_attention_does_not_change_the_reasons(
    captures: Captures, tmp_path: Path, architecture: str
) -> None:
    engine = EngineSettings(n_threads=1, flash_attention=True)
    settings = CaptureSettings(steps=range(2), engine=engine)
    model = captures.model(architecture)
    trace = capture(model, PROMPT, settings, tmp_path, verify_capture)
    found = [(layer.index, layer.reason) for layer in trace.unpaged_layers]
    assert found == UNPAGED[architecture]


def test_a_layer_that_attends_beside_its_state_is_paged() -> None:
    layers: list[Mapping[str, Any]] = [{"index": 0, "window": None}, {"index": 1, "window": 64}]
    assert unpaged_layers(3, layers, shared={2}, recurrent={0, 1}) == [
        {"layer": 1, "reason": WINDOWED},
        {"layer": 2, "reason": SHARED},
    ]
