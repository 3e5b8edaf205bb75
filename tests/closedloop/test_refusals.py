"""Models and prompts that have no closed loop."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from pytest_kvgate.closedloop import ClosedLoopError
from pytest_kvgate.closedloop.layers import AttentionLayer
from pytest_kvgate.engine import EngineError, EngineSettings
from tests.closedloop.loops import (
    CONTINUATION,
    F16,
    F32,
    PROMPT,
    SETTINGS,
    Floats,
    follow,
    open_loop,
)
from tests.models import WINDOW, Shape, tiny_model
from tests.sparse_models import compressed_model, sparse_model

Softmax = Callable[[AttentionLayer, Floats, Floats], Floats]

FEW = replace(SETTINGS, n_token=2)
ENGINES = {"unfused": F16, "fused": replace(F16, flash_attention=True)}


def refuse(
    model: Path,
    error: type[Exception],
    message: str,
    n_prompt: int = len(PROMPT),
    engine: EngineSettings = F32,
) -> None:
    with (
        pytest.raises(error, match=message),
        open_loop(model, PROMPT[:n_prompt], follow(CONTINUATION), FEW, engine),
    ):
        pass


@pytest.mark.parametrize("engine", ENGINES.values(), ids=ENGINES)
@pytest.mark.parametrize("top_k", [16, 4096])
@pytest.mark.parametrize("architecture", ["deepseek32", "glm-dsa"])
def test_a_natively_sparse_model_is_refused(
    tmp_path: Path, architecture: str, top_k: int, engine: EngineSettings
) -> None:
    """Whether its own top-k hides anything yet or not."""
    model = sparse_model(tmp_path / "sparse.gguf", architecture, top_k=top_k)
    refuse(model, ClosedLoopError, "natively sparse: .* there is no closed loop", engine=engine)


def test_a_model_with_compressed_keys_is_refused(tmp_path: Path) -> None:
    model = compressed_model(tmp_path / "compressed.gguf", top_k=8)
    refuse(model, EngineError, "natively sparse in a way that is not measured")


@pytest.mark.parametrize("architecture", ["gemma2", "gemma3", "gemma4", "gpt-oss"])
@pytest.mark.parametrize("engine", ENGINES.values(), ids=ENGINES)
def test_a_prompt_inside_the_sliding_window_is_refused(
    tiny: Callable[[str], Path], architecture: str, engine: EngineSettings
) -> None:
    """With one more token than the window holds the layers can be told apart."""
    refuse(
        tiny(architecture),
        ClosedLoopError,
        f"{WINDOW} tokens fit into this model's sliding window of {WINDOW}, so .* longer",
        WINDOW - 1,
        engine,
    )
    prompt = PROMPT[:WINDOW]
    with open_loop(tiny(architecture), prompt, follow(CONTINUATION), FEW, engine) as loop:
        assert {layer.paged for layer in loop.layers} == {True, False}


@pytest.mark.parametrize("engine", ENGINES.values(), ids=ENGINES)
def test_a_model_with_windows_only_is_refused(tmp_path: Path, engine: EngineSettings) -> None:
    shape = Shape(windowed=(True, True))
    model = tiny_model(tmp_path / "windows.gguf", "gemma3", shape=shape)
    refuse(model, ClosedLoopError, "no layer .* whole context, so .* nothing", engine=engine)
    refuse(model, ClosedLoopError, "fit into this model's sliding window", 20, engine)


@pytest.mark.parametrize("architecture", ["mamba", "rwkv6"])
def test_a_recurrent_model_is_refused(tiny: Callable[[str], Path], architecture: str) -> None:
    refuse(tiny(architecture), ClosedLoopError, "no layer .* whole context, so .* nothing")


@pytest.mark.parametrize("architecture", ["dream", "bert"])
def test_a_model_without_a_cache_is_refused(tiny: Callable[[str], Path], architecture: str) -> None:
    refuse(tiny(architecture), EngineError, "keeps no KV cache")


def test_chunked_attention_is_refused_on_a_prompt_shorter_than_a_chunk(
    tiny: Callable[[str], Path],
) -> None:
    refuse(tiny("llama4"), ClosedLoopError, "156 tokens fit into this model's sliding window")


def test_a_tail_as_long_as_the_prompt_is_refused(tiny: Callable[[str], Path]) -> None:
    for n_prompt in (19, 20):
        with (
            pytest.raises(
                ClosedLoopError, match=rf"the prompt has {n_prompt} tokens, so its last 20 cannot"
            ),
            open_loop(tiny("llama"), PROMPT[:n_prompt], settings=replace(FEW, sparse_tail=20)),
        ):
            pass
    with open_loop(tiny("llama"), PROMPT[:21], settings=replace(FEW, sparse_tail=20)) as loop:
        assert len(loop.noise.kl) == 2


def test_an_empty_prompt_is_refused(tiny: Callable[[str], Path]) -> None:
    with pytest.raises(ClosedLoopError, match="the prompt"), open_loop(tiny("llama"), []):
        pass


def shifted_heads(
    layer: AttentionLayer, queries: Floats, keys: Floats, softmax: Softmax = AttentionLayer.softmax
) -> Floats:
    return softmax(layer, np.roll(queries, 2, axis=0), keys)


def shifted_positions(
    layer: AttentionLayer, queries: Floats, keys: Floats, softmax: Softmax = AttentionLayer.softmax
) -> Floats:
    return softmax(layer, queries, np.roll(keys, 1, axis=1))


def other_scale(
    layer: AttentionLayer, queries: Floats, keys: Floats, softmax: Softmax = AttentionLayer.softmax
) -> Floats:
    return softmax(layer, queries * 2, keys)


def not_finite(
    layer: AttentionLayer, queries: Floats, keys: Floats, softmax: Softmax = AttentionLayer.softmax
) -> Floats:
    return softmax(layer, queries, keys * np.float32(np.inf))


@pytest.mark.parametrize(
    ("engine", "what"),
    [
        (F32, "softmax recomputed from q and K"),
        (replace(F16, flash_attention=True), "attention output recomputed from q, K and V"),
        (
            replace(F16, flash_attention=True, cache_type_k="q8_0", cache_type_v="q8_0"),
            "attention output recomputed from q, K and V",
        ),
    ],
    ids=["unfused", "f16", "q8_0"],
)
@pytest.mark.parametrize("wrong", [shifted_heads, shifted_positions, other_scale])
def test_a_cache_that_is_read_wrongly_is_refused(
    tiny: Callable[[str], Path],
    monkeypatch: pytest.MonkeyPatch,
    wrong: Softmax,
    engine: EngineSettings,
    what: str,
) -> None:
    """With flash attention, too, where there is no softmax to compare with."""
    monkeypatch.setattr(AttentionLayer, "softmax", wrong)
    refuse(tiny("llama"), ClosedLoopError, f"layer 0: the {what} .* read wrongly", engine=engine)


@pytest.mark.parametrize("engine", ENGINES.values(), ids=ENGINES)
def test_keys_that_are_no_numbers_are_refused(
    tiny: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch, engine: EngineSettings
) -> None:
    monkeypatch.setattr(AttentionLayer, "softmax", not_finite)
    refuse(tiny("llama"), ClosedLoopError, "finite", engine=engine)
