"""A wrong read must not pass, and a right one must."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import pytest
from numpy.typing import NDArray

from pytest_kvgate.analysis import SOFTMAX_TOLERANCE, verify_capture
from pytest_kvgate.analysis.verification import OUTPUT_TOLERANCE
from pytest_kvgate.trace import UNROUNDED, Reference, Trace, load_trace
from tests.plain import head_masses, read_layer
from tests.traces import FloatArray, LayerArrays, make_trace, random_layer

N_VISIBLE = [38, 39, 40]
LAYERS = [
    random_layer(1, n_token=40, n_step=3, n_head=4, n_head_kv=2, sinks=True, softcap=10.0, index=0),
    random_layer(2, n_token=40, n_step=3, n_head=4, n_head_kv=2, alibi=True, window=16, index=3),
]


@dataclass(frozen=True)
class Captured:
    """A right trace and, as the engine's own softmax, the masses a plain program computes."""

    directory: Path
    trace: Trace
    reference: Reference


@pytest.fixture
def captured(tmp_path: Path) -> Captured:
    directory = make_trace(tmp_path / "trace", LAYERS, N_VISIBLE)
    trace = load_trace(directory)
    steps = (0, 2)
    softmax = []
    for position, layer in enumerate(LAYERS):
        plain = read_layer(directory, layer.fields)
        paths = []
        for step in steps:
            n = N_VISIBLE[step]
            rows = [head_masses(plain, step, head, n) for head in range(4)]
            paths.append(tmp_path / f"softmax-{position}-{step}.npy")
            np.save(paths[-1], np.array(rows, dtype=np.float32))
        softmax.append(tuple(paths))
    queries = {UNROUNDED: tuple(layer.q[list(steps)] for layer in trace.layers)}
    return Captured(directory, trace, Reference(steps, tuple(softmax), queries))


def with_layer(
    captured: Captured,
    position: int,
    *,
    k: FloatArray | None = None,
    scale: float | None = None,
) -> Trace:
    """Return the trace as a wrong read of one layer would have left it."""
    layers = list(captured.trace.layers)
    layer = layers[position]
    layers[position] = replace(
        layer,
        k=layer.k if k is None else k,
        scale=layer.scale if scale is None else scale,
    )
    return replace(captured.trace, layers=tuple(layers))


def with_queries(captured: Captured, position: int, q: NDArray[np.float32]) -> Reference:
    queries = list(captured.reference.queries[UNROUNDED])
    queries[position] = q
    return replace(captured.reference, queries={UNROUNDED: tuple(queries)})


def keys_of(captured: Captured, position: int) -> FloatArray:
    return np.array(captured.trace.layers[position].k)


def test_a_right_read_passes_with_room(captured: Captured) -> None:
    verification = verify_capture(captured.trace, captured.reference)

    assert verification.status == "passed"
    assert verification.max_abs_error < 1e-5
    assert verification.tolerance == SOFTMAX_TOLERANCE
    assert verification.reference == "softmax"


@pytest.mark.parametrize("position", [0, 1])
def test_two_swapped_rows_fail(captured: Captured, position: int) -> None:
    # rows 30 and 31 lie inside the window of the windowed layer
    k = keys_of(captured, position)
    k[:, [30, 31]] = k[:, [31, 30]]

    verification = verify_capture(with_layer(captured, position, k=k), captured.reference)

    assert verification.status == "failed"
    assert verification.max_abs_error > 1e-2


@pytest.mark.parametrize("position", [0, 1])
def test_a_shifted_kv_head_fails(captured: Captured, position: int) -> None:
    k = np.roll(keys_of(captured, position), 1, axis=0)

    verification = verify_capture(with_layer(captured, position, k=k), captured.reference)

    assert verification.status == "failed"
    assert verification.max_abs_error > 1e-2


@pytest.mark.parametrize("factor", [0.9, 1.1, 8**0.5])
def test_a_wrong_scale_fails(captured: Captured, factor: float) -> None:
    wrong = with_layer(captured, 0, scale=captured.trace.layers[0].scale * factor)

    assert verify_capture(wrong, captured.reference).status == "failed"


@pytest.mark.parametrize("shift", [-1, 1])
def test_positions_off_by_one_fail(captured: Captured, shift: int) -> None:
    k = np.roll(keys_of(captured, 0), shift, axis=1)

    verification = verify_capture(with_layer(captured, 0, k=k), captured.reference)

    assert verification.status == "failed"
    assert verification.max_abs_error > 1e-2


def test_one_stale_row_fails(captured: Captured) -> None:
    # the last step's own row, as if it was read before the step wrote it
    k = keys_of(captured, 0)
    k[:, 39] = 0

    verification = verify_capture(with_layer(captured, 0, k=k), captured.reference)

    assert verification.status == "failed"


def test_a_row_that_only_a_compared_step_sees_decides(captured: Captured) -> None:
    k = keys_of(captured, 0)
    k[:, 39] = 0
    only_first = replace(
        captured.reference,
        steps=(0,),
        softmax=tuple(paths[:1] for paths in captured.reference.softmax),
        queries={
            name: tuple(q[:1] for q in queries)
            for name, queries in captured.reference.queries.items()
        },
    )
    wrong = with_layer(captured, 0, k=k)

    assert verify_capture(wrong, only_first).status == "passed"
    assert verify_capture(wrong, captured.reference).status == "failed"


@pytest.mark.parametrize("window", [None, 15, 17])
def test_a_wrong_window_fails(captured: Captured, window: int | None) -> None:
    first, windowed = captured.trace.layers
    wrong = replace(captured.trace, layers=(first, replace(windowed, window=window)))

    assert verify_capture(wrong, captured.reference).status == "failed"


@pytest.mark.parametrize("term", ["softcap", "sinks"])
def test_a_forgotten_term_fails(captured: Captured, term: str) -> None:
    first, windowed = captured.trace.layers
    forgotten = replace(first, softcap=None) if term == "softcap" else replace(first, sinks=None)
    wrong = replace(captured.trace, layers=(forgotten, windowed))

    assert verify_capture(wrong, captured.reference).status == "failed"


def test_the_query_of_another_step_fails(captured: Captured) -> None:
    swapped = np.array(captured.reference.queries[UNROUNDED][0])[::-1]

    verification = verify_capture(captured.trace, with_queries(captured, 0, swapped))

    assert verification.status == "failed"


def test_a_stored_query_that_the_engine_did_not_multiply_fails(captured: Captured) -> None:
    first, windowed = captured.trace.layers
    q = np.array(first.q)
    q[2, 1, 0] += 0.5
    wrong = replace(captured.trace, layers=(replace(first, q=q), windowed))

    assert verify_capture(wrong, captured.reference).status == "failed"


def with_rounded_product(captured: Captured, positions: list[int]) -> Reference:
    """Return the reference of an engine that rounds q to halves in these layers' products."""
    unrounded = captured.reference.queries[UNROUNDED]
    rounded = tuple(np.round(q * 2) / 2 for q in unrounded)
    for position in positions:
        plain = read_layer(captured.directory, LAYERS[position].fields)
        for row, step in enumerate(captured.reference.steps):
            queries = [*plain.q]
            queries[step] = rounded[position][row].tolist()
            layer = replace(plain, q=queries)
            rows = [head_masses(layer, step, head, N_VISIBLE[step]) for head in range(4)]
            path = captured.reference.softmax[position][row]
            np.save(path, np.array(rows, dtype=np.float32))
    return replace(captured.reference, queries={UNROUNDED: unrounded, "as K": rounded})


@pytest.mark.parametrize("order", [(UNROUNDED, "as K"), ("as K", UNROUNDED)])
@pytest.mark.parametrize("positions", [[], [0, 1]])
def test_the_rounding_that_fits_best_counts(
    captured: Captured, order: tuple[str, str], positions: list[int]
) -> None:
    reference = with_rounded_product(captured, positions)
    ordered = {name: reference.queries[name] for name in order}

    verification = verify_capture(captured.trace, replace(reference, queries=ordered))

    assert verification.status == "passed"
    assert verification.max_abs_error < 1e-5


def test_a_rounding_that_was_not_offered_does_not_count(captured: Captured) -> None:
    reference = with_rounded_product(captured, [0, 1])
    only = {UNROUNDED: reference.queries[UNROUNDED]}

    assert verify_capture(captured.trace, replace(reference, queries=only)).status == "failed"


def test_one_rounding_must_fit_every_layer(captured: Captured) -> None:
    reference = with_rounded_product(captured, [1])

    assert verify_capture(captured.trace, reference).status == "failed"


@pytest.mark.parametrize("array", ["k", "q", "softmax"])
def test_a_value_that_is_not_a_number_fails(captured: Captured, array: str) -> None:
    trace, reference = captured.trace, captured.reference
    if array == "k":
        k = keys_of(captured, 0)
        k[1, 5, 2] = np.nan
        trace = with_layer(captured, 0, k=k)
    elif array == "q":
        q = np.array(reference.queries[UNROUNDED][0])
        q[1, 3, 0] = np.nan
        reference = with_queries(captured, 0, q)
    else:
        softmax = np.load(reference.softmax[0][1])
        softmax[2, 7] = np.nan
        np.save(reference.softmax[0][1], softmax)

    verification = verify_capture(trace, reference)

    assert verification.status == "failed"
    assert not np.isfinite(verification.max_abs_error)


def test_mass_on_a_position_the_engine_masks_is_an_error(captured: Captured) -> None:
    softmax = np.load(captured.reference.softmax[0][0])
    expected = float(softmax[1, 4])
    softmax[1, 4] = 0
    np.save(captured.reference.softmax[0][0], softmax)

    verification = verify_capture(captured.trace, captured.reference)

    assert expected > SOFTMAX_TOLERANCE
    assert verification.max_abs_error == pytest.approx(expected, abs=1e-5)


def test_the_worst_weight_counts_not_the_average(captured: Captured) -> None:
    path = captured.reference.softmax[1][1]
    softmax = np.load(path)
    softmax[3, 39] += 0.0025
    np.save(path, softmax)

    verification = verify_capture(captured.trace, captured.reference)

    assert verification.max_abs_error == pytest.approx(0.0025, abs=1e-5)
    assert verification.status == "failed"


def test_layers_are_compared_at_their_own_place(captured: Captured) -> None:
    wrong = replace(captured.reference, softmax=tuple(reversed(captured.reference.softmax)))

    assert verify_capture(captured.trace, wrong).status == "failed"


def test_the_rounding_of_a_float16_cache_is_tolerated(tmp_path: Path) -> None:
    # float16 K and its float32 original differ by less than the tolerance
    layer = random_layer(4, n_token=40)
    stored = LayerArrays(k=layer.k.astype(np.float16), q=layer.q)
    original = read_layer(make_trace(tmp_path / "original", [layer]), layer.fields)
    trace = load_trace(make_trace(tmp_path / "stored", [stored]))
    rows = [head_masses(original, 0, head, 40) for head in range(4)]
    np.save(tmp_path / "softmax.npy", np.array(rows, dtype=np.float32))

    verification = verify_capture(
        trace, Reference((0,), ((tmp_path / "softmax.npy",),), {UNROUNDED: (layer.q,)})
    )

    assert verification.status == "passed"
    assert 1e-7 < verification.max_abs_error < SOFTMAX_TOLERANCE


def with_values(captured: Captured, dtype: str = "float32") -> Captured:
    """Add random V, narrower than K, and the outputs that a plain program computes from it."""
    layers, outputs = [], []
    for position, layer in enumerate(captured.trace.layers):
        v = np.random.default_rng(position).standard_normal((2, 40, 5)).astype(dtype)
        layers.append(replace(layer, v=v))
        plain = read_layer(captured.directory, LAYERS[position].fields)
        steps = []
        for step in captured.reference.steps:
            rows = []
            for head in range(4):
                masses = head_masses(plain, step, head, N_VISIBLE[step])
                exact = v[head // 2, : N_VISIBLE[step]].astype(np.float64)
                rows.append(
                    [sum(m * x for m, x in zip(masses, dim, strict=True)) for dim in exact.T]
                )
            steps.append(rows)
        outputs.append(np.array(steps, dtype=np.float32))
    return replace(
        captured,
        trace=replace(captured.trace, layers=tuple(layers)),
        reference=replace(captured.reference, outputs=tuple(outputs)),
    )


def with_output(captured: Captured, position: int, output: NDArray[np.float32]) -> Reference:
    """Put another output in the place of the last step's."""
    assert captured.reference.outputs is not None
    outputs = [np.array(steps) for steps in captured.reference.outputs]
    outputs[position][-1] = output
    return replace(captured.reference, outputs=tuple(outputs))


def output_of(captured: Captured, position: int) -> NDArray[np.float32]:
    """Return the last step's output."""
    assert captured.reference.outputs is not None
    return np.array(captured.reference.outputs[position][-1])


@pytest.mark.parametrize("dtype", ["float16", "float32"])
def test_right_values_leave_the_verification_of_the_softmax(captured: Captured, dtype: str) -> None:
    complete = with_values(captured, dtype)

    verification = verify_capture(complete.trace, complete.reference)

    assert verification == verify_capture(captured.trace, captured.reference)
    assert verification.status == "passed"


@pytest.mark.parametrize(("factor", "status"), [(1.009, "passed"), (1.011, "failed")])
@pytest.mark.parametrize("position", [0, 1])
def test_the_worst_head_decides_by_its_relative_error(
    captured: Captured, position: int, factor: float, status: str
) -> None:
    complete = with_values(captured)
    output = output_of(complete, position)
    output[2] /= np.float32(factor)

    verification = verify_capture(complete.trace, with_output(complete, position, output))

    assert verification.status == status
    if status == "failed":
        assert verification.reference == "attention output"
        assert verification.tolerance == OUTPUT_TOLERANCE
        assert verification.max_abs_error == pytest.approx(factor - 1, abs=1e-5)


def test_an_output_of_zero_is_right_where_the_values_are_zero(captured: Captured) -> None:
    complete = with_values(captured)
    first, windowed = complete.trace.layers
    zero = replace(first, v=np.zeros((2, 40, 5), dtype=np.float32))
    trace = replace(complete.trace, layers=(zero, windowed))
    assert complete.reference.outputs is not None
    outputs = (np.zeros((2, 4, 5), dtype=np.float32), complete.reference.outputs[1])
    reference = replace(complete.reference, outputs=outputs)

    assert verify_capture(trace, reference).status == "passed"
    assert verify_capture(trace, complete.reference).max_abs_error == pytest.approx(1)


def test_an_output_of_zero_is_wrong_where_the_values_are_not(captured: Captured) -> None:
    complete = with_values(captured)
    output = output_of(complete, 0)
    output[3] = 0

    verification = verify_capture(complete.trace, with_output(complete, 0, output))

    assert (verification.status, verification.reference) == ("failed", "attention output")


def test_an_output_where_the_values_are_zero_is_wrong_however_small(captured: Captured) -> None:
    complete = with_values(captured)
    first, windowed = complete.trace.layers
    zero = replace(first, v=np.zeros((2, 40, 5), dtype=np.float32))
    trace = replace(complete.trace, layers=(zero, windowed))
    output = np.full((4, 5), 1e-30, dtype=np.float32)

    assert verify_capture(trace, with_output(complete, 0, output)).status == "failed"


def test_an_output_that_is_not_a_number_fails(captured: Captured) -> None:
    complete = with_values(captured)
    output = output_of(complete, 1)
    output[0, 2] = np.nan

    verification = verify_capture(complete.trace, with_output(complete, 1, output))

    assert verification.status == "failed"
    assert not np.isfinite(verification.max_abs_error)


@pytest.mark.parametrize("rounds", [False, True])
def test_a_product_may_round_the_softmax_or_not(tmp_path: Path, rounds: bool) -> None:
    # a sink leaves each of 400 positions five steps of half precision, and a bit
    n, mass = 400, np.float32(1 / (400 + np.exp(15)))
    made = LayerArrays(
        k=np.zeros((2, n, 8), dtype=np.float16),
        q=np.ones((1, 4, 8), dtype=np.float32),
        v=np.ones((2, n, 5), dtype=np.float16),
        sinks=np.full(4, 15, dtype=np.float32),
    )
    trace = load_trace(make_trace(tmp_path / "trace", [made]))
    np.save(tmp_path / "softmax.npy", np.full((4, n), mass))
    weight = float(mass.astype(np.float16)) if rounds else float(mass)
    output = np.full((1, 4, 5), n * weight, dtype=np.float32)
    reference = Reference((0,), ((tmp_path / "softmax.npy",),), {UNROUNDED: (made.q,)}, (output,))

    assert abs(float(mass.astype(np.float16)) / float(mass) - 1) > OUTPUT_TOLERANCE
    assert verify_capture(trace, reference).status == "passed"
    wrong = replace(reference, outputs=(output * np.float32(1.1),))
    assert verify_capture(trace, wrong).status == "failed"


def test_what_a_model_selected_for_itself_is_part_of_the_softmax(tmp_path: Path) -> None:
    visible = np.zeros((3, 40), dtype=np.bool_)
    for step, n in enumerate(N_VISIBLE):
        visible[step, step:n:3] = True  # another third at each step
    layer = replace(LAYERS[0], visible=visible)
    directory = make_trace(tmp_path / "sparse", [layer], N_VISIBLE)
    plain = read_layer(directory, layer.fields)
    paths = []
    for step in (0, 2):
        rows = [head_masses(plain, step, head, N_VISIBLE[step]) for head in range(4)]
        paths.append(tmp_path / f"{step}.npy")
        np.save(paths[-1], np.array(rows, dtype=np.float32))
    trace = load_trace(directory)
    queries = {UNROUNDED: (trace.layers[0].q[[0, 2]],)}
    reference = Reference((0, 2), (tuple(paths),), queries)
    found = verify_capture(trace, reference)
    assert found.status == "passed"
    assert found.max_abs_error < 1e-6

    for step in (0, 2):  # one position too many, and one too few
        for position in (step + 1, step + 3):
            wrong = visible.copy()
            wrong[step, position] ^= True
            (tampered,) = (replace(kept, visible=wrong) for kept in trace.layers)
            assert verify_capture(replace(trace, layers=(tampered,)), reference).status == "failed"
