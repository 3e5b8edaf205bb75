"""Models that cannot be gated are refused by the name of the reason."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from numpy.typing import NDArray

from pytest_kvgate.analysis import verify_capture
from pytest_kvgate.capture import CaptureError, CaptureSettings, Prompt, capture
from pytest_kvgate.capture.collector import Collector
from pytest_kvgate.capture.sparsity import OwnSelections
from pytest_kvgate.engine import AttentionRead, Engine, EngineError, EngineSettings
from pytest_kvgate.trace import Step, TraceWriter
from tests.capture.captures import LETTERS, PROMPT, Captures, random_text
from tests.models import WINDOW, Shape, token_ids

NO_CACHE = {
    "mamba": "mamba.gguf (mamba) is recurrent in every layer: it keeps a state of fixed size and "
    "no KV cache, so there is nothing to page.",
    "rwkv6": "rwkv6.gguf (rwkv6) is recurrent in every layer: it keeps a state of fixed size and "
    "no KV cache, so there is nothing to page.",
    "bert": "bert.gguf (bert) is an encoder: every token attends to those after it too, and "
    "nothing is decoded over a KV cache, so there is nothing to page. Gate a decoder-only model.",
    "t5encoder": "t5encoder.gguf (t5encoder) is an encoder: every token attends to those after it "
    "too, and nothing is decoded over a KV cache, so there is nothing to page. Gate a "
    "decoder-only model.",
    "t5": "t5.gguf (t5) is an encoder-decoder: its decoder also attends to a text that was "
    "encoded before, which is no KV cache that grows, so what a pager would do is not defined. "
    "Gate a decoder-only model.",
    "dream": "dream.gguf (dream) is a diffusion model: it fills in a whole text at once, with no "
    "KV cache to decode over, so there is nothing to page. Gate a decoder-only model.",
    "llama4": "llama4.gguf (llama4) has chunked attention: most of its layers see only the "
    "current chunk of 8192 tokens, so the last query alone does not say which pages were in use. "
    "That is not supported.",
}


@pytest.fixture
def out(tmp_path: Path) -> Path:
    folder = tmp_path / "out"
    folder.mkdir()
    return folder


def refusal(
    model: Path, out: Path, cache_type_k: str = "f16", prompt: Prompt = PROMPT
) -> CaptureError | EngineError:
    """Try to capture, and return why it was refused; nothing may be left behind."""
    engine = EngineSettings(n_threads=1, cache_type_k=cache_type_k)
    settings = CaptureSettings(steps=range(0, 9, 4), engine=engine)
    with pytest.raises(RuntimeError) as caught:
        capture(model, prompt, settings, out, verify_capture)
    assert list(out.iterdir()) == []
    assert isinstance(caught.value, CaptureError | EngineError)
    return caught.value


def named(captures: Captures, architecture: str, tmp_path: Path) -> Path:
    """Return a tiny model under the name of its architecture."""
    link = tmp_path / f"{architecture}.gguf"
    link.symlink_to(captures.model(architecture))
    return link


@pytest.mark.parametrize("cache_type", ["f16", "q8_0"])
@pytest.mark.parametrize("architecture", NO_CACHE)
def test_a_model_without_a_causal_cache_is_refused(
    captures: Captures, tmp_path: Path, out: Path, architecture: str, cache_type: str
) -> None:
    error = refusal(named(captures, architecture, tmp_path), out, cache_type)
    assert isinstance(error, CaptureError)
    assert str(error) == NO_CACHE[architecture]


def test_a_decoder_whose_attention_passes_its_cache_by_is_refused(
    captures: Captures, out: Path
) -> None:
    error = refusal(captures.model("llama-embed"), out)
    assert str(error) == (
        "this model's attention reads keys of its own batch and not a KV cache (an encoder or a "
        "diffusion model), so there is nothing to page."
    )


def test_an_engine_without_a_cache_does_not_start(captures: Captures) -> None:
    with Engine(captures.model("bert"), EngineSettings(n_threads=1)) as engine:
        with pytest.raises(EngineError) as caught:
            engine.start(64)
        assert "(bert) keeps no KV cache, so it does not decode token by token" in str(caught.value)


@pytest.mark.parametrize("cache_type", ["f32", "f16", "q8_0"])
def test_windows_alone_are_refused(captures: Captures, out: Path, cache_type: str) -> None:
    model = captures.model("gemma3", Shape(windowed=(True, True)))
    assert str(refusal(model, out, cache_type)) == (
        f"every layer that attends has a sliding window ({WINDOW} of 122 tokens): what lies before "
        "it is never read again and can be dropped, so there is nothing to page."
    )


def test_windows_alone_that_the_prompt_fits_into_are_refused_as_soon_as_they_show(
    captures: Captures, out: Path
) -> None:
    model = captures.model("gemma3", Shape(windowed=(True, True)))
    prompt = Prompt("short", random_text(WINDOW - 3))
    assert str(refusal(model, out, prompt=prompt)).startswith(
        f"every layer that attends has a sliding window ({WINDOW} of 35 tokens)"
    )


@pytest.mark.parametrize("cache_type", ["f32", "bf16", "q8_0", "q4_0"])
def test_latent_attention_with_two_types_of_cache_is_refused(
    captures: Captures, tmp_path: Path, out: Path, cache_type: str
) -> None:
    assert str(refusal(named(captures, "deepseek2", tmp_path), out, cache_type)) == (
        "deepseek2.gguf (deepseek2) has latent attention (MLA): llama.cpp keeps K and V in one "
        f"cache of one type, so K cannot be {cache_type} where V is f16. Capture with "
        "--kvgate-cache-type-k=f16."
    )


# with one KV head of 80 dims and a q8_0 cache llama.cpp ends the process, with two it goes on
@pytest.mark.parametrize("n_head_kv", [1, 2])
@pytest.mark.parametrize("cache_type", ["q8_0", "q5_0", "q4_0", "iq4_nl"])
def test_a_head_that_blocks_do_not_divide_is_refused(
    captures: Captures, out: Path, cache_type: str, n_head_kv: int
) -> None:
    model = captures.model("llama", Shape(head_dim=80, n_head_kv=n_head_kv))
    assert str(refusal(model, out, cache_type)) == (
        f"a head of this model has 80 dims, and a {cache_type} K cache rounds 32 of them together, "
        "which does not divide 80, so llama.cpp's attention would be wrong. Capture with "
        "--kvgate-cache-type-k=f16, f32 or bf16."
    )


@pytest.mark.parametrize("cache_type", ["f16", "f32", "bf16"])
@pytest.mark.parametrize("n_head_kv", [1, 2])
def test_the_cache_types_that_the_refusal_names_work(
    captures: Captures, cache_type: str, n_head_kv: int
) -> None:
    captured = captures("llama", cache_type, shape=Shape(head_dim=80, n_head_kv=n_head_kv))
    assert captured.verification.max_abs_error < 1e-5
    assert {layer.head_dim for layer in captured.trace.layers} == {80}


def test_a_quantized_cache_works_where_blocks_divide_a_head(captures: Captures) -> None:
    captured = captures("llama", "q8_0", shape=Shape(head_dim=96))  # 96 dims: not rotated
    assert captured.verification.max_abs_error < 1e-5


def test_llama_cpp_itself_attends_wrongly_where_blocks_do_not_divide_a_head(
    captures: Captures,
) -> None:
    def softmax(head_dim: int, cache_type: str) -> NDArray[np.float32]:
        found: list[NDArray[np.float32]] = []

        def keep(read: AttentionRead) -> None:
            assert read.read_softmax is not None
            found.append(read.read_softmax()[:, :122])

        model = captures.model("llama", Shape(head_dim=head_dim))
        with Engine(model, EngineSettings(n_threads=1, cache_type_k=cache_type)) as engine:
            context = engine.start(140)
            context.decode(token_ids(LETTERS))
            context.hook.arm(keep)
            context.decode([80])
        return found[0]

    def distance(head_dim: int) -> float:
        exact, rounded = softmax(head_dim, "f32"), softmax(head_dim, "q8_0")
        return float(np.nan_to_num(np.abs(rounded - exact), nan=1.0).max())

    assert distance(96) < 0.01
    assert distance(80) > 0.05


def test_a_step_in_which_nothing_attends_is_refused(captures: Captures, tmp_path: Path) -> None:
    # metadata refuse such models before; this is what a step itself shows
    with TraceWriter(tmp_path / "traces", "none") as writer:
        settings = CaptureSettings(steps=range(1))
        collector = Collector(writer, tmp_path, settings, OwnSelections(None, allowed=False))
        with Engine(captures.model("mamba"), EngineSettings(n_threads=1)) as engine:
            context = engine.start(64)
            context.decode(token_ids("abc"))
            collector.begin(Step(0, 5))
            context.hook.arm(collector.take)
            context.decode([80])
        with pytest.raises(CaptureError, match="no attention over a KV cache was seen"):
            collector.end()


@pytest.mark.slow
def test_chunks_are_seen_in_the_attention_of_two_steps(captures: Captures, tmp_path: Path) -> None:
    # metadata refuse this architecture before; this is what the steps themselves show
    tokens = token_ids(random_text(8195))
    model = captures.model("llama4", Shape(n_head=1, n_head_kv=1, n_layer=4, n_context=16384))
    with (
        Engine(model, EngineSettings(n_threads=1)) as engine,
        TraceWriter(tmp_path / "traces", "chunks") as writer,
    ):
        settings = CaptureSettings(steps=range(2))
        collector = Collector(writer, tmp_path, settings, OwnSelections(None, allowed=False))
        context = engine.start(len(tokens) + 2)
        context.decode(tokens)
        for index in range(2):
            collector.begin(Step(index, len(tokens) + index + 1))
            context.hook.arm(collector.take)
            context.decode([80])
            collector.end()
        with pytest.raises(CaptureError, match=r"layer 0 .* as chunked attention does"):
            collector.write_layers(engine.sliding_window)
