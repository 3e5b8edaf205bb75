"""Going back to an earlier token: the same tokens give the same bits again."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache
from pathlib import Path

import numpy as np
import pytest
from numpy.typing import NDArray

from pytest_kvgate.engine import (
    AttentionNode,
    AttentionRead,
    Context,
    Engine,
    EngineSettings,
    visible_span,
)
from tests.models import WINDOW, tiny_model, token_ids

PROMPT = token_ids("a prompt that is longer than any sliding window of the tiny models")
FOLLOWING = token_ids("and goes on")[1:]

ATTENTION = ("llama", "gemma2", "gemma3", "gemma4", "gpt-oss", "deepseek2", "bloom", "llama4")
HYBRIDS = ("jamba", "granitehybrid", "nemotron_h", "lfm2", "qwen35")
RECURRENT = ("mamba", "rwkv6")


@pytest.fixture(scope="session")
def models(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    folder = tmp_path_factory.mktemp("rewinding")
    return cache(lambda architecture: tiny_model(folder / f"{architecture}.gguf", architecture))


@contextmanager
def prefilled(model: Path, settings: EngineSettings) -> Iterator[Context]:
    with Engine(model, settings) as engine:
        context = engine.start(len(PROMPT) + len(FOLLOWING) + 8)
        context.decode(PROMPT)
        yield context


def follow(context: Context) -> NDArray[np.float32]:
    return np.stack([context.decode([token]) for token in FOLLOWING])


def spoil(node: AttentionNode) -> None:
    """Attend to the first position alone: what is written to later caches is something else."""
    assert node.open_softmax is not None
    assert node.write_softmax is not None
    weights = node.open_softmax()
    weights[:] = 0
    weights[:, 0] = 1
    node.write_softmax(weights)


def follow_elsewhere(context: Context) -> NDArray[np.float32]:
    """Decode other tokens, with an attention that is spoilt."""
    rows = []
    for token in reversed(FOLLOWING[1:]):
        context.hook.steer(spoil, with_queries=False)
        rows.append(context.decode([token]))
        context.hook.release()
    return np.stack(rows)


@pytest.mark.parametrize("architecture", [*ATTENTION, *HYBRIDS])
def test_the_same_tokens_give_the_same_bits_after_every_rewind(
    models: Callable[[str], Path], architecture: str
) -> None:
    with prefilled(models(architecture), EngineSettings(n_threads=1)) as context:
        start = context.checkpoint()
        assert start.n_token == context.n_token == len(PROMPT)
        first = follow(context)
        assert context.n_token == len(PROMPT) + len(FOLLOWING)
        for _ in range(3):
            context.rewind(start)
            assert context.n_token == len(PROMPT)
            other = follow_elsewhere(context)
            assert np.abs(other[-1] - first[-1]).max() > 0
            context.rewind(start)
            np.testing.assert_array_equal(follow(context), first)


@pytest.mark.parametrize("architecture", RECURRENT)
def test_a_recurrent_state_is_brought_back_too(
    models: Callable[[str], Path], architecture: str
) -> None:
    with prefilled(models(architecture), EngineSettings(n_threads=1)) as context:
        start = context.checkpoint()
        first = follow(context)
        for _ in range(2):
            context.rewind(start)
            np.testing.assert_array_equal(follow(context), first)


@pytest.mark.parametrize("cache_type", ["f32", "q8_0"])
@pytest.mark.parametrize("architecture", ["llama", "gemma3", "deepseek2", "qwen35", "jamba"])
def test_rewinding_is_exact_with_flash_attention(
    models: Callable[[str], Path], architecture: str, cache_type: str
) -> None:
    settings = EngineSettings(
        n_threads=1, cache_type_k=cache_type, cache_type_v=cache_type, flash_attention=True
    )
    with prefilled(models(architecture), settings) as context:
        start = context.checkpoint()
        first = follow(context)
        for _ in range(2):
            context.rewind(start)
            np.testing.assert_array_equal(follow(context), first)


@pytest.mark.parametrize("architecture", ["llama", "gemma3", "qwen35", "jamba"])
def test_one_may_go_back_to_several_places(
    models: Callable[[str], Path], architecture: str
) -> None:
    with prefilled(models(architecture), EngineSettings(n_threads=1)) as context:
        places, rows = [], []
        for token in FOLLOWING:
            places.append(context.checkpoint())
            rows.append(context.decode([token]))
        for index in (5, 2, 0):  # backwards: a later place is gone once one is before it
            context.rewind(places[index])
            assert context.n_token == len(PROMPT) + index
            for token, expected in zip(FOLLOWING[index:], rows[index:], strict=True):
                np.testing.assert_array_equal(context.decode([token]), expected)


@pytest.mark.parametrize("architecture", ["llama", "gemma3", "gemma4", "qwen35", "jamba"])
def test_cells_go_on_following_positions(models: Callable[[str], Path], architecture: str) -> None:
    """Whatever was decoded before, cell j holds position j, with the same keys."""
    spans: list[list[int]] = []
    keys: list[list[NDArray[np.float32]]] = []

    def take(read: AttentionRead) -> None:
        spans[-1].append(visible_span(read, n_visible))  # raises where the order is another
        keys[-1].append(np.asarray(read.read_keys(n_visible), dtype=np.float32))

    with prefilled(models(architecture), EngineSettings(n_threads=1)) as context:
        start = context.checkpoint()
        for attempt in range(3):
            context.rewind(start)
            if attempt:
                follow_elsewhere(context)
                context.rewind(start)
            for token in FOLLOWING:
                spans.append([])
                keys.append([])
                n_visible = context.n_token + 1
                context.hook.arm(take)
                context.decode([token])
                context.hook.disarm()
    n_step = len(FOLLOWING)
    assert {span for of_step in spans for span in of_step} <= {
        WINDOW,
        *range(len(PROMPT) + 1, len(PROMPT) + n_step + 1),
    }
    for step in range(n_step):
        for other in (step + n_step, step + 2 * n_step):
            assert spans[step] == spans[other]
            for found, expected in zip(keys[other], keys[step], strict=True):
                np.testing.assert_array_equal(found, expected)


@pytest.mark.parametrize("architecture", ["llama", "qwen35"])
def test_an_edit_that_fails_leaves_a_context_that_can_be_rewound(
    models: Callable[[str], Path], architecture: str
) -> None:
    def fail(_node: AttentionNode) -> None:
        raise ValueError("wrong")

    with prefilled(models(architecture), EngineSettings(n_threads=1)) as context:
        start = context.checkpoint()
        first = follow(context)
        context.rewind(start)
        context.decode(FOLLOWING[:2])
        context.hook.steer(fail, with_queries=False)
        with pytest.raises(ValueError, match="wrong"):
            context.decode([FOLLOWING[2]])
        context.rewind(start)
        np.testing.assert_array_equal(follow(context), first)


def test_a_steered_step_counts_its_attention_and_a_step_after_it_is_not_touched(
    models: Callable[[str], Path],
) -> None:
    ordinals: list[int] = []
    with prefilled(models("gpt-oss"), EngineSettings(n_threads=1)) as context:
        start = context.checkpoint()
        first = context.decode(FOLLOWING[:1])
        context.rewind(start)
        context.hook.steer(lambda node: ordinals.append(node.ordinal), with_queries=False)
        untouched = context.decode(FOLLOWING[:1])
        assert context.hook.release() == 2  # the router's softmax is none of them
        assert context.hook.release() == 0
        np.testing.assert_allclose(untouched, first, atol=1e-4)
        context.rewind(start)
        np.testing.assert_array_equal(context.decode(FOLLOWING[:1]), first)
    assert ordinals == [0, 1]


@pytest.mark.parametrize("architecture", ["llama", "deepseek2", "jamba"])
def test_queries_are_handed_over_where_they_are_asked_for_and_change_nothing(
    models: Callable[[str], Path], architecture: str
) -> None:
    rows: list[NDArray[np.float32]] = []
    shapes: list[list[tuple[int, ...] | None]] = []

    def take(node: AttentionNode) -> None:
        shapes[-1].append(None if node.queries is None else node.queries.shape)

    with prefilled(models(architecture), EngineSettings(n_threads=1)) as context:
        start = context.checkpoint()
        for with_queries in (True, False):
            context.rewind(start)
            shapes.append([])
            context.hook.steer(take, with_queries=with_queries)
            rows.append(context.decode(FOLLOWING[:1]))
            context.hook.release()
    np.testing.assert_array_equal(rows[0], rows[1])
    assert None not in shapes[0]
    assert shapes[1] == [None] * len(shapes[0])
