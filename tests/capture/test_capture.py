from __future__ import annotations

import dataclasses
import hashlib
import json
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
from numpy.typing import NDArray

from pytest_kvgate.analysis import verify_capture
from pytest_kvgate.capture import CaptureSettings, Prompt, capture
from pytest_kvgate.engine import EngineSettings
from pytest_kvgate.trace import Trace, load_trace
from tests.capture.captures import LETTERS, PROMPT, STEPS, Captures, hadamard, random_text
from tests.models import (
    EPSILON,
    HEAD_DIM,
    LATENT,
    MLA_PLAIN,
    MLA_ROPE,
    N_LAYER,
    N_VOCAB,
    PARTIAL_ROPE,
    ROPE_BASE,
    SOFTCAP,
    WINDOW,
    Array,
    Shape,
    tiny_model,
    token_ids,
)

ATTENTION = ("llama", "stablelm", "gemma2", "bloom", "mpt", "gpt-oss")
HEAD_COUNTS = {
    "multi-head": Shape(n_head=4, n_head_kv=4),
    "grouped": Shape(n_head=4, n_head_kv=2),
    "multi-query": Shape(n_head=4, n_head_kv=1),
}
N_PROMPT = len(token_ids(LETTERS))


@pytest.mark.parametrize("cache_type", ["f32", "f16", "q8_0"])
@pytest.mark.parametrize("architecture", ATTENTION)
def test_recomputed_attention_is_the_models_own(
    captures: Captures, architecture: str, cache_type: str
) -> None:
    verification = captures(architecture, cache_type).verification
    assert verification.status == "passed"
    assert verification.max_abs_error < 1e-5
    assert verification.reference == "softmax"


@pytest.mark.parametrize("cache_type", ["bf16", "q4_0", "q5_0", "iq4_nl"])
def test_recomputed_attention_is_the_models_own_with_rarer_caches(
    captures: Captures, cache_type: str
) -> None:
    verification = captures("llama", cache_type).verification
    assert verification.status == "passed"
    assert verification.max_abs_error < 1e-5


@pytest.mark.parametrize("cache_type", ["f32", "f16", "q8_0"])
@pytest.mark.parametrize("heads", HEAD_COUNTS)
def test_query_heads_are_matched_to_their_kv_heads(
    captures: Captures, heads: str, cache_type: str
) -> None:
    shape = HEAD_COUNTS[heads]
    captured = captures("llama", cache_type, shape=shape)
    assert captured.verification.max_abs_error < 1e-5
    for layer in captured.trace.layers:
        assert (layer.n_head, layer.n_head_kv) == (shape.n_head, shape.n_head_kv)
        assert layer.k.shape[0] == shape.n_head_kv
        assert layer.q.shape[1] == shape.n_head


@pytest.mark.parametrize("architecture", ATTENTION)
def test_the_models_attention_is_far_from_uniform(captures: Captures, architecture: str) -> None:
    captured = captures(architecture)
    for paths in captured.reference.softmax:
        for path in paths:
            softmax = np.load(path)
            peaks = softmax.max(axis=1)
            assert peaks.mean() > 5 / softmax.shape[1]


@pytest.mark.parametrize("architecture", ATTENTION)
def test_every_layer_is_recorded_with_whole_arrays(captures: Captures, architecture: str) -> None:
    trace = captures(architecture).trace
    assert [layer.index for layer in trace.layers] == list(range(N_LAYER))
    for layer in trace.layers:
        assert layer.head_dim == HEAD_DIM
        assert layer.k.shape == (layer.n_head_kv, N_PROMPT + STEPS[-1] + 1, HEAD_DIM)
        assert layer.q.shape == (len(STEPS), layer.n_head, HEAD_DIM)
        assert layer.q.dtype == np.float32
        assert np.isfinite(layer.k).all()
        assert np.isfinite(layer.q).all()


@pytest.mark.parametrize(
    ("architecture", "n_head", "n_head_kv"),
    [
        ("llama", 4, 2),
        ("stablelm", 2, 1),
        ("gemma2", 4, 2),
        ("bloom", 2, 2),
        ("mpt", 3, 3),
        ("gpt-oss", 4, 2),
    ],
)
def test_head_counts_are_recorded(
    captures: Captures, architecture: str, n_head: int, n_head_kv: int
) -> None:
    for layer in captures(architecture).trace.layers:
        assert (layer.n_head, layer.n_head_kv) == (n_head, n_head_kv)


@pytest.mark.parametrize(
    ("architecture", "scale"),
    [
        ("llama", 0.125),
        ("stablelm", 0.125),
        ("gemma2", 1.0),  # scales q before the product
        ("bloom", 0.125),
        ("mpt", 0.125),
        ("gpt-oss", 0.125),
    ],
)
def test_scale_is_what_the_product_is_multiplied_by(
    captures: Captures, architecture: str, scale: float
) -> None:
    for layer in captures(architecture).trace.layers:
        assert layer.scale == pytest.approx(scale, rel=1e-6)


@pytest.mark.parametrize("architecture", ATTENTION)
def test_softcap_is_recorded_where_the_model_has_one(captures: Captures, architecture: str) -> None:
    expected = SOFTCAP if architecture == "gemma2" else None
    assert [layer.softcap for layer in captures(architecture).trace.layers] == [expected] * N_LAYER


@pytest.mark.parametrize(
    ("architecture", "slopes"),
    [
        ("llama", None),
        ("stablelm", None),
        ("gemma2", None),
        ("bloom", (1 / 16, 1 / 256)),  # maximal bias 8
        ("mpt", (1 / 4, 1 / 16, 1 / 2)),  # maximal bias 4, three heads
        ("gpt-oss", None),
    ],
)
def test_alibi_slopes_are_recorded_where_the_model_has_them(
    captures: Captures, architecture: str, slopes: tuple[float, ...] | None
) -> None:
    for layer in captures(architecture).trace.layers:
        assert layer.alibi_slopes == slopes


@pytest.mark.parametrize(
    ("architecture", "windows"),
    [
        ("llama", [None, None]),
        ("stablelm", [None, None]),
        ("gemma2", [WINDOW, None]),
        ("bloom", [None, None]),
        ("mpt", [None, None]),
        ("gpt-oss", [WINDOW, None]),
    ],
)
def test_sliding_windows_are_recorded_for_the_layers_that_have_them(
    captures: Captures, architecture: str, windows: list[int | None]
) -> None:
    trace = captures(architecture).trace
    assert [layer.window for layer in trace.layers] == windows
    assert [layer.index for layer in trace.paged_layers] == [
        index for index, window in enumerate(windows) if window is None
    ]


@pytest.mark.parametrize("architecture", ["gemma2", "gpt-oss"])
def test_windowed_layers_attend_to_the_window_and_full_layers_to_all(
    captures: Captures, architecture: str
) -> None:
    captured = captures(architecture)
    for layer, paths in zip(captured.trace.layers, captured.reference.softmax, strict=True):
        for path in paths:
            softmax = np.load(path)
            seen = np.flatnonzero(softmax.max(axis=0))
            first = 0 if layer.window is None else softmax.shape[1] - WINDOW
            assert (seen[0], seen[-1]) == (first, softmax.shape[1] - 1)


def test_a_window_is_found_when_only_the_last_step_reaches_beyond_it(captures: Captures) -> None:
    prompt = Prompt("short", random_text(WINDOW - 10))
    captured = captures("gemma2", prompt=prompt)
    first, *_, last = captured.trace.steps
    assert first.n_visible < WINDOW < last.n_visible
    assert [layer.window for layer in captured.trace.layers] == [WINDOW, None]
    assert captured.verification.max_abs_error < 1e-5


@pytest.mark.parametrize(
    ("architecture", "n_rot"),
    [
        ("llama", HEAD_DIM),
        ("stablelm", PARTIAL_ROPE),
        ("gemma2", HEAD_DIM),
        ("bloom", 0),
        ("mpt", 0),
        ("gpt-oss", HEAD_DIM),
    ],
)
@pytest.mark.parametrize("cache_type", ["f16", "q8_0"])
def test_the_number_of_rotary_dims_is_recorded(
    captures: Captures, architecture: str, cache_type: str, n_rot: int
) -> None:
    for layer in captures(architecture, cache_type).trace.layers:
        assert layer.n_rot == n_rot


@pytest.mark.parametrize("architecture", ["deepseek2", "plm"])
def test_latent_attention_turns_the_last_dims(captures: Captures, architecture: str) -> None:
    trace = captures(architecture).trace
    document = json.loads((trace.directory / "trace.json").read_text(encoding="utf-8"))
    for layer, entry in zip(trace.layers, document["layers"], strict=True):
        assert (layer.n_rot, layer.rotated_last) == (MLA_ROPE, True)
        assert entry["rotated_last"] is True


@pytest.mark.parametrize("cache_type", ["f16", "q8_0"])
def test_where_rope_turns_the_first_dims_nothing_is_recorded(
    captures: Captures, cache_type: str
) -> None:
    trace = captures("stablelm", cache_type).trace
    assert not any(layer.rotated_last for layer in trace.layers)
    assert "rotated_last" not in (trace.directory / "trace.json").read_text(encoding="utf-8")


@pytest.mark.parametrize(
    ("architecture", "head_dim"),
    [("stablelm", HEAD_DIM), ("deepseek2", LATENT + MLA_ROPE), ("plm", MLA_PLAIN + MLA_ROPE)],
)
def test_the_unrotated_dims_are_those_in_which_a_key_knows_no_position(
    captures: Captures, architecture: str, head_dim: int
) -> None:
    # In the first layer a key depends on its token, and else on its position only.
    layer = captures(architecture, prompt=Prompt("same", "a" * 100)).trace.layers[0]
    keys = np.asarray(layer.k[:, 1:101], dtype=np.float32)
    change = np.abs(keys - keys[:, :1]).max(axis=(0, 1))
    unrotated = layer.unrotated_dims
    assert unrotated is not None
    fixed = np.zeros(head_dim, dtype=bool)
    fixed[unrotated] = True
    assert fixed.sum() == head_dim - layer.n_rot
    assert change[fixed].max() < 5e-4
    assert change[~fixed].min() > 1e-3


@pytest.mark.parametrize("architecture", ATTENTION)
def test_learned_sinks_are_the_models_weights(captures: Captures, architecture: str) -> None:
    captured = captures(architecture)
    weights = _read_weights(captured.model)
    for layer in captured.trace.layers:
        expected = weights.get(f"blk.{layer.index}.attn_sinks.weight")
        if expected is None:
            assert layer.sinks is None
        else:
            assert architecture == "gpt-oss"
            np.testing.assert_array_equal(layer.sinks, expected)


def test_learned_sinks_take_mass_from_the_positions(captures: Captures) -> None:
    for paths in captures("gpt-oss").reference.softmax:
        for path in paths:
            sums = np.load(path).sum(axis=1)
            assert sums.max() < 0.9999
            assert sums.mean() < 0.98


@pytest.mark.parametrize("architecture", ["llama", "gemma2"])
def test_decode_step_i_sees_the_prompt_and_i_plus_one_tokens(
    captures: Captures, architecture: str
) -> None:
    trace = captures(architecture).trace
    assert trace.workload == {
        "name": "letters",
        "n_prompt": N_PROMPT,
        "kind": "text",
        "forced": False,
    }
    assert [step.decode_index for step in trace.steps] == [0, 8, 16]
    assert [step.n_visible for step in trace.steps] == [N_PROMPT + 1, N_PROMPT + 9, N_PROMPT + 17]


@pytest.mark.parametrize(
    ("cache_type", "dtype"),
    [
        ("f16", "float16"),
        ("f32", "float32"),
        ("bf16", "float32"),
        ("q8_0", "float32"),
        ("q4_0", "float32"),
    ],
)
def test_keys_keep_half_precision_and_everything_else_is_single(
    captures: Captures, cache_type: str, dtype: str
) -> None:
    trace = captures("llama", cache_type).trace
    assert {layer.k.dtype.name for layer in trace.layers} == {dtype}
    assert trace.capture["cache_type_k"] == cache_type


def test_keys_of_a_half_precision_cache_are_the_exact_keys_rounded(captures: Captures) -> None:
    exact, half = captures("llama", "f32").trace, captures("llama", "f16").trace
    np.testing.assert_array_equal(
        half.layers[0].k[:, :N_PROMPT], exact.layers[0].k[:, :N_PROMPT].astype(np.float16)
    )


@pytest.mark.parametrize("architecture", ATTENTION)
def test_queries_of_a_quantized_cache_are_in_the_models_own_basis(
    captures: Captures, architecture: str
) -> None:
    exact = captures(architecture, "f32").trace.layers[0].q[0]
    quantized = captures(architecture, "q8_0").trace.layers[0].q[0]
    np.testing.assert_allclose(quantized, exact, atol=1e-5)
    assert _distance(exact @ hadamard(), exact) > 0.5


@pytest.mark.parametrize("architecture", ATTENTION)
def test_keys_of_a_quantized_cache_are_in_the_models_own_basis(
    captures: Captures, architecture: str
) -> None:
    exact = captures(architecture, "f32").trace.layers[0].k[:, :N_PROMPT]
    quantized = captures(architecture, "q8_0").trace.layers[0].k[:, :N_PROMPT]
    assert 1e-4 < _distance(quantized, exact) < 1e-2
    assert _distance(exact @ hadamard(), exact) > 0.5


def test_a_quantized_cache_was_rotated_on_its_way(captures: Captures) -> None:
    # In the rotated basis each block of 32 dims is a scale times small whole numbers.
    keys = captures("llama", "q8_0").trace.layers[0].k
    rotated = (keys @ hadamard()).reshape(-1, 32)
    scaled = rotated / np.abs(rotated).max(axis=1, keepdims=True) * 127
    assert np.abs(scaled - np.rint(scaled)).max() < 1e-2
    plain = keys.reshape(-1, 32)
    scaled = plain / np.abs(plain).max(axis=1, keepdims=True) * 127
    assert np.abs(scaled - np.rint(scaled)).max() > 0.4


def test_the_trace_is_what_a_plain_recomputation_of_the_model_gives(captures: Captures) -> None:
    steps = range(0, 6, 2)
    captured = captures("llama", "f32", steps=steps)
    tokens = token_ids(LETTERS)
    plain = _PlainLlama(_read_weights(captured.model), Shape())
    for _ in range(steps[-1] + 1):
        tokens.append(plain.next_token(tokens))
    keys, queries = plain.attention_inputs(tokens)
    positions = [step.n_visible - 1 for step in captured.trace.steps]
    for layer in captured.trace.layers:
        np.testing.assert_allclose(layer.k, keys[layer.index], atol=2e-4)
        np.testing.assert_allclose(
            layer.q, queries[layer.index][:, positions].transpose(1, 0, 2), atol=2e-4
        )


@pytest.mark.parametrize("cache_type", ["f32", "f16", "q8_0"])
def test_sampling_fewer_steps_gives_the_same_keys_and_queries(
    captures: Captures, cache_type: str
) -> None:
    dense = captures("llama", cache_type, steps=range(0, 24)).trace
    sparse = captures("llama", cache_type, steps=range(3, 21, 5)).trace
    assert [step.decode_index for step in sparse.steps] == [3, 8, 13, 18]
    shared = [dense.steps.index(step) for step in sparse.steps]
    np.testing.assert_array_equal(sparse.layers[0].k, dense.layers[0].k[:, : N_PROMPT + 19])
    np.testing.assert_array_equal(sparse.layers[0].q, dense.layers[0].q[shared])
    for some, all_of_it in zip(sparse.layers, dense.layers, strict=True):
        assert some.k.shape[1] == N_PROMPT + 19
        assert _distance(some.k, all_of_it.k[:, : N_PROMPT + 19]) < 1e-3
        assert _distance(some.q, all_of_it.q[shared]) < 1e-3


def test_a_single_step_is_enough(captures: Captures) -> None:
    captured = captures("llama", steps=range(5, 6))
    assert [step.n_visible for step in captured.trace.steps] == [N_PROMPT + 6]
    assert captured.reference.steps == (0,)
    assert captured.verification.max_abs_error < 1e-5


@pytest.mark.parametrize("cache_type", ["f32", "f16", "q8_0"])
@pytest.mark.parametrize("architecture", ["llama", "gemma2", "mpt"])
def test_a_prompt_of_several_prefill_batches_is_captured_right(
    captures: Captures, architecture: str, cache_type: str
) -> None:
    captured = captures(architecture, cache_type, prompt=Prompt("long", random_text(1300)))
    assert captured.trace.workload["n_prompt"] == 1301
    assert captured.verification.max_abs_error < 1e-5


def test_the_provenance_names_engine_cache_and_steps(captures: Captures) -> None:
    import llama_cpp  # noqa: PLC0415

    assert captures("llama", "q8_0").trace.capture == {
        "backend": "llama-cpp-python",
        "backend_version": llama_cpp.__version__,
        "flash_attention": False,
        "cache_type_k": "q8_0",
        "cache_type_v": "f16",
        "values": False,
        "n_gpu_layers": 0,
        "n_threads": 1,
        "steps": "0:17:8",
        "shared_kv_layers": [],
        "unpaged_layers": [],
    }


@pytest.mark.parametrize("architecture", ATTENTION)
def test_the_model_is_named_by_file_architecture_and_checksum(
    captures: Captures, architecture: str
) -> None:
    captured = captures(architecture)
    assert captured.trace.model == {
        "name": captured.model.stem,
        "architecture": architecture,
        "quantization": "F32",
        "file_sha256": hashlib.sha256(captured.model.read_bytes()).hexdigest(),
    }


def test_the_trace_holds_no_prompt_no_tokens_and_no_paths(captures: Captures) -> None:
    captured = captures("llama")
    text = (captured.trace.directory / "trace.json").read_text(encoding="utf-8")
    assert not any(LETTERS[start : start + 5] in text for start in range(len(LETTERS) - 4))
    assert "/" not in text.replace('"kvgate-trace/1"', "")
    assert "\\" not in text
    document = json.loads(text)
    assert set(document) == {
        "schema",
        "model",
        "workload",
        "capture",
        "layers",
        "steps",
        "verification",
    }
    assert set(document["workload"]) == {"name", "n_prompt", "kind", "forced"}
    assert set(document["steps"][0]) == {"decode_index", "n_visible"}
    assert max(_list_lengths(document)) < 10


def test_the_trace_folder_holds_the_document_and_the_arrays_only(captures: Captures) -> None:
    directory = captures("gpt-oss").trace.directory
    found = {str(path.relative_to(directory)) for path in directory.rglob("*") if path.is_file()}
    assert found == {
        "trace.json",
        *(f"layers/{i:03d}/{name}.npy" for i in range(2) for name in ("k", "q", "sinks")),
    }


def test_a_captured_trace_loads_as_it_was_returned(captures: Captures) -> None:
    trace = captures("gpt-oss").trace
    loaded = load_trace(trace.directory)
    assert loaded.steps == trace.steps
    assert loaded.verification == trace.verification
    assert [_geometry(loaded, index) for index in range(N_LAYER)] == [
        _geometry(trace, index) for index in range(N_LAYER)
    ]


def test_capturing_twice_keeps_both_traces_and_gives_the_same_arrays(
    llama: Path, tmp_path: Path
) -> None:
    settings = CaptureSettings(steps=range(2))
    first = capture(llama, PROMPT, settings, tmp_path, verify_capture)
    second = capture(llama, PROMPT, settings, tmp_path, verify_capture)
    assert first.directory == tmp_path / "tiny-letters"
    assert second.directory == tmp_path / "tiny-letters-2"
    for one, other in zip(first.layers, second.layers, strict=True):
        np.testing.assert_array_equal(one.k, other.k)
        np.testing.assert_array_equal(one.q, other.q)


def test_names_with_spaces_and_other_alphabets_are_captured(tmp_path: Path) -> None:
    folder = tmp_path / "Modèle à moi"
    folder.mkdir()
    model = tiny_model(folder / "petit modèle.gguf")
    trace = capture(
        model,
        Prompt("日本 ../x", LETTERS),
        CaptureSettings(steps=range(1)),
        tmp_path / "out",
        verify_capture,
    )
    assert trace.directory.parent == tmp_path / "out"
    assert trace.model["name"] == "petit modèle"
    assert trace.workload["name"] == "日本 ../x"


def test_a_good_capture_prints_nothing(
    llama: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    settings = CaptureSettings(steps=range(3), engine=EngineSettings(cache_type_k="q8_0"))
    capture(llama, PROMPT, settings, tmp_path, verify_capture)
    assert capfd.readouterr() == ("", "")


def test_the_number_of_threads_does_not_change_the_trace(llama: Path, tmp_path: Path) -> None:
    traces = [
        capture(
            llama,
            PROMPT,
            CaptureSettings(steps=range(2), engine=EngineSettings(n_threads=n_threads)),
            tmp_path,
            verify_capture,
        )
        for n_threads in (1, 2)
    ]
    for one, other in zip(traces[0].layers, traces[1].layers, strict=True):
        np.testing.assert_allclose(
            np.asarray(one.k, np.float32), np.asarray(other.k, np.float32), atol=1e-2
        )
        np.testing.assert_allclose(one.q, other.q, atol=1e-2)


def test_the_models_longest_context_can_be_filled(llama: Path, tmp_path: Path) -> None:
    prompt = Prompt("full", random_text(512 - 1 - 4))
    trace = capture(llama, prompt, CaptureSettings(steps=range(4)), tmp_path, verify_capture)
    assert trace.n_context == 512
    assert trace.verification is not None
    assert trace.verification.max_abs_error < 1e-5


def _geometry(trace: Trace, index: int) -> dict[str, Any]:
    layer = trace.layers[index]
    return {
        entry.name: getattr(layer, entry.name)
        for entry in dataclasses.fields(layer)
        if entry.name not in ("k", "q", "v", "sinks")
    }


def _list_lengths(value: object) -> list[int]:
    if isinstance(value, dict):
        return [n for child in value.values() for n in _list_lengths(child)]
    if isinstance(value, list):
        return [len(value), *(n for child in value for n in _list_lengths(child))]
    return [0]


def _distance(found: NDArray[Any], expected: NDArray[Any]) -> float:
    difference = np.asarray(found, np.float64) - expected
    return float(np.linalg.norm(difference) / np.linalg.norm(expected))


def _read_weights(model: Path) -> dict[str, Array]:
    return {
        tensor.name: np.array(tensor.data, dtype=np.float32)
        for tensor in gguf.GGUFReader(model).tensors
    }


@dataclasses.dataclass(frozen=True)
class _PlainLlama:
    """The llama architecture written down once more, whole sequences at a time, in float64.

    V is kept and multiplied in half precision, as in the engine's default V cache.
    """

    weights: dict[str, Array]
    shape: Shape

    def next_token(self, tokens: list[int]) -> int:
        stream, _, _ = self._run(tokens)
        final = self._norm(stream[-1], "output_norm")
        logits = self.weights["output.weight"] @ final
        assert logits.shape == (N_VOCAB,)
        return int(np.argmax(logits))

    def attention_inputs(
        self, tokens: list[int]
    ) -> tuple[list[NDArray[np.float64]], list[NDArray[np.float64]]]:
        """Return K and q per layer, ``[head, position, head_dim]``, after RoPE."""
        _, keys, queries = self._run(tokens)
        return keys, queries

    def _run(
        self, tokens: list[int]
    ) -> tuple[NDArray[np.float64], list[NDArray[np.float64]], list[NDArray[np.float64]]]:
        all_keys, all_queries = [], []
        stream = self.weights["token_embd.weight"][tokens].astype(np.float64)
        group = self.shape.n_head // self.shape.n_head_kv
        for index in range(N_LAYER):
            block = f"blk.{index}"
            normed = self._norm(stream, f"{block}.attn_norm")
            queries = _rope(self._heads(normed, f"{block}.attn_q"))
            keys = _rope(self._heads(normed, f"{block}.attn_k"))
            values = _half(self._heads(normed, f"{block}.attn_v"))
            all_keys.append(keys)
            all_queries.append(queries)
            logits = queries @ np.repeat(keys, group, axis=0).transpose(0, 2, 1)
            logits /= np.sqrt(HEAD_DIM)
            logits[:, ~np.tri(len(tokens), dtype=bool)] = -np.inf
            masses = np.exp(logits - logits.max(axis=2, keepdims=True))
            masses /= masses.sum(axis=2, keepdims=True)
            masses = _half(masses)
            mixed = (masses @ np.repeat(values, group, axis=0)).transpose(1, 0, 2)
            stream = stream + self._linear(mixed.reshape(len(tokens), -1), f"{block}.attn_output")
            normed = self._norm(stream, f"{block}.ffn_norm")
            gate = self._linear(normed, f"{block}.ffn_gate")
            hidden = gate / (1 + np.exp(-gate)) * self._linear(normed, f"{block}.ffn_up")
            stream = stream + self._linear(hidden, f"{block}.ffn_down")
        return stream, all_keys, all_queries

    def _linear(self, values: NDArray[np.float64], name: str) -> NDArray[np.float64]:
        product: NDArray[np.float64] = values @ self.weights[f"{name}.weight"].T
        return product

    def _norm(self, values: NDArray[np.float64], name: str) -> NDArray[np.float64]:
        mean_square = np.square(values).mean(axis=-1, keepdims=True)
        normed: NDArray[np.float64] = values / np.sqrt(mean_square + EPSILON)
        return normed * self.weights[f"{name}.weight"]

    def _heads(self, values: NDArray[np.float64], name: str) -> NDArray[np.float64]:
        return self._linear(values, name).reshape(len(values), -1, HEAD_DIM).transpose(1, 0, 2)


def _half(values: NDArray[np.float64]) -> NDArray[np.float64]:
    return values.astype(np.float16).astype(np.float64)


def _rope(heads: NDArray[np.float64]) -> NDArray[np.float64]:
    """Turn neighbouring pairs of ``[head, position, head_dim]`` by position and frequency."""
    frequencies = ROPE_BASE ** (-np.arange(0, HEAD_DIM, 2) / HEAD_DIM)
    turns = np.exp(1j * np.outer(np.arange(heads.shape[1]), frequencies))
    turned = (heads[..., 0::2] + 1j * heads[..., 1::2]) * turns
    return np.stack([turned.real, turned.imag], axis=-1).reshape(heads.shape)
