"""A malformed trace is refused with a sentence that names file, field and value."""

from __future__ import annotations

import json
import pickle
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from pytest_kvgate.trace import Trace, TraceError, load_trace
from tests.traces import FAILED, PASSED, make_trace, random_layer

Edit = Callable[[dict[str, Any]], object]


@pytest.fixture
def directory(tmp_path: Path) -> Path:
    layers = [
        random_layer(1, n_token=20, n_step=2, index=2, dtype="float16", sinks=True, values=True),
        random_layer(2, n_token=20, n_step=2, index=5, alibi=True, window=9, softcap=3.0),
    ]
    return make_trace(tmp_path / "mytrace", layers, [18, 20], verification=dict(PASSED))


def edit(directory: Path, change: Edit) -> None:
    path = directory / "trace.json"
    document = json.loads(path.read_text("utf-8"))
    change(document)
    path.write_text(json.dumps(document), encoding="utf-8")


def message(directory: Path) -> str:
    with pytest.raises(TraceError) as caught:
        load_trace(directory)
    return str(caught.value)


def parent_of(document: dict[str, Any], field: str) -> tuple[Any, str | int]:
    """Find the object or list that holds a field such as ``layers[0].n_head``, and its key."""
    keys = [
        int(key) if key.isdigit() else key
        for key in field.replace("[", ".").replace("]", "").split(".")
    ]
    node: Any = document
    for key in keys[:-1]:
        node = node[key]
    return node, keys[-1]


def put(field: str, value: object) -> Edit:
    def change(document: dict[str, Any]) -> None:
        node, key = parent_of(document, field)
        node[key] = value

    return change


def drop(field: str) -> Edit:
    def change(document: dict[str, Any]) -> None:
        node, key = parent_of(document, field)
        del node[key]

    return change


def test_a_whole_trace_is_read(directory: Path) -> None:
    trace = load_trace(directory)

    assert trace.directory == directory
    assert trace.model["name"] == "tiny"
    assert trace.label == "tiny · made"
    assert [step.n_visible for step in trace.steps] == [18, 20]
    assert trace.n_context == 20
    assert [layer.index for layer in trace.layers] == [2, 5]
    assert [layer.index for layer in trace.paged_layers] == [2]
    first, second = trace.layers
    assert (first.n_head, first.n_head_kv, first.group_size, first.head_dim) == (4, 2, 2, 8)
    assert (first.scale, first.softcap, first.alibi_slopes) == (8**-0.5, None, None)
    assert (second.softcap, second.window, second.n_rot) == (3.0, 9, 8)
    assert second.alibi_slopes == (0.05, 0.025, 0.0125, 0.00625)
    assert first.sinks is not None
    assert first.v is not None
    assert (second.sinks, second.v) == (None, None)
    assert trace.verification is not None
    assert trace.verification.status == "passed"


def test_a_path_may_be_a_string(directory: Path) -> None:
    assert load_trace(str(directory)).directory == directory


def test_arrays_are_memory_mapped_and_read_only(directory: Path) -> None:
    first, second = load_trace(directory).layers

    arrays = [first.k, first.q, first.v, first.sinks, second.k, second.q]

    assert all(isinstance(array, np.memmap) for array in arrays)
    assert not any(array.flags.writeable for array in arrays if array is not None)
    assert [first.k.dtype.name, second.k.dtype.name] == ["float16", "float32"]


def test_a_failed_verification_is_read_as_it_stands(directory: Path) -> None:
    edit(directory, put("verification", dict(FAILED)))

    verification = load_trace(directory).verification

    assert verification is not None
    assert (verification.status, verification.max_abs_error) == ("failed", 0.25)


def test_a_trace_without_verification_is_read(directory: Path) -> None:
    edit(directory, put("verification", None))

    assert load_trace(directory).verification is None


def test_keys_that_are_not_known_are_ignored(directory: Path) -> None:
    edit(directory, put("layers[0].note", "later versions may add keys"))
    edit(directory, put("capture.threads", 4))

    assert load_trace(directory).capture == {"backend": "made", "threads": 4}


def test_a_missing_folder(tmp_path: Path) -> None:
    assert message(tmp_path / "gone") == (
        f"{tmp_path / 'gone'}: a trace is a folder with trace.json and layers/, "
        "and this does not exist."
    )


def test_a_file_in_place_of_the_folder(tmp_path: Path) -> None:
    (tmp_path / "trace.zip").write_bytes(b"PK")

    assert message(tmp_path / "trace.zip").endswith("and this is a file.")


def test_a_missing_trace_json(directory: Path) -> None:
    (directory / "trace.json").unlink()

    found = message(directory)

    assert found.startswith(f"{directory}: trace.json is missing")
    assert "kvgate-trace/1" in found


@pytest.mark.parametrize("text", ["", '{"schema": "kvgate-tra', "{'schema': 1}", "nul"])
def test_json_that_does_not_parse(directory: Path, text: str) -> None:
    (directory / "trace.json").write_text(text, encoding="utf-8")

    assert message(directory).startswith(f"{directory / 'trace.json'}: is not valid JSON (")


def test_bytes_that_are_not_text(directory: Path) -> None:
    (directory / "trace.json").write_bytes(b"\xff\xfe\x00")

    assert message(directory).startswith(f"{directory / 'trace.json'}: cannot be read: ")


@pytest.mark.parametrize(("text", "kind"), [("[]", "list"), ("3", "int"), ("null", "NoneType")])
def test_json_that_is_not_an_object(directory: Path, text: str, kind: str) -> None:
    (directory / "trace.json").write_text(text, encoding="utf-8")

    assert message(directory) == (
        f"{directory / 'trace.json'}: holds a JSON {kind}; an object is needed."
    )


@pytest.mark.parametrize("schema", ["kvgate-trace/2", "kvgate-report/1"])
def test_another_schema(directory: Path, schema: str) -> None:
    edit(directory, put("schema", schema))

    assert message(directory) == (
        f"{directory / 'trace.json'}: field 'schema' is {schema!r}; accepted: "
        "'kvgate-trace/1', the only format read here."
    )


REQUIRED = [
    "schema",
    "model",
    "model.name",
    "model.architecture",
    "workload",
    "workload.name",
    "capture",
    "layers",
    "layers[1].index",
    "layers[1].n_head",
    "layers[1].n_head_kv",
    "layers[1].head_dim",
    "layers[1].scale",
    "layers[1].softcap",
    "layers[1].alibi_slopes",
    "layers[1].window",
    "layers[1].n_rot",
    "steps",
    "steps[1].decode_index",
    "steps[1].n_visible",
    "verification",
    "verification.max_abs_error",
    "verification.tolerance",
    "verification.reference",
    "verification.status",
]


@pytest.mark.parametrize("field", REQUIRED)
def test_a_missing_key(directory: Path, field: str) -> None:
    edit(directory, drop(field))

    found = message(directory)

    assert found.startswith(f"{directory / 'trace.json'}: field {field!r} is missing; accepted: ")


WRONG: list[tuple[str, object]] = [
    ("schema", 1),
    ("model", "llama"),
    ("model.name", ""),
    ("model.name", 7),
    ("model.architecture", None),
    ("workload", []),
    ("workload.name", ["a"]),
    ("workload.eos_ignored_from", None),
    ("workload.eos_ignored_from", -1),
    ("workload.eos_ignored_from", "3"),
    ("capture", None),
    ("layers", {}),
    ("layers", []),
    ("layers[0]", 3),
    ("layers[1].index", -1),
    ("layers[1].index", "5"),
    ("layers[1].n_head", 0),
    ("layers[1].n_head", 4.0),
    ("layers[1].n_head_kv", None),
    ("layers[1].n_head_kv", True),
    ("layers[1].head_dim", "8"),
    ("layers[1].scale", 0),
    ("layers[1].scale", -0.5),
    ("layers[1].scale", None),
    ("layers[1].scale", "0.5"),
    ("layers[1].scale", True),
    ("layers[1].softcap", 0),
    ("layers[1].softcap", "none"),
    ("layers[1].alibi_slopes", 0.5),
    ("layers[1].window", 0),
    ("layers[1].window", 8.5),
    ("layers[1].n_rot", -1),
    ("layers[1].n_rot", 9),
    ("layers[1].n_rot", None),
    ("steps", []),
    ("steps", None),
    ("steps[0]", [0, 18]),
    ("steps[0].decode_index", -1),
    ("steps[0].n_visible", 0),
    ("steps[0].n_visible", "18"),
    ("verification", "passed"),
    ("verification.max_abs_error", "small"),
    ("verification.tolerance", None),
    ("verification.reference", 5),
    ("verification.status", True),
]


@pytest.mark.parametrize(
    ("field", "value"), WRONG, ids=[f"{field}={value}" for field, value in WRONG]
)
def test_a_value_of_the_wrong_kind(directory: Path, field: str, value: object) -> None:
    edit(directory, put(field, value))

    found = message(directory)

    assert found.startswith(f"{directory / 'trace.json'}: field {field!r} is {value!r}; accepted: ")


@pytest.mark.parametrize("number", ["1e300", "1e-44", "-3.0", "0.0"])
def test_a_number_that_float32_does_not_hold(directory: Path, number: str) -> None:
    path = directory / "trace.json"
    text = path.read_text("utf-8").replace('"softcap": 3.0', f'"softcap": {number}')
    path.write_text(text, encoding="utf-8")

    found = message(directory)

    assert "field 'layers[1].softcap' is " in found
    assert found.endswith("accepted: a number from 1e-30 to 1e+30.")


@pytest.mark.parametrize(
    "text", ["NaN", "Infinity", "-Infinity", "1e999", "9" * 5000, "[" * 200_000]
)
def test_what_is_no_json_value_is_refused_anywhere(directory: Path, text: str) -> None:
    path = directory / "trace.json"
    whole = path.read_text("utf-8").replace('"workload": {', f'"workload": {{"x": {text}, ')
    path.write_text(whole, encoding="utf-8")

    assert message(directory).startswith(f"{path}: is not valid JSON (")


def test_an_alibi_slope_that_would_overflow(directory: Path) -> None:
    edit(directory, put("layers[1].alibi_slopes", [0.5, 1e38, 0.2, 0.1]))

    assert message(directory).endswith("is 1e+38; accepted: a number in size up to 1e+30.")


def test_a_whole_number_too_large_for_a_float(directory: Path) -> None:
    edit(directory, put("layers[1].softcap", 10**400))

    assert "field 'layers[1].softcap' is " in message(directory)


def test_a_slope_that_is_not_a_number(directory: Path) -> None:
    edit(directory, put("layers[1].alibi_slopes", [0.5, 0.25, "x", 0.1]))

    assert "field 'layers[1].alibi_slopes.2' is 'x'" in message(directory)


def test_slopes_of_another_number_of_heads(directory: Path) -> None:
    edit(directory, put("layers[1].alibi_slopes", [0.5, 0.25]))

    assert "field 'layers[1].alibi_slopes' is 2 slopes; accepted: one per head, 4." in message(
        directory
    )


def test_query_heads_that_do_not_divide_over_the_kv_heads(directory: Path) -> None:
    edit(directory, put("layers[1].n_head", 5))

    assert message(directory) == (
        f"{directory / 'trace.json'}: field 'layers[1].n_head' is 5 with n_head_kv 2; "
        "accepted: a multiple of n_head_kv."
    )


def test_a_layer_that_is_listed_twice(directory: Path) -> None:
    edit(directory, lambda document: document["layers"].append(document["layers"][0]))

    assert message(directory) == (
        f"{directory / 'trace.json'}: field 'layers' is indices [2, 5, 2]; "
        "accepted: each layer index once."
    )


@pytest.mark.parametrize(
    ("field", "value", "found"),
    [
        ("steps[1].n_visible", 18, "(decode_index 1, n_visible 18)"),
        ("steps[1].n_visible", 17, "(decode_index 1, n_visible 17)"),
        ("steps[1].decode_index", 0, "(decode_index 0, n_visible 20)"),
    ],
)
def test_steps_that_do_not_increase(directory: Path, field: str, value: int, found: str) -> None:
    edit(directory, put(field, value))

    assert message(directory) == (
        f"{directory / 'trace.json'}: field 'steps' is step {found} after "
        "(decode_index 0, n_visible 18); accepted: steps in strictly increasing order."
    )


def test_fewer_rows_of_k_than_visible_tokens(directory: Path) -> None:
    edit(directory, put("steps[1].n_visible", 21))

    assert message(directory) == (
        f"{directory / 'layers/002/k.npy'}: holds 20 tokens, but the last step sees 21. "
        "Every visible position needs a row; capture it again."
    )


def test_more_rows_of_k_than_visible_tokens_are_fine(directory: Path) -> None:
    edit(directory, put("steps[1].n_visible", 19))

    assert load_trace(directory).layers[0].k.shape == (2, 20, 8)


def test_a_missing_layer_folder(directory: Path) -> None:
    shutil.rmtree(directory / "layers/005")

    assert message(directory) == (
        f"{directory / 'layers/005/k.npy'}: is missing. "
        "The trace is incomplete; copy or capture it again."
    )


@pytest.mark.parametrize("name", ["k", "q"])
def test_a_missing_array(directory: Path, name: str) -> None:
    path = directory / f"layers/002/{name}.npy"
    path.unlink()

    assert message(directory).startswith(f"{path}: is missing.")


@pytest.mark.parametrize(
    ("name", "shape"),
    [
        ("k", (1, 20, 8)),
        ("k", (2, 20, 4)),
        ("k", (20, 8)),
        ("k", (2, 20, 8, 1)),
        ("q", (1, 4, 8)),
        ("q", (2, 2, 8)),
        ("q", (2, 4, 16)),
        ("v", (2, 19, 8)),
        ("v", (4, 20, 8)),
        ("sinks", (2,)),
        ("sinks", (4, 1)),
    ],
)
def test_an_array_of_another_shape(directory: Path, name: str, shape: tuple[int, ...]) -> None:
    path = directory / f"layers/002/{name}.npy"
    np.save(path, np.zeros(shape, dtype=np.float32))

    found = message(directory)

    assert found.startswith(f"{path}: holds float32 of shape {shape}; trace.json asks for ")


def test_v_may_have_a_head_dimension_of_its_own(directory: Path) -> None:
    np.save(directory / "layers/002/v.npy", np.zeros((2, 20, 3), dtype=np.float16))

    v = load_trace(directory).layers[0].v

    assert v is not None
    assert v.shape == (2, 20, 3)


@pytest.mark.parametrize(
    ("name", "dtype"),
    [
        ("k", "float64"),
        ("k", "int8"),
        ("k", ">f2"),
        ("q", "float16"),
        ("q", "float64"),
        ("q", ">f4"),
        ("v", "float64"),
        ("sinks", "float16"),
    ],
)
def test_an_array_of_another_type(directory: Path, name: str, dtype: str) -> None:
    path = directory / f"layers/002/{name}.npy"
    np.save(path, np.load(path).astype(dtype))

    found = message(directory)

    assert found.startswith(f"{path}: holds {np.dtype(dtype)} of shape ")
    assert "trace.json asks for float" in found


@pytest.mark.parametrize("name", ["k", "q", "v", "sinks"])
@pytest.mark.parametrize("kept", [0, 5, 60, -1])
def test_a_truncated_array(directory: Path, name: str, kept: int) -> None:
    path = directory / f"layers/002/{name}.npy"
    path.write_bytes(path.read_bytes()[:kept])

    assert message(directory).startswith(f"{path}: is not a whole .npy file (")


class Bomb:
    """Leaves a file behind where it is unpickled."""

    def __init__(self, crater: Path) -> None:
        self.crater = crater

    def __reduce__(self) -> tuple[Callable[..., Any], tuple[object, ...]]:
        return (Path.touch, (self.crater,))


@pytest.mark.parametrize("form", ["pickle", "npy"])
def test_a_pickled_array_is_refused_and_not_unpickled(
    directory: Path, tmp_path: Path, form: str
) -> None:
    crater = tmp_path / "crater"
    path = directory / "layers/002/k.npy"
    if form == "pickle":
        path.write_bytes(pickle.dumps(Bomb(crater)))
    else:
        np.save(path, np.array([Bomb(crater)], dtype=object), allow_pickle=True)

    found = message(directory)

    assert found.startswith(f"{path}: is not a whole .npy file (")
    assert not crater.exists()
    np.load(path, allow_pickle=True)
    assert crater.exists(), "the file was harmless, so this test showed nothing"


@pytest.mark.parametrize("content", ["archive", "broken archive", "text"])
def test_another_file_in_place_of_an_array(directory: Path, content: str) -> None:
    path = directory / "layers/002/k.npy"
    if content == "archive":
        with path.open("wb") as file:
            np.savez(file, k=np.zeros((2, 20, 8), dtype=np.float16))
    else:
        path.write_bytes(b"PK\x03\x04 cut" if content == "broken archive" else b"hello, world\n")

    assert message(directory).startswith(f"{path}: ")


def test_a_folder_in_place_of_an_array(directory: Path) -> None:
    path = directory / "layers/002/q.npy"
    path.unlink()
    path.mkdir()

    assert message(directory).startswith(f"{path}: ")


@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
def test_a_learned_sink_that_is_not_finite(directory: Path, value: float) -> None:
    path = directory / "layers/002/sinks.npy"
    np.save(path, np.array([0, value, 0, 0], dtype=np.float32))

    assert message(directory) == f"{path}: holds a value that is not finite."


@pytest.mark.parametrize(
    ("error", "status", "says"),
    [
        (0.25, "passed", "failed"),
        (None, "passed", "failed"),
        (1e-6, "unsure", "passed"),
    ],
)
def test_a_status_that_contradicts_its_numbers(
    directory: Path, error: float | None, status: str, says: str
) -> None:
    edit(directory, put("verification", {**PASSED, "max_abs_error": error, "status": status}))

    found = message(directory)

    shown = "nan" if error is None else f"{error:g}"
    assert found == (
        f"{directory / 'trace.json'}: field 'verification.status' is {status!r} with "
        f"max_abs_error {shown} and tolerance 0.001; accepted: {says!r}, "
        "which is what these two numbers say."
    )


def test_a_failed_trace_stays_failed_whatever_its_numbers(directory: Path) -> None:
    edit(directory, put("verification", {**PASSED, "status": "failed"}))

    verification = load_trace(directory).verification
    assert verification is not None
    assert (verification.status, verification.max_abs_error) == ("failed", 1e-6)


def test_an_error_below_zero_is_no_error_at_all(directory: Path) -> None:
    edit(directory, put("verification", {**PASSED, "max_abs_error": -0.5}))

    assert "field 'verification.max_abs_error' is -0.5" in message(directory)


def test_an_error_as_large_as_the_tolerance_passes(directory: Path) -> None:
    edit(directory, put("verification", {**PASSED, "max_abs_error": 1e-3}))

    trace: Trace = load_trace(directory)

    assert trace.verification is not None
    assert trace.verification.status == "passed"


def test_a_name_that_would_not_print_as_it_is(directory: Path) -> None:
    edit(directory, put("model.name", "a\x1b[31m\nGO  x"))

    assert "accepted: a non-empty string of printable characters." in message(directory)


def test_rotary_dims_are_the_first_unless_the_layer_says_otherwise(directory: Path) -> None:
    edit(directory, put("layers[1].rotated_last", True))

    assert [layer.rotated_last for layer in load_trace(directory).layers] == [False, True]

    edit(directory, put("layers[1].rotated_last", False))

    assert [layer.rotated_last for layer in load_trace(directory).layers] == [False, False]


@pytest.mark.parametrize("value", [None, 0, 1, "true", [True]])
def test_where_the_rotary_dims_lie_is_true_or_false(directory: Path, value: object) -> None:
    edit(directory, put("layers[1].rotated_last", value))

    assert message(directory) == (
        f"{directory / 'trace.json'}: field 'layers[1].rotated_last' is {value!r}; accepted: "
        "true, false, or no such field."
    )


@pytest.mark.parametrize(
    ("n_rot", "rotated_last", "unrotated"),
    [
        (0, False, None),
        (0, True, None),
        (2, False, [2, 3, 4, 5, 6, 7]),
        (2, True, [0, 1, 2, 3, 4, 5]),
        (6, False, [6, 7]),
        (6, True, [0, 1]),
        (8, False, None),
        (8, True, None),
    ],
)
def test_the_dims_that_rope_never_turns_are_told(
    tmp_path: Path, n_rot: int, rotated_last: bool, unrotated: list[int] | None
) -> None:
    arrays = replace(random_layer(n_token=20), n_rot=n_rot, rotated_last=rotated_last)

    layer = load_trace(make_trace(tmp_path / "mytrace", [arrays])).layers[0]

    dims = layer.unrotated_dims
    assert (None if dims is None else [*range(8)][dims]) == unrotated


@pytest.mark.parametrize("value", [8, "eight", None])
def test_the_value_dim_in_a_layer_is_not_relied_on(directory: Path, value: object) -> None:
    edit(directory, put("layers[0].value_dim", value))

    layer = load_trace(directory).layers[0]

    assert layer.v is not None
    assert layer.v.shape == (2, 20, 8)


def reasons(directory: Path) -> list[tuple[int, str]]:
    return [(layer.index, layer.reason) for layer in load_trace(directory).unpaged_layers]


def test_layers_that_are_not_paged_are_read_with_the_reason(directory: Path) -> None:
    listed = [
        {"layer": 7, "reason": "recurrent"},
        {"layer": 5, "reason": "sliding window"},
        {"layer": 0, "reason": "a reason of a later version"},
    ]
    edit(directory, put("capture.unpaged_layers", listed))

    assert reasons(directory) == [
        (0, "a reason of a later version"),
        (5, "sliding window"),
        (7, "recurrent"),
    ]


def test_whether_a_layer_has_a_window_is_said_by_the_layer(directory: Path) -> None:
    edit(directory, put("capture.unpaged_layers", [{"layer": 2, "reason": "sliding window"}]))

    trace = load_trace(directory)

    assert [layer.index for layer in trace.paged_layers] == [2]
    assert reasons(directory) == [(5, "sliding window")]


def test_an_older_trace_names_the_layers_that_share_a_cache(directory: Path) -> None:
    edit(directory, put("capture.shared_kv_layers", [6, 8]))

    assert reasons(directory) == [
        (5, "sliding window"),
        (6, "reads another layer's cache"),
        (8, "reads another layer's cache"),
    ]


def test_an_older_trace_may_name_no_layers_at_all(directory: Path) -> None:
    assert reasons(directory) == [(5, "sliding window")]


@pytest.mark.parametrize(
    ("key", "value", "found"),
    [
        ("unpaged_layers", "none", "field 'capture.unpaged_layers' is 'none'"),
        ("unpaged_layers", [3], "field 'capture.unpaged_layers[0]' is 3"),
        ("unpaged_layers", [{"layer": 3}], "unpaged_layers[0].reason' is missing"),
        ("unpaged_layers", [{"layer": -1, "reason": "x"}], "unpaged_layers[0].layer' is -1"),
        ("unpaged_layers", [{"layer": 1, "reason": "x"}] * 2, "is of layers [1, 1]; accepted:"),
        ("shared_kv_layers", 3, "field 'capture.shared_kv_layers' is 3"),
        ("shared_kv_layers", ["3"], "field 'capture.shared_kv_layers.0' is '3'"),
    ],
)  # fmt: skip
def test_a_malformed_list_of_unpaged_layers_is_refused(
    directory: Path, key: str, value: object, found: str
) -> None:
    edit(directory, put(f"capture.{key}", value))

    assert found in message(directory)


def test_learned_sinks_that_were_lost_are_missed(directory: Path) -> None:
    edit(directory, put("layers[0].sinks", True))
    assert load_trace(directory).layers[0].sinks is not None
    path = directory / "layers/002/sinks.npy"
    path.unlink()
    assert message(directory).startswith(f"{path}: is missing.")


def test_the_error_of_each_layer_is_read(directory: Path) -> None:
    edit(directory, put("verification.layer_errors", [PASSED["max_abs_error"], 0.0]))
    verification = load_trace(directory).verification
    assert verification is not None
    assert verification.layer_errors == (PASSED["max_abs_error"], 0.0)


@pytest.mark.parametrize(
    ("errors", "complaint"),
    [
        ([0.9, None], "a list whose largest is inf; accepted: numbers whose largest is "),
        ([0.9, 0.0], "a list whose largest is 0.9; accepted: numbers whose largest is "),
        ([0.0], "a list of 1; accepted: one number for each of 2 layers"),
        ("none", "'none'; accepted: a list of numbers and nulls"),
    ],
)
def test_layer_errors_that_contradict_the_rest(
    directory: Path, errors: object, complaint: str
) -> None:
    edit(directory, put("verification.layer_errors", errors))
    assert f"'verification.layer_errors' is {complaint}" in message(directory)
