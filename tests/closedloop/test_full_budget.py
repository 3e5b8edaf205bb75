"""A budget for everything is the dense run again, within the noise of an edit of nothing."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from pytest_kvgate.analysis.effects import Variant
from pytest_kvgate.engine import EngineSettings
from tests.closedloop.loops import PAGE_SIZE, SETTINGS, Watch, open_loop

#: How far an edit that changes nothing moves the next token of these models, in nats: the softmax
#: is brought back to a sum of 1, which it had up to the last bits of float32.
UNFUSED_NOISE = 1e-10
#: With flash attention the engine adds up an f16 V in half precision, and the dense run does not.
FUSED_NOISE = 1e-5

ARCHITECTURES = (
    "llama",
    "gemma2",
    "gemma3",
    "gemma4",
    "gpt-oss",
    "deepseek2",
    "bloom",
    "jamba",
    "granitehybrid",
    "qwen35",
    "nemotron_h",
    "lfm2",
)
CACHES = {"f32": ("f32", "f32"), "f16": ("f16", "f16"), "bf16": ("bf16", "bf16")}


def unfused_cache(name: str) -> EngineSettings:
    cache_type_k, cache_type_v = CACHES.get(name, (name, "f16"))
    return EngineSettings(n_threads=1, cache_type_k=cache_type_k, cache_type_v=cache_type_v)


def fused_cache(name: str) -> EngineSettings:
    cache_type_k, cache_type_v = CACHES.get(name, (name, name))
    return EngineSettings(
        n_threads=1, cache_type_k=cache_type_k, cache_type_v=cache_type_v, flash_attention=True
    )


def check_full_budget(model: Path, watch: Watch, engine: EngineSettings, selector: str) -> None:
    fused = engine.flash_attention
    noise = FUSED_NOISE if fused else UNFUSED_NOISE
    with open_loop(model, engine=engine) as loop:
        run = watch.run(loop, Variant(PAGE_SIZE, 1.0, selector))
        full = watch.logits
        for node in watch.edited:
            if not loop.layers[node.ordinal].paged:
                assert node.output is None
                assert fused or np.array_equal(*node.softmax)
        watch.run(loop, Variant(PAGE_SIZE, 1.0, selector, loop.paged_layers))
        dense = watch.logits
        found = loop.noise
    assert len(full) == SETTINGS.n_token
    # the coverage of everything, as a sum of float32 masses divided by itself
    assert run.coverage == 1
    assert all(share.lost == 0 for share in run.layers.values())
    assert found.kl.max() <= noise
    assert run.effects.kl.max() <= noise
    assert run.effects.agrees.all()
    np.testing.assert_allclose(full, dense, rtol=0, atol=0 if fused else 1e-4)


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_a_full_budget_is_the_dense_run(
    tiny: Callable[[str], Path], watch: Watch, architecture: str
) -> None:
    check_full_budget(tiny(architecture), watch, unfused_cache("f32"), "landmark")


# MLA has no V of its own, and a quantized V needs flash attention
@pytest.mark.parametrize("cache", ["f16", "bf16", "q8_0"])
@pytest.mark.parametrize("architecture", ["llama", "gemma3", "bloom", "qwen35"])
def test_a_full_budget_is_the_dense_run_on_every_cache(
    tiny: Callable[[str], Path], watch: Watch, architecture: str, cache: str
) -> None:
    check_full_budget(tiny(architecture), watch, unfused_cache(cache), "quest")


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_a_full_budget_is_the_dense_run_with_flash_attention(
    tiny: Callable[[str], Path], watch: Watch, architecture: str
) -> None:
    check_full_budget(tiny(architecture), watch, fused_cache("f16"), "landmark")


@pytest.mark.parametrize("cache", ["f32", "bf16", "q8_0"])
@pytest.mark.parametrize("architecture", ["llama", "gemma3", "gpt-oss", "deepseek2"])
def test_a_full_budget_is_the_dense_run_with_flash_attention_on_every_cache(
    tiny: Callable[[str], Path], watch: Watch, architecture: str, cache: str
) -> None:
    check_full_budget(tiny(architecture), watch, fused_cache(cache), "oracle")
