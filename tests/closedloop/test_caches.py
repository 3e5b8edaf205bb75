"""The sizes of KV caches, against those of the state that llama.cpp writes."""

from __future__ import annotations

from pathlib import Path

import llama_cpp
import pytest

from pytest_kvgate.analysis.resident import LayerCache
from pytest_kvgate.closedloop import Loop, LoopSettings
from pytest_kvgate.engine import Engine, EngineSettings
from tests.models import HEAD_DIM, WINDOW, WINDOWED_HEAD_DIM, Shape, tiny_model, token_ids

PROMPT = token_ids("a prompt that is longer than the windows of the tiny models, by some tokens")
SETTINGS = LoopSettings(n_token=2, sinks=8, recent=8)

#: What the state says of a token, in bytes: its position, how many sequences have it, and which one
#: does; each 4.
CELL = 12


def state_bytes(loop: Loop) -> int:
    """Return the size of the state of the sequence."""
    size = llama_cpp.llama_state_seq_get_size(loop._context._context, 0)
    return int(size)


@pytest.mark.parametrize(
    ("architecture", "settings"),
    [
        ("llama", EngineSettings(n_threads=1)),
        ("llama", EngineSettings(n_threads=1, cache_type_k="f32", cache_type_v="f32")),
        ("llama", EngineSettings(n_threads=1, cache_type_k="q8_0")),
        (
            "llama",
            EngineSettings(1, 1, cache_type_k="q4_0", cache_type_v="q8_0", flash_attention=True),
        ),
        (
            "llama",
            EngineSettings(1, 1, cache_type_k="f32", cache_type_v="f32", flash_attention=True),
        ),
        ("deepseek2", EngineSettings(n_threads=1)),
        ("plm", EngineSettings(n_threads=1)),
        ("gemma3", EngineSettings(n_threads=1)),
        ("gemma4", EngineSettings(1, 1, flash_attention=True)),
    ],
)
def test_a_token_takes_in_all_paged_caches_what_it_adds_to_the_state(
    tmp_path: Path, architecture: str, settings: EngineSettings
) -> None:
    shape = Shape(n_layer=6) if architecture == "gemma4" else None
    model = tiny_model(tmp_path / "tiny.gguf", architecture, shape=shape)
    with Engine(model, settings) as engine:
        loop = Loop(engine, PROMPT, lambda step, _logits: PROMPT[step], SETTINGS)
        before = state_bytes(loop)
        loop._context.decode(PROMPT[:1])
        added = state_bytes(loop) - before
        # of a sliding window the state holds no more than the window, whatever is decoded
        caches = [cache for cache in loop.caches if cache.paged]
    per_token = sum(cache.n_head_kv * cache.token_bytes for cache in caches)
    assert per_token + CELL == added


def test_a_cache_is_listed_once_with_all_layers_that_read_it(tmp_path: Path) -> None:
    model = tiny_model(tmp_path / "tiny.gguf", "gemma4", shape=Shape(n_layer=6))
    with Engine(model, EngineSettings(n_threads=1)) as engine:
        loop = Loop(engine, PROMPT, lambda step, _logits: PROMPT[step], SETTINGS)
        found = loop.caches
    narrow, wide = WINDOWED_HEAD_DIM, HEAD_DIM
    # K and V, at 2 bytes a number
    assert found == (
        LayerCache((0,), 2, narrow, 4 * narrow, paged=False, window=WINDOW),
        LayerCache((1,), 2, wide, 4 * wide),
        LayerCache((2, 4), 2, narrow, 4 * narrow, paged=False, window=WINDOW),
        LayerCache((3, 5), 2, wide, 4 * wide),
    )
