"""Gather what the hook reports at the sampled steps into a trace under construction."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from pytest_kvgate.capture.basis import alibi_slopes, rotate, round_like_product
from pytest_kvgate.capture.errors import CaptureError
from pytest_kvgate.capture.sparsity import OwnSelections
from pytest_kvgate.engine import AttentionRead, ValueRead
from pytest_kvgate.trace import UNROUNDED, Reference, Step, TraceWriter


@dataclass
class _LayerRecord:
    """One KV layer as it grows: its latest read, and per step its q, span and window."""

    read: AttentionRead
    queries: list[NDArray[np.float32]] = field(default_factory=list)
    spans: list[int] = field(default_factory=list)
    checked: list[NDArray[np.float32]] = field(default_factory=list)
    softmax: list[Path] = field(default_factory=list)
    output: NDArray[np.float32] | None = None


class Collector:
    """Takes attention reads step by step; K is copied once, at the last sampled step.

    The first and the last sampled step also keep the model's own softmax, in ``scratch``. With
    ``values``, the last one also copies V and keeps the attention output.
    """

    def __init__(
        self,
        writer: TraceWriter,
        scratch: Path,
        n_step: int,
        selections: OwnSelections,
        *,
        values: bool,
    ) -> None:
        self._writer = writer
        self._selections = selections
        self._scratch = scratch
        self._n_step = n_step
        self._values = values
        self._layers: dict[int, _LayerRecord] = {}
        self.steps: list[Step] = []
        self.shared_layers: set[int] = set()

    def begin(self, step: Step) -> None:
        """Open the next sampled step."""
        self.steps.append(step)

    def take(self, read: AttentionRead) -> None:
        """Keep one attention read of the open step."""
        if read.shared_keys:
            self.shared_layers.add(read.index)
            return
        record = self._layers.setdefault(read.index, _LayerRecord(read))
        record.read = read
        n_visible = self.steps[-1].n_visible
        selects = self._selections.take(read, n_visible)
        record.spans.append(n_visible if selects else _visible_span(read, n_visible))
        record.queries.append(_model_basis(read.queries, read))
        if len(self.steps) == 1 or self._at_last_step:
            path = self._scratch / f"softmax-{read.index}-{len(self.steps)}.npy"
            np.save(path, read.read_softmax()[:, :n_visible])
            record.softmax.append(path)
            record.checked.append(read.queries)
        if self._at_last_step:
            keys = read.read_keys(n_visible)
            if read.rotation is not None:
                keys = rotate(keys, read.rotation)
            self._writer.write_array(read.index, "k", keys)

    @property
    def wants_values(self) -> bool:
        """Whether V is to be read at the open step."""
        return self._values and self._at_last_step

    def take_values(self, read: ValueRead) -> None:
        """Copy V and keep the attention output of a layer that was taken at the open step."""
        record = self._layers[read.index]
        record.output = read.read_output()
        self._writer.write_array(read.index, "v", read.read_values(self.steps[-1].n_visible))

    def end(self) -> None:
        """Close the step: every layer must have shown itself, as in the steps before."""
        if not self._layers:
            raise CaptureError(
                "no attention over a KV cache was seen in a decode step. Models without attention "
                "(Mamba, RWKV) have no KV pages, so there is nothing to gate."
            )
        for index, record in self._layers.items():
            if len(record.queries) != len(self.steps):
                raise CaptureError(
                    f"layer {index} attended in {len(record.queries)} of {len(self.steps)} sampled "
                    "steps; a layer that comes and goes is not supported."
                )
            if self.wants_values and record.output is None:
                raise CaptureError(
                    f"layer {index} does not multiply its softmax by V as llama.cpp usually does, "
                    "so its V was not seen. Capture without values."
                )

    def write_layers(self, sliding_window: int) -> list[Mapping[str, Any]]:
        """Write q and sinks of every layer and return their entries for trace.json."""
        return [
            self._write_layer(index, record, sliding_window)
            for index, record in sorted(self._layers.items())
        ]

    def reference(self) -> Reference:
        """Return the model's own softmax and output, with q as the product may have rounded it."""
        records = [record for _, record in sorted(self._layers.items())]
        unrounded, rounded = [], []
        for record in records:
            raw = np.stack(record.checked)
            unrounded.append(_model_basis(raw, record.read))
            like_keys = round_like_product(raw, record.read.key_type)
            rounded.append(_model_basis(like_keys, record.read))
        outputs = tuple(record.output for record in records if record.output is not None)
        steps = (0,) if self._n_step == 1 else (0, self._n_step - 1)
        return Reference(
            steps=steps,
            softmax=tuple(tuple(record.softmax) for record in records),
            queries={"as K": tuple(rounded), UNROUNDED: tuple(unrounded)},
            outputs=outputs if self._values else None,
        )

    @property
    def _at_last_step(self) -> bool:
        return len(self.steps) == self._n_step

    def _write_layer(
        self, index: int, record: _LayerRecord, sliding_window: int
    ) -> Mapping[str, Any]:
        read = record.read
        n_head, head_dim = read.queries.shape
        self._writer.write_array(index, "q", np.stack(record.queries))
        self._selections.write(self._writer, index, len(self.steps))
        if read.sinks is not None:
            self._writer.write_array(index, "sinks", read.sinks)
        entry: dict[str, Any] = {
            "index": index,
            "n_head": n_head,
            "n_head_kv": read.n_head_kv,
            "head_dim": head_dim,
            "scale": read.scale,
            "softcap": read.softcap,
            "alibi_slopes": alibi_slopes(n_head, read.max_bias),
            "window": self._window(index, record.spans, sliding_window),
            "n_rot": read.n_rot,
        }
        if read.rotated_last:
            entry["rotated_last"] = True
        if record.output is not None:
            entry["value_dim"] = record.output.shape[1]
        return entry

    def _window(self, index: int, spans: list[int], sliding_window: int) -> int | None:
        """Return a layer's sliding window from how many positions it saw at each step."""
        n_visible = [step.n_visible for step in self.steps]
        cut = {span for span, n in zip(spans, n_visible, strict=True) if span < n}
        if cut:
            window = cut.pop()
            if cut or any(span > window for span in spans):
                raise CaptureError(
                    f"layer {index} sees neither the whole context nor a sliding window of one "
                    f"length (it saw {sorted(set(spans))} tokens), as chunked attention does; that "
                    "is not supported."
                )
            return window
        if sliding_window and max(n_visible) <= sliding_window:
            raise CaptureError(
                f"{max(n_visible)} tokens fit into this model's sliding window of "
                f"{sliding_window}, so layers with a window cannot be told from those without. Use "
                "a prompt longer than the window."
            )
        return None


def _model_basis(queries: NDArray[np.float32], read: AttentionRead) -> NDArray[np.float32]:
    return queries if read.rotation is None else rotate(queries, read.rotation)


def _visible_span(read: AttentionRead, n_visible: int) -> int:
    """Return how many positions the mask shows; they must be the last ones, in order.

    Cell j of the cache holds position j as long as the sequence was decoded front to back into an
    empty cache. The mask proves it: it shows cells up to the query's own and no further.
    """
    shown = np.flatnonzero(np.isfinite(read.mask))
    expected = np.arange(n_visible - len(shown), n_visible)
    distance = (expected - (n_visible - 1)).astype(np.float32)
    wanted = distance if read.max_bias > 0 else np.zeros_like(distance)
    if not np.array_equal(shown, expected) or not np.array_equal(read.mask[shown], wanted):
        raise CaptureError(
            f"layer {read.index} shows {len(shown)} cache cells that are not the last positions "
            f"before {n_visible} in order, so cells cannot be matched to positions."
        )
    return len(shown)
