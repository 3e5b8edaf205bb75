"""Small models whose layers differ in what their attention is worth."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from itertools import combinations
from pathlib import Path

import gguf
import numpy as np

from pytest_kvgate.analysis.effects import Variant
from pytest_kvgate.closedloop import Loop, LoopSettings
from pytest_kvgate.engine import Engine, EngineSettings
from tests.models import FIRST_BYTE, Shape, tiny_model

ONE_THREAD = EngineSettings(n_threads=1)
SETTINGS = LoopSettings(n_token=8, sinks=8, recent=8)
PAGE_SIZE = 8
SELECTOR = "landmark"


def layered_model(path: Path, worth: Sequence[float], focus: Sequence[float] | None = None) -> Path:
    """Write a llama whose layer i adds ``worth[i]`` times what its attention would put out.

    Its logits are ``focus[i]`` times as large: 0 spreads the mass evenly.
    """
    tiny_model(path, shape=Shape(n_layer=len(worth)))
    reader = gguf.GGUFReader(path, "r+")
    tensors = {tensor.name: tensor.data for tensor in reader.tensors}
    for layer, factor in enumerate(worth):
        tensors[f"blk.{layer}.attn_output.weight"][:] *= factor
        tensors[f"blk.{layer}.attn_q.weight"][:] *= 1 if focus is None else focus[layer]
    del tensors, reader  # writes what was changed
    return path


@contextmanager
def open_loop(
    model: Path, settings: LoopSettings = SETTINGS, engine: EngineSettings = ONE_THREAD
) -> Iterator[Loop]:
    """Read a prompt of 200 tokens that say nothing."""
    letters = np.random.default_rng(3).integers(ord("a"), ord("z") + 1, 200)
    prompt = [FIRST_BYTE + int(letter) for letter in letters]
    with Engine(model, engine) as opened:
        yield Loop(opened, prompt, lambda step, _logits: prompt[step], settings)


def every_assignment(loop: Loop, budgets: Sequence[float]) -> dict[Variant, float]:
    """Return the KL of every assignment but those with all layers dense."""
    layers = loop.paged_layers
    return {
        variant: loop.run(variant).effects.mean("kl")
        for budget in budgets
        for n_dense in range(len(layers))
        for dense in combinations(layers, n_dense)
        for variant in [Variant(PAGE_SIZE, budget, SELECTOR, dense)]
    }
