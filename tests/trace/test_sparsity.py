"""What a trace says of a model's own top-k, and what is refused."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from pytest_kvgate.trace import NativeSparsity, Step, TraceError, TraceWriter, load_trace
from tests.traces import LayerArrays, make_trace, random_layer

N_VISIBLE = [18, 20]


def layer(index: int, *, sparse: bool = True, window: int | None = None) -> LayerArrays:
    made = random_layer(index, n_token=20, n_step=2, index=index, window=window)
    visible = np.zeros((2, 20), dtype=np.bool_)
    visible[0, 3:9] = visible[1, 7:12] = True
    return LayerArrays(made.k, made.q, index, window=window, visible=visible if sparse else None)


@pytest.fixture
def directory(tmp_path: Path) -> Path:
    return make_trace(tmp_path / "sparse", [layer(2, sparse=False), layer(5)], N_VISIBLE)


@pytest.fixture
def path(directory: Path) -> Path:
    return directory / "layers/005/visible.npy"


def message(directory: Path) -> str:
    with pytest.raises(TraceError) as refusal:
        load_trace(directory)
    return str(refusal.value)


def state(directory: Path, sparsity: object) -> None:
    document = json.loads((directory / "trace.json").read_text("utf-8"))
    document["capture"]["native_sparse"] = sparsity
    (directory / "trace.json").write_text(json.dumps(document), encoding="utf-8")


def test_what_a_layer_selected_is_read(directory: Path) -> None:
    trace = load_trace(directory)
    assert trace.native_sparsity == NativeSparsity(6, (5,))
    ordinary, sparse = trace.layers
    assert ordinary.visible is None
    assert sparse.visible is not None
    assert [np.flatnonzero(row).tolist() for row in sparse.visible] == [
        [3, 4, 5, 6, 7, 8],
        [7, 8, 9, 10, 11],
    ]


def test_a_sparse_model_that_ran_densely_has_no_such_layer(tmp_path: Path) -> None:
    directory = make_trace(tmp_path / "dense", [layer(2, sparse=False)], N_VISIBLE)
    assert load_trace(directory).native_sparsity is None
    state(directory, {"top_k": 2048, "layers": []})
    assert load_trace(directory).native_sparsity == NativeSparsity(2048, ())


def test_a_round_trip_keeps_what_was_selected(tmp_path: Path) -> None:
    written = layer(3)
    assert written.visible is not None
    with TraceWriter(tmp_path, "sparse") as writer:
        for name in ("k", "q", "visible"):
            writer.write_array(3, name, getattr(written, name))
        writer.write_document(
            model={"name": "tiny", "architecture": "made"},
            workload={"name": "story"},
            capture={"native_sparse": NativeSparsity(6, (3,)).as_json()},
            layers=[written.fields],
            steps=[Step(0, 18), Step(1, 20)],
        )
        trace = writer.commit(None)
    assert trace.native_sparsity == NativeSparsity(6, (3,))
    read = trace.layers[0].visible
    assert read is not None
    np.testing.assert_array_equal(read, written.visible)


def test_a_lost_array_is_not_taken_for_an_ordinary_layer(directory: Path, path: Path) -> None:
    path.unlink()
    assert message(directory) == (
        f"{directory / 'trace.json'}: field 'capture.native_sparse.layers' is [5]; accepted: the "
        "layers that have visible.npy, []."
    )


@pytest.mark.parametrize("sparsity", [None, {"top_k": 6, "layers": []}, {"top_k": 6, "layers": 5}])
def test_an_array_that_the_document_does_not_name(directory: Path, sparsity: object) -> None:
    state(directory, sparsity)
    found = message(directory)
    assert found.startswith(f"{directory / 'trace.json'}: field 'capture.native_sparse")


@pytest.mark.parametrize("top_k", [0, -1, 2.5, "6", None, True])
def test_a_top_k_that_is_no_number_of_tokens(directory: Path, top_k: object) -> None:
    state(directory, {"top_k": top_k, "layers": [5]})
    assert message(directory) == (
        f"{directory / 'trace.json'}: field 'capture.native_sparse.top_k' is {top_k!r}; accepted: "
        "a whole number from 1."
    )


def test_a_sliding_window_beside_it(tmp_path: Path) -> None:
    directory = make_trace(tmp_path / "both", [layer(1, window=9)], N_VISIBLE)
    assert message(directory) == (
        f"{directory / 'trace.json'}: field 'layers[0].window' is 9 beside visible.npy; accepted: "
        "null where that file is."
    )


@pytest.mark.parametrize(
    "array",
    [
        np.ones((2, 19), dtype=np.bool_),
        np.ones((3, 20), dtype=np.bool_),
        np.ones(20, dtype=np.bool_),
        np.ones((2, 20), dtype=np.float32),
        np.ones((2, 20), dtype=np.uint8),
    ],
    ids=lambda array: f"{array.dtype}-{array.shape}",
)
def test_an_array_of_another_shape_or_type(directory: Path, path: Path, array: Any) -> None:  # noqa: ANN401
    np.save(path, array)
    assert message(directory) == (
        f"{path}: holds {array.dtype} of shape {array.shape}; trace.json asks for bool of shape "
        "(2, 20)."
    )


def test_a_position_after_the_query(directory: Path, path: Path) -> None:
    visible = np.load(path)
    visible[0, 19] = True
    np.save(path, visible)
    assert message(directory) == (
        f"{path}: step 0 shows position 19, but its query sits at 17. Copy or capture the trace "
        "again."
    )


def test_a_step_that_sees_nothing(directory: Path, path: Path) -> None:
    visible = np.load(path)
    visible[1] = False
    np.save(path, visible)
    assert message(directory) == (
        f"{path}: step 1 shows no position at all, so it has no attention. Copy or capture the "
        "trace again."
    )
