"""Reads that are wrong in one way each: verification has to notice every one of them."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from pytest_kvgate.analysis import verify_softmax
from pytest_kvgate.analysis.verification import SOFTMAX_TOLERANCE
from pytest_kvgate.trace import Layer, Reference, Step, Trace
from tests.capture.captures import Captured, Captures, hadamard

Keys = NDArray[Any]
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
    verification = verify_softmax(trace, reference)
    assert verification.status == "failed"
    assert not verification.max_abs_error < 3 * SOFTMAX_TOLERANCE


def assert_believed(captured: Captured) -> None:
    verification = verify_softmax(captured.trace, captured.reference)
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
    verification = verify_softmax(wrong, captured.reference)
    assert verification.status == "failed"
    assert verification.max_abs_error == float("inf")


def test_layers_in_another_order_are_caught(captures: Captures) -> None:
    captured = captures("llama")
    first, second = captured.trace.layers
    swapped: tuple[Layer, Layer] = (replace(second, index=0), replace(first, index=1))
    assert_caught(replace(captured.trace, layers=swapped), captured.reference)


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
