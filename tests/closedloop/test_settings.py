"""What a closed loop compares, and what it does with tokens, budgets and layers."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from pytest_kvgate.analysis import PAGE_SELECTORS, PageKeys, Selector, SelectorError
from pytest_kvgate.analysis.effects import Variant
from pytest_kvgate.analysis.selectors import register
from tests.closedloop.loops import (
    BUDGET,
    CONTINUATION,
    F16,
    PAGE_SIZE,
    PROMPT,
    SETTINGS,
    Floats,
    Watch,
    likeliest,
    open_loop,
    random_tokens,
)

LANDMARK = Variant(PAGE_SIZE, BUDGET, "landmark")
FEW = replace(SETTINGS, n_token=4)


@pytest.mark.parametrize("n_token", [1, 4])
@pytest.mark.parametrize("tail", [0, 1, 2, 9])
def test_a_run_begins_with_the_tail_and_ends_with_the_last_prediction(
    tiny_llama: Path, watch: Watch, tail: int, n_token: int
) -> None:
    settings = replace(SETTINGS, n_token=n_token, sparse_tail=tail)
    with open_loop(tiny_llama, settings=settings) as loop:
        run = watch.run(loop, LANDMARK)
        closed = loop.compare([LANDMARK])
    # the prediction after the last token of the prompt is sparse where that token was
    n_decoded = n_token - 1 if tail else n_token
    inputs = [*PROMPT[len(PROMPT) - tail :], *CONTINUATION[:n_decoded]]
    assert [call.tokens for call in watch.decoded[: len(inputs)]] == [[token] for token in inputs]
    seen = [node.n_visible for node in watch.edited[: 2 * len(inputs)]]
    first = len(PROMPT) - tail + 1
    assert seen == [n for n in range(first, first + len(inputs)) for _layer in range(2)]
    assert len(run.effects.kl) == len(loop.noise.kl) == closed.n_token == n_token
    assert run.effects.position.tolist() == list(range(n_token))
    assert closed.sparse_tail == tail
    # every decoded token was attended sparsely, whether its prediction counts or not
    assert {share.n_step for share in run.layers.values()} == {2 * len(inputs)}


@pytest.mark.parametrize("tail", [0, 3])
def test_the_next_token_is_asked_for_once_in_the_dense_run_and_followed_in_all(
    tiny_llama: Path, watch: Watch, tail: int
) -> None:
    asked: list[int] = []
    logits_seen: list[Floats] = []

    def choose(step: int, logits: Floats) -> int:
        asked.append(step)
        logits_seen.append(logits.copy())
        return CONTINUATION[step]

    settings = replace(FEW, sparse_tail=tail)
    with open_loop(tiny_llama, next_token=choose, settings=settings) as loop:
        of_dense = watch.decoded
        run = watch.run(loop, LANDMARK)
        of_sparse = [call.tokens[0] for call in watch.decoded]
    # the prompt, one step to learn from, the dense run, and the noise
    n_run = len(of_sparse)
    dense = [call.tokens[0] for call in of_dense[-2 * n_run : -n_run]]
    assert dense == of_sparse == [*PROMPT[len(PROMPT) - tail :], *CONTINUATION[: settings.n_decode]]
    assert asked == list(range(settings.n_decode + 1))
    # it is given what the dense model said before that token: after the prompt, first
    prefill = [call for call in of_dense if call.n_before + len(call.tokens) == len(PROMPT)]
    np.testing.assert_allclose(logits_seen[0], prefill[0].logits, atol=1e-4)
    targets = CONTINUATION[: settings.n_decode + 1][-4:]
    before = logits_seen[-4:]
    nll = [
        np.log(np.exp(row.astype(np.float64)).sum()) - row[target]
        for row, target in zip(before, targets, strict=True)
    ]
    np.testing.assert_allclose(run.effects.nll_dense, nll, atol=1e-5)


def test_a_sparse_run_follows_the_dense_one_even_where_it_would_not(
    tiny_llama: Path, watch: Watch
) -> None:
    with open_loop(tiny_llama, next_token=likeliest) as loop:
        dense_tokens = [call.tokens[0] for call in watch.decoded[-SETTINGS.n_token :]]
        run = watch.run(loop, Variant(PAGE_SIZE, 0.06, "random"))
        own = [int(row.argmax()) for row in watch.logits]
        tokens = [call.tokens[0] for call in watch.decoded]
        nll_dense = run.effects.nll_dense
    assert tokens == dense_tokens
    assert own[:-1] != tokens[1:]
    # the likeliest token followed in the dense run
    assert (np.exp(-nll_dense) >= 1 / len(watch.logits[0])).all()
    agreed = [a == b for a, b in zip(own[:-1], tokens[1:], strict=True)]
    assert run.effects.agrees[:-1].tolist() == agreed


def test_what_cannot_be_run_is_left_out_with_the_reason(tiny: Callable[[str], Path]) -> None:
    below = Variant(PAGE_SIZE, 0.05, "landmark")
    windowed = Variant(PAGE_SIZE, BUDGET, "landmark", (0, 1))
    beyond = Variant(PAGE_SIZE, BUDGET, "landmark", (7,))
    whole = Variant(128, 0.9, "landmark")
    with open_loop(tiny("gemma3"), settings=FEW) as loop:
        closed = loop.compare([below, LANDMARK, windowed, beyond, whole, LANDMARK, below])
        assert loop.paged_layers == closed.paged_layers == (1,)
        assert loop.problem(LANDMARK) is None
    assert list(closed.runs) == [LANDMARK]
    assert list(closed.undefined) == [below, windowed, beyond, whole]
    assert closed.undefined[below] == ("5% of 156 tokens is 7 tokens, less than one 8-token page")
    assert closed.undefined[windowed] == (
        "layer 0 of dense_layers=[0, 1] is not paged, so it cannot be kept dense. Accepted: 1."
    )
    assert closed.undefined[beyond].startswith("layer 7 of dense_layers=[7] is not paged")
    assert closed.undefined[whole].startswith(
        "at the first sparse step, of 156 tokens, all positions are free, so there is no page"
    )
    assert not closed.fused


def test_with_a_sparse_tail_the_first_sparse_token_decides_what_is_defined(
    tiny_llama: Path,
) -> None:
    """160 tokens buy a page at 5%; with a tail of ten, the first step sees fewer."""
    variant, prompt = Variant(PAGE_SIZE, 0.05, "landmark"), random_tokens(159)
    for tail, problem in (
        (0, None),
        (1, "5% of 159 tokens is 7 tokens, less than one 8-token page"),
    ):
        with open_loop(tiny_llama, prompt, settings=replace(FEW, sparse_tail=tail)) as loop:
            assert loop.problem(variant) == problem


@pytest.mark.parametrize("dense_layers", [(0,), (1,), (0, 1), (1, 0)], ids=str)
def test_dense_layers_lose_nothing(tiny_llama: Path, dense_layers: tuple[int, ...]) -> None:
    with open_loop(tiny_llama, settings=FEW) as loop:
        run = loop.run(Variant(PAGE_SIZE, BUDGET, "landmark", dense_layers))
    assert set(run.layers) == {0, 1} - set(dense_layers)
    assert (run.coverage is None) == (len(dense_layers) == 2)
    assert (run.effects.kl.max() < 1e-10) == (len(dense_layers) == 2)


def test_a_selector_of_ones_own_ranks_pages(tiny_llama: Path, watch: Watch) -> None:
    seen: list[tuple[tuple[int, ...], tuple[int, ...], list[int]]] = []

    def oldest(queries: Floats, pages: PageKeys) -> Floats:
        seen.append((queries.shape, pages.rows.shape, pages.numbers.tolist()))
        return np.tile(-pages.numbers.astype(np.float32), (len(queries), 1))

    registry = register([Selector("oldest", oldest)], PAGE_SELECTORS)
    settings = replace(FEW, registry=registry)
    with open_loop(tiny_llama, settings=settings) as loop:
        run = watch.run(loop, Variant(PAGE_SIZE, BUDGET, "oldest"))
    assert run.coverage is not None
    for node in watch.edited:
        before, after = node.softmax
        # of the pages 2 to 17 or so the first, two from 160 tokens on
        n_kept = 1 if node.n_visible < 160 else 2
        last = (node.n_visible - (8 if node.n_visible <= 160 else 9)) // 8
        assert (after[:, : (2 + n_kept) * 8] > before[:, : (2 + n_kept) * 8]).all()
        assert not after[:, (2 + n_kept) * 8 : last * 8].any()
        assert (after[:, last * 8 :] > before[:, last * 8 :]).all()
    # one KV head at a time, at one step
    assert {(shape, rows[1:]) for shape, rows, _ in seen} == {((1, 2, 64), (8, 64))}
    assert {numbers[0] for *_, numbers in seen} == {2}


def test_what_a_selector_raises_comes_out_and_the_loop_goes_on(tiny_llama: Path) -> None:
    def fail(_queries: Floats, _pages: PageKeys) -> Floats:
        raise ValueError("wrong")

    def not_a_number(queries: Floats, pages: PageKeys) -> Floats:
        return np.full((len(queries), len(pages.rows)), np.nan, dtype=np.float32)

    registry = register([Selector("fail", fail), Selector("nan", not_a_number)], PAGE_SELECTORS)
    with open_loop(tiny_llama, settings=replace(FEW, registry=registry)) as loop:
        expected = loop.run(LANDMARK)
        with pytest.raises(ValueError, match="wrong"):
            loop.run(Variant(PAGE_SIZE, BUDGET, "fail"))
        with pytest.raises(SelectorError, match="NaN"):
            loop.run(Variant(PAGE_SIZE, BUDGET, "nan"))
        found = loop.run(LANDMARK)
    assert found.layers == expected.layers
    np.testing.assert_array_equal(found.effects.kl, expected.effects.kl)


@pytest.mark.parametrize("architecture", ["llama", "qwen35"])
def test_a_run_does_not_depend_on_those_before_it(
    tiny: Callable[[str], Path], architecture: str
) -> None:
    """Summaries and cells are cut back; page sizes do not get into each other's way."""
    variants = [
        Variant(8, 0.12, "landmark"),
        Variant(16, 0.12, "quest", (1,)),
        Variant(8, 0.12, "oracle"),
        Variant(16, 0.12, "cuboid-mean"),
    ]
    # decoded tokens come to stand on eligible pages, and their keys depend on the run
    settings = replace(SETTINGS, n_token=24, recent=1)
    for engine in (F16, replace(F16, flash_attention=True)):
        with open_loop(tiny(architecture), settings=settings, engine=engine) as loop:
            closed = loop.compare(variants)
            again = {variant: loop.run(variant) for variant in reversed(variants)}
        for variant in variants[::3]:
            with open_loop(tiny(architecture), settings=settings, engine=engine) as loop:
                alone = loop.run(variant)
            for run in (closed.run(variant), again[variant]):
                np.testing.assert_array_equal(run.effects.kl, alone.effects.kl)
                np.testing.assert_array_equal(run.effects.nll_sparse, alone.effects.nll_sparse)
                assert run.layers == alone.layers
