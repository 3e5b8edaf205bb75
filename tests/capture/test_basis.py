"""A quantized K cache is rotated; what is measured is measured in the model's own basis."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from pytest_kvgate.analysis import PageGrid, Plan, Profile, profile_trace
from pytest_kvgate.analysis.findings import dim_ablation
from pytest_kvgate.capture import CaptureError, Prompt
from pytest_kvgate.capture.refusals import require_whole_blocks
from pytest_kvgate.engine.basis import PLAIN, VECTOR, product_roundings
from pytest_kvgate.trace import Trace
from tests.capture.captures import Captures, hadamard, random_text
from tests.models import Array, Shape

BUDGET = 0.1
GRID = PageGrid(page_size=16, sinks=32, recent=0.02)
PROMPT = Prompt("long", random_text(1300))
SHAPE = Shape(n_head=4, n_head_kv=4, n_embd=256)

#: Rankings that a rotation of q and K changes, and those that it does not.
BOUND_TO_A_BASIS = ("quest", "mean-std", "cuboid-mean")
FREE_OF_IT = ("oracle", "landmark")


@pytest.fixture(scope="module")
def exact(captures: Captures) -> Trace:
    """Return a capture whose K cache was neither rounded nor rotated."""
    return _captured(captures, "f32")


@pytest.fixture(scope="module")
def quantized(captures: Captures) -> Trace:
    """Return a capture of the same text whose K cache was both."""
    return _captured(captures, "q8_0")


@pytest.fixture(scope="module")
def as_cached(quantized: Trace) -> Trace:
    """Return what the capture would be, had q and K stayed as they meet the cache."""
    rotated = [
        replace(layer, k=np.asarray(layer.k) @ hadamard(), q=np.asarray(layer.q) @ hadamard())
        for layer in quantized.layers
    ]
    return replace(quantized, layers=tuple(rotated))


def _captured(captures: Captures, cache_type: str) -> Trace:
    # The first decode step alone: its token follows from the prompt before K is read much.
    return captures("stablelm", cache_type, shape=SHAPE, steps=range(1), prompt=PROMPT).trace


def _profile(trace: Trace) -> Profile:
    return profile_trace(trace, GRID, Plan((BUDGET,)))


def _of_units(trace: Trace, selector: str) -> Array:
    return _profile(trace).samples("coverage", selector, BUDGET).value.astype(np.float32)


def test_both_captures_read_the_same_text(exact: Trace, quantized: Trace) -> None:
    for one, other in zip(exact.layers, quantized.layers, strict=True):
        distance = np.linalg.norm(one.k - other.k, axis=2) / np.linalg.norm(one.k, axis=2)
        assert distance.max() < 0.05


@pytest.mark.parametrize("selector", [*BOUND_TO_A_BASIS, *FREE_OF_IT])
def test_a_rounded_cache_gives_the_coverage_of_the_exact_one(
    exact: Trace, quantized: Trace, selector: str
) -> None:
    exactly, rounded = _of_units(exact, selector), _of_units(quantized, selector)
    assert len(exactly) == 8
    assert abs(exactly.mean() - rounded.mean()) < 0.005


@pytest.mark.parametrize("selector", BOUND_TO_A_BASIS)
def test_without_rotating_back_coverage_would_be_another(
    exact: Trace, quantized: Trace, as_cached: Trace, selector: str
) -> None:
    exactly = _of_units(exact, selector)
    right = np.abs(_of_units(quantized, selector) - exactly).mean()
    wrong = np.abs(_of_units(as_cached, selector) - exactly).mean()
    assert wrong > 0.01
    assert wrong > 5 * right


@pytest.mark.parametrize("selector", FREE_OF_IT)
def test_products_of_q_and_k_know_no_basis(
    quantized: Trace, as_cached: Trace, selector: str
) -> None:
    found, rotated = _of_units(quantized, selector), _of_units(as_cached, selector)
    np.testing.assert_allclose(found, rotated, atol=1e-4)


def test_the_dim_ablation_asks_for_the_dims_of_the_model(
    exact: Trace, quantized: Trace, as_cached: Trace
) -> None:
    found = [dim_ablation(_profile(trace), BUDGET) for trace in (exact, quantized, as_cached)]
    exactly, right, wrong = (ablation.unrotated for ablation in found if ablation is not None)
    assert abs(right - exactly) < 0.005
    assert abs(wrong - exactly) > 0.02


@pytest.mark.parametrize("key_type", ["f32", "f16", "bf16"])
def test_every_head_fits_a_cache_that_rounds_number_by_number(key_type: str) -> None:
    require_whole_blocks(77, key_type)


@pytest.mark.parametrize("key_type", ["q8_0", "q5_0", "q4_0", "iq4_nl"])
def test_a_head_that_is_no_whole_number_of_blocks_is_refused(key_type: str) -> None:
    require_whole_blocks(96, key_type)
    with pytest.raises(CaptureError, match=f"has 80 dims, and a {key_type} K cache rounds 32 of"):
        require_whole_blocks(80, key_type)


def test_bytes_are_rounded_as_plain_code_and_as_vector_instructions_do() -> None:
    # the scale of this block is 1, so halves are where the two ways part
    block = np.zeros(32, dtype=np.float32)
    block[:4] = [127, 0.5, 1.5, -2.5]
    ways = product_roundings(block[None], "q8_0")
    assert ways[PLAIN][0, :4].tolist() == [127, 1, 2, -3]
    assert ways[VECTOR][0, :4].tolist() == [127, 0, 2, -2]
    assert not product_roundings(np.zeros((1, 32), np.float32), "q4_0")[VECTOR].any()
    assert list(product_roundings(block[None], "bf16")) == [PLAIN]
