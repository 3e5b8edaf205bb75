"""One layer of a trace directory, and the attention masses of its query heads."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np


@dataclass(frozen=True)
class PlainLayer:
    n_head: int
    n_head_kv: int
    head_dim: int
    n_rot: int
    scale: float
    softcap: float | None
    alibi_slopes: list[float] | None
    window: int | None
    k: list[list[list[float]]]
    q: list[list[list[float]]]
    v: list[list[list[float]]] | None
    sinks: list[float] | None
    rotated_last: bool
    visible: list[list[bool]] | None = None


def dot(a: Sequence[float], b: Sequence[float]) -> float:
    return math.fsum(x * y for x, y in zip(a, b, strict=True))


def head_masses(layer: PlainLayer, step: int, head: int, n: int) -> list[float]:
    """Return ``p_j`` for the ``n`` visible positions of one query head."""
    keys = layer.k[head // (layer.n_head // layer.n_head_kv)]
    logits: list[float | None] = []
    for j in range(n):
        x = layer.scale * dot(layer.q[step][head], keys[j])
        if layer.softcap is not None:
            x = layer.softcap * math.tanh(x / layer.softcap)
        if layer.alibi_slopes is not None:
            x -= layer.alibi_slopes[head] * (n - 1 - j)
        seen = layer.window is None or j > n - 1 - layer.window
        seen = seen and (layer.visible is None or layer.visible[step][j])
        logits.append(x if seen else None)
    top = max(x for x in logits if x is not None)
    if layer.sinks is not None:
        top = max(top, layer.sinks[head])
    weights = [0.0 if x is None else math.exp(x - top) for x in logits]
    total = math.fsum(weights)
    if layer.sinks is not None:
        total += math.exp(layer.sinks[head] - top)
    return [weight / total for weight in weights]


def _numbers(path: Path) -> Any:  # noqa: ANN401 - nested lists of any depth
    return np.load(path).astype(np.float64).tolist()


def read_layer(directory: Path, fields: dict[str, Any]) -> PlainLayer:
    folder = directory / "layers" / f"{fields['index']:03d}"
    values, sinks, visible = folder / "v.npy", folder / "sinks.npy", folder / "visible.npy"
    return PlainLayer(
        n_head=fields["n_head"],
        n_head_kv=fields["n_head_kv"],
        head_dim=fields["head_dim"],
        n_rot=fields["n_rot"],
        scale=fields["scale"],
        softcap=fields["softcap"],
        alibi_slopes=fields["alibi_slopes"],
        window=fields["window"],
        k=_numbers(folder / "k.npy"),
        q=_numbers(folder / "q.npy"),
        v=_numbers(values) if values.exists() else None,
        sinks=_numbers(sinks) if sinks.exists() else None,
        rotated_last=fields.get("rotated_last", False),
        visible=np.load(visible).tolist() if visible.exists() else None,
    )
