"""Sparse logits of planted attention, where what is kept is known on paper.

Pages of 4 tokens; 4 sinks and 4 recent tokens are free. The first KV head has a plateau on page 3
(keys of level 4), a peak on page 6 (one of 6 among zeros) and a pair on page 8 (two of 5.5 and two
of -5.5); the second has a plateau of 4 on page 12. All other keys are zero.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from pytest_kvgate.analysis.effects import Variant
from pytest_kvgate.closedloop import ClosedLoopError, LoopSettings
from tests.closedloop.loops import Watch, follow, open_loop
from tests.closedloop.plain import divergence
from tests.closedloop.planted import GROUP, N_HEAD, N_HEAD_KV, Planted

PAGE_SIZE, N_PROMPT, N_STEP = 4, 64, 8
SETTINGS = LoopSettings(n_token=N_STEP, sinks=4, recent=4)
PLATEAU, PEAK, PAIR, OTHER = 3, 6, 8, 12
#: The token of every decode step; those before 16 are the hot ones.
QUERY = 48

#: 11.5% of 65 to 69 tokens are one page, and of 70 to 72 two.
BUDGET = 0.115
N_VISIBLE = range(N_PROMPT + 1, N_PROMPT + N_STEP + 1)

#: The pages that a KV head keeps where the budget buys one, and where it buys two. The first head:
#: the pair has the largest mass for both query heads, then the peak; the plateau has the highest
#: mean; the peak the highest key and the highest box with its radius (3 + 3), then the pair;
#: mean-std gives the pair 0 + 5.5 and the peak 1.5 + 2.6. The second: all but its plateau tie.
PAGES = {
    "oracle": ([PAIR], [PAIR, PEAK], [OTHER], [OTHER, 1]),
    "landmark": ([PLATEAU], [PLATEAU, PEAK], [OTHER], [OTHER, 1]),
    "quest": ([PEAK], [PEAK, PAIR], [OTHER], [OTHER, 1]),
    "mean-std": ([PAIR], [PAIR, PEAK], [OTHER], [OTHER, 1]),
    "cuboid-mean": ([PEAK], [PEAK, PAIR], [OTHER], [OTHER, 1]),
}


def tokens_of(pages: list[int]) -> list[int]:
    return [page * PAGE_SIZE + place for page in pages for place in range(PAGE_SIZE)]


def kept(selector: str, n: int) -> list[list[int]]:
    """Return the eligible positions that each KV head keeps of ``n``."""
    two = n >= 70
    if selector == "recency":
        # of 4 recent tokens one is free, at least, beyond the last whole page before them
        last = {65: 14, 66: 14, 67: 14, 68: 15, 69: 15, 70: 15, 71: 15, 72: 16}[n]
        return [tokens_of([last, last - 1] if two else [last])] * N_HEAD_KV
    if selector == "token-oracle":
        # the peak, the pair's two, the plateau; then the first of those that are all the same
        hot = [PEAK * 4, PAIR * 4, PAIR * 4 + 1]
        plateau = tokens_of([PLATEAU])
        first = [*hot, *plateau, 4] if two else [*hot, plateau[0]]
        return [first, tokens_of([OTHER, 1] if two else [OTHER])]
    first_one, first_two, second_one, second_two = PAGES[selector]
    return [
        tokens_of(first_two if two else first_one),
        tokens_of(second_two if two else second_one),
    ]


@pytest.fixture(scope="module")
def planted() -> Planted:
    rng = np.random.default_rng(1)
    levels = np.zeros((QUERY + 1, N_HEAD_KV))
    levels[0:4, 0] = 4
    levels[4, 0] = 6
    levels[8:12, 0] = [5.5, 5.5, -5.5, -5.5]
    levels[12:16, 1] = 4
    strengths = np.zeros((QUERY + 1, N_HEAD))
    strengths[QUERY] = [1, 0.5, 1, 0.25]
    prompt = [16 + position % 32 for position in range(N_PROMPT)]
    for place, page in enumerate((PLATEAU, PEAK, PAIR, OTHER)):
        prompt[page * 4 : page * 4 + 4] = range(place * 4, place * 4 + 4)
    return Planted(
        levels=levels,
        values=rng.normal(size=levels.shape) * 8,
        strengths=strengths,
        output=rng.normal(size=(QUERY + 1, N_HEAD)),
        own=rng.normal(size=QUERY + 1) / 8,
        prompt=tuple(prompt),
    )


@pytest.fixture(scope="module")
def model(planted: Planted, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return planted.write(tmp_path_factory.mktemp("planted") / "planted.gguf")


@pytest.mark.parametrize("selector", [*PAGES, "recency", "token-oracle"])
def test_only_what_is_kept_and_what_is_free_is_attended_to(
    planted: Planted, model: Path, watch: Watch, selector: str
) -> None:
    variant = Variant(PAGE_SIZE, BUDGET, selector)
    queries = [QUERY] * (N_STEP + 1)
    with open_loop(model, planted.prompt, follow(queries), SETTINGS) as loop:
        run = watch.run(loop, variant)

    coverage, lost, divergences = [], [], []
    for n, found in zip(N_VISIBLE, watch.logits, strict=True):
        tokens = [*planted.prompt, *queries][:n]
        eligible = np.zeros(n, dtype=bool)
        eligible[4 : (n - 4) // 4 * 4] = True
        visible = np.tile(~eligible, (N_HEAD, 1))
        masses = planted.masses(tokens)
        for kv_head, positions in enumerate(kept(selector, n)):
            heads = slice(kv_head * GROUP, (kv_head + 1) * GROUP)
            visible[heads, positions] = True
            of_pages = masses[heads][:, eligible].sum()
            coverage.append(masses[heads][:, positions].sum() / of_pages)
            lost.append(of_pages * (1 - coverage[-1]) / GROUP)
        expected = planted.logits(tokens, visible)
        np.testing.assert_allclose(found, expected, atol=1e-5)
        dense = planted.logits(tokens, np.ones_like(visible))
        divergences.append(divergence(dense, expected))
    np.testing.assert_allclose(run.effects.kl, divergences, rtol=1e-4, atol=1e-7)
    assert run.coverage is not None
    assert run.coverage == pytest.approx(np.mean(coverage), abs=1e-6)
    assert run.layers[0].lost == pytest.approx(sum(lost), abs=1e-5)
    # neither everything nor nothing was kept, and it shows
    assert 0 < run.coverage < 0.99
    assert min(divergences) > 1e-3


def test_attention_to_everything_is_what_is_planted(
    planted: Planted, model: Path, watch: Watch
) -> None:
    queries = [QUERY] * (N_STEP + 1)
    with open_loop(model, planted.prompt, follow(queries), SETTINGS) as loop:
        watch.run(loop, Variant(PAGE_SIZE, 1.0, "random"))
    for n, found in zip(N_VISIBLE, watch.logits, strict=True):
        tokens = [*planted.prompt, *queries][:n]
        expected = planted.logits(tokens, np.ones((N_HEAD, n), dtype=bool))
        np.testing.assert_allclose(found, expected, atol=1e-5)


@pytest.mark.parametrize("budget", [0.07, 0.115, 0.5, 1.0])
@pytest.mark.parametrize("selector", ["oracle", "landmark", "random", "token-oracle"])
def test_where_v_is_zero_no_selection_matters(
    planted: Planted, tmp_path: Path, watch: Watch, selector: str, budget: float
) -> None:
    silent = replace(planted, values=planted.values * 0)
    model = silent.write(tmp_path / "silent.gguf")
    with open_loop(model, silent.prompt, follow([QUERY] * (N_STEP + 1)), SETTINGS) as loop:
        run = watch.run(loop, Variant(PAGE_SIZE, budget, selector))
        noise = loop.noise
    assert noise.kl.max() == 0
    assert run.effects.kl.tolist() == [0.0] * N_STEP
    assert run.effects.agrees.all()
    for logits in watch.logits:
        np.testing.assert_allclose(logits, silent.own * 8, atol=1e-6)
    hidden = [(node.softmax[1] == 0).any() for node in watch.edited]
    assert hidden == [budget < 1] * N_STEP


def test_where_nothing_that_is_kept_has_any_weight_the_run_is_refused(
    planted: Planted, tmp_path: Path
) -> None:
    """Nothing is free, the hot pages take all of the softmax, and recency keeps others."""
    steep = replace(planted, strengths=planted.strengths * 1000, prompt=planted.prompt[:-1])
    settings = replace(SETTINGS, sinks=0, recent=0)
    oracle = Variant(PAGE_SIZE, BUDGET, "oracle")
    model = steep.write(tmp_path / "steep.gguf")
    with open_loop(model, steep.prompt, follow([QUERY] * (N_STEP + 1)), settings) as loop:
        expected = loop.run(oracle)
        with pytest.raises(ClosedLoopError, match=r"layer 0: nothing that is kept .* 64 tokens"):
            loop.run(Variant(PAGE_SIZE, BUDGET, "recency"))
        found = loop.run(oracle)
    np.testing.assert_array_equal(found.effects.kl, expected.effects.kl)
    assert found.layers == expected.layers
    assert expected.coverage == pytest.approx(1)


def test_a_unit_without_eligible_mass_is_not_counted(planted: Planted, tmp_path: Path) -> None:
    """Two of the free first tokens take the whole softmax, one for each KV head."""
    background = [16 + position % 32 for position in range(N_PROMPT - 2)]
    steep = replace(planted, strengths=planted.strengths * 1000, prompt=(4, 12, *background))
    model = steep.write(tmp_path / "free.gguf")
    with open_loop(model, steep.prompt, follow([QUERY] * (N_STEP + 1)), SETTINGS) as loop:
        run = loop.run(Variant(PAGE_SIZE, BUDGET, "recency"))
    share = run.layers[0]
    assert (share.n_unit, share.n_step) == (0, N_STEP * N_HEAD_KV)
    assert (share.coverage, share.lost, run.coverage) == (0, 0, None)
