"""KL, agreement and NLL of two runs, by formulas written out, and how runs are put together."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from pytest_kvgate.analysis import UndefinedError
from pytest_kvgate.analysis.effects import (
    EFFECT_MEASURES,
    ClosedLoop,
    DenseRun,
    LayerShare,
    LoopRun,
    TokenEffects,
    Variant,
)

Row = Sequence[float]
ORACLE = Variant(32, 0.02, "oracle")
LANDMARK = Variant(32, 0.02, "landmark", (0, 3))
SMALL = Variant(16, 0.01, "token-oracle")


def compared(dense: Sequence[Row], sparse: Sequence[Row], targets: Sequence[int]) -> TokenEffects:
    def as_logits(rows: Sequence[Row]) -> list[np.ndarray[tuple[int], np.dtype[np.float32]]]:
        return [np.array(row, dtype=np.float32) for row in rows]

    return DenseRun.of(as_logits(dense), targets).effects(as_logits(sparse))


def log_probabilities(row: Row) -> list[float]:
    top = max(row)
    total = math.log(math.fsum(math.exp(x - top) for x in row))
    return [x - top - total for x in row]


@st.composite
def runs(draw: st.DrawFn) -> tuple[list[list[float]], list[list[float]], list[int]]:
    n_token, n_vocab = draw(st.integers(1, 5)), draw(st.integers(1, 6))
    logit = st.integers(-480, 480).map(lambda eighths: eighths / 8)  # exact, and with ties
    rows = [
        [draw(st.lists(logit, min_size=n_vocab, max_size=n_vocab)) for _ in range(n_token)]
        for _ in range(2)
    ]
    targets = [draw(st.integers(0, n_vocab - 1)) for _ in range(n_token)]
    return rows[0], rows[1], targets


@given(runs())
def test_effects_are_those_of_the_formulas(
    drawn: tuple[list[list[float]], list[list[float]], list[int]],
) -> None:
    dense, sparse, targets = drawn
    effects = compared(dense, sparse, targets)
    assert effects.position.tolist() == list(range(len(dense)))
    assert effects.trace.tolist() == [0] * len(dense)
    for place, (before, after, target) in enumerate(zip(dense, sparse, targets, strict=True)):
        p, q = log_probabilities(before), log_probabilities(after)
        divergence = math.fsum(math.exp(a) * (a - b) for a, b in zip(p, q, strict=True))
        assert effects.kl[place] == pytest.approx(max(0, divergence), rel=1e-9, abs=1e-12)
        assert effects.kl[place] >= 0
        assert effects.agrees[place] == (before.index(max(before)) == after.index(max(after)))
        assert effects.nll_dense[place] == pytest.approx(-p[target], abs=1e-9)
        assert effects.nll_sparse[place] == pytest.approx(-q[target], abs=1e-9)


@given(runs(), st.floats(-50, 50, width=32))
def test_a_distribution_does_not_differ_from_itself(
    drawn: tuple[list[list[float]], list[list[float]], list[int]], shift: float
) -> None:
    dense, _, targets = drawn
    same = compared(dense, dense, targets)
    assert same.kl.tolist() == [0.0] * len(dense)
    assert same.agrees.all()
    assert same.values("nll_increase").tolist() == [0.0] * len(dense)
    shifted = compared([[0.0, 1.0]], [[shift, shift + 1.0]], [0])
    assert shifted.kl[0] == pytest.approx(0, abs=1e-9)


def test_two_tokens_by_hand() -> None:
    """From (3/4, 1/4) to (1/2, 1/2) and back."""
    apart, even = [math.log(3), 0.0], [0.0, 0.0]
    effects = compared([apart, even], [even, apart], [1, 0])
    there = 0.75 * math.log(1.5) + 0.25 * math.log(0.5)
    back = 0.5 * math.log(0.5 / 0.75) + 0.5 * math.log(0.5 / 0.25)
    assert effects.kl.tolist() == pytest.approx([there, back], abs=1e-6)
    assert there != pytest.approx(back, abs=1e-3)  # from the dense run, not from the sparse one
    assert effects.nll_dense.tolist() == pytest.approx([math.log(4), math.log(2)], abs=1e-6)
    assert effects.nll_sparse.tolist() == pytest.approx([math.log(2), math.log(4 / 3)], abs=1e-6)
    assert effects.values("nll_increase").tolist() == pytest.approx(
        [math.log(0.5), math.log(2 / 3)], abs=1e-6
    )
    assert effects.mean("kl") == pytest.approx((there + back) / 2, abs=1e-6)
    # the first of equally likely tokens is the likeliest, so both times it is the same one
    assert effects.values("top1").tolist() == [1.0, 1.0]
    assert compared([apart], [[0.0, 0.1]], [0]).values("top1").tolist() == [0.0]


def test_tokens_that_are_ruled_out() -> None:
    none = -math.inf
    ruled_out = compared([[0.0, none, 0.0]], [[0.0, none, 0.0]], [0])
    assert ruled_out.kl.tolist() == [0.0]
    # the sparse run allows what the dense one does not: that costs the others' share
    allowed = compared([[0.0, none]], [[0.0, 0.0]], [0])
    assert allowed.kl.tolist() == pytest.approx([math.log(2)])
    # and the other way round there is no finite code for it
    impossible = compared([[0.0, 0.0]], [[0.0, none]], [1])
    assert impossible.kl.tolist() == [math.inf]
    assert impossible.nll_sparse.tolist() == [math.inf]
    assert impossible.mean("kl") == math.inf


def test_very_different_logits_stay_finite() -> None:
    effects = compared([[3e4, -3e4]], [[-3e4, 3e4]], [0])
    assert effects.kl.tolist() == [6e4]
    assert effects.nll_sparse.tolist() == [6e4]
    assert not effects.agrees.any()


@pytest.mark.parametrize("n_sparse", [1, 3])
def test_as_many_predictions_are_needed_as_the_dense_run_has(n_sparse: int) -> None:
    with pytest.raises(ValueError, match="zip"):
        compared([[0.0, 1.0]] * 2, [[0.0, 1.0]] * n_sparse, [0, 1])


def made(n_token: int, seed: int) -> TokenEffects:
    rng = np.random.default_rng(seed)
    logits = rng.normal(size=(2, n_token, 5))
    targets = rng.integers(0, 5, n_token)
    return compared(logits[0].tolist(), logits[1].tolist(), targets.tolist())


def test_joined_prompts_are_numbered_and_keep_their_tokens() -> None:
    parts = [made(3, 1), made(1, 2), made(2, 3)]
    joined = TokenEffects.joined(parts)
    assert joined.trace.tolist() == [0, 0, 0, 1, 2, 2]
    assert joined.position.tolist() == [0, 1, 2, 0, 0, 1]
    for name in ("kl", "agrees", "nll_dense", "nll_sparse"):
        expected = [value for part in parts for value in getattr(part, name).tolist()]
        assert getattr(joined, name).tolist() == expected
    # every token weighs the same, whatever prompt it is of
    assert joined.mean("kl") == pytest.approx(math.fsum(joined.kl) / 6)


@pytest.mark.parametrize("measure", EFFECT_MEASURES)
def test_intervals_are_over_tokens_of_few_prompts_and_over_prompts_of_five(measure: str) -> None:
    few = TokenEffects.joined([made(20, seed) for seed in range(4)])
    many = TokenEffects.joined([made(20, seed) for seed in range(5)])
    for effects, n, drawn in ((few, 80, "steps"), (many, 5, "traces")):
        for each in EFFECT_MEASURES:
            if each != measure:
                continue
            interval = effects.interval(each)
            assert interval is not None
            assert (interval.n, interval.drawn, interval.confidence) == (n, drawn, 0.95)
            assert interval.low < effects.mean(each) < interval.high
            narrower = effects.interval(each, 0.5)
            assert narrower is not None
            assert interval.low < narrower.low < narrower.high < interval.high
            assert effects.interval(each) == interval


def test_the_interval_over_tokens_is_as_wide_as_the_standard_error_says() -> None:
    effects = made(400, 1)
    interval = effects.interval("kl")
    assert interval is not None
    error = effects.kl.std(ddof=1) / math.sqrt(400)
    assert interval.high - interval.low == pytest.approx(2 * 1.96 * error, rel=0.15)


def test_one_token_has_no_interval() -> None:
    assert made(1, 1).interval("kl") is None


def share(seed: int) -> LayerShare:
    rng = np.random.default_rng(seed)
    return LayerShare(float(rng.random()), seed + 1, float(rng.random()), seed + 2)


def closed_loop(seed: int, undefined: dict[Variant, str] | None = None) -> ClosedLoop:
    runs = {
        variant: LoopRun(made(3 + seed, 10 * seed + place), {1: share(seed), 4: share(seed + 7)})
        for place, variant in enumerate((LANDMARK, ORACLE, SMALL))
        if variant not in (undefined or {})
    }
    return ClosedLoop(
        noise=made(3 + seed, 99 + seed),
        eos_ignored_from=seed or None,
        runs=runs,
        undefined=undefined or {},
        paged_layers=(1, 4),
        sparse_tail=2,
        fused=bool(seed % 2),
    )


def test_coverage_is_the_mean_over_units_of_all_layers() -> None:
    run = LoopRun(made(2, 1), {0: LayerShare(1.5, 2, 0, 4), 3: LayerShare(0.25, 1, 0, 4)})
    assert run.coverage == pytest.approx(1.75 / 3)
    assert LoopRun(made(2, 1), {}).coverage is None
    assert LoopRun(made(2, 1), {2: LayerShare(0, 0, 1, 4)}).coverage is None


def test_joined_runs_add_up_by_layer() -> None:
    first = LoopRun(made(2, 1), {0: share(1), 3: share(2)})
    second = LoopRun(made(3, 2), {3: share(5), 8: share(6)})
    joined = LoopRun.joined([first, second])
    assert set(joined.layers) == {0, 3, 8}
    assert joined.layers[0] == share(1)
    assert joined.layers[8] == share(6)
    both = joined.layers[3]
    assert (both.n_unit, both.n_step) == (3 + 6, 4 + 7)
    assert both.coverage == pytest.approx(share(2).coverage + share(5).coverage)
    assert both.lost == pytest.approx(share(2).lost + share(5).lost)
    assert joined.effects.trace.tolist() == [0, 0, 1, 1, 1]


def test_what_one_prompt_leaves_undefined_is_so_for_all() -> None:
    why = "too short"
    joined = ClosedLoop.joined([closed_loop(0), closed_loop(1, {ORACLE: why}), closed_loop(2)])
    assert set(joined.runs) == {LANDMARK, SMALL}
    assert joined.undefined == {ORACLE: why}
    assert joined.n_token == 3 + 4 + 5
    assert joined.eos_ignored_from == 1  # the first of any prompt
    assert joined.run(SMALL).effects.trace.tolist() == [0] * 3 + [1] * 4 + [2] * 5
    assert joined.noise.trace.tolist() == [0] * 3 + [1] * 4 + [2] * 5
    with pytest.raises(UndefinedError, match="too short"):
        joined.run(ORACLE)
    with pytest.raises(KeyError):
        joined.run(Variant(32, 0.5, "oracle"))


def test_variants_are_listed_by_page_size_dense_layers_and_budget() -> None:
    more = Variant(32, 0.01, "quest")
    closed = closed_loop(0, {ORACLE: "too short", more: "below a page"})
    assert closed.variants(32) == [more, ORACLE, LANDMARK]
    assert closed.variants(16) == [SMALL]
    assert closed.variants(64) == []


@pytest.mark.parametrize("seed", range(3))
def test_plain_values_make_the_same_again(seed: int) -> None:
    closed = ClosedLoop.joined([closed_loop(seed), closed_loop(seed, {SMALL: "wörds"})])
    again = ClosedLoop.from_json(json.loads(json.dumps(closed.as_json())))
    assert (again.undefined, again.paged_layers) == ({SMALL: "wörds"}, (1, 4))
    assert (again.sparse_tail, again.fused) == (closed.sparse_tail, closed.fused)
    assert again.eos_ignored_from == closed.eos_ignored_from == (seed or None)
    assert list(again.runs) == list(closed.runs) == [LANDMARK, ORACLE]
    pairs = [(again.noise, closed.noise)]
    for variant, run in closed.runs.items():
        found = again.run(variant)
        assert found.layers == run.layers
        assert found.coverage == run.coverage
        pairs.append((found.effects, run.effects))
    for one, other in pairs:
        for name in ("kl", "agrees", "nll_dense", "nll_sparse", "trace", "position"):
            before, after = getattr(other, name), getattr(one, name)
            assert after.dtype == before.dtype
            np.testing.assert_array_equal(after, before)
        for measure in EFFECT_MEASURES:
            assert one.mean(measure) == other.mean(measure)
            assert one.interval(measure) == other.interval(measure)


def test_values_that_are_infinite_survive_too() -> None:
    effects = compared([[0.0, 0.0]], [[0.0, -math.inf]], [1])
    closed = ClosedLoop(effects, {ORACLE: LoopRun(effects, {})}, {}, (0,), 0, True)
    again = ClosedLoop.from_json(json.loads(json.dumps(closed.as_json())))
    assert again.run(ORACLE).effects.kl.tolist() == [math.inf]
    assert again.run(ORACLE).coverage is None
