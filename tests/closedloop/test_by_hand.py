"""Sparse logits of a random llama model, against a plain model that attends by the definitions."""

from __future__ import annotations

from dataclasses import replace
from functools import cache
from pathlib import Path

import numpy as np
import pytest

from pytest_kvgate.analysis.effects import Variant
from tests.closedloop.loops import (
    BUDGET,
    CONTINUATION,
    PAGE_SIZE,
    PROMPT,
    SETTINGS,
    Watch,
    open_loop,
    selection,
)
from tests.closedloop.plain import SELECTORS, PlainLlama, Reals, divergence

#: Of logits with a standard deviation of about 1, computed in float32.
TOLERANCE = 1e-4
INPUTS = CONTINUATION[: SETTINGS.n_token]
TARGETS = CONTINUATION[1 : SETTINGS.n_token + 1]
N_VISIBLE = range(len(PROMPT) + 1, len(PROMPT) + SETTINGS.n_token + 1)


@cache
def read(model: Path, n_token: int) -> PlainLlama:
    """Return the plain model after the first tokens of the prompt."""
    plain = PlainLlama(model)
    plain.run(PROMPT[:n_token])
    return plain


def by_hand(model: Path, variant: Variant | None) -> tuple[PlainLlama, list[Reals]]:
    """Return the plain model after a run, and its logits."""
    plain = read(model, len(PROMPT)).branch()
    if variant is None:
        return plain, plain.run(INPUTS)
    return plain, plain.run(INPUTS, selection(variant), variant.dense_layers)


@pytest.fixture(scope="module")
def dense(tiny_llama: Path) -> list[Reals]:
    return by_hand(tiny_llama, None)[1]


def test_the_plain_model_is_the_dense_one(
    tiny_llama: Path, dense: list[Reals], watch: Watch
) -> None:
    with open_loop(tiny_llama):
        pass
    runs = np.array(watch.logits[-SETTINGS.n_token :])
    np.testing.assert_allclose(runs, dense, atol=TOLERANCE)


@pytest.mark.parametrize("dense_layers", [(), (0,), (1,)], ids=str)
@pytest.mark.parametrize("selector", SELECTORS)
def test_sparse_logits_are_those_of_the_definitions(
    tiny_llama: Path,
    dense: list[Reals],
    watch: Watch,
    selector: str,
    dense_layers: tuple[int, ...],
) -> None:
    variant = Variant(PAGE_SIZE, BUDGET, selector, dense_layers)
    plain, expected = by_hand(tiny_llama, variant)
    with open_loop(tiny_llama) as loop:
        run = watch.run(loop, variant)
        assert loop.paged_layers == (0, 1)

    np.testing.assert_allclose(watch.logits, expected, atol=TOLERANCE)
    # the selection matters by far more than that
    assert np.abs(np.array(expected) - dense).max(axis=1).min() > 100 * TOLERANCE

    effects = run.effects
    divergences = [divergence(*rows) for rows in zip(dense, expected, strict=True)]
    np.testing.assert_allclose(effects.kl, divergences, rtol=1e-3, atol=1e-6)
    likeliest = [a.argmax() == b.argmax() for a, b in zip(dense, expected, strict=True)]
    assert effects.agrees.tolist() == likeliest
    for found, rows in ((effects.nll_dense, dense), (effects.nll_sparse, expected)):
        nll = [
            np.log(np.exp(row).sum()) - row[target]
            for row, target in zip(rows, TARGETS, strict=True)
        ]
        np.testing.assert_allclose(found, nll, atol=TOLERANCE)

    assert set(run.layers) == {0, 1} - set(dense_layers)
    for layer, share in run.layers.items():
        units = plain.shares[layer]
        assert (share.n_unit, share.n_step) == (len(units.coverage), len(units.lost))
        assert share.n_step == SETTINGS.n_token * plain.n_head_kv
        assert share.coverage == pytest.approx(sum(units.coverage), abs=1e-4)
        assert share.lost == pytest.approx(sum(units.lost), abs=1e-4)
    units_of_all = [value for share in plain.shares.values() for value in share.coverage]
    assert run.coverage == pytest.approx(np.mean(units_of_all), abs=1e-5)


def test_the_steps_and_heads_that_are_compared_differ_in_what_they_may_keep(
    tiny_llama: Path,
) -> None:
    """The runs above prove little if one page is always as good as another."""
    variant = Variant(PAGE_SIZE, BUDGET, "oracle")
    choice = selection(variant)
    assert {choice.chosen(n) for n in N_VISIBLE} == {1, 2}
    assert {len(choice.pages(n)) for n in N_VISIBLE} == {16, 17}
    kept = by_hand(tiny_llama, variant)[0].kept
    apart = [kept[n, layer, 0] != kept[n, layer, 1] for n in N_VISIBLE for layer in (0, 1)]
    assert sum(apart) > len(apart) / 2
    later = [kept[n, layer, g] for n in N_VISIBLE for layer in (0, 1) for g in (0, 1)]
    assert len(set(map(tuple, later))) > SETTINGS.n_token


def test_errors_of_earlier_layers_and_steps_add_up(tiny_llama: Path) -> None:
    """What a layer sees of a run depends on what was lost before it."""
    together = by_hand(tiny_llama, Variant(PAGE_SIZE, BUDGET, "recency"))[0]
    alone = by_hand(tiny_llama, Variant(PAGE_SIZE, BUDGET, "recency", (0,)))[0]
    difference = np.subtract(together.shares[1].coverage, alone.shares[1].coverage)
    assert np.abs(difference).min() > 0


@pytest.mark.parametrize(
    ("page_size", "sinks", "recent", "budget"),
    [
        (1, 3, 7, 0.02),  # single tokens
        (5, 0, 0.05, 0.05),  # the first tokens may be hidden
        (4, 4, 0, 0.03),  # and here the query's own, at the end of a page
        (32, 32, 0.3, 0.21),  # the recent window leaves three pages, of which one is kept
        (16, 8, 1, 0.9),  # more pages than are eligible
    ],
)
@pytest.mark.parametrize("selector", ["oracle", "quest", "token-oracle"])
def test_any_page_grid_is_that_of_the_definitions(
    tiny_llama: Path,
    watch: Watch,
    selector: str,
    page_size: int,
    sinks: int,
    recent: float,
    budget: float,
) -> None:
    variant = Variant(page_size, budget, selector)
    settings = replace(SETTINGS, sinks=sinks, recent=recent)
    plain = read(tiny_llama, len(PROMPT)).branch()
    expected = plain.run(INPUTS, selection(variant, settings))
    with open_loop(tiny_llama, settings=settings) as loop:
        run = watch.run(loop, variant)
    np.testing.assert_allclose(watch.logits, expected, atol=TOLERANCE)
    units = [value for share in plain.shares.values() for value in share.coverage]
    assert run.coverage == pytest.approx(np.mean(units), abs=1e-5)


@pytest.mark.parametrize("tail", [1, 7])
def test_a_sparse_tail_begins_within_the_prompt(tiny_llama: Path, watch: Watch, tail: int) -> None:
    settings = replace(SETTINGS, sparse_tail=tail)
    variant = Variant(PAGE_SIZE, BUDGET, "landmark")
    with open_loop(tiny_llama, settings=settings) as loop:
        run = watch.run(loop, variant)

    inputs = [*PROMPT[-tail:], *CONTINUATION[: settings.n_token - 1]]
    rows: dict[bool, list[Reals]] = {}
    for sparse in (False, True):
        plain = read(tiny_llama, len(PROMPT) - tail).branch()
        rows[sparse] = plain.run(inputs, selection(variant) if sparse else None)
    np.testing.assert_allclose(watch.logits, rows[True], atol=TOLERANCE)
    compared = zip(rows[False][tail - 1 :], rows[True][tail - 1 :], strict=True)
    divergences = [divergence(*pair) for pair in compared]
    assert len(divergences) == settings.n_token
    np.testing.assert_allclose(run.effects.kl, divergences, rtol=1e-3, atol=1e-6)
    followed = CONTINUATION[: settings.n_token]
    nll = [
        np.log(np.exp(row).sum()) - row[target]
        for row, target in zip(rows[True][tail - 1 :], followed, strict=True)
    ]
    np.testing.assert_allclose(run.effects.nll_sparse, nll, atol=TOLERANCE)
