"""Wrong reads of a cache that flash attention reads: the proof catches all, the alarm some.

The softmax of a capture without flash attention and the proof catch every one of them. The smoke
alarm compares outputs, so it misses what moves little of them: with an f16 V, which the engine adds
up in half precision, it is deaf to single rows.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from pytest_kvgate.analysis import verify_capture
from pytest_kvgate.analysis.verification import OUTPUT_TOLERANCE
from pytest_kvgate.capture import Prompt
from pytest_kvgate.trace import Trace
from tests.capture.captures import Captured, Captures
from tests.capture.test_wrong_reads import (
    keep_last_row_stale,
    shift_heads,
    shift_positions,
    swap_rows,
    with_keys,
    with_layer,
    with_values,
)
from tests.models import HEAD_DIM, ROPE_BASE

Change = Callable[[Captured], Trace]


def keys_before_rope(keys: NDArray[Any]) -> NDArray[np.float32]:
    """Turn K back by its positions; neighbouring dims make a pair in the llama architecture."""
    n_token = keys.shape[1]
    frequencies = ROPE_BASE ** (-np.arange(0, HEAD_DIM, 2) / HEAD_DIM)
    angles = np.arange(n_token)[:, None] * frequencies
    pairs = np.asarray(keys, dtype=np.float64).reshape(*keys.shape[:2], -1, 2)
    turned = (pairs[..., 0] + 1j * pairs[..., 1]) * np.exp(-1j * angles)
    back = np.stack([turned.real, turned.imag], axis=-1)
    return back.reshape(keys.shape).astype(np.float32)


def keep_row_stale(keys: NDArray[Any]) -> NDArray[Any]:
    """Leave in one row, of no great mass, what the row before holds."""
    keys[:, 20] = keys[:, 19]
    return keys


def in_keys(change: Callable[[NDArray[Any]], NDArray[Any]]) -> Change:
    return lambda captured: with_keys(captured.trace, 1, change)


def with_wrong_scale(captured: Captured) -> Trace:
    scale = captured.trace.layers[1].scale
    return with_layer(captured.trace, 1, {"scale": scale * 1.05})


#: A wrong read, and whether the smoke alarm hears it with V in f16 and in q8_0.
WRONG_READS: dict[str, tuple[Change, bool, bool]] = {
    "two K rows swapped": (in_keys(swap_rows), False, True),
    "one KV head shifted": (in_keys(shift_heads), True, True),
    "wrong scale": (with_wrong_scale, False, True),
    "K before RoPE": (in_keys(keys_before_rope), True, True),
    "an off-by-one position": (in_keys(shift_positions), True, True),
    "a stale row": (in_keys(keep_row_stale), False, True),
    "the newest row stale": (in_keys(keep_last_row_stale), False, True),
}


def test_undoing_rope_by_hand_is_right(captures: Captures) -> None:
    # a repeated token has one key at all positions, but for the turn
    captured = captures("llama", "f32", prompt=Prompt("same", "a" * 60))
    keys = np.asarray(captured.trace.layers[0].k[:, 1:50])
    turned_back = keys_before_rope(np.asarray(captured.trace.layers[0].k))[:, 1:50]
    assert np.ptp(keys, axis=1).max() > 1
    assert np.ptp(turned_back, axis=1).max() < 1e-3


@pytest.mark.parametrize("name", WRONG_READS)
@pytest.mark.parametrize("cache_type", ["f16", "q8_0"])
def test_the_proof_catches_every_wrong_read(captures: Captures, name: str, cache_type: str) -> None:
    change, *_ = WRONG_READS[name]
    captured = captures(
        "llama", cache_type, cache_type_v=cache_type, flash_attention=True, prove=True
    )
    assert captured.verification.status == "passed"
    found = verify_capture(change(captured), captured.reference)
    assert (found.status, found.reference) == ("failed", "softmax without flash attention")
    assert np.argmax(found.layer_errors) == 1


@pytest.mark.parametrize("name", WRONG_READS)
@pytest.mark.parametrize("cache_type", ["f16", "q8_0"])
def test_the_softmax_of_a_plain_capture_catches_every_wrong_read(
    captures: Captures, name: str, cache_type: str
) -> None:
    change, *_ = WRONG_READS[name]
    captured = captures("llama", cache_type)
    found = verify_capture(change(captured), captured.reference)
    assert (found.status, found.reference) == ("failed", "softmax")


@pytest.mark.parametrize("name", WRONG_READS)
def test_the_smoke_alarm_misses_what_moves_little_of_the_output(
    captures: Captures, name: str
) -> None:
    change, *heard = WRONG_READS[name]
    for cache_type, hears in zip(("f16", "q8_0"), heard, strict=True):
        captured = captures("llama", "f16", cache_type_v=cache_type, flash_attention=True)
        assert captured.verification.status == "passed"
        found = verify_capture(change(captured), captured.reference)
        assert found.reference == "attention output"
        assert (found.status == "failed") == hears, (cache_type, found.max_abs_error)


def test_queries_of_another_step_raise_the_alarm(captures: Captures) -> None:
    captured = captures("llama", flash_attention=True)
    stored = np.array(captured.trace.layers[0].q)[::-1]
    found = verify_capture(with_layer(captured.trace, 0, {"q": stored}), captured.reference)
    assert (found.status, found.max_abs_error) == ("failed", float("inf"))


def test_an_output_of_another_layer_raises_the_alarm(captures: Captures) -> None:
    captured = captures("llama", flash_attention=True)
    assert captured.reference.outputs is not None
    wrong = replace(captured.reference, outputs=captured.reference.outputs[::-1])
    found = verify_capture(captured.trace, wrong)
    assert (found.status, found.reference) == ("failed", "attention output")


def test_a_fused_capture_without_outputs_is_not_believed(captures: Captures) -> None:
    captured = captures("llama", flash_attention=True)
    found = verify_capture(captured.trace, replace(captured.reference, outputs=None))
    assert (found.status, found.max_abs_error) == ("failed", float("inf"))


def swap_values(values: NDArray[Any]) -> NDArray[Any]:
    values[:, [10, 70]] = values[:, [70, 10]]
    return values


def scale_values(values: NDArray[Any]) -> NDArray[Any]:
    scaled: NDArray[Any] = values * values.dtype.type(1.1)
    return scaled


def keep_newest_values_stale(values: NDArray[Any]) -> NDArray[Any]:
    values[:, -1] = 0
    return values


@pytest.mark.parametrize("cache_type_v", ["f32", "f16", "bf16", "q8_0"])
@pytest.mark.parametrize("change", [swap_values, scale_values, keep_newest_values_stale])
def test_wrong_values_are_caught_by_the_proof(
    captures: Captures, change: Callable[[NDArray[Any]], NDArray[Any]], cache_type_v: str
) -> None:
    captured = captures(
        "llama",
        cache_type_v=cache_type_v,
        flash_attention=True,
        prove=True,
        values=True,
    )
    assert captured.verification.status == "passed"
    assert captured.verification.reference == "softmax without flash attention"
    found = verify_capture(with_values(captured.trace, 1, change), captured.reference)
    assert (found.status, found.reference) == ("failed", "attention output")
    assert found.tolerance == OUTPUT_TOLERANCE
