"""Every kind of attention is captured as it attends; the README's table holds what was measured."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from tests.capture.captures import STEPS, Captures
from tests.capture.kinds import CACHE_TYPES, KINDS, REFUSED, Kind, measured, rounded_up
from tests.models import HEAD_DIM, PARTIAL_ROPE, WINDOW, Shape

README = Path(__file__).parents[2] / "README.md"

HYBRIDS = {
    "qwen35": [1, 3],
    "jamba": [1],
    "granitehybrid": [1],
    "nemotron_h": [1],
    "lfm2": [1],
}


def printed() -> dict[tuple[str, str], list[str]]:
    """Return the cells of the README's table by kind and architecture."""
    text = README.read_text(encoding="utf-8")
    head = f"| attention | model | {' | '.join(CACHE_TYPES)} |"
    assert text.count(head) == 1
    rows = [
        [cell.strip() for cell in line.strip("|").split("|")]
        for line in text.split(head)[1].split("\n\n")[0].splitlines()[2:]
    ]
    return {(row[0], row[1]): row[2:] for row in rows}


def test_the_readme_has_a_row_for_every_kind() -> None:
    assert list(printed()) == [(kind.name, kind.architecture) for kind in KINDS]


@pytest.mark.parametrize("cache_type", CACHE_TYPES)
@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: f"{kind.name} ({kind.architecture})")
def test_the_readme_says_what_is_measured(captures: Captures, kind: Kind, cache_type: str) -> None:
    cell = printed()[kind.name, kind.architecture][CACHE_TYPES.index(cache_type)]
    found = measured(captures, kind, cache_type)
    if REFUSED in (cell, found):
        assert cell == found
        return
    # last bits differ between machines and processors
    assert 0.1 <= float(cell) / float(found) <= 10
    assert max(float(cell), float(found)) < 1e-5


@pytest.mark.parametrize(
    ("error", "text"),
    [(0.0, "1e-9"), (1e-6, "1e-6"), (1.1e-6, "2e-6"), (9.9e-8, "1e-7"), (3e-7, "3e-7")],
)
def test_errors_are_rounded_up_to_one_digit(error: float, text: str) -> None:
    assert rounded_up(error) == text


@pytest.mark.parametrize("cache_type", CACHE_TYPES)
@pytest.mark.parametrize("architecture", HYBRIDS)
def test_of_a_hybrid_the_layers_that_attend_are_captured(
    captures: Captures, architecture: str, cache_type: str
) -> None:
    trace = captures(architecture, cache_type).trace
    assert [layer.index for layer in trace.layers] == HYBRIDS[architecture]
    for layer in trace.layers:
        assert layer.k.shape == (layer.n_head_kv, trace.n_context, HEAD_DIM)
        assert layer.q.shape == (len(STEPS), layer.n_head, HEAD_DIM)


@pytest.mark.parametrize(
    ("architecture", "n_rot"),
    [
        ("stablelm", PARTIAL_ROPE),
        ("qwen3", HEAD_DIM),
        ("qwen3moe", HEAD_DIM),
        ("gemma3", HEAD_DIM),
        ("qwen35", HEAD_DIM),
        ("granitehybrid", HEAD_DIM),
        ("lfm2", HEAD_DIM),
        ("jamba", 0),
        ("nemotron_h", 0),
    ],
)
@pytest.mark.parametrize("cache_type", CACHE_TYPES)
def test_rotary_dims_are_counted(
    captures: Captures, architecture: str, n_rot: int, cache_type: str
) -> None:
    for layer in captures(architecture, cache_type).trace.layers:
        assert layer.n_rot == n_rot


@pytest.mark.parametrize("architecture", ["qwen3", "qwen3moe", "gemma3", "lfm2"])
def test_keys_are_read_after_their_norm(captures: Captures, architecture: str) -> None:
    for layer in captures(architecture, "f32").trace.layers:
        lengths = np.linalg.norm(layer.k, axis=2)
        # a norm leaves sqrt(64) times its weights, which lie around 1.4
        assert np.abs(lengths / np.sqrt(HEAD_DIM) - 1.4).max() < 0.2


def test_sinks_and_a_router_beside_them_do_not_mix(captures: Captures) -> None:
    trace = captures("gpt-oss", "f32").trace
    assert all(layer.sinks is not None for layer in trace.layers)
    assert captures("qwen3moe", "f32").trace.layers[0].sinks is None


@pytest.mark.parametrize("architecture", ["gpt-oss", "qwen3moe"])
def test_a_router_is_not_taken_for_attention(captures: Captures, architecture: str) -> None:
    captured = captures(architecture)
    assert [layer.index for layer in captured.trace.layers] == [0, 1]
    n_head = Shape().n_head
    for paths in captured.reference.softmax:
        assert [np.load(path).shape for path in paths] == [
            (n_head, captured.trace.steps[step].n_visible) for step in captured.reference.steps
        ]


@pytest.mark.parametrize("windowed", [(True, False), (False, True)], ids=["first", "second"])
def test_windows_stand_where_the_file_says_so(
    captures: Captures, windowed: tuple[bool, bool]
) -> None:
    trace = captures("gemma3", shape=Shape(windowed=windowed)).trace
    assert [layer.window for layer in trace.layers] == [WINDOW if cut else None for cut in windowed]
