"""What is written into the softmax of every kind of model, against the definition."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from pytest_kvgate.analysis.effects import LoopRun, Variant
from pytest_kvgate.closedloop import Loop
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
from tests.models import HEAD_DIM, WINDOW

SELECTORS = ("oracle", "landmark", "quest", "mean-std", "token-oracle")

#: The layers that are sparse, and those of them that read another layer's cache.
KINDS: dict[str, tuple[tuple[int, ...], tuple[int, ...]]] = {
    "llama": ((0, 1), ()),
    "stablelm": ((0, 1), ()),
    "qwen3": ((0, 1), ()),
    "qwen3moe": ((0, 1), ()),
    "gemma2": ((1,), ()),  # softcap
    "gemma3": ((1,), ()),
    "gemma4": ((1, 3), (3,)),
    "gpt-oss": ((1,), ()),  # learned sinks
    "bloom": ((0, 1), ()),  # ALiBi
    "mpt": ((0, 1), ()),  # ALiBi for three heads
    "deepseek2": ((0, 1), ()),  # MLA
    "plm": ((0, 1), ()),  # MLA that is spelled out
    "jamba": ((1,), ()),
    "granitehybrid": ((1,), ()),
    "nemotron_h": ((1,), ()),
    "lfm2": ((1,), ()),
    "qwen35": ((1, 3), ()),
}


def in_model_basis(vectors: Reals, cache_type: str) -> Reals:
    """Take back the rotation that llama.cpp gives q and K before a quantized cache."""
    if cache_type != "q8_0":
        return vectors
    assert vectors.shape[-1] == HEAD_DIM
    return np.asarray(vectors @ hadamard().astype(np.float64))


def by_definition(node: Edited, choice: Selection, cache_type: str) -> tuple[Reals, list[float]]:
    """Return the softmax that a node should have after the edit, and each KV head's coverage."""
    before = node.softmax[0].astype(np.float64)
    n_head_kv = len(node.keys)
    group = len(before) // n_head_kv
    keys = in_model_basis(node.keys.astype(np.float64), cache_type)
    queries = in_model_basis(node.queries.astype(np.float64), cache_type)
    after, coverage = [], []
    for kv_head in range(n_head_kv):
        heads = slice(kv_head * group, (kv_head + 1) * group)
        seen = before[heads], queries[heads], keys[kv_head]
        kept = choice.kept(*seen)
        coverage.append(choice.coverage(before[heads], kept))
        after.append(renormalised(before[heads], choice.visible(node.n_visible, kept)))
    return np.concatenate(after), coverage


def check_run(
    watch: Watch, loop: Loop, run: LoopRun, variant: Variant, shared: tuple[int, ...], cache: str
) -> None:
    """Assert that every node of the run was edited as defined, and counted."""
    units: dict[int, list[float]] = {}
    assert len(watch.edited) == SETTINGS.n_token * len(loop.layers)
    for node in watch.edited:
        layer = loop.layers[node.ordinal]
        assert node.before is not None
        assert node.after is not None
        # cell j holds position j, whatever was rewound before
        assert not node.before[:, node.n_visible :].any()
        assert not node.after[:, node.n_visible :].any()
        before, found = node.softmax
        assert (before[:, -WINDOW - 1] > 0).all() == layer.paged
        if layer.paged and layer.index not in variant.dense_layers:
            expected, coverage = by_definition(node, selection(variant), cache)
            np.testing.assert_allclose(found, expected, rtol=1e-4, atol=1e-7)
            assert not np.array_equal(found, before)
            if layer.index not in shared:
                units.setdefault(layer.index, []).extend(coverage)
        else:
            np.testing.assert_array_equal(found, before)
    assert {layer: share.n_unit for layer, share in run.layers.items()} == {
        layer: len(of_layer) for layer, of_layer in units.items()
    }
    for layer_index, of_layer in units.items():
        assert run.layers[layer_index].coverage == pytest.approx(sum(of_layer), abs=1e-4)
    every = [value for of_layer in units.values() for value in of_layer]
    assert run.coverage == (pytest.approx(np.mean(every), abs=1e-5) if every else None)


@pytest.mark.parametrize("architecture", KINDS)
def test_the_softmax_of_every_kind_is_edited_as_defined(
    tiny: Callable[[str], Path], watch: Watch, architecture: str
) -> None:
    paged, shared = KINDS[architecture]
    with open_loop(tiny(architecture)) as loop:
        assert loop.paged_layers == paged
        assert tuple(layer.index for layer in loop.layers if layer.shared_keys and layer.paged) == (
            shared
        )
        for selector in SELECTORS:
            variant = Variant(PAGE_SIZE, BUDGET, selector)
            check_run(watch, loop, watch.run(loop, variant), variant, shared, "f32")


@pytest.mark.parametrize("cache_type", ["f16", "bf16", "q8_0"])
def test_a_rounded_or_rotated_cache_is_scored_in_the_basis_of_the_model(
    tiny: Callable[[str], Path], watch: Watch, cache_type: str
) -> None:
    engine = EngineSettings(n_threads=1, cache_type_k=cache_type)
    with open_loop(tiny("llama"), engine=engine) as loop:
        for selector in (*SELECTORS, "cuboid-mean"):
            variant = Variant(PAGE_SIZE, BUDGET, selector)
            check_run(watch, loop, watch.run(loop, variant), variant, (), cache_type)


@pytest.mark.parametrize("dense_layers", [(1,), (3,), (1, 3)], ids=str)
@pytest.mark.parametrize(
    ("architecture", "shared"),
    [("gemma4", (3,)), ("qwen35", ())],  # of qwen35 the first attention node is that of layer 1
)
def test_dense_layers_are_left_as_they_are(
    tiny: Callable[[str], Path],
    watch: Watch,
    architecture: str,
    shared: tuple[int, ...],
    dense_layers: tuple[int, ...],
) -> None:
    with open_loop(tiny(architecture)) as loop:
        variant = Variant(PAGE_SIZE, BUDGET, "oracle", dense_layers)
        check_run(watch, loop, watch.run(loop, variant), variant, shared, "f32")


def test_a_learned_sink_keeps_its_share_beside_what_is_kept(
    tiny: Callable[[str], Path], watch: Watch
) -> None:
    """Its logit is the same as before, so against each kept token its weight is, too."""
    with open_loop(tiny("gpt-oss")) as loop:
        watch.run(loop, Variant(PAGE_SIZE, BUDGET, "oracle"))
        nodes = [node for node in watch.edited if loop.layers[node.ordinal].paged]
    assert nodes
    for node in nodes:
        before, after = (weights.astype(np.float64) for weights in node.softmax)
        sinks = [1 - weights.sum(axis=1) for weights in (before, after)]
        assert sinks[0].min() > 1e-3
        # position 0 is free
        np.testing.assert_allclose(sinks[1] / after[:, 0], sinks[0] / before[:, 0], rtol=1e-4)


def test_pages_are_ranked_by_random_as_the_selector_does(
    tiny: Callable[[str], Path], watch: Watch
) -> None:
    """Two runs choose the same pages, another step or another KV head others."""
    chosen: list[list[tuple[int, ...]]] = []
    with open_loop(tiny("llama")) as loop:
        for _ in range(2):
            watch.run(loop, Variant(PAGE_SIZE, BUDGET, "random", (1,)))
            chosen.append([])
            for node in watch.edited:
                if loop.layers[node.ordinal].index == 0:
                    after: Floats = node.softmax[1]
                    eligible = after[:, 16 : 16 * 9]
                    for heads in (eligible[:2], eligible[2:]):
                        pages = heads.reshape(2, -1, PAGE_SIZE).any(axis=(0, 2))
                        chosen[-1].append(tuple(np.flatnonzero(pages)))
    assert chosen[0] == chosen[1]
    assert len(set(chosen[0])) > len(chosen[0]) / 2
