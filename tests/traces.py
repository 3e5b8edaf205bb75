"""Write valid ``kvgate-trace/1`` directories from arrays, with nothing of the package's writer."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

FloatArray = NDArray[np.floating[Any]]

PASSED = {"max_abs_error": 1e-6, "tolerance": 1e-3, "reference": "softmax", "status": "passed"}
FAILED = {"max_abs_error": 0.25, "tolerance": 1e-3, "reference": "softmax", "status": "failed"}


@dataclass(frozen=True)
class LayerArrays:
    """One layer: ``k`` is ``[n_head_kv, n_token, head_dim]``, ``q`` ``[n_step, n_head, head_dim]``.

    ``scale`` None stands for ``head_dim ** -0.5``, ``n_rot`` None for ``head_dim``.
    """

    k: FloatArray
    q: FloatArray
    index: int = 0
    scale: float | None = None
    softcap: float | None = None
    alibi_slopes: tuple[float, ...] | None = None
    window: int | None = None
    n_rot: int | None = None
    v: FloatArray | None = None
    sinks: FloatArray | None = None
    rotated_last: bool = False
    visible: NDArray[np.bool_] | None = None

    @property
    def fields(self) -> dict[str, Any]:
        """The layer's object in trace.json."""
        head_dim = int(self.k.shape[2])
        return {
            "index": self.index,
            "n_head": int(self.q.shape[1]),
            "n_head_kv": int(self.k.shape[0]),
            "head_dim": head_dim,
            "scale": head_dim**-0.5 if self.scale is None else self.scale,
            "softcap": self.softcap,
            "alibi_slopes": None if self.alibi_slopes is None else list(self.alibi_slopes),
            "window": self.window,
            "n_rot": head_dim if self.n_rot is None else self.n_rot,
            **({"rotated_last": True} if self.rotated_last else {}),
        }


def random_layer(
    seed: int = 0,
    *,
    n_token: int,
    n_step: int = 1,
    n_head: int = 4,
    n_head_kv: int = 2,
    head_dim: int = 8,
    dtype: str = "float32",
    index: int = 0,
    scale: float | None = None,
    softcap: float | None = None,
    alibi: bool = False,
    window: int | None = None,
    sinks: bool = False,
    values: bool = False,
    step: float = 0.0,
) -> LayerArrays:
    """Make a layer of normally distributed q, K and sinks.

    With ``step`` set, q and K are whole multiples of it between -2 and 2.
    """
    rng = np.random.default_rng(seed)

    def draw(*shape: int) -> FloatArray:
        drawn = rng.standard_normal(shape)
        return np.clip(np.round(drawn / step) * step, -2, 2) if step else drawn

    return LayerArrays(
        k=draw(n_head_kv, n_token, head_dim).astype(dtype),
        q=draw(n_step, n_head, head_dim).astype(np.float32),
        index=index,
        scale=scale,
        softcap=softcap,
        alibi_slopes=tuple(0.05 / 2**head for head in range(n_head)) if alibi else None,
        window=window,
        v=rng.standard_normal((n_head_kv, n_token, head_dim)).astype(dtype) if values else None,
        sinks=rng.standard_normal(n_head).astype(np.float32) if sinks else None,
    )


def layer_of_logits(
    logits: Sequence[float] | FloatArray, *, n_step: int = 1, index: int = 0
) -> LayerArrays:
    """Make a layer of one head and one dimension, whose logits are these, before other terms."""
    k = np.asarray(logits, dtype=np.float32).reshape(1, -1, 1)
    q = np.ones((n_step, 1, 1), dtype=np.float32)
    return LayerArrays(k=k, q=q, index=index, scale=1.0)


def layer_of_masses(
    masses: Sequence[float] | FloatArray, *, n_step: int = 1, index: int = 0
) -> LayerArrays:
    """Make a layer of one head and one dimension, whose masses are in these proportions."""
    logits = np.log(np.asarray(masses, dtype=np.float64))
    return layer_of_logits(logits, n_step=n_step, index=index)


def trace_document(
    layers: Sequence[LayerArrays],
    n_visible: Sequence[int],
    *,
    name: str = "tiny",
    workload: str = "made",
    verification: dict[str, Any] | None = None,
    decode_indices: Sequence[int] | None = None,
) -> dict[str, Any]:
    """Return the content of trace.json; ``decode_indices`` None counts the steps.

    Layers with ``visible`` make it the capture of a natively sparse model, of the smallest top-k
    that shows as much.
    """
    if decode_indices is None:
        decode_indices = range(len(n_visible))
    capture: dict[str, Any] = {"backend": "made"}
    sparse = [layer for layer in layers if layer.visible is not None]
    if sparse:
        shown = [layer.visible.sum(axis=1).max() for layer in sparse if layer.visible is not None]
        indices = [layer.index for layer in sparse]
        capture["native_sparse"] = {"top_k": int(max(shown)), "layers": indices}
    return {
        "schema": "kvgate-trace/1",
        "model": {
            "name": name,
            "architecture": "made",
            "quantization": None,
            "file_sha256": None,
        },
        "workload": {"name": workload, "n_prompt": n_visible[0] - 1},
        "capture": capture,
        "layers": [layer.fields for layer in layers],
        "steps": [
            {"decode_index": index, "n_visible": visible}
            for index, visible in zip(decode_indices, n_visible, strict=True)
        ],
        "verification": verification,
    }


def make_trace(
    path: Path,
    layers: Sequence[LayerArrays],
    n_visible: Sequence[int] | None = None,
    *,
    name: str = "tiny",
    workload: str = "made",
    verification: dict[str, Any] | None = None,
    decode_indices: Sequence[int] | None = None,
) -> Path:
    """Write a trace directory and return it.

    ``n_visible`` None: the last step sees every token, each step before it one fewer.
    """
    if n_visible is None:
        n_token, n_step = layers[0].k.shape[1], layers[0].q.shape[0]
        n_visible = range(n_token - n_step + 1, n_token + 1)
    for layer in layers:
        folder = path / "layers" / f"{layer.index:03d}"
        folder.mkdir(parents=True)
        np.save(folder / "k.npy", layer.k)
        np.save(folder / "q.npy", layer.q)
        if layer.v is not None:
            np.save(folder / "v.npy", layer.v)
        if layer.sinks is not None:
            np.save(folder / "sinks.npy", layer.sinks)
        if layer.visible is not None:
            np.save(folder / "visible.npy", layer.visible)
    document = trace_document(
        layers,
        n_visible,
        name=name,
        workload=workload,
        verification=verification,
        decode_indices=decode_indices,
    )
    (path / "trace.json").write_text(json.dumps(document), encoding="utf-8")
    return path
