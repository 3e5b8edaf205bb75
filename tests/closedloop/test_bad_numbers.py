"""What is not a number never becomes a small effect, and one selector spoils no other."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import gguf
import numpy as np
import pytest
from numpy.typing import NDArray

from pytest_kvgate.analysis import PAGE_SELECTORS, PageKeys, Selector
from pytest_kvgate.analysis.effects import DenseRun, Variant
from pytest_kvgate.closedloop import ClosedLoopError, Loop, LoopSettings
from pytest_kvgate.engine import Engine, EngineSettings
from tests.models import tiny_model, token_ids

SETTINGS = EngineSettings(n_threads=1)
TOKENS = token_ids(
    "a prompt that is long enough for some pages of eight tokens each, twice over " * 3
)
VARIANT = Variant(8, 0.2, "landmark")


def with_output(folder: Path, change: Callable[[NDArray[np.float32]], None]) -> Path:
    """Write a tiny model whose output weights ``[n_vocab, n_embd]`` are changed in place."""
    path = tiny_model(folder / "tiny.gguf")
    tensors = {tensor.name: tensor for tensor in gguf.GGUFReader(path, "r+").tensors}
    change(tensors["output.weight"].data)
    return path


def loop_on(engine: Engine, followed: int = 80) -> Loop:
    return Loop(engine, TOKENS, lambda _index, _logits: followed, LoopSettings(n_token=3, sinks=8))


def test_logits_that_rule_everything_out_are_refused(tmp_path: Path) -> None:
    def rule_out(weights: NDArray[np.float32]) -> None:
        weights[:, 0] = -np.inf
        weights[:, 1:] = 0.0

    path = with_output(tmp_path, rule_out)
    with Engine(path, SETTINGS) as engine, pytest.raises(ClosedLoopError, match="no finite"):
        loop_on(engine)


def test_a_followed_token_without_probability_is_refused(tmp_path: Path) -> None:
    def rule_out(weights: NDArray[np.float32]) -> None:
        weights[:] = 0.0
        weights[80] = -np.finfo(np.float32).max

    path = with_output(tmp_path, rule_out)
    with Engine(path, SETTINGS) as engine, pytest.raises(ClosedLoopError, match="finite"):
        loop_on(engine)


def test_a_kl_that_is_no_number_stays_none() -> None:
    ruled_out = np.full(4, -np.inf, dtype=np.float32)
    with np.errstate(invalid="ignore"):
        dense = DenseRun.of([np.zeros(4, dtype=np.float32)], [0])
        effects = dense.effects([ruled_out])
    assert not np.isfinite(effects.kl).any()


def normalise_rows(queries: NDArray[np.float32], pages: PageKeys) -> NDArray[np.floating]:
    pages.rows[...] = 0  # what a selector must not do
    return np.zeros((len(queries), len(pages.rows)))


def return_nan(queries: NDArray[np.float32], pages: PageKeys) -> NDArray[np.floating]:
    return np.full((len(queries), len(pages.rows)), np.nan)


def test_a_selector_cannot_write_to_the_keys(tmp_path: Path) -> None:
    registry = {**PAGE_SELECTORS, "rude": Selector("rude", normalise_rows)}
    settings = LoopSettings(n_token=2, sinks=8, registry=registry)
    with Engine(tiny_model(tmp_path / "tiny.gguf"), SETTINGS) as engine:
        loop = Loop(engine, TOKENS, lambda _index, _logits: 80, settings)
        before = loop.run(VARIANT)
        with pytest.raises(ValueError, match="read-only"):
            loop.run(Variant(8, 0.2, "rude"))
        after = loop.run(VARIANT)
    np.testing.assert_array_equal(after.effects.kl, before.effects.kl)


def test_a_selector_that_cannot_be_ranked_takes_no_other_along(tmp_path: Path) -> None:
    registry = {**PAGE_SELECTORS, "broken": Selector("broken", return_nan)}
    settings = LoopSettings(n_token=2, sinks=8, registry=registry)
    broken = Variant(8, 0.2, "broken")
    with Engine(tiny_model(tmp_path / "tiny.gguf"), SETTINGS) as engine:
        loop = Loop(engine, TOKENS, lambda _index, _logits: 80, settings)
        found = loop.compare([broken, VARIANT])
        alone = loop.run(VARIANT)
    assert "returned NaN for a page" in found.undefined[broken]
    np.testing.assert_array_equal(found.runs[VARIANT].effects.kl, alone.effects.kl)


def test_keeping_every_layer_dense_leaves_nothing_to_compare(tmp_path: Path) -> None:
    with Engine(tiny_model(tmp_path / "tiny.gguf"), SETTINGS) as engine:
        loop = loop_on(engine)
        every = Variant(8, 0.2, "landmark", loop.paged_layers)
        assert loop.compare([every]).undefined[every].startswith("every layer is kept dense")
