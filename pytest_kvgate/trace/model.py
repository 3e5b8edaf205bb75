"""The trace in memory: frozen dataclasses over memory-mapped arrays."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from pytest_kvgate.trace.unpaged import WINDOWED, UnpagedLayer

SCHEMA = "kvgate-trace/1"

#: The rounding that leaves q as it is.
UNROUNDED = "unrounded"

FloatArray = NDArray[np.floating[Any]]


@dataclass(frozen=True)
class Step:
    """One sampled decode step.

    ``decode_index`` counts decode steps from 0. ``n_visible`` is the number of positions the
    query sees, its own included, so the query sits at position ``n_visible - 1``.
    """

    decode_index: int
    n_visible: int


@dataclass(frozen=True, repr=False)
class Layer:
    """What one KV-carrying layer read.

    ``k`` is ``[n_head_kv, n_token, head_dim]`` float16 or float32, after RoPE and the cache's
    rounding, row ``j`` = position ``j``. ``q`` is ``[n_step, n_head, head_dim]`` float32. ``v`` is
    like ``k`` or None; ``sinks`` is ``[n_head]`` float32 logits or None. ``window`` is the sliding
    window in tokens, None for a layer that attends to the whole context. RoPE turns ``n_rot`` dims
    of a head, the first ones or, where ``rotated_last``, the last. ``visible`` is ``[n_step,
    n_token]``, what the model's own top-k let each query attend to, None for a layer that shows a
    query everything up to its own position.
    """

    index: int
    n_head: int
    n_head_kv: int
    head_dim: int
    scale: float
    softcap: float | None
    alibi_slopes: tuple[float, ...] | None
    window: int | None
    n_rot: int
    k: FloatArray
    q: FloatArray
    v: FloatArray | None = None
    sinks: FloatArray | None = None
    rotated_last: bool = False
    visible: NDArray[np.bool_] | None = None

    def __repr__(self) -> str:
        return f"<Layer {self.index}: {self.n_head} query heads on {self.n_head_kv} KV heads>"

    @property
    def group_size(self) -> int:
        """Query heads per KV head (the GQA group)."""
        return self.n_head // self.n_head_kv

    def query_heads(self, kv_head: int) -> slice:
        """The query heads that read a KV head: ``h // G == kv_head``."""
        group = self.group_size
        return slice(kv_head * group, (kv_head + 1) * group)

    @property
    def unrotated_dims(self) -> slice | None:
        """The dims of a head that RoPE never turns; None where it turns all of them or none."""
        if not 0 < self.n_rot < self.head_dim:
            return None
        if self.rotated_last:
            return slice(0, self.head_dim - self.n_rot)
        return slice(self.n_rot, self.head_dim)


@dataclass(frozen=True)
class NativeSparsity:
    """A model that selects for itself what its queries attend to.

    ``top_k`` is the number of positions that its own top-k leaves, in tokens. ``layers`` are the
    indices of the layers where it did so in the capture; empty where the engine ran them densely.
    """

    top_k: int
    layers: tuple[int, ...]

    def as_json(self) -> dict[str, Any]:
        """Return the values that a trace and a report state."""
        return {"top_k": self.top_k, "layers": list(self.layers)}


@dataclass(frozen=True)
class Verification:
    """How far the recomputed attention lies from the model's own.

    ``max_abs_error`` is the worst difference, of one attention weight or, where ``reference`` says
    so, relative of one head's output; ``tolerance`` is the largest that is accepted, ``reference``
    what was compared with. ``layer_errors`` is the worst of each of the trace's layers, empty where
    that is not known.
    """

    max_abs_error: float
    tolerance: float
    reference: str
    status: Literal["passed", "failed"]
    layer_errors: tuple[float, ...] = ()

    @classmethod
    def of(
        cls,
        max_abs_error: float,
        tolerance: float,
        reference: str,
        layer_errors: Sequence[float] = (),
    ) -> Verification:
        """Judge an error; an error that is not a number has failed."""
        passed = math.isfinite(max_abs_error) and max_abs_error <= tolerance
        status: Literal["passed", "failed"] = "passed" if passed else "failed"
        return cls(max_abs_error, tolerance, reference, status, tuple(layer_errors))

    def as_json(self) -> dict[str, Any]:
        """Return the values that a trace and a report state; an error that is no number is None."""
        stated: dict[str, Any] = {
            "max_abs_error": _finite(self.max_abs_error),
            "tolerance": self.tolerance,
            "reference": self.reference,
            "status": self.status,
        }
        if self.layer_errors:
            stated["layer_errors"] = [_finite(error) for error in self.layer_errors]
        return stated


def _finite(error: float) -> float | None:
    return error if math.isfinite(error) else None


@dataclass(frozen=True)
class Reference:
    """What the model itself computed at some sampled steps, to verify a capture against.

    ``steps`` are indices into ``Trace.steps``. ``queries`` maps the name of a rounding to one
    ``[len(steps), n_head, head_dim]`` float32 array per layer: q as the engine's matrix product may
    have rounded it, in the basis of the trace's K; ``UNROUNDED`` is among them.
    ``softmax[layer][i]`` is a path to an ``.npy`` file with ``[n_head, n_visible]`` float32, the
    weights the engine computed for layer position ``layer`` (into ``Trace.layers``) at step
    ``steps[i]``; empty where flash attention leaves none. ``outputs`` holds, where they were read,
    one ``[len(steps), n_head, d_v]`` float32 array per layer: the product of softmax and V.
    ``values`` are paths to V, ``[n_head_kv, n_token, d_v]`` per layer, where V is not in the trace.
    ``unfused_outputs`` are like ``outputs``, of a run without flash attention whose V has the same
    type.
    """

    steps: tuple[int, ...]
    softmax: tuple[tuple[Path, ...], ...]
    queries: Mapping[str, tuple[FloatArray, ...]]
    outputs: tuple[FloatArray, ...] | None = None
    values: tuple[Path, ...] | None = None
    unfused_outputs: tuple[FloatArray, ...] | None = None


@dataclass(frozen=True, repr=False)
class Trace:
    """A ``kvgate-trace/1`` directory, validated and memory-mapped.

    ``cacheless_layers`` are those layers of the model that have no KV cache of their own, and so
    are not among ``layers``.
    """

    directory: Path
    model: Mapping[str, Any]
    workload: Mapping[str, Any]
    capture: Mapping[str, Any]
    layers: tuple[Layer, ...]
    steps: tuple[Step, ...]
    verification: Verification | None
    cacheless_layers: tuple[UnpagedLayer, ...] = ()
    native_sparsity: NativeSparsity | None = None

    def __repr__(self) -> str:
        return f"<Trace {self.label}: {self.n_context} tokens, {len(self.steps)} steps>"

    @property
    def n_context(self) -> int:
        """Positions visible at the last sampled step, in tokens."""
        return self.steps[-1].n_visible

    @property
    def label(self) -> str:
        """The model and the workload by name, for tables."""
        return f"{self.model['name']} · {self.workload['name']}"

    @property
    def flash_attention(self) -> bool:
        """Whether the engine used flash attention, which leaves no softmax."""
        return self.capture.get("flash_attention") is True

    @property
    def eos_ignored_from(self) -> int | None:
        """The decode step from which on the text goes past the end that the model chose for it.

        None where it does not, as far as the trace tells.
        """
        step = self.workload.get("eos_ignored_from")
        return None if step is None else int(step)

    @property
    def paged_layers(self) -> tuple[Layer, ...]:
        """The layers that paging is about: those without a sliding window."""
        return tuple(layer for layer in self.layers if layer.window is None)

    @property
    def unpaged_layers(self) -> tuple[UnpagedLayer, ...]:
        """All layers that paging is not about, each with the reason, in ascending order."""
        windowed = (
            UnpagedLayer(layer.index, WINDOWED) for layer in self.layers if layer.window is not None
        )
        found = (*windowed, *self.cacheless_layers)
        return tuple(sorted(found, key=lambda layer: layer.index))
