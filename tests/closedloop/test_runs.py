"""How the runs of a loop are made: what is edited in which, and what they leave behind."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from pytest_kvgate.analysis.effects import Variant
from pytest_kvgate.closedloop import Loop
from pytest_kvgate.engine import Engine
from pytest_kvgate.engine.ggml import load_ggml
from tests.closedloop.loops import (
    BUDGET,
    CONTINUATION,
    F16,
    F32,
    PAGE_SIZE,
    SETTINGS,
    Floats,
    Watch,
    follow,
    open_loop,
    random_tokens,
    selection,
)
from tests.closedloop.plain import renormalised

FEW = replace(SETTINGS, n_token=4)
FUSED = replace(F16, flash_attention=True)


def test_the_noise_is_that_of_an_edit_which_the_dense_run_does_not_have(
    tiny_llama: Path, watch: Watch
) -> None:
    with Engine(tiny_llama, F32) as engine:
        context = engine.start(300)
        context.decode(random_tokens(155))
        untouched = [context.decode([token]) for token in CONTINUATION[:4]]
    watch.clear()
    with open_loop(tiny_llama, random_tokens(155), settings=FEW) as loop:
        dense, noisy = watch.logits[-8:-4], watch.logits[-4:]
        assert len(watch.edited) == 4 * len(loop.layers)
        noise = loop.noise
    np.testing.assert_array_equal(dense, untouched)
    assert not np.array_equal(noisy, dense)
    assert noise.kl.max() > 0
    for node in watch.edited:
        before, after = (weights.astype(np.float64) for weights in node.softmax)
        np.testing.assert_allclose(after, before / before.sum(axis=1, keepdims=True), rtol=1e-6)


def test_with_flash_attention_the_noise_is_that_of_the_engines_own(
    tiny_llama: Path, watch: Watch
) -> None:
    with Engine(tiny_llama, FUSED) as engine:
        context = engine.start(300)
        context.decode(random_tokens(155))
        untouched = [context.decode([token]) for token in CONTINUATION[:4]]
    watch.clear()
    with open_loop(tiny_llama, random_tokens(155), settings=FEW, engine=FUSED) as loop:
        dense, noisy = watch.logits[-8:-4], watch.logits[-4:]
        assert [node.output is not None for node in watch.edited] == [True] * 8
        noise = loop.noise
        assert loop.compare([]).fused
    np.testing.assert_array_equal(noisy, untouched)
    assert 1e-5 < np.abs(np.subtract(dense, untouched)).max() < 1e-2
    assert noise.kl.max() > 0


def test_a_softmax_that_is_not_in_reach_is_copied_there_and_back(
    tiny_llama: Path, watch: Watch, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As on a device whose memory this process cannot write to."""
    variant = Variant(PAGE_SIZE, BUDGET, "landmark")
    with open_loop(tiny_llama, settings=FEW) as loop:
        here = watch.run(loop, variant)
        rows = watch.logits
    monkeypatch.setattr(load_ggml()._library, "ggml_backend_buffer_is_host", lambda _buffer: False)
    with open_loop(tiny_llama, settings=FEW) as loop:
        there = watch.run(loop, variant)
        np.testing.assert_array_equal(watch.logits, rows)
    np.testing.assert_array_equal(there.effects.kl, here.effects.kl)
    assert there.layers == here.layers


def check_edits(watch: Watch, variant: Variant) -> None:
    for node in watch.edited:
        before, found = node.softmax
        group = len(before) // len(node.keys)
        for kv_head, keys in enumerate(node.keys.astype(np.float64)):
            heads = slice(kv_head * group, (kv_head + 1) * group)
            masses = before[heads].astype(np.float64)
            queries = node.queries[heads].astype(np.float64)
            choice = selection(variant)
            visible = choice.visible(node.n_visible, choice.kept(masses, queries, keys))
            expected = renormalised(masses, visible)
            np.testing.assert_allclose(found[heads], expected, rtol=1e-4, atol=1e-7)


@pytest.mark.parametrize(
    "n_prompt",
    [
        251,  # within the run llama.cpp takes 256 more cells into the graph
        1100,  # read in several batches
    ],
)
@pytest.mark.parametrize("architecture", ["llama", "jamba"])
def test_longer_prompts_are_edited_as_defined(
    tiny: Callable[[str], Path], watch: Watch, n_prompt: int, architecture: str
) -> None:
    variant = Variant(16, 0.08, "quest")
    with open_loop(tiny(architecture), random_tokens(n_prompt)) as loop:
        run = watch.run(loop, variant)
        padded = {node.before.shape[1] for node in watch.edited if node.before is not None}
    assert len(padded) == (2 if n_prompt == 251 else 1)
    check_edits(watch, variant)
    assert run.coverage is not None


def test_two_loops_of_one_engine_do_not_disturb_each_other(tiny_llama: Path) -> None:
    variant = Variant(PAGE_SIZE, BUDGET, "landmark")
    prompts = [random_tokens(155), random_tokens(170, seed=9)]
    alone: list[Floats] = []
    for prompt in prompts:
        with open_loop(tiny_llama, prompt, settings=FEW) as loop:
            alone.append(loop.run(variant).effects.nll_sparse.astype(np.float32))
    with Engine(tiny_llama, F32) as engine:
        loops = [Loop(engine, prompt, follow(CONTINUATION), FEW) for prompt in prompts]
        for _ in range(2):
            for loop, expected in zip(loops, alone, strict=True):
                found = loop.run(variant).effects.nll_sparse.astype(np.float32)
                np.testing.assert_array_equal(found, expected)
