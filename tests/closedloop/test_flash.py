"""Sparse runs with flash attention: the written output by the definition, and as without it."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from pytest_kvgate.analysis.effects import LoopRun, Variant
from pytest_kvgate.engine import EngineSettings
from tests.capture.captures import hadamard
from tests.closedloop.loops import (
    BUDGET,
    PAGE_SIZE,
    SETTINGS,
    Edited,
    Floats,
    Watch,
    open_loop,
    selection,
)
from tests.closedloop.plain import Reals, Selection, renormalised
from tests.models import HEAD_DIM, SOFTCAP

ARCHITECTURES = ("llama", "gpt-oss", "bloom", "gemma2", "deepseek2", "gemma4", "qwen35")
SELECTORS = ("oracle", "landmark", "quest", "recency", "token-oracle")
Q8_BLOCK = 32
#: What q·k is multiplied by in the attention node; gemma2 scales q before.
SCALES = {"llama": HEAD_DIM**-0.5, "gemma2": 1.0}


def settings(cache_type_k: str, cache_type_v: str, *, fused: bool) -> EngineSettings:
    return EngineSettings(
        n_threads=1,
        cache_type_k=cache_type_k,
        cache_type_v=cache_type_v,
        flash_attention=fused,
    )


def rounded(queries: Floats, cache_type: str) -> Reals:
    """Round q as the CPU's product with K does."""
    if cache_type == "q8_0":
        blocks = queries.reshape(-1, Q8_BLOCK)
        largest = np.abs(blocks).max(axis=1, keepdims=True)
        scale = (largest / 127).astype(np.float16).astype(np.float64)
        steps = np.rint(blocks.astype(np.float64) * 127 / largest)
        return np.asarray((steps * scale).reshape(queries.shape))
    return queries.astype(np.float16).astype(np.float64)


def masses_of(node: Edited, cache_type: str, architecture: str) -> list[Reals]:
    """Return the softmax over everything, ``[G, n]`` of each KV head."""
    queries = rounded(node.queries, cache_type).reshape(len(node.keys), -1, node.keys.shape[2])
    masses = []
    for of_group, keys in zip(queries, node.keys.astype(np.float64), strict=True):
        logits = of_group @ keys.T * SCALES[architecture]
        if architecture == "gemma2":
            logits = SOFTCAP * np.tanh(logits / SOFTCAP)
        weights = np.exp(logits - logits.max(axis=1, keepdims=True))
        masses.append(weights / weights.sum(axis=1, keepdims=True))
    return masses


def output_by_definition(
    node: Edited, choice: Selection | None, cache_type: str, architecture: str
) -> tuple[Reals, list[float]]:
    assert node.values is not None
    turn = hadamard().astype(np.float64) if cache_type == "q8_0" else np.eye(node.keys.shape[2])
    queries = node.queries.reshape(len(node.keys), -1, node.keys.shape[2])
    outputs, coverage = [], []
    for kv_head, masses in enumerate(masses_of(node, cache_type, architecture)):
        values = node.values[kv_head].astype(np.float64)
        if choice is None:
            outputs.append(masses @ values)
            continue
        keys = node.keys[kv_head].astype(np.float64)
        seen = masses, queries[kv_head] @ turn, keys @ turn
        kept = choice.kept(*seen)
        coverage.append(choice.coverage(masses, kept))
        outputs.append(renormalised(masses, choice.visible(node.n_visible, kept)) @ values)
    return np.concatenate(outputs), coverage


@pytest.mark.parametrize("cache_type", ["f16", "q8_0"])
@pytest.mark.parametrize("architecture", ["llama", "gemma2"])
def test_the_output_is_that_of_attention_to_the_selection(
    tiny: Callable[[str], Path], watch: Watch, architecture: str, cache_type: str
) -> None:
    """In float32 from what is in the cache: only the rounding of q is the engine's."""
    engine = settings(cache_type, cache_type, fused=True)
    with open_loop(tiny(architecture), engine=engine) as loop:
        dense_layers = loop.paged_layers[1:]
        for selector in SELECTORS:
            variant = Variant(PAGE_SIZE, BUDGET, selector, dense_layers)
            run = watch.run(loop, variant)
            units: list[float] = []
            for node in watch.edited:
                layer = loop.layers[node.ordinal]
                if not layer.paged:
                    assert node.output is None
                    continue
                choice = None if layer.index in dense_layers else selection(variant)
                expected, coverage = output_by_definition(node, choice, cache_type, architecture)
                assert node.output is not None
                np.testing.assert_allclose(node.output, expected, atol=2e-5)
                units += coverage
            assert run.coverage == pytest.approx(np.mean(units), abs=1e-5)


#: How far the logits may lie apart, as a share of what the selection does to them.
TOLERANCES = {
    # the product with V rounds the softmax to half precision, and the output here does not; and the
    # prompt was read with flash attention
    ("f16", "f16"): 0.005,
    # bf16 has 8 bits, and so has the softmax that is multiplied by it
    ("bf16", "bf16"): 0.02,
    ("q8_0", "f16"): 0.02,
    # without flash attention V is f16 at least: this is what quantizing V changes
    ("q8_0", "q8_0"): 0.05,
}


@pytest.mark.parametrize(
    ("architecture", "cache_types"),
    [
        (architecture, cache_types)
        for architecture in ARCHITECTURES
        for cache_types in TOLERANCES
        # MLA has no V of its own, and a quantized V needs flash attention
        if architecture != "deepseek2" or cache_types[0] != "q8_0"
    ],
)
def test_a_sparse_run_is_the_same_with_and_without_flash_attention(
    tiny: Callable[[str], Path],
    watch: Watch,
    architecture: str,
    cache_types: tuple[str, str],
) -> None:
    """The selection moves the logits by much more; recency cannot rank otherwise by a rounding."""
    cache_type_k, cache_type_v = cache_types
    variants = [
        Variant(PAGE_SIZE, BUDGET, "recency"),
        Variant(PAGE_SIZE, BUDGET, "landmark"),
    ]
    rows: dict[bool, Floats] = {}
    runs: dict[bool, list[LoopRun]] = {}
    for fused in (False, True):
        unfused_v = "f16" if cache_type_v == "q8_0" else cache_type_v
        engine = settings(cache_type_k, cache_type_v if fused else unfused_v, fused=fused)
        with open_loop(tiny(architecture), engine=engine) as loop:
            runs[fused] = [watch.run(loop, variant) for variant in variants[1:]]
            runs[fused].append(watch.run(loop, variants[0]))
            rows[fused] = np.array(watch.logits)
            watch.run(loop, Variant(PAGE_SIZE, BUDGET, "recency", loop.paged_layers))
            dense = np.array(watch.logits)
    effect = np.abs(rows[True] - dense).max()
    assert effect > 0.3
    assert np.abs(rows[True] - rows[False]).max() < TOLERANCES[cache_types] * effect
    landmark, recency = zip(runs[False], runs[True], strict=True)
    assert recency[1].coverage == pytest.approx(recency[0].coverage, rel=0.02)
    # a near tie may fall otherwise, and then other pages are kept from there on
    assert landmark[1].coverage == pytest.approx(landmark[0].coverage, abs=0.02)
    assert len(rows[True]) == SETTINGS.n_token


@pytest.mark.parametrize("selector", [*SELECTORS, "mean-std", "cuboid-mean"])
def test_every_selector_covers_the_same_with_and_without_flash_attention(
    tiny: Callable[[str], Path], selector: str
) -> None:
    runs = []
    for fused in (False, True):
        engine = settings("f16", "f16", fused=fused)
        with open_loop(tiny("llama"), engine=engine) as loop:
            runs.append(loop.run(Variant(PAGE_SIZE, BUDGET, selector)))
    assert runs[1].coverage == pytest.approx(runs[0].coverage, abs=1e-4)
    np.testing.assert_allclose(runs[1].effects.kl, runs[0].effects.kl, atol=5e-4)
