"""Flash attention leaves no softmax: a smoke alarm and a proof take its place."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from numpy.typing import NDArray

from pytest_kvgate.analysis import verify_capture
from pytest_kvgate.analysis.verification import FLASH_TOLERANCES, OUTPUT_TOLERANCE
from pytest_kvgate.capture import CaptureError, CaptureSettings, Prompt, capture
from pytest_kvgate.capture.collector import Collector
from pytest_kvgate.capture.decoder import ReferenceRun
from pytest_kvgate.engine import AttentionRead, Engine, EngineError, EngineSettings, OutputNode
from tests.capture.captures import LETTERS, Captures, random_text
from tests.models import HEAD_DIM, N_LAYER, token_ids

ARCHITECTURES = ["llama", "stablelm", "gemma2", "bloom", "mpt", "gpt-oss", "deepseek2", "gemma4"]
CACHE_TYPES = [
    ("f16", "f16"),
    ("f32", "f32"),
    ("f16", "bf16"),
    ("q8_0", "f16"),
    ("q8_0", "q8_0"),
    ("q4_0", "q5_1"),
]
#: Longer than the batches in which two runs take turns.
LONG = Prompt("long", random_text(300))


KINDS = [(architecture, *types) for architecture in ARCHITECTURES for types in CACHE_TYPES]

#: Latent attention keeps K and V in one cache, which flash attention alone reads where quantized.
UNPROVABLE = [("deepseek2", *types) for types in CACHE_TYPES if types[0].startswith("q")]


@pytest.mark.parametrize(
    ("architecture", "cache_type_k", "cache_type_v"),
    [kind for kind in KINDS if kind not in UNPROVABLE],
)
def test_the_proof_finds_the_softmax_of_a_run_without_flash_attention(
    captures: Captures, architecture: str, cache_type_k: str, cache_type_v: str
) -> None:
    captured = captures(
        architecture,
        cache_type_k,
        cache_type_v=cache_type_v,
        flash_attention=True,
        prove=True,
        prompt=LONG,
    )
    checked = captured.verification
    assert (checked.status, checked.reference) == ("passed", "softmax without flash attention")
    assert checked.tolerance == 1e-3
    assert checked.max_abs_error < 1e-5
    assert checked.max_abs_error == max(checked.layer_errors)
    assert len(checked.layer_errors) == len(captured.trace.layers)


@pytest.mark.parametrize(("architecture", "cache_type_k", "cache_type_v"), KINDS)
def test_the_smoke_alarm_is_silent_where_the_read_is_right(
    captures: Captures, architecture: str, cache_type_k: str, cache_type_v: str
) -> None:
    captured = captures(
        architecture, cache_type_k, cache_type_v=cache_type_v, flash_attention=True, prompt=LONG
    )
    checked = captured.verification
    assert (checked.status, checked.reference) == ("passed", "attention output")
    if architecture == "deepseek2":
        cache_type_v = cache_type_k
    assert captured.trace.capture["cache_type_v"] == cache_type_v
    half = cache_type_v in ("f16", "f32")
    assert checked.tolerance == (FLASH_TOLERANCES["f16"] if half else OUTPUT_TOLERANCE)
    # half precision is where the engine adds up; the others agree much better
    assert checked.max_abs_error < (0.05 if half else 2e-3)
    assert len(checked.layer_errors) == len(captured.trace.layers)


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_flash_attention_reads_the_layers_that_the_model_has(
    captures: Captures, architecture: str
) -> None:
    plain = captures(architecture).trace
    fused = captures(architecture, flash_attention=True).trace
    assert fused.capture["flash_attention"] is True
    assert fused.capture["shared_kv_layers"] == plain.capture["shared_kv_layers"]
    for one, other in zip(plain.layers, fused.layers, strict=True):
        for name in (
            "index",
            "n_head",
            "n_head_kv",
            "head_dim",
            "softcap",
            "alibi_slopes",
            "window",
            "n_rot",
            "rotated_last",
        ):
            assert getattr(one, name) == getattr(other, name), name
        assert one.scale == pytest.approx(other.scale)
        assert one.k.shape == other.k.shape
        assert one.k.dtype == other.k.dtype
        if one.sinks is not None:
            np.testing.assert_array_equal(one.sinks, other.sinks)
    # before the first layer nothing has been added up in half precision; later tokens may differ
    known = plain.steps[0].n_visible
    one, other = plain.layers[0], fused.layers[0]
    np.testing.assert_array_equal(one.q[0], other.q[0])
    np.testing.assert_array_equal(one.k[:, :known], other.k[:, :known])


@pytest.mark.parametrize("cache_type", ["f16", "q8_0"])
@pytest.mark.parametrize(
    "architecture", ["qwen35", "jamba", "granitehybrid", "nemotron_h", "lfm2", "gemma3"]
)
def test_layers_keep_their_numbers_where_not_all_attend(
    captures: Captures, architecture: str, cache_type: str
) -> None:
    plain = captures(architecture, cache_type).trace
    fused = captures(
        architecture, cache_type, cache_type_v=cache_type, flash_attention=True, prove=True
    )
    assert fused.verification.reference == "softmax without flash attention"
    assert fused.verification.max_abs_error < 1e-5
    indices = [layer.index for layer in plain.layers]
    assert [layer.index for layer in fused.trace.layers] == indices
    assert fused.trace.unpaged_layers == plain.unpaged_layers


def test_a_proof_that_lacks_a_layer_is_no_proof(
    captures: Captures, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    take_reference = Collector.take_reference

    def lose_a_layer(collector: Collector, read: AttentionRead) -> None:
        if read.index != 1:
            take_reference(collector, read)

    monkeypatch.setattr(Collector, "take_reference", lose_a_layer)
    engine = EngineSettings(n_threads=1, flash_attention=True)
    settings = CaptureSettings(steps=range(2), engine=engine, prove=True)
    with pytest.raises(CaptureError, match="layer 1 shows no softmax in the run without flash"):
        capture(captures.model("llama"), LONG, settings, tmp_path, verify_capture)


def test_a_proof_with_a_layer_too_many_is_no_proof(
    captures: Captures, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    take_reference = Collector.take_reference
    monkeypatch.setattr(
        Collector,
        "take_reference",
        lambda collector, read: take_reference(collector, replace(read, index=read.index + 1)),
    )
    engine = EngineSettings(n_threads=1, flash_attention=True)
    settings = CaptureSettings(steps=range(2), engine=engine, prove=True)
    with pytest.raises(CaptureError, match="layer 2 attends in a run without flash attention"):
        capture(captures.model("llama"), LONG, settings, tmp_path, verify_capture)


def test_an_architecture_that_flash_attention_ends_is_refused(
    captures: Captures, tmp_path: Path
) -> None:
    engine = EngineSettings(n_threads=1, flash_attention=True)
    settings = CaptureSettings(steps=range(1), engine=engine)
    with pytest.raises(CaptureError, match=r"\(plm\) cannot run with flash attention"):
        capture(captures.model("plm"), LONG, settings, tmp_path, verify_capture)


def test_an_f32_cache_is_captured_as_flash_attention_reads_it(captures: Captures) -> None:
    exact = captures("llama", "f32").trace.layers[0].k
    read = captures("llama", "f32", flash_attention=True).trace.layers[0].k
    assert exact.dtype == np.float32
    assert read.dtype == np.float16
    np.testing.assert_array_equal(read, exact.astype(np.float16))


@pytest.mark.parametrize("cache_type_v", ["f16", "bf16", "q8_0", "q4_0"])
def test_values_of_a_fused_capture_are_in_the_models_own_basis(
    captures: Captures, cache_type_v: str
) -> None:
    plain = captures("llama", values=True).trace
    fused = captures("llama", cache_type_v=cache_type_v, flash_attention=True, values=True).trace
    assert fused.capture["cache_type_v"] == cache_type_v
    v, read = plain.layers[0].v, fused.layers[0].v
    assert v is not None
    assert read is not None
    exact = np.asarray(v, dtype=np.float32)
    rounding = {"f16": 0.0, "bf16": 4e-3, "q8_0": 1e-2, "q4_0": 0.2}[cache_type_v]
    assert np.abs(read - exact).max() <= rounding * np.abs(exact).max()


def test_values_that_nobody_asked_for_stay_out_of_the_trace(captures: Captures) -> None:
    captured = captures("llama", flash_attention=True)
    assert all(layer.v is None for layer in captured.trace.layers)
    assert not list(captured.trace.directory.rglob("v.npy"))


def test_a_fused_capture_decodes_what_it_would_without_a_proof(captures: Captures) -> None:
    alone = captures("llama", "q8_0", cache_type_v="q8_0", flash_attention=True)
    proved = captures("llama", "q8_0", cache_type_v="q8_0", flash_attention=True, prove=True)
    for one, other in zip(alone.trace.layers, proved.trace.layers, strict=True):
        np.testing.assert_array_equal(one.k, other.k)
        np.testing.assert_array_equal(one.q, other.q)


def test_a_proof_of_unfused_attention_is_the_capture_itself(captures: Captures) -> None:
    assert captures("llama", prove=True).verification == captures("llama").verification


def test_without_carried_outputs_the_runs_drift_apart(
    captures: Captures, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    held = captures("llama", flash_attention=True, prove=True, prompt=LONG, steps=range(2))

    def forget(run: ReferenceRun, _output: OutputNode) -> None:
        run._outputs.popleft()

    monkeypatch.setattr(ReferenceRun, "_replace", forget)
    engine = EngineSettings(n_threads=1, flash_attention=True)
    settings = CaptureSettings(steps=range(2), engine=engine, prove=True)
    trace = capture(captures.model("llama"), LONG, settings, tmp_path, verify_capture)
    assert trace.verification is not None
    assert trace.verification.max_abs_error > 100 * held.verification.max_abs_error


def test_a_quantized_v_cache_needs_flash_attention(captures: Captures, tmp_path: Path) -> None:
    engine = EngineSettings(n_threads=1, cache_type_v="q8_0")
    with pytest.raises(EngineError, match="a q8_0 V cache"):
        capture(
            captures.model("llama"),
            LONG,
            CaptureSettings(steps=range(1), engine=engine),
            tmp_path,
            verify_capture,
        )


def test_what_cannot_run_without_flash_attention_cannot_be_proved(
    captures: Captures, tmp_path: Path
) -> None:
    engine = EngineSettings(1, 1, "q8_0", "q8_0", flash_attention=True)
    settings = CaptureSettings(steps=range(1), engine=engine, prove=True)
    with pytest.raises(EngineError, match="cannot be proved by a run without flash attention"):
        capture(captures.model("deepseek2"), LONG, settings, tmp_path, verify_capture)
    assert not list(tmp_path.iterdir())


def test_a_model_that_does_not_attend_is_refused_as_ever(
    captures: Captures, tmp_path: Path
) -> None:
    settings = CaptureSettings(
        steps=range(1), engine=EngineSettings(n_threads=1, flash_attention=True)
    )
    with pytest.raises(CaptureError, match="is recurrent in every layer"):
        capture(captures.model("mamba"), LONG, settings, tmp_path, verify_capture)


def test_outputs_are_read_and_replaced_in_any_batch(captures: Captures) -> None:
    tokens = token_ids(LETTERS)
    settings = EngineSettings(n_threads=1, flash_attention=True)
    with Engine(captures.model("llama"), settings) as engine:
        fused, plain = engine.start(256), engine.start_unfused(256)
        kept: list[NDArray[np.float32]] = []
        fused.hook.carry(lambda node: kept.append(node.read()))
        expected = fused.decode(tokens)
        assert [output.shape for output in kept] == [(len(tokens), 4 * HEAD_DIM)] * N_LAYER
        plain.hook.carry(lambda node: node.write(kept.pop(0)))
        np.testing.assert_allclose(plain.decode(tokens), expected, atol=1e-5)
        assert not kept
        plain.hook.carry(lambda node: node.write(np.zeros_like(node.read())))
        assert not np.allclose(plain.decode([80]), fused.decode([80]), atol=0.1)
