"""Attention masses, term by term, against examples small enough to work out by hand."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from numpy.typing import NDArray

from pytest_kvgate.analysis import SELECTORS, PageGrid, Plan, masses, measure, profile_trace
from pytest_kvgate.trace import Layer, TraceError, load_trace
from tests.traces import LayerArrays, layer_of_logits, make_trace, random_layer

EXACT = 1e-6


def masses_of(
    path: Path, layer: LayerArrays, n_visible: list[int] | None = None, kv_head: int = 0
) -> NDArray[np.float32]:
    """Return the masses ``[n_step, G, n_token]`` of one KV head of a layer on disk."""
    trace = load_trace(make_trace(path / "trace", [layer], n_visible))
    loaded: Layer = trace.layers[0]
    group = slice(kv_head * loaded.group_size, (kv_head + 1) * loaded.group_size)
    return masses.group_masses(
        loaded,
        kv_head,
        np.asarray(loaded.q[:, group]),
        masses.head_keys(loaded, kv_head, loaded.k.shape[1]),
        [step.n_visible for step in trace.steps],
    )


def test_masses_are_the_softmax_of_the_logits(tmp_path: Path) -> None:
    layer = layer_of_logits([math.log(1), math.log(2), math.log(5)])

    assert masses_of(tmp_path, layer)[0, 0] == pytest.approx([0.125, 0.25, 0.625], abs=EXACT)


def test_the_scale_multiplies_the_product_of_q_and_k(tmp_path: Path) -> None:
    # q·k is 4·ln 3 and 0; a quarter of it leaves odds of 3 to 1
    layer = LayerArrays(
        k=np.array([[[2 * math.log(3), 0], [0, 7]]], dtype=np.float32),
        q=np.array([[[2, 0]]], dtype=np.float32),
        scale=0.25,
    )

    assert masses_of(tmp_path, layer)[0, 0] == pytest.approx([0.75, 0.25], abs=EXACT)


def test_positions_behind_the_query_have_no_mass(tmp_path: Path) -> None:
    layer = layer_of_logits([0, 0, 0, 9, 9], n_step=2)

    first, second = masses_of(tmp_path, layer, [2, 3])[:, 0]

    assert first == pytest.approx([1 / 2, 1 / 2, 0, 0, 0], abs=EXACT)
    assert second == pytest.approx([1 / 3, 1 / 3, 1 / 3, 0, 0], abs=EXACT)
    assert first[2:].tolist() == [0, 0, 0]


def test_every_query_head_reads_the_kv_head_of_its_group(tmp_path: Path) -> None:
    # KV head 0 prefers the first token 3 to 1, KV head 1 the second 3 to 1
    odds = math.log(3)
    layer = LayerArrays(
        k=np.array([[[odds], [0]], [[0], [odds]]], dtype=np.float32),
        q=np.array([[[1], [0], [1], [2]]], dtype=np.float32),
        scale=1.0,
    )

    of_first = masses_of(tmp_path / "first", layer, kv_head=0)[0]
    of_second = masses_of(tmp_path / "second", layer, kv_head=1)[0]

    assert of_first == pytest.approx(np.array([[0.75, 0.25], [0.5, 0.5]]), abs=EXACT)
    assert of_second == pytest.approx(np.array([[0.25, 0.75], [0.1, 0.9]]), abs=EXACT)


def test_softcap_bends_the_logit(tmp_path: Path) -> None:
    # 2·tanh(x/2) with x = 2·artanh(½) is 1
    layer = replace(layer_of_logits([2 * math.atanh(0.5), 0]), softcap=2.0)
    odds = math.e

    assert masses_of(tmp_path, layer)[0, 0] == pytest.approx(
        [odds / (odds + 1), 1 / (odds + 1)], abs=EXACT
    )


def test_alibi_takes_slope_times_distance_from_every_logit(tmp_path: Path) -> None:
    layer = replace(layer_of_logits([0, 0, 0], n_step=1), alibi_slopes=(math.log(2),))

    assert masses_of(tmp_path, layer)[0, 0] == pytest.approx([1 / 7, 2 / 7, 4 / 7], abs=EXACT)


def test_alibi_counts_the_distance_from_the_query_of_each_step(tmp_path: Path) -> None:
    layer = replace(layer_of_logits([0, 0, 0], n_step=2), alibi_slopes=(math.log(2),))

    first, second = masses_of(tmp_path, layer, [2, 3])[:, 0]

    assert first == pytest.approx([1 / 3, 2 / 3, 0], abs=EXACT)
    assert second == pytest.approx([1 / 7, 2 / 7, 4 / 7], abs=EXACT)


def test_alibi_has_a_slope_per_query_head_of_the_group(tmp_path: Path) -> None:
    layer = LayerArrays(
        k=np.zeros((2, 2, 1), dtype=np.float32),
        q=np.ones((1, 4, 1), dtype=np.float32),
        alibi_slopes=(0.0, math.log(3), math.log(4), math.log(9)),
    )

    of_second = masses_of(tmp_path, layer, kv_head=1)[0]

    assert of_second == pytest.approx(np.array([[0.2, 0.8], [0.1, 0.9]]), abs=EXACT)


def test_softcap_comes_before_alibi(tmp_path: Path) -> None:
    # the cap holds the logit at 1, and then the distance takes ln 2: odds e/2 to 1
    layer = replace(
        layer_of_logits([2 * math.atanh(0.5), 0]), softcap=2.0, alibi_slopes=(math.log(2),)
    )
    odds = math.e / 2

    assert masses_of(tmp_path, layer)[0, 0] == pytest.approx(
        [odds / (odds + 1), 1 / (odds + 1)], abs=EXACT
    )


@pytest.mark.parametrize(
    ("window", "expected"),
    [
        (1, [0, 0, 0, 1]),
        (3, [0, 1 / 3, 1 / 3, 1 / 3]),
        (4, [1 / 4, 1 / 4, 1 / 4, 1 / 4]),
        (9, [1 / 4, 1 / 4, 1 / 4, 1 / 4]),
    ],
)
def test_a_window_sees_that_many_tokens_with_the_query_s_own(
    tmp_path: Path, window: int, expected: list[float]
) -> None:
    layer = replace(layer_of_logits([0, 0, 0, 0]), window=window)

    assert masses_of(tmp_path, layer)[0, 0] == pytest.approx(expected, abs=EXACT)


def test_a_window_moves_with_the_step(tmp_path: Path) -> None:
    layer = replace(layer_of_logits([0, 0, 0, 0], n_step=2), window=2)

    first, second = masses_of(tmp_path, layer, [3, 4])[:, 0]

    assert first.tolist() == [0, 0.5, 0.5, 0]
    assert second.tolist() == [0, 0, 0.5, 0.5]


def test_a_learned_sink_takes_its_share_and_gives_it_to_no_token(tmp_path: Path) -> None:
    layer = replace(layer_of_logits([0, 0]), sinks=np.array([math.log(2)], dtype=np.float32))

    row = masses_of(tmp_path, layer)[0, 0]

    assert row == pytest.approx([0.25, 0.25], abs=EXACT)


def test_a_learned_sink_above_every_logit_does_not_overflow(tmp_path: Path) -> None:
    layer = replace(layer_of_logits([0, 0]), sinks=np.array([60.0], dtype=np.float32))

    row = masses_of(tmp_path, layer)[0, 0]

    assert row == pytest.approx([math.exp(-60)] * 2, rel=1e-5)


def test_large_logits_do_not_overflow(tmp_path: Path) -> None:
    layer = layer_of_logits([1000, 1000, -1000])

    assert masses_of(tmp_path, layer)[0, 0].tolist() == [0.5, 0.5, 0]


@pytest.mark.parametrize("dtype", ["float16", "float32"])
def test_rows_sum_to_one(tmp_path: Path, dtype: str) -> None:
    layer = random_layer(3, n_token=70, n_step=3, dtype=dtype, alibi=True, softcap=5.0)

    for kv_head in range(2):
        rows = masses_of(tmp_path / str(kv_head), layer, kv_head=kv_head)
        assert rows.sum(axis=-1) == pytest.approx(np.ones((3, 2)), abs=EXACT)


def test_rows_sum_to_less_by_the_share_of_the_sink(tmp_path: Path) -> None:
    layer = random_layer(3, n_token=70, n_step=3, sinks=True)
    assert layer.sinks is not None
    logits = np.einsum("shd,td->sht", layer.q[:, :2], layer.k[0]) * 8**-0.5
    weights = np.exp(logits.astype(np.float64))
    for step, n in enumerate((68, 69, 70)):
        weights[step, :, n:] = 0
    sink = np.exp(layer.sinks[:2].astype(np.float64))

    sums = masses_of(tmp_path, layer).sum(axis=-1)

    assert sums == pytest.approx(1 - sink / (weights.sum(axis=-1) + sink), abs=EXACT)
    assert (sums < 0.999).all()


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("array", ["k", "q"])
@pytest.mark.parametrize("softcap", [None, 20.0])
def test_a_value_that_is_not_finite_is_named_with_layer_and_head(
    tmp_path: Path, array: str, value: float, softcap: float | None
) -> None:
    layer = random_layer(1, n_token=48, index=7, softcap=softcap)
    if array == "k":
        layer.k[1, 20, 3] = value
    else:
        layer.q[0, 2, 3] = value
    trace = load_trace(make_trace(tmp_path / "trace", [layer]))

    with pytest.raises(TraceError, match=r"layer 7, KV head 1\b"):
        profile_trace(trace, PageGrid(8, 8, 8), Plan((0.5,)))


def test_a_value_that_no_step_sees_is_not_read(tmp_path: Path) -> None:
    layer = random_layer(1, n_token=48, n_step=2)
    layer.k[1, 47, 3] = math.nan
    trace = load_trace(make_trace(tmp_path / "trace", [layer], [46, 47]))

    profile = profile_trace(trace, PageGrid(8, 8, 8), Plan((0.5,)))

    assert 0 < profile.coverage("landmark", 0.5) <= 1


def test_the_step_of_a_value_that_is_not_finite_is_named_in_any_block(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    layer = random_layer(1, n_token=48, n_step=4)
    layer.q[2, 0, 0] = math.nan
    trace = load_trace(make_trace(tmp_path / "trace", [layer]))
    monkeypatch.setattr(measure, "BLOCK_LOGITS", 2 * 2 * 48)

    with pytest.raises(TraceError, match=r"step 2\b"):
        profile_trace(trace, PageGrid(8, 8, 8), Plan((0.5,)))


@pytest.mark.parametrize("steps_per_block", [1, 2, 3])
def test_blocks_of_steps_give_the_same_numbers_as_one_block(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, steps_per_block: int
) -> None:
    layer = random_layer(
        5, n_token=90, n_step=5, n_head=6, alibi=True, softcap=4.0, sinks=True, dtype="float16"
    )
    trace = load_trace(make_trace(tmp_path / "trace", [layer]))
    grid, budgets = PageGrid(8, 8, 8), (0.1, 0.4)
    whole = profile_trace(trace, grid, Plan(budgets))
    group, n_token = 3, 90
    monkeypatch.setattr(measure, "BLOCK_LOGITS", steps_per_block * group * n_token)

    cut = profile_trace(trace, grid, Plan(budgets))

    assert whole.n_unit == cut.n_unit == 10
    for budget in budgets:
        for selector in SELECTORS:
            assert cut.coverage(selector, budget) == pytest.approx(
                whole.coverage(selector, budget), abs=EXACT
            )
            assert cut.total_mass(selector, budget) == pytest.approx(
                whole.total_mass(selector, budget), abs=EXACT
            )
    for number in ("support", "hottest", "eligible_mass"):
        assert getattr(cut, number).mean() == pytest.approx(getattr(whole, number).mean(), rel=1e-5)


@pytest.mark.parametrize(
    ("values", "blocks"),
    [
        (100, [slice(0, 5)]),
        (60, [slice(0, 3), slice(3, 5)]),
        (1, [slice(step, step + 1) for step in range(5)]),
    ],
)
def test_blocks_hold_as_many_steps_as_fit(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, values: int, blocks: list[slice]
) -> None:
    monkeypatch.setattr(measure, "BLOCK_LOGITS", values)
    layer = load_trace(make_trace(tmp_path / "trace", [random_layer(n_token=10, n_step=5)])).layers[
        0
    ]

    assert list(measure.step_blocks(layer, 5, 10, [PageGrid(2)], Plan(()), 1)) == blocks


@pytest.mark.parametrize("part", ["finite", "all"])
def test_every_float16_becomes_the_same_number(part: str) -> None:
    halves = np.arange(2**16, dtype=np.uint16).view(np.float16).reshape(256, 256)
    if part == "finite":  # what takes the fast way: subnormals and both zeros, too
        halves = halves[np.isfinite(halves)]

    singles = masses.single_precision(halves)

    wanted = halves.astype(np.float32)
    assert singles.dtype == np.float32
    known = ~np.isnan(wanted)
    # bit by bit, so that the sign of zero counts
    assert (singles.view(np.uint32)[known] == wanted.view(np.uint32)[known]).all()
    assert np.isnan(singles[~known]).all()


@pytest.mark.parametrize("value", [math.inf, -math.inf, math.nan])
def test_one_value_that_is_not_finite_stays_so_and_leaves_the_others(value: float) -> None:
    found = masses.single_precision(np.array([1.5, value, -(2.0**-24), 65504], dtype=np.float16))

    assert found[1] == value or (math.isnan(value) and math.isnan(found[1]))
    assert found[[0, 2, 3]].tolist() == [1.5, -(2.0**-24), 65504]


def test_single_precision_leaves_its_argument_and_takes_parts_of_arrays() -> None:
    halves = np.arange(24, dtype=np.float16).reshape(2, 3, 4)

    assert masses.single_precision(halves[:, 1:, ::2]).tolist() == [
        [[4, 6], [8, 10]],
        [[16, 18], [20, 22]],
    ]
    assert halves.ravel().tolist() == list(range(24))
    assert masses.single_precision(halves[:0]).shape == (0, 3, 4)
    singles = np.array([0.1, math.nan], dtype=np.float32)
    assert masses.single_precision(singles) is singles
