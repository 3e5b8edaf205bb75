"""A trace is written whole or not at all, and never over another one."""

from __future__ import annotations

import json
import math
from pathlib import Path

import numpy as np
import pytest

from pytest_kvgate.trace import Step, Trace, TraceError, TraceWriter, Verification, load_trace
from tests.traces import LayerArrays, random_layer

PASSED = Verification(1e-6, 1e-3, "softmax", "passed")
STEPS = [Step(decode_index=0, n_visible=18), Step(decode_index=4, n_visible=20)]
LAYERS = [
    random_layer(1, n_token=20, n_step=2, index=2, dtype="float16", sinks=True, values=True),
    random_layer(2, n_token=20, n_step=2, index=5, alibi=True, window=9, softcap=3.0),
]


def fill(writer: TraceWriter, layers: list[LayerArrays] = LAYERS) -> Trace:
    for layer in layers:
        for name in ("k", "q", "v", "sinks"):
            array = getattr(layer, name)
            if array is not None:
                writer.write_array(layer.index, name, array)
    return writer.write_document(
        model={"name": "tiny", "architecture": "made", "quantization": "Q8_0", "file_sha256": "ab"},
        workload={"name": "story", "n_prompt": 17},
        capture={"backend": "made"},
        layers=[layer.fields for layer in layers],
        steps=STEPS,
    )


def write(parent: Path, name: str, verification: Verification | None = PASSED) -> Trace:
    with TraceWriter(parent, name) as writer:
        fill(writer)
        return writer.commit(verification)


def names(parent: Path) -> list[str]:
    return sorted(path.name for path in parent.iterdir())


def test_a_round_trip_keeps_everything(tmp_path: Path) -> None:
    trace = write(tmp_path, "mytrace")

    assert trace.directory == tmp_path / "mytrace"
    assert trace.model == {
        "name": "tiny",
        "architecture": "made",
        "quantization": "Q8_0",
        "file_sha256": "ab",
    }
    assert trace.workload == {"name": "story", "n_prompt": 17}
    assert trace.capture == {"backend": "made"}
    assert trace.steps == tuple(STEPS)
    assert trace.verification == PASSED
    assert len(trace.layers) == len(LAYERS)
    for read, written in zip(trace.layers, LAYERS, strict=True):
        assert read.index == written.index
        assert read.scale == written.fields["scale"]
        assert (read.softcap, read.window) == (written.softcap, written.window)
        assert read.alibi_slopes == written.alibi_slopes
        assert read.n_rot == 8
        for name in ("k", "q", "v", "sinks"):
            array, original = getattr(read, name), getattr(written, name)
            assert (array is None) == (original is None), name
            if original is not None:
                assert array.dtype == original.dtype
                np.testing.assert_array_equal(array, original)


def test_a_committed_trace_is_all_that_is_left(tmp_path: Path) -> None:
    write(tmp_path / "new" / "folder", "mytrace")

    assert names(tmp_path / "new" / "folder") == ["mytrace"]
    assert names(tmp_path / "new" / "folder" / "mytrace") == ["layers", "trace.json"]
    assert names(tmp_path / "new" / "folder" / "mytrace" / "layers") == ["002", "005"]


def test_a_committed_trace_can_be_read_by_others(tmp_path: Path) -> None:
    trace = write(tmp_path, "mytrace")

    assert trace.directory.stat().st_mode & 0o777 == 0o755


def test_what_is_written_conforms_to_the_format(tmp_path: Path) -> None:
    trace = write(tmp_path, "mytrace")

    document = json.loads((trace.directory / "trace.json").read_text("utf-8"))

    assert list(document) == [
        "schema",
        "model",
        "workload",
        "capture",
        "layers",
        "steps",
        "verification",
    ]
    assert document["schema"] == "kvgate-trace/1"
    assert document["steps"] == [
        {"decode_index": 0, "n_visible": 18},
        {"decode_index": 4, "n_visible": 20},
    ]
    assert document["verification"] == {
        "max_abs_error": 1e-6,
        "tolerance": 1e-3,
        "reference": "softmax",
        "status": "passed",
    }


def test_the_document_is_loaded_before_it_is_verified(tmp_path: Path) -> None:
    with TraceWriter(tmp_path, "mytrace") as writer:
        trace = fill(writer)

        assert trace.verification is None
        assert trace.directory.parent == tmp_path
        assert trace.directory.name.startswith(".mytrace.partial-")
        assert not (tmp_path / "mytrace").exists()


def test_a_trace_without_verification_is_committed_as_such(tmp_path: Path) -> None:
    assert write(tmp_path, "mytrace", None).verification is None


@pytest.mark.parametrize("moment", ["at once", "after an array", "after the document"])
def test_an_error_leaves_nothing_behind(tmp_path: Path, moment: str) -> None:
    def interrupted() -> None:
        with TraceWriter(tmp_path, "mytrace") as writer:
            if moment == "after an array":
                writer.write_array(2, "k", LAYERS[0].k)
            elif moment == "after the document":
                fill(writer)
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        interrupted()

    assert names(tmp_path) == []


def test_a_trace_that_cannot_be_loaded_leaves_nothing_behind(tmp_path: Path) -> None:
    broken = LayerArrays(k=LAYERS[0].k.astype(np.float64), q=LAYERS[0].q)

    with (
        pytest.raises(TraceError, match="holds float64"),
        TraceWriter(tmp_path, "mytrace") as writer,
    ):
        fill(writer, [broken])

    assert names(tmp_path) == []


def test_a_trace_that_is_not_committed_leaves_nothing_behind(tmp_path: Path) -> None:
    with TraceWriter(tmp_path, "mytrace") as writer:
        fill(writer)

    assert names(tmp_path) == []


def test_an_error_does_not_touch_what_was_there(tmp_path: Path) -> None:
    write(tmp_path, "mytrace")

    with pytest.raises(ZeroDivisionError), TraceWriter(tmp_path, "mytrace"):
        _ = 1 / 0

    assert names(tmp_path) == ["mytrace"]
    assert load_trace(tmp_path / "mytrace").verification == PASSED


def test_nothing_is_overwritten(tmp_path: Path) -> None:
    first, second, third = (write(tmp_path, "mytrace") for _ in range(3))

    assert [trace.directory.name for trace in (first, second, third)] == [
        "mytrace",
        "mytrace-2",
        "mytrace-3",
    ]
    assert names(tmp_path) == ["mytrace", "mytrace-2", "mytrace-3"]


def test_a_file_of_the_name_is_not_overwritten_either(tmp_path: Path) -> None:
    (tmp_path / "mytrace").write_text("mine", encoding="utf-8")

    trace = write(tmp_path, "mytrace")

    assert trace.directory.name == "mytrace-2"
    assert (tmp_path / "mytrace").read_text("utf-8") == "mine"


def test_a_free_number_in_between_is_used(tmp_path: Path) -> None:
    for name in ("mytrace", "mytrace-3"):
        (tmp_path / name).mkdir()

    assert write(tmp_path, "mytrace").directory.name == "mytrace-2"


def test_two_writers_of_one_name_do_not_meet(tmp_path: Path) -> None:
    with TraceWriter(tmp_path, "mytrace") as one, TraceWriter(tmp_path, "mytrace") as other:
        fill(one)
        fill(other)
        committed = [one.commit(PASSED), other.commit(None)]

    assert [trace.directory.name for trace in committed] == ["mytrace", "mytrace-2"]
    assert [trace.verification for trace in committed] == [PASSED, None]


@pytest.mark.parametrize("error", [math.nan, math.inf])
def test_an_error_that_is_not_a_number_is_recorded_as_null_and_failed(
    tmp_path: Path, error: float
) -> None:
    trace = write(tmp_path, "mytrace", Verification.of(error, 1e-3, "softmax"))

    recorded = json.loads((trace.directory / "trace.json").read_text("utf-8"))["verification"]

    assert recorded["max_abs_error"] is None
    assert recorded["status"] == "failed"
    assert trace.verification is not None
    assert trace.verification.status == "failed"
    assert math.isnan(trace.verification.max_abs_error)


def test_a_failed_verification_is_kept(tmp_path: Path) -> None:
    failed = Verification.of(0.25, 1e-3, "softmax")

    assert write(tmp_path, "mytrace", failed).verification == failed


@pytest.mark.parametrize(
    ("error", "status"),
    [(0.0, "passed"), (1e-3, "passed"), (1.0001e-3, "failed"), (math.nan, "failed")],
)
def test_a_verification_is_judged_by_its_numbers(error: float, status: str) -> None:
    assert Verification.of(error, 1e-3, "softmax").status == status


@pytest.mark.parametrize(
    ("name", "folder"),
    [
        ("SmolLM2-135M.Q8_0-story", "SmolLM2-135M.Q8_0-story"),
        ("a model/with: spaces", "a-model-with-spaces"),
        ("../../etc/passwd", "etc-passwd"),
        (".hidden", "hidden"),
        ("größe", "gr-e"),
        ("...", "trace"),
        ("", "trace"),
        ("日本語", "trace"),
        ("a\nb", "a-b"),
    ],
)
def test_names_are_made_safe(tmp_path: Path, name: str, folder: str) -> None:
    parent = tmp_path / "parent"

    trace = write(parent, name)

    assert trace.directory == parent / folder
    assert names(tmp_path) == ["parent"]


def test_arrays_need_not_be_contiguous(tmp_path: Path) -> None:
    layer = LAYERS[0]
    strided = LayerArrays(
        k=np.asfortranarray(layer.k), q=np.repeat(layer.q, 2, axis=2)[:, :, ::2], index=2
    )
    with TraceWriter(tmp_path, "mytrace") as writer:
        fill(writer, [strided])
        trace = writer.commit(None)

    np.testing.assert_array_equal(trace.layers[0].k, layer.k)
    np.testing.assert_array_equal(trace.layers[0].q, layer.q)
