"""Natively sparse models, through the real engine: refused by name, or measured exactly."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest

from pytest_kvgate.analysis import PageGrid, Plan, profile_trace, verify_capture
from pytest_kvgate.capture import CaptureError, CaptureSettings, Prompt, capture
from pytest_kvgate.capture.sparsity import OwnSelections
from pytest_kvgate.engine import AttentionRead, Engine, EngineError, EngineSettings
from pytest_kvgate.trace import NativeSparsity, Reference, Trace, Verification
from tests.capture.captures import Captures, random_text
from tests.models import N_LAYER, token_ids
from tests.plain import head_masses, read_layer
from tests.sparse_models import compressed_model, sparse_model, with_metadata
from tests.traces import LayerArrays

TEXT = random_text(200)
STEPS = range(0, 17, 8)
#: Tokens at the sampled steps.
N_VISIBLE = [202, 210, 218]
#: Less than the context of every sampled step, and more than that of any.
CUT, WHOLE = 64, 512
SPARSE = ["deepseek32", "glm-dsa"]


@dataclass(frozen=True, repr=False)
class Measured:
    """A trace, and what the model's own softmax hid at the first and the last sampled step."""

    trace: Trace
    hidden: list[list[np.ndarray]]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("sparse")


def model_of(folder: Path, architecture: str, top_k: int) -> Path:
    path = folder / f"{architecture}-{top_k}.gguf"
    return path if path.exists() else sparse_model(path, architecture, top_k=top_k)


def attempt(
    model: Path,
    out: Path,
    *,
    allowed: bool,
    values: bool = False,
    engine: EngineSettings | None = None,
    prove: bool = False,
) -> Measured:
    hidden: list[list[np.ndarray]] = []

    def verify(trace: Trace, reference: Reference) -> Verification:
        for paths in reference.softmax:
            hidden.append([~np.load(path).any(axis=0) for path in paths])
        return verify_capture(trace, reference)

    settings = CaptureSettings(
        STEPS,
        engine=engine or EngineSettings(n_threads=1),
        values=values,
        prove=prove,
        allow_native_sparse=allowed,
    )
    return Measured(capture(model, Prompt("letters", TEXT), settings, out, verify), hidden)


def refusal(model: Path, out: Path, *, allowed: bool = False) -> str:
    with pytest.raises(CaptureError) as error:
        attempt(model, out, allowed=allowed)
    assert not out.exists()
    return str(error.value)


@pytest.fixture(scope="module")
def reads(folder: Path) -> dict[int, list[AttentionRead]]:
    """What the hook reports of a decode step where the top-k cuts, and where it does not."""
    tokens, found = token_ids(TEXT), {}
    for top_k in (CUT, WHOLE):
        taken: list[AttentionRead] = []
        model = model_of(folder, "deepseek32", top_k)
        with Engine(model, EngineSettings(n_threads=1)) as engine:
            context = engine.start(len(tokens) + 1)
            context.decode(tokens)
            context.hook.arm(taken.append)
            context.decode([80])
            context.hook.disarm()
        found[top_k] = taken
    return found


@pytest.mark.parametrize("top_k", [CUT, WHOLE])
@pytest.mark.parametrize("architecture", SPARSE)
def test_a_natively_sparse_model_is_refused_by_that_name(
    folder: Path, tmp_path: Path, architecture: str, top_k: int
) -> None:
    assert refusal(model_of(folder, architecture, top_k), tmp_path / "out") == (
        f"this model's attention is natively sparse (top-k of {top_k} tokens): for each query an "
        "indexer of its own selects what it attends to, and hides the rest of a context that is "
        "longer. What is hidden has no mass that a page selector could miss, so coverage looks "
        "better than on a model that attends to everything. With --kvgate-allow-native-sparse it "
        "is measured nevertheless, and every report says so."
    )


@pytest.mark.parametrize("top_k", [CUT, WHOLE])
def test_the_graph_alone_gives_it_away(reads: dict[int, list[AttentionRead]], top_k: int) -> None:
    # also where the context is shorter than the top-k, and the mask hides nothing
    n_visible = len(token_ids(TEXT)) + 1
    shown = [int(np.isfinite(read.mask).sum()) for read in reads[top_k]]
    assert shown == [min(top_k, n_visible)] * N_LAYER
    unstated = OwnSelections(None, allowed=False)
    with pytest.raises(CaptureError, match=r"is natively sparse \(layer 0, top-k of \d+ cells\): "):
        unstated.take(reads[top_k][0], n_visible)
    allowed = OwnSelections(None, allowed=True)
    assert all(allowed.take(read, n_visible) for read in reads[top_k])
    assert allowed.found is not None
    assert allowed.found.layers == (0, 1)


def test_the_mask_must_show_positions_up_to_the_querys_own(
    reads: dict[int, list[AttentionRead]],
) -> None:
    selections = OwnSelections(CUT, allowed=True)
    with pytest.raises(CaptureError, match="layer 0 selects 64 cache cells for itself, and they "):
        selections.take(reads[CUT][0], 100)


@pytest.mark.parametrize("values", [False, True])
@pytest.mark.parametrize("architecture", SPARSE)
def test_what_a_sparse_layer_hid_is_hidden_in_the_trace(
    folder: Path, tmp_path: Path, architecture: str, values: bool
) -> None:
    model = model_of(folder, architecture, CUT)
    measured = attempt(model, tmp_path, allowed=True, values=values)
    trace = measured.trace
    assert trace.verification is not None
    assert trace.verification.status == "passed"
    assert trace.verification.max_abs_error < 1e-5
    assert trace.native_sparsity == NativeSparsity(CUT, (0, 1))
    assert trace.capture["native_sparse"] == {"top_k": CUT, "layers": [0, 1]}
    for layer, hidden in zip(trace.layers, measured.hidden, strict=True):
        assert layer.visible is not None
        assert layer.visible.sum(axis=1).tolist() == [CUT] * 3
        for row, step in enumerate((0, -1)):
            n = N_VISIBLE[step]
            np.testing.assert_array_equal(layer.visible[step, :n], ~hidden[row])
            # what is shown is no sliding window
            assert np.flatnonzero(layer.visible[step])[0] < n - CUT
    first, second = (np.asarray(layer.visible) for layer in trace.layers)
    # GLM reuses the selection of the layer before
    assert np.array_equal(first, second) == (architecture == "glm-dsa")


@pytest.mark.parametrize("architecture", SPARSE)
def test_a_context_below_the_top_k_hides_nothing_and_is_marked_all_the_same(
    folder: Path, tmp_path: Path, architecture: str
) -> None:
    trace = attempt(model_of(folder, architecture, WHOLE), tmp_path, allowed=True).trace
    assert trace.verification is not None
    assert trace.verification.max_abs_error < 1e-5
    assert trace.native_sparsity == NativeSparsity(WHOLE, (0, 1))
    for layer in trace.layers:
        assert layer.visible is not None
        assert layer.visible.sum(axis=1).tolist() == N_VISIBLE


@pytest.mark.parametrize("top_k", [CUT, WHOLE])
@pytest.mark.parametrize(
    ("cache_type", "prove"),
    # latent attention keeps K and V in one cache, and a quantized V has no proof
    [("f16", False), ("f16", True), ("q8_0", False)],
)
def test_flash_attention_shows_what_was_selected_as_well(
    folder: Path, tmp_path: Path, cache_type: str, top_k: int, prove: bool
) -> None:
    engine = EngineSettings(
        n_threads=1, cache_type_k=cache_type, cache_type_v=cache_type, flash_attention=True
    )
    model = model_of(folder, "deepseek32", top_k)
    measured = attempt(model, tmp_path, allowed=True, engine=engine, prove=prove)
    trace = measured.trace
    assert trace.verification is not None
    assert trace.verification.status == "passed"
    assert trace.verification.max_abs_error < (1e-5 if prove else 1e-2)
    assert trace.native_sparsity == NativeSparsity(top_k, (0, 1))
    for layer in trace.layers:
        assert layer.visible is not None
        assert layer.visible.sum(axis=1).tolist() == [min(top_k, n) for n in N_VISIBLE]


def test_hidden_positions_have_no_mass_so_a_budget_of_the_top_k_holds_it_all(
    folder: Path, tmp_path: Path
) -> None:
    trace = attempt(model_of(folder, "deepseek32", 16), tmp_path, allowed=True).trace
    (index,) = (layer.index for layer in trace.layers[:1])
    fields = LayerArrays(trace.layers[0].k, trace.layers[0].q, index, trace.layers[0].scale).fields
    plain = read_layer(trace.directory, fields)
    visible = trace.layers[0].visible
    assert visible is not None
    for step, n in enumerate(N_VISIBLE):
        masses = np.array([head_masses(plain, step, head, n) for head in range(4)])
        assert (masses > 0).any(axis=0).tolist() == visible[step, :n].tolist()
    profile = profile_trace(trace, PageGrid(4, 0, 1), Plan((0.08,), ("oracle", "token-oracle")))
    assert profile.coverage("token-oracle", 0.08) == pytest.approx(1.0)
    assert profile.coverage("oracle", 0.08) < 1.0


@pytest.mark.parametrize("architecture", ["llama", "deepseek2", "gemma2", "gpt-oss", "bloom"])
def test_a_model_that_attends_to_everything_is_not_marked(
    captures: Captures, architecture: str
) -> None:
    trace = captures(architecture).trace
    assert trace.native_sparsity is None
    assert "native_sparse" not in trace.capture
    assert all(layer.visible is None for layer in trace.layers)
    assert list(trace.directory.glob("layers/*/visible.npy")) == []


def test_a_sparse_model_that_the_engine_runs_densely(captures: Captures, tmp_path: Path) -> None:
    # as MiniMax M3 is without flash attention; its top-k counts blocks
    values = {"attention.indexer.top_k": 4, "attention.indexer.block_size": 16}
    model = with_metadata(tmp_path / "dense.gguf", captures.model("llama"), values)
    assert "natively sparse (top-k of 64 tokens)" in refusal(model, tmp_path / "out")
    trace = attempt(model, tmp_path / "out", allowed=True).trace
    assert trace.native_sparsity == NativeSparsity(64, ())
    assert all(layer.visible is None for layer in trace.layers)


def test_an_indexer_without_a_top_k_selects_nothing(captures: Captures, tmp_path: Path) -> None:
    values = {"attention.indexer.top_k": 0, "attention.indexer.block_size": 16}
    model = with_metadata(tmp_path / "dense.gguf", captures.model("llama"), values)
    assert attempt(model, tmp_path / "out", allowed=False).trace.native_sparsity is None


@pytest.mark.parametrize(
    ("key", "value", "what"),
    [
        ("compress_rope_freq_base", 160000.0, "attends to compressed keys beside the latest ones"),
        ("indexer.kpool", 4, "gathers the keys that its indexer selected in pools"),
    ],
)
@pytest.mark.parametrize("allowed", [False, True])
def test_keys_that_are_no_positions_of_a_cache_are_refused_whatever_is_allowed(
    captures: Captures, tmp_path: Path, allowed: bool, key: str, value: float, what: str
) -> None:
    values = {"attention.indexer.top_k": 64, f"attention.{key}": value}
    model = with_metadata(tmp_path / "compressed.gguf", captures.model("llama"), values)
    assert refusal(model, tmp_path / "out", allowed=allowed) == (
        f"llama is natively sparse in a way that is not measured: it {what} (its GGUF file has "
        f"llama.attention.{key}), so its attention masses are not those of the positions of a KV "
        "cache, and there are no pages to gate."
    )


@pytest.mark.parametrize("allowed", [False, True])
def test_a_model_with_compressed_keys_is_refused_by_its_metadata(
    folder: Path, tmp_path: Path, allowed: bool
) -> None:
    model = compressed_model(folder / f"compressed-{allowed}.gguf", top_k=16)
    found = refusal(model, tmp_path / "out", allowed=allowed)
    assert found.startswith("deepseek4 is natively sparse in a way that is not measured: it attend")


@pytest.mark.parametrize("top_k", [16, WHOLE])
def test_compressed_keys_are_refused_by_the_graph_alone(folder: Path, top_k: int) -> None:
    model = compressed_model(folder / f"compressed-{top_k}.gguf", top_k=top_k)
    tokens, taken = token_ids(TEXT), list[AttentionRead]()
    with Engine(model, EngineSettings(n_threads=1)) as engine:
        context = engine.start(len(tokens) + 1)
        context.decode(tokens)
        context.hook.arm(taken.append)
        with pytest.raises(EngineError, match="natively sparse in a way that is not measured: "):
            context.decode([80])
    assert [read.index for read in taken] == [0]  # its window shows no keys but the cache's
