from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
from numpy.typing import NDArray

from pytest_kvgate.capture import CaptureError, CaptureSettings, Prompt
from pytest_kvgate.capture.collector import Collector
from pytest_kvgate.capture.sparsity import OwnSelections
from pytest_kvgate.engine import Engine, EngineSettings
from pytest_kvgate.trace import Step, TraceWriter
from tests.capture.captures import LETTERS, STEPS, Captured, Captures, random_text
from tests.models import (
    EPSILON,
    HEAD_DIM,
    LATENT,
    MLA_VALUE,
    WINDOWED_HEAD_DIM,
    Shape,
    token_ids,
)

N_PROMPT = len(token_ids(LETTERS))
N_TOKEN = N_PROMPT + STEPS[-1] + 1

#: How wide V is in each layer that has a cache of its own.
VALUE_DIMS = {
    "llama": [HEAD_DIM, HEAD_DIM],
    "stablelm": [HEAD_DIM, HEAD_DIM],
    "gemma2": [HEAD_DIM, HEAD_DIM],
    "bloom": [HEAD_DIM, HEAD_DIM],
    "mpt": [HEAD_DIM, HEAD_DIM],
    "gpt-oss": [HEAD_DIM, HEAD_DIM],
    "deepseek2": [LATENT, LATENT],
    "plm": [MLA_VALUE, MLA_VALUE],
    "gemma4": [WINDOWED_HEAD_DIM, HEAD_DIM],
}


def layer_entries(captured: Captured) -> list[dict[str, Any]]:
    document = json.loads((captured.trace.directory / "trace.json").read_text(encoding="utf-8"))
    entries: list[dict[str, Any]] = document["layers"]
    return entries


def outputs_by_hand(captured: Captured, position: int) -> NDArray[np.float64]:
    """Multiply the engine's own softmax of the last step by v.npy, in float64."""
    layer = captured.trace.layers[position]
    assert layer.v is not None
    softmax = np.load(captured.reference.softmax[position][-1]).astype(np.float64)
    values = np.repeat(np.asarray(layer.v, dtype=np.float64), layer.group_size, axis=0)
    return np.stack([weights @ rows for weights, rows in zip(softmax, values, strict=True)])


@pytest.mark.parametrize("architecture", VALUE_DIMS)
def test_values_that_are_read_right_are_believed(captures: Captures, architecture: str) -> None:
    captured = captures(architecture, values=True)
    assert captured.verification.status == "passed"
    assert captured.verification.reference == "softmax"
    assert captured.verification.max_abs_error < 1e-5


@pytest.mark.parametrize("architecture", VALUE_DIMS)
def test_the_engines_own_output_is_its_softmax_times_the_captured_values(
    captures: Captures, architecture: str
) -> None:
    captured = captures(architecture, values=True)
    assert captured.reference.outputs is not None
    for position, outputs in enumerate(captured.reference.outputs):
        output, by_hand = outputs[-1], outputs_by_hand(captured, position)
        assert output.dtype == np.float32
        assert output.shape == by_hand.shape
        distance = np.linalg.norm(output - by_hand, axis=1)
        assert (distance < 1e-3 * np.linalg.norm(by_hand, axis=1)).all()


@pytest.mark.parametrize("architecture", VALUE_DIMS)
def test_values_have_a_row_for_every_position(captures: Captures, architecture: str) -> None:
    captured = captures(architecture, values=True)
    dims = VALUE_DIMS[architecture]
    assert [entry["value_dim"] for entry in layer_entries(captured)] == dims
    for layer, value_dim in zip(captured.trace.layers, dims, strict=True):
        assert layer.v is not None
        assert layer.v.shape == (layer.n_head_kv, N_TOKEN, value_dim)
        assert layer.v.dtype == np.float16
        assert np.isfinite(layer.v).all()


@pytest.mark.parametrize("cache_type", ["f32", "f16", "q8_0"])
def test_values_are_what_the_models_weights_give(captures: Captures, cache_type: str) -> None:
    captured = captures("llama", cache_type, values=True)
    weights = {
        tensor.name: np.array(tensor.data, dtype=np.float64)
        for tensor in gguf.GGUFReader(captured.model).tensors
    }
    stream = weights["token_embd.weight"][token_ids(LETTERS)]
    normed = stream / np.sqrt(np.square(stream).mean(axis=1, keepdims=True) + EPSILON)
    normed *= weights["blk.0.attn_norm.weight"]
    expected = (normed @ weights["blk.0.attn_v.weight"].T).reshape(N_PROMPT, 2, HEAD_DIM)
    found = captured.trace.layers[0].v
    assert found is not None
    np.testing.assert_allclose(
        np.asarray(found[:, :N_PROMPT], np.float64), expected.transpose(1, 0, 2), atol=5e-3
    )


def test_latent_values_are_the_unrotated_dims_of_the_keys(captures: Captures) -> None:
    for layer in captures("deepseek2", values=True).trace.layers:
        np.testing.assert_array_equal(layer.v, layer.k[:, :, layer.unrotated_dims])


def test_layers_that_read_another_layers_cache_have_no_values_of_their_own(
    captures: Captures,
) -> None:
    trace = captures("gemma4", values=True).trace
    assert trace.capture["shared_kv_layers"] == [2, 3]
    assert sorted(path.parent.name for path in trace.directory.rglob("v.npy")) == ["000", "001"]


def test_without_values_none_are_kept(captures: Captures) -> None:
    captured = captures("llama")
    assert captured.reference.outputs is None
    assert [layer.v for layer in captured.trace.layers] == [None, None]
    assert list(captured.trace.directory.rglob("v.npy")) == []
    assert not any("value_dim" in entry for entry in layer_entries(captured))


@pytest.mark.parametrize("values", [False, True])
@pytest.mark.parametrize("cache_type", ["f32", "f16", "q8_0"])
def test_the_type_of_the_value_cache_is_recorded(
    captures: Captures, cache_type: str, values: bool
) -> None:
    recorded = captures("llama", cache_type, values=values).trace.capture
    assert (recorded["values"], recorded["cache_type_v"]) == (values, "f16")


@pytest.mark.parametrize("architecture", VALUE_DIMS)
def test_capturing_values_changes_neither_keys_nor_queries(
    captures: Captures, architecture: str
) -> None:
    without, with_values = captures(architecture).trace, captures(architecture, values=True).trace
    for one, other in zip(without.layers, with_values.layers, strict=True):
        np.testing.assert_array_equal(one.k, other.k)
        np.testing.assert_array_equal(one.q, other.q)


def test_values_of_a_single_step_are_enough(captures: Captures) -> None:
    captured = captures("gemma2", steps=range(3, 4), values=True)
    assert captured.verification.status == "passed"
    assert captured.reference.outputs is not None
    assert all(layer.v is not None for layer in captured.trace.layers)


@pytest.mark.parametrize("architecture", ["llama", "gemma2", "deepseek2"])
def test_values_of_a_prompt_of_several_prefill_batches_are_believed(
    captures: Captures, architecture: str
) -> None:
    captured = captures(architecture, prompt=Prompt("long", random_text(1300)), values=True)
    assert captured.verification.status == "passed"


@pytest.mark.parametrize("sink", [12.0, 16.0, 20.0, 24.0])
@pytest.mark.parametrize("length", [120, 1300])
def test_values_are_believed_where_sinks_leave_hardly_any_mass(
    captures: Captures, sink: float, length: int
) -> None:
    # Half precision ends at 6e-8, so here weights are a few such steps, or zero.
    prompt = Prompt("letters", random_text(length))
    captured = captures("gpt-oss", shape=Shape(sink=sink), prompt=prompt, values=True)
    assert captured.verification.status == "passed"
    assert captured.reference.outputs is not None
    assert np.load(captured.reference.softmax[0][-1]).sum(axis=1).max() < 1e-2
    silent = [not outputs[-1].any(axis=1).all() for outputs in captured.reference.outputs]
    assert any(silent) == (sink >= 20)


def test_a_layer_whose_values_were_not_seen_is_refused(llama: Path, tmp_path: Path) -> None:
    tokens = token_ids(LETTERS)
    with (
        Engine(llama, EngineSettings(n_threads=1)) as engine,
        TraceWriter(tmp_path / "traces", "unseen") as writer,
    ):
        settings = CaptureSettings(steps=range(1), values=True)
        collector = Collector(writer, tmp_path, settings, OwnSelections(None, allowed=False))
        context = engine.start(len(tokens) + 1)
        context.decode(tokens)
        collector.begin(Step(0, len(tokens) + 1))
        context.hook.arm(collector.take)  # and nobody takes V
        context.decode([80])
        with pytest.raises(CaptureError, match=r"layer 0 does not multiply its softmax by V .* V "):
            collector.end()
