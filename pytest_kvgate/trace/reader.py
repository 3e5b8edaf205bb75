"""Read a trace directory; all of it is validated before any of it is used."""

from __future__ import annotations

import itertools
import json
import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from pytest_kvgate.trace.errors import TraceError
from pytest_kvgate.trace.fields import Fields
from pytest_kvgate.trace.model import (
    SCHEMA,
    Layer,
    NativeSparsity,
    Step,
    Trace,
    Verification,
)
from pytest_kvgate.trace.unpaged import read_cacheless


def load_trace(directory: str | Path) -> Trace:
    """Load and validate a ``kvgate-trace/1`` directory.

    Arrays are memory-mapped read-only and never unpickled.

    Raises:
        TraceError: something is missing, malformed or inconsistent; nothing is half-loaded.
    """
    directory = Path(directory)
    if not directory.is_dir():
        found = "is a file" if directory.exists() else "does not exist"
        raise TraceError(
            f"{directory}: a trace is a folder with trace.json and layers/, and this {found}."
        )
    document = _read_document(directory / "trace.json")
    steps = _steps(document)
    model = document.child("model")
    for key in ("name", "architecture"):
        model.text(key)
    workload = document.child("workload")
    workload.text("name")
    if "eos_ignored_from" in workload.values:
        workload.integer("eos_ignored_from", minimum=0)
    layers = tuple(_layer(directory, fields, steps) for fields in document.children("layers"))
    indices = [layer.index for layer in layers]
    if len(set(indices)) != len(indices):
        raise document.error("layers", f"indices {indices}", "each layer index once")
    capture = document.child("capture")
    return Trace(
        directory=directory,
        model=dict(model.values),
        workload=dict(workload.values),
        capture=dict(capture.values),
        layers=layers,
        steps=steps,
        verification=_verification(document, len(layers)),
        cacheless_layers=read_cacheless(capture, indices),
        native_sparsity=_native_sparsity(capture, layers),
    )


def _read_document(path: Path) -> Fields:
    try:
        text = path.read_text(encoding="utf-8")
    except FileNotFoundError:
        inside = sorted(found.parent.name for found in path.parent.glob("*/trace.json"))
        remedy = (
            f"It holds traces, though: name one of {', '.join(inside)} in it."
            if inside
            else "Copy or capture the trace again."
        )
        raise TraceError(
            f"{path.parent}: trace.json is missing, so this is not a {SCHEMA} directory. {remedy}"
        ) from None
    except (OSError, UnicodeDecodeError) as error:
        raise TraceError(f"{path}: cannot be read: {error}.") from error
    try:
        values = json.loads(text, parse_constant=_refuse_constant, parse_float=_finite)
    except (ValueError, RecursionError) as error:
        raise TraceError(
            f"{path}: is not valid JSON ({error}). An interrupted copy leaves such a file; "
            "copy or capture the trace again."
        ) from error
    if not isinstance(values, dict):
        raise TraceError(f"{path}: holds a JSON {type(values).__name__}; an object is needed.")
    document = Fields(path, "", values)
    schema = document.text("schema")
    if schema != SCHEMA:
        raise document.error("schema", repr(schema), f"{SCHEMA!r}, the only format read here")
    return document


def _refuse_constant(name: str) -> None:
    raise ValueError(f"{name} is no JSON value")


def _finite(text: str) -> float:
    number = float(text)
    if math.isinf(number):
        raise ValueError(f"{text} is too large for a number")
    return number


def _steps(document: Fields) -> tuple[Step, ...]:
    steps = tuple(
        Step(
            fields.integer("decode_index", minimum=0, maximum=2**53),
            fields.integer("n_visible", minimum=1),
        )
        for fields in document.children("steps")
    )
    for before, after in itertools.pairwise(steps):
        if after.decode_index <= before.decode_index or after.n_visible <= before.n_visible:
            raise document.error(
                "steps",
                f"step (decode_index {after.decode_index}, n_visible {after.n_visible}) after "
                f"(decode_index {before.decode_index}, n_visible {before.n_visible})",
                "steps in strictly increasing order",
            )
    return steps


def _layer(directory: Path, fields: Fields, steps: tuple[Step, ...]) -> Layer:
    index = fields.integer("index", minimum=0)
    n_head = fields.integer("n_head", minimum=1)
    n_head_kv = fields.integer("n_head_kv", minimum=1)
    head_dim = fields.integer("head_dim", minimum=1)
    if n_head % n_head_kv:
        raise fields.error(
            "n_head", f"{n_head} with n_head_kv {n_head_kv}", "a multiple of n_head_kv"
        )
    slopes = fields.numbers_or_none("alibi_slopes")
    if slopes is not None and len(slopes) != n_head:
        raise fields.error("alibi_slopes", f"{len(slopes)} slopes", f"one per head, {n_head}")
    folder = directory / "layers" / f"{index:03d}"
    k = _array(folder / "k.npy", (n_head_kv, None, head_dim), ("float16", "float32"))
    if k.shape[1] < steps[-1].n_visible:
        raise TraceError(
            f"{folder / 'k.npy'}: holds {k.shape[1]} tokens, but the last step sees "
            f"{steps[-1].n_visible}. Every visible position needs a row; capture it again."
        )
    v_path, sinks_path = folder / "v.npy", folder / "sinks.npy"
    v = None
    if v_path.exists():
        v = _array(v_path, (n_head_kv, k.shape[1], None), ("float16", "float32"))
        if not v.shape[2]:
            raise TraceError(f"{v_path}: its values have no numbers; copy or capture it again.")
    sinks = None
    if sinks_path.exists() or fields.flag("sinks"):
        sinks = _array(sinks_path, (n_head,), ("float32",))
        if not np.isfinite(sinks).all():
            raise TraceError(f"{sinks_path}: holds a value that is not finite.")
    window = fields.integer_or_none("window", minimum=1)
    visible_path = folder / "visible.npy"
    visible = None
    if visible_path.exists():
        if window is not None:
            raise fields.error("window", f"{window} beside visible.npy", "null where that file is")
        visible = _visible(visible_path, k.shape[1], steps)
    return Layer(
        index=index,
        n_head=n_head,
        n_head_kv=n_head_kv,
        head_dim=head_dim,
        scale=fields.number("scale", positive=True),
        softcap=fields.number_or_none("softcap", positive=True),
        alibi_slopes=slopes,
        window=window,
        n_rot=fields.integer("n_rot", minimum=0, maximum=head_dim),
        rotated_last=fields.flag("rotated_last"),
        k=k,
        q=_array(folder / "q.npy", (len(steps), n_head, head_dim), ("float32",)),
        v=v,
        sinks=sinks,
        visible=visible,
    )


def _visible(path: Path, n_token: int, steps: tuple[Step, ...]) -> NDArray[np.bool_]:
    visible: NDArray[np.bool_] = _array(path, (len(steps), n_token), ("bool",))
    for number, (step, shown) in enumerate(zip(steps, visible, strict=True)):
        if shown[step.n_visible :].any():
            raise TraceError(
                f"{path}: step {number} shows position "
                f"{step.n_visible + int(shown[step.n_visible :].argmax())}, but its query sits at "
                f"{step.n_visible - 1}. Copy or capture the trace again."
            )
        if not shown.any():
            raise TraceError(
                f"{path}: step {number} shows no position at all, so it has no attention. Copy or "
                "capture the trace again."
            )
    return visible


def _native_sparsity(capture: Fields, layers: tuple[Layer, ...]) -> NativeSparsity | None:
    """Read what the capture says of the model's own top-k; visible.npy must agree with it."""
    found = [layer.index for layer in layers if layer.visible is not None]
    if capture.values.get("native_sparse") is None:
        if found:
            raise capture.error(
                "native_sparse",
                f"missing or null, though layer {found[0]} has visible.npy",
                "the model's top_k and these layers",
            )
        return None
    fields = capture.child("native_sparse")
    listed = fields.value("layers")
    if listed != found:
        raise fields.error("layers", repr(listed), f"the layers that have visible.npy, {found}")
    return NativeSparsity(fields.integer("top_k", minimum=1), tuple(found))


def _array(path: Path, shape: tuple[int | None, ...], dtypes: tuple[str, ...]) -> NDArray[Any]:
    """Memory-map one ``.npy`` file; None in ``shape`` accepts any length."""
    try:
        # unlike np.load, this opens nothing but .npy and has no way to unpickle
        array: NDArray[Any] = np.lib.format.open_memmap(path, mode="r")
    except FileNotFoundError:
        raise TraceError(
            f"{path}: is missing. The trace is incomplete; copy or capture it again."
        ) from None
    except (OSError, ValueError, EOFError) as error:
        raise TraceError(
            f"{path}: is not a whole .npy file ({error}). Copy or capture the trace again."
        ) from error
    fits = array.ndim == len(shape) and all(
        want in (None, got) for want, got in zip(shape, array.shape, strict=False)
    )
    if not fits or array.dtype.name not in dtypes or not array.dtype.isnative:
        wanted = ", ".join("any" if length is None else str(length) for length in shape)
        raise TraceError(
            f"{path}: holds {array.dtype} of shape {array.shape}; trace.json asks for "
            f"{' or '.join(dtypes)} of shape ({wanted})."
        )
    return array


def _verification(document: Fields, n_layer: int) -> Verification | None:
    if document.value("verification") is None:
        return None
    fields = document.child("verification")
    status = fields.text("status")
    recorded: Any = fields.value("max_abs_error")
    # A capture whose softmax was not a number is recorded with a null error, and has failed.
    error = float("nan") if recorded is None else fields.number("max_abs_error")
    if error < 0:
        raise fields.error("max_abs_error", repr(recorded), "0 or more, or null")
    errors = fields.errors("layer_errors")
    if len(errors) not in (0, n_layer):
        raise fields.error(
            "layer_errors", f"a list of {len(errors)}", f"one number for each of {n_layer} layers"
        )
    if errors and not math.isclose(max(errors), error if math.isfinite(error) else math.inf):
        raise fields.error(
            "layer_errors",
            f"a list whose largest is {max(errors):g}",
            f"numbers whose largest is max_abs_error ({recorded!r})",
        )
    judged = Verification.of(error, fields.number("tolerance"), fields.text("reference"), errors)
    if status == "failed":  # whatever the reason was, it stays failed
        return replace(judged, status="failed")
    if status != judged.status:
        raise fields.error(
            "status",
            f"{status!r} with max_abs_error {error:g} and tolerance {judged.tolerance:g}",
            f"{judged.status!r}, which is what these two numbers say",
        )
    return judged
