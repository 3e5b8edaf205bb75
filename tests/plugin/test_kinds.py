"""What a person is told of a model's layers, and of a model that cannot be gated."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tests.models import Shape, tiny_model

GATE = """
import pytest
from pytest_kvgate import kvgate

@pytest.mark.xfail(strict=True)
@kvgate(budget=0.25, min_coverage=0.99)
def test_decided():
    pass

@kvgate(budget=0.25, min_coverage=0.1)
def test_gate():
    pass
"""

#: One page size and few steps, so that a report is quick.
QUICK = ("--kvgate-steps=0:9:4", "--kvgate-sweep=32", "--kvgate-threads=1")


def run(
    pytester: pytest.Pytester, model: Path, prompts: list[Path], *options: str
) -> tuple[pytest.RunResult, dict[str, Any]]:
    """Run both gates on a model; return pytest's output and the report."""
    pytester.makepyfile(GATE)
    result = pytester.runpytest(
        f"--kvgate-model={model}", *(f"--kvgate-prompt={prompt}" for prompt in prompts), *QUICK,
        "--kvgate-report=json:r.json", *options,
    )  # fmt: skip
    report: dict[str, Any] = json.loads((pytester.path / "r.json").read_text("utf-8"))
    return result, report


@pytest.mark.parametrize(
    ("architecture", "n_paged", "text", "unpaged"),
    [
        (
            "nemotron_h",
            "1 layer",
            "not paged: layers 0, 3 (recurrent); layer 2 (no attention)",
            {0: "recurrent", 2: "no attention", 3: "recurrent"},
        ),
        (
            "gemma4",
            "1 layer",
            "not paged: layer 0 (sliding window); layers 2-3 (reads another layer's cache)",
            {
                0: "sliding window",
                2: "reads another layer's cache",
                3: "reads another layer's cache",
            },
        ),
        (
            "qwen35",
            "2 layers",
            "not paged: layers 0, 2 (recurrent)",
            {0: "recurrent", 2: "recurrent"},
        ),
    ],
)
def test_layers_that_are_not_paged_are_listed_with_the_reason(
    pytester: pytest.Pytester,
    prompt: Path,
    architecture: str,
    n_paged: str,
    text: str,
    unpaged: dict[int, str],
) -> None:
    model = tiny_model(pytester.path / "tiny.gguf", architecture)
    result, report = run(pytester, model, [prompt])
    assert result.ret == pytest.ExitCode.OK
    result.stdout.fnmatch_lines(
        [f"  lesson: 910 tokens, 3 steps, {n_paged}; softmax verified to *", f"  {text}"]
    )
    (trace,) = report["traces"]
    assert {row["layer"]: row["reason"] for row in trace["unpaged_layers"]} == unpaged
    measured = {row["layer"] for row in report["layers"]}
    assert measured == set(trace["paged_layers"])
    assert not measured & set(unpaged)


def test_a_saved_trace_keeps_the_reasons(pytester: pytest.Pytester, prompt: Path) -> None:
    model = tiny_model(pytester.path / "tiny.gguf", "nemotron_h")
    run(pytester, model, [prompt], "--kvgate-save=kept")
    (saved,) = (pytester.path / "kept").iterdir()
    result = pytester.runpytest(f"--kvgate-trace={saved}")
    result.stdout.fnmatch_lines(
        ["  not paged: layers 0, 3 (recurrent); layer 2 (no attention)"],
    )


def test_what_is_not_paged_is_said_once_for_several_prompts(
    pytester: pytest.Pytester, prompt: Path
) -> None:
    other = pytester.path / "other.txt"
    other.write_text(prompt.read_text("utf-8")[::-1], encoding="utf-8")
    model = tiny_model(pytester.path / "tiny.gguf", "gemma3")
    result, _ = run(pytester, model, [prompt, other])
    assert result.stdout.str().count("not paged: layer 0 (sliding window)") == 1


def test_where_every_layer_is_paged_nothing_is_said(
    pytester: pytest.Pytester, tiny_llama: Path, prompt: Path
) -> None:
    result, report = run(pytester, tiny_llama, [prompt])
    assert "not paged" not in result.stdout.str()
    assert report["traces"][0]["unpaged_layers"] == []


@pytest.mark.parametrize(
    ("architecture", "shape", "option", "reason"),
    [
        ("mamba", None, "", "*tiny.gguf (mamba) is recurrent in every layer: *"),
        ("rwkv6", None, "", "*tiny.gguf (rwkv6) is recurrent in every layer: *"),
        ("bert", None, "", "*tiny.gguf (bert) is an encoder: *"),
        ("t5", None, "", "*tiny.gguf (t5) is an encoder-decoder: *"),
        ("dream", None, "", "*tiny.gguf (dream) is a diffusion model: *"),
        ("llama4", None, "", "*tiny.gguf (llama4) has chunked attention: *"),
        ("llama-embed", None, "", "*attention reads keys of its own batch and not a KV cache*"),
        (
            "gemma3",
            Shape(windowed=(True, True)),
            "",
            "*every layer that attends has a sliding window (32 of *",
        ),
        (
            "llama",
            Shape(head_dim=80, n_head_kv=1),
            "--kvgate-cache-type-k=q8_0",
            "*has 80 dims, and a q8_0 K cache rounds 32 of them together*",
        ),
        ("deepseek2", None, "--kvgate-cache-type-k=q8_0", "*has latent attention (MLA): *"),
    ],
)
def test_a_gate_on_a_model_that_cannot_be_gated_is_invalid_and_fails(
    pytester: pytest.Pytester,
    prompt: Path,
    architecture: str,
    shape: Shape | None,
    option: str,
    reason: str,
) -> None:
    model = tiny_model(pytester.path / "tiny.gguf", architecture, shape=shape)
    result, report = run(pytester, model, [prompt], *filter(None, [option]))
    assert result.ret == pytest.ExitCode.TESTS_FAILED
    result.assert_outcomes(failed=2)  # the xfail does not excuse it
    result.stdout.fnmatch_lines([f"INVALID: {reason}", "INVALID  *test_gate*"])
    assert [gate["verdict"] for gate in report["gates"]] == ["INVALID", "INVALID"]
    assert report["coverage"] == []
    assert "coverage at" not in result.stdout.str()
