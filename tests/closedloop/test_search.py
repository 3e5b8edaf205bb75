"""The search for the cheapest assignment, against running every assignment there is."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path

import pytest

from pytest_kvgate.analysis import PAGE_SELECTORS
from pytest_kvgate.analysis.assignment import Search
from pytest_kvgate.analysis.effects import Variant
from pytest_kvgate.analysis.resident import resident
from pytest_kvgate.closedloop import ClosedLoopError, Loop, LoopSettings
from pytest_kvgate.closedloop.search import propose
from tests.closedloop.layered import (
    PAGE_SIZE,
    SELECTOR,
    SETTINGS,
    every_assignment,
    layered_model,
    open_loop,
)
from tests.models import Shape, tiny_model

BUDGETS = (0.1, 0.2, 0.4)


@pytest.fixture(scope="module")
def one_matters(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Loop]:
    """A model of four layers: all but layer 2 spread their mass evenly, and add nothing."""
    path = tmp_path_factory.mktemp("search") / "one.gguf"
    with open_loop(layered_model(path, worth=(0, 0, 1, 0), focus=(0, 0, 0.5, 0))) as loop:
        yield loop


@pytest.fixture(scope="module")
def all_matter(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Loop]:
    """A model of four layers that matter more or less, not in the order of what they lose."""
    path = tmp_path_factory.mktemp("search") / "all.gguf"
    with open_loop(layered_model(path, worth=(0.3, 1.5, 1, 0.6), focus=(1, 0.5, 2, 1))) as loop:
        yield loop


@pytest.fixture(scope="module")
def every(all_matter: Loop) -> Mapping[Variant, float]:
    """The KL of every assignment of the model whose layers all matter."""
    return every_assignment(all_matter, BUDGETS)


def plan(loop: Loop, max_kl: float, max_runs: int = 100) -> Search:
    return propose(loop, SELECTOR, PAGE_SIZE, BUDGETS, max_kl, max_runs=max_runs)


def kept(loop: Loop, variant: Variant) -> float:
    """Return the bytes that stay resident."""
    return resident(
        loop.caches,
        loop.settings.grid(variant.page_size),
        variant.budget,
        loop.n_context,
        selector=PAGE_SELECTORS[variant.selector],
        dense_layers=variant.dense_layers,
    ).total


def least(loop: Loop, every: Mapping[Variant, float], max_kl: float) -> float:
    """Return the fewest bytes of all assignments that meet a limit."""
    return min(kept(loop, variant) for variant, kl in every.items() if kl <= max_kl)


def test_a_budget_that_does_in_all_layers_is_proposed_with_none_of_them_dense(
    all_matter: Loop, every: Mapping[Variant, float]
) -> None:
    sparse = [Variant(PAGE_SIZE, budget, SELECTOR) for budget in BUDGETS]
    found = plan(all_matter, every[sparse[0]])
    assert found.best is not None
    assert found.best.variant == sparse[0]
    assert [item.variant for item in found.tried] == sparse[:1]
    assert found.ending == "all-measured"


def test_the_one_layer_that_matters_is_found_although_it_loses_the_least(
    one_matters: Loop,
) -> None:
    sparse = one_matters.run(Variant(PAGE_SIZE, BUDGETS[0], SELECTOR))
    lost = {layer: share.lost / share.n_step for layer, share in sparse.layers.items()}
    assert min(lost, key=lost.__getitem__) == 2
    found = plan(one_matters, sparse.effects.mean("kl") / 1000)
    assert found.best is not None
    assert found.best.variant == Variant(PAGE_SIZE, BUDGETS[0], SELECTOR, (2,))
    assert found.ending == "all-measured"


@pytest.mark.parametrize("rank", [1, 4, 9, 16, 24, 33, 40])
def test_nothing_cheaper_meets_the_limit_where_the_runs_suffice_to_measure_it(
    all_matter: Loop, every: Mapping[Variant, float], rank: int
) -> None:
    max_kl = sorted(every.values())[rank]
    found = plan(all_matter, max_kl)
    assert found.best is not None
    assert found.ending == "all-measured"
    assert found.best.kl == every[found.best.variant] <= max_kl
    assert found.best.resident.total == least(all_matter, every, max_kl)


@pytest.mark.parametrize("rank", [1, 9, 24])
@pytest.mark.parametrize("max_runs", [1, 3, 6, 10, 14])
def test_with_fewer_runs_the_proposal_is_the_cheapest_that_was_measured(
    all_matter: Loop, every: Mapping[Variant, float], rank: int, max_runs: int
) -> None:
    max_kl = sorted(every.values())[rank]
    found = plan(all_matter, max_kl, max_runs)
    assert len(found.tried) <= max_runs
    assert {item.variant: item.kl for item in found.tried}.items() <= every.items()
    meeting = [kept(all_matter, item.variant) for item in found.tried if item.kl <= max_kl]
    assert (found.best is None) == (not meeting)
    if found.best is not None:
        assert found.best.resident.total == min(meeting)
    if found.ending == "max-runs":
        assert len(found.tried) == max_runs
    if found.ending == "all-measured":
        assert min(meeting) == least(all_matter, every, max_kl)


def test_no_assignment_is_run_twice_and_each_is_told_before_it_is_run(
    all_matter: Loop, every: Mapping[Variant, float]
) -> None:
    told: list[tuple[Variant, int, int]] = []
    max_kl = sorted(every.values())[9]
    found = propose(
        all_matter,
        SELECTOR,
        PAGE_SIZE,
        BUDGETS,
        max_kl,
        max_runs=100,
        before_run=lambda variant, number, most: told.append((variant, number, most)),
    )
    variants = [item.variant for item in found.tried]
    assert len(set(variants)) == len(variants)
    assert told == [(variant, place + 1, 100) for place, variant in enumerate(variants)]


def test_where_nothing_meets_the_limit_the_nearest_of_all_is_named(all_matter: Loop) -> None:
    few = every_assignment(all_matter, BUDGETS[:1])
    max_kl = min(few.values()) * 0.999
    found = propose(all_matter, SELECTOR, PAGE_SIZE, BUDGETS[:1], max_kl)
    assert found.best is None
    assert found.roomier is None
    assert found.ending == "all-measured"
    assert found.nearest.variant == min(few, key=few.__getitem__)


def test_more_that_is_cheaper_than_runs_are_left_is_not_begun(all_matter: Loop) -> None:
    found = plan(all_matter, 1e-9, 40)
    assert found.best is None
    assert found.ending == "too-many-left"
    assert len(found.tried) < 40


def test_a_limit_within_the_noise_is_refused(tmp_path: Path) -> None:
    with open_loop(tiny_model(tmp_path / "tiny.gguf")) as loop:
        noise = loop.noise.mean("kl")
        for limit in (noise, noise / 2, 0.0, -1.0, float("nan")):
            with pytest.raises(ClosedLoopError, match="cannot be told from noise"):
                plan(loop, limit)


@pytest.mark.parametrize(
    ("budgets", "reason"),
    [
        ((), "give one or more"),
        ((0.0, 0.1), "above 0"),
        ((0.1, 1.5), "up to 1"),
        ((0.01, 0.02), "1%: 1% of 201 tokens is 2 tokens, less than one 8-token page. 2%: "),
        ((1.0,), "nothing is saved"),
    ],
)
def test_budgets_that_leave_nothing_to_run_are_refused(
    one_matters: Loop, budgets: tuple[float, ...], reason: str
) -> None:
    with pytest.raises(ClosedLoopError) as caught:
        propose(one_matters, SELECTOR, PAGE_SIZE, budgets, 0.1)
    assert reason in str(caught.value)


def test_a_budget_below_one_page_is_named_beside_those_that_are_run(one_matters: Loop) -> None:
    found = propose(one_matters, SELECTOR, PAGE_SIZE, (0.01, 0.4), 10.0)
    assert list(found.undefined) == [0.01]
    assert found.best is not None
    assert found.best.variant.budget == 0.4


def test_an_unknown_selector_and_a_search_without_runs_are_refused(one_matters: Loop) -> None:
    with pytest.raises(ClosedLoopError, match="no selector 'best'"):
        propose(one_matters, "best", PAGE_SIZE, BUDGETS, 0.1)
    with pytest.raises(ClosedLoopError, match="0 runs"):
        plan(one_matters, 0.1, 0)


def test_an_oracle_is_planned_with_and_keeps_no_metadata(one_matters: Loop) -> None:
    found = propose(one_matters, "oracle", PAGE_SIZE, BUDGETS, 10.0)
    assert found.best is not None
    assert found.best.resident.metadata == 0


def test_layers_that_share_a_cache_are_dense_together(tmp_path: Path) -> None:
    shape = Shape(n_layer=6)
    model = tiny_model(tmp_path / "shared.gguf", "gemma4", shape=shape)
    with open_loop(model, LoopSettings(n_token=4, sinks=8, recent=8)) as loop:
        shared = [cache.layers for cache in loop.caches if len(cache.layers) > 1 and cache.paged]
        assert shared == [(3, 5)]
        found = propose(loop, SELECTOR, PAGE_SIZE, (0.1, 0.4), loop.noise.mean("kl") + 1e-12)
    tried = [set(item.variant.dense_layers) for item in found.tried]
    assert all((3 in dense) == (5 in dense) for dense in tried)
    assert any(3 in dense for dense in tried)


def test_layers_with_a_window_are_neither_paged_nor_made_dense(tmp_path: Path) -> None:
    shape = Shape(n_layer=3, windowed=(True, False, False))
    with open_loop(tiny_model(tmp_path / "windowed.gguf", "gemma3", shape=shape)) as loop:
        # the tiny model is all but sure of each next token
        found = propose(loop, SELECTOR, PAGE_SIZE, BUDGETS, loop.noise.mean("kl") + 1e-300)
    assert found.paged_layers == (1, 2)
    assert {layer for item in found.tried for layer in item.variant.dense_layers} == {1, 2}


def test_tokens_of_the_prompt_that_are_read_sparsely_count_in_the_context(tmp_path: Path) -> None:
    model = tiny_model(tmp_path / "tiny.gguf")
    with open_loop(model) as plain:
        assert plain.n_context == 200 + SETTINGS.n_token
    with open_loop(model, LoopSettings(n_token=8, sparse_tail=5, sinks=8, recent=8)) as tail:
        assert tail.n_context == 200 + 7
