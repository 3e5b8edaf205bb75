"""Reads that are wrong in one way each: verification has to notice every one of them."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from pytest_kvgate.analysis import verify_capture
from pytest_kvgate.analysis.verification import OUTPUT_TOLERANCE, SOFTMAX_TOLERANCE
from pytest_kvgate.trace import Layer, Reference, Step, Trace
from tests.capture.captures import Captured, Captures, hadamard

Keys = NDArray[Any]
Values = NDArray[Any]
CACHE_TYPES = ("f32", "f16", "q8_0")


def with_layer(trace: Trace, position: int, changes: Mapping[str, Any]) -> Trace:
    layers = list(trace.layers)
    layers[position] = replace(layers[position], **changes)
    return replace(trace, layers=tuple(layers))


def with_keys(trace: Trace, position: int, change: Callable[[Keys], Keys]) -> Trace:
    keys = change(np.array(trace.layers[position].k))
    return with_layer(trace, position, {"k": keys})


def with_queries(
    reference: Reference, position: int, change: Callable[[NDArray[Any]], NDArray[Any]]
) -> Reference:
    changed = {}
    for rounding, layers in reference.queries.items():
        arrays = list(layers)
        arrays[position] = change(np.array(arrays[position]))
        changed[rounding] = tuple(arrays)
    return replace(reference, queries=changed)


def assert_caught(trace: Trace, reference: Reference) -> None:
    verification = verify_capture(trace, reference)
    assert verification.status == "failed"
    assert not verification.max_abs_error < 3 * SOFTMAX_TOLERANCE


def with_values(trace: Trace, position: int, change: Callable[[Values], Values]) -> Trace:
    return with_layer(trace, position, {"v": change(np.array(trace.layers[position].v))})


def assert_values_caught(trace: Trace, reference: Reference) -> None:
    verification = verify_capture(trace, reference)
    assert verification.status == "failed"
    assert verification.reference == "attention output"
    assert verification.tolerance == OUTPUT_TOLERANCE
    assert verification.max_abs_error > 3 * OUTPUT_TOLERANCE


def assert_believed(captured: Captured) -> None:
    verification = verify_capture(captured.trace, captured.reference)
    assert verification == captured.verification
    assert verification.status == "passed"


def swap_rows(keys: Keys) -> Keys:
    """Swap the rows of two neighbouring positions in every head."""
    keys[:, [40, 41]] = keys[:, [41, 40]]
    return keys


def swap_rows_of_one_head(keys: Keys) -> Keys:
    keys[-1, [3, 90]] = keys[-1, [90, 3]]
    return keys


def shift_heads(keys: Keys) -> Keys:
    return np.roll(keys, 1, axis=0)


def shift_positions(keys: Keys) -> Keys:
    """Move every row one position on, as if the first cell were skipped."""
    return np.roll(keys, 1, axis=1)


def keep_last_row_stale(keys: Keys) -> Keys:
    """Read the cache before the step's own row was written."""
    keys[:, -1] = 0
    return keys


def keep_middle_row_stale(keys: Keys) -> Keys:
    keys[:, 60] = keys[:, 59]
    return keys


def reorder_dims(keys: Keys) -> Keys:
    """Read the halves of each row the other way round."""
    return np.roll(keys, keys.shape[2] // 2, axis=2)


def read_heads_and_positions_the_other_way_round(keys: Keys) -> Keys:
    n_head, n_token, head_dim = keys.shape
    return keys.reshape(n_token, n_head, head_dim).transpose(1, 0, 2)


WRONG_READS = (
    swap_rows,
    swap_rows_of_one_head,
    shift_heads,
    shift_positions,
    keep_last_row_stale,
    keep_middle_row_stale,
    reorder_dims,
    read_heads_and_positions_the_other_way_round,
)


@pytest.mark.parametrize("cache_type", CACHE_TYPES)
@pytest.mark.parametrize("position", [0, 1])
@pytest.mark.parametrize("change", WRONG_READS)
def test_wrong_keys_are_caught(
    captures: Captures, change: Callable[[Keys], Keys], position: int, cache_type: str
) -> None:
    captured = captures("llama", cache_type)
    assert_believed(captured)
    assert_caught(with_keys(captured.trace, position, change), captured.reference)


@pytest.mark.parametrize("architecture", ["gemma2", "mpt", "gpt-oss"])
@pytest.mark.parametrize("change", [shift_heads, shift_positions])
def test_wrong_keys_are_caught_in_every_kind_of_attention(
    captures: Captures, change: Callable[[Keys], Keys], architecture: str
) -> None:
    captured = captures(architecture)
    assert_believed(captured)
    for position in range(2):
        assert_caught(with_keys(captured.trace, position, change), captured.reference)


def test_keys_left_in_the_rotated_basis_are_caught(captures: Captures) -> None:
    rotated = captures("llama", "q8_0")
    matrix = hadamard()
    wrong = with_keys(rotated.trace, 0, lambda keys: np.asarray(keys @ matrix, np.float32))
    assert_caught(wrong, rotated.reference)


@pytest.mark.parametrize("cache_type", CACHE_TYPES)
def test_shifted_query_heads_are_caught(captures: Captures, cache_type: str) -> None:
    captured = captures("llama", cache_type)
    shifted = with_queries(captured.reference, 0, lambda queries: np.roll(queries, 1, axis=1))
    assert_caught(captured.trace, shifted)


@pytest.mark.parametrize("cache_type", CACHE_TYPES)
def test_queries_of_another_step_are_caught(captures: Captures, cache_type: str) -> None:
    captured = captures("llama", cache_type)
    swapped = with_queries(captured.reference, 1, lambda queries: queries[::-1])
    assert_caught(captured.trace, swapped)


def test_stored_queries_of_another_step_are_caught(captures: Captures) -> None:
    captured = captures("llama")
    wrong = with_layer(captured.trace, 0, {"q": np.array(captured.trace.layers[0].q)[::-1]})
    assert_caught(wrong, captured.reference)


def test_stored_queries_with_shifted_heads_are_caught(captures: Captures) -> None:
    captured = captures("llama")
    wrong = with_layer(captured.trace, 0, {"q": np.roll(captured.trace.layers[0].q, 1, axis=1)})
    assert_caught(wrong, captured.reference)


@pytest.mark.parametrize("offset", [-1, 1])
def test_a_step_that_is_one_position_off_is_caught(captures: Captures, offset: int) -> None:
    captured = captures("llama")
    trace = captured.trace
    first = trace.steps[0]
    moved = replace(first, n_visible=first.n_visible + offset)
    wrong = replace(trace, steps=(moved, *trace.steps[1:]))
    reference = _softmax_with_length(captured, moved)
    assert_caught(wrong, reference)


@pytest.mark.parametrize(
    ("architecture", "position", "changes"),
    [
        ("llama", 0, {"scale": 0.12}),
        ("gemma2", 1, {"softcap": None}),
        ("gemma2", 0, {"window": None}),
        ("gemma2", 0, {"window": 31}),
        ("gemma2", 0, {"window": 33}),
        ("gpt-oss", 0, {"sinks": None}),
        ("mpt", 0, {"alibi_slopes": None}),
        ("mpt", 1, {"alibi_slopes": (0.0625, 0.25, 0.5)}),
    ],
)
def test_wrong_settings_of_a_layer_are_caught(
    captures: Captures, architecture: str, position: int, changes: dict[str, Any]
) -> None:
    captured = captures(architecture)
    assert_believed(captured)
    assert_caught(with_layer(captured.trace, position, changes), captured.reference)


@pytest.mark.parametrize("value", [np.nan, np.inf])
def test_values_that_are_not_finite_are_caught(captures: Captures, value: float) -> None:
    def spoil(keys: Keys) -> Keys:
        keys[0, 5, 0] = value
        return keys

    captured = captures("llama")
    wrong = with_keys(captured.trace, 0, spoil)
    verification = verify_capture(wrong, captured.reference)
    assert verification.status == "failed"
    assert verification.max_abs_error == float("inf")


def test_layers_in_another_order_are_caught(captures: Captures) -> None:
    captured = captures("llama")
    first, second = captured.trace.layers
    swapped: tuple[Layer, Layer] = (replace(second, index=0), replace(first, index=1))
    assert_caught(replace(captured.trace, layers=swapped), captured.reference)


def transpose(values: Values) -> Values:
    """Read dim by dim what lies there position by position."""
    n_head, n_token, value_dim = values.shape
    return values.reshape(n_head, value_dim, n_token).transpose(0, 2, 1)


def shift_dims(values: Values) -> Values:
    return np.roll(values, 1, axis=2)


def shift_memory(values: Values) -> Values:
    """Begin to read one number late."""
    return np.roll(values.reshape(-1), 1).reshape(values.shape)


WRONG_VALUES = (
    shift_heads,
    shift_positions,
    reorder_dims,
    read_heads_and_positions_the_other_way_round,
    transpose,
    shift_dims,
    shift_memory,
)


@pytest.mark.parametrize("cache_type", CACHE_TYPES)
@pytest.mark.parametrize("position", [0, 1])
@pytest.mark.parametrize("change", WRONG_VALUES)
def test_wrong_values_are_caught(
    captures: Captures, change: Callable[[Values], Values], position: int, cache_type: str
) -> None:
    captured = captures("llama", cache_type, values=True)
    assert_believed(captured)
    assert_values_caught(with_values(captured.trace, position, change), captured.reference)


@pytest.mark.parametrize("cache_type", CACHE_TYPES)
@pytest.mark.parametrize("position", [0, 1])
def test_a_single_stale_row_is_caught_where_a_head_looks_at_it(
    captures: Captures, position: int, cache_type: str
) -> None:
    captured = captures("llama", cache_type, values=True)
    softmax = np.load(captured.reference.softmax[position][-1])
    head, row = np.unravel_index(softmax.argmax(), softmax.shape)

    def keep_row_stale(values: Values) -> Values:
        kv_head = head // captured.trace.layers[position].group_size
        values[kv_head, row] = values[kv_head, row - 1]
        return values

    assert_values_caught(with_values(captured.trace, position, keep_row_stale), captured.reference)


@pytest.mark.parametrize("architecture", ["gemma2", "gemma4", "mpt", "gpt-oss", "plm"])
@pytest.mark.parametrize("change", [shift_heads, shift_positions, transpose])
def test_wrong_values_are_caught_in_every_kind_of_attention(
    captures: Captures, change: Callable[[Values], Values], architecture: str
) -> None:
    captured = captures(architecture, values=True)
    assert_believed(captured)
    for position in range(2):
        assert_values_caught(with_values(captured.trace, position, change), captured.reference)


@pytest.mark.parametrize("architecture", ["stablelm", "deepseek2"])
@pytest.mark.parametrize("change", [shift_positions, transpose])
def test_wrong_values_of_a_single_kv_head_are_caught(
    captures: Captures, change: Callable[[Values], Values], architecture: str
) -> None:
    captured = captures(architecture, values=True)
    assert_believed(captured)
    for position in range(2):
        assert_values_caught(with_values(captured.trace, position, change), captured.reference)


def test_latent_values_taken_from_the_wrong_end_of_the_keys_are_caught(captures: Captures) -> None:
    captured = captures("deepseek2", values=True)
    keys = captured.trace.layers[0].k
    wrong = with_values(captured.trace, 0, lambda values: keys[:, :, -values.shape[2] :])
    assert_values_caught(wrong, captured.reference)


def test_values_of_another_layer_are_caught(captures: Captures) -> None:
    captured = captures("llama", values=True)
    other = captured.trace.layers[1].v
    assert_values_caught(with_layer(captured.trace, 0, {"v": other}), captured.reference)


@pytest.mark.parametrize(
    "change",
    [
        lambda values: values.transpose(0, 2, 1),
        lambda values: values[:, :-1],
        lambda values: values[:, :, :-1],
    ],
    ids=["turned", "a row short", "a dim short"],
)
def test_values_of_another_shape_are_caught(
    captures: Captures, change: Callable[[Values], Values]
) -> None:
    captured = captures("llama", values=True)
    assert_values_caught(with_values(captured.trace, 0, change), captured.reference)


@pytest.mark.parametrize("value", [np.nan, np.inf])
def test_values_that_are_not_numbers_are_caught(captures: Captures, value: float) -> None:
    def spoil(values: Values) -> Values:
        values[0, 5, 0] = value
        return values

    captured = captures("llama", values=True)
    assert_values_caught(with_values(captured.trace, 0, spoil), captured.reference)


def test_wrong_keys_are_named_before_wrong_values(captures: Captures) -> None:
    captured = captures("llama", values=True)
    trace = with_values(captured.trace, 0, shift_positions)
    verification = verify_capture(with_keys(trace, 0, shift_positions), captured.reference)
    assert (verification.status, verification.reference) == ("failed", "softmax")


def test_values_that_were_never_compared_are_not_believed(captures: Captures) -> None:
    captured = captures("llama", values=True)
    assert_values_caught(captured.trace, replace(captured.reference, outputs=None))
    without = with_layer(captured.trace, 1, {"v": None})
    assert_values_caught(without, captured.reference)


def _softmax_with_length(captured: Captured, step: Step) -> Reference:
    """Pad or cut the first step's softmax, as a capture with that many positions would have it."""
    reference = captured.reference
    rows = []
    for position, paths in enumerate(reference.softmax):
        softmax = np.load(paths[0])[:, : step.n_visible]
        missing = step.n_visible - softmax.shape[1]
        path = paths[0].with_name(f"length-{step.n_visible}-{position}.npy")
        np.save(path, np.pad(softmax, ((0, 0), (0, missing))))
        rows.append((path, *paths[1:]))
    return replace(reference, softmax=tuple(rows))
