"""Gather what the hook reports at the sampled steps into a trace under construction."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from pytest_kvgate.capture.errors import CaptureError
from pytest_kvgate.capture.refusals import refuse_windows_alone, require_whole_blocks
from pytest_kvgate.capture.settings import CaptureSettings
from pytest_kvgate.capture.sparsity import OwnSelections
from pytest_kvgate.engine import AttentionRead, ValueRead, visible_span
from pytest_kvgate.engine.basis import alibi_slopes, model_basis, product_roundings
from pytest_kvgate.trace import UNROUNDED, Reference, Step, TraceWriter


@dataclass
class _LayerRecord:
    """One KV layer as it grows: its latest read, and per step its q and span.

    ``checked``, ``softmax`` and ``outputs`` have an entry for each checked step; ``values`` is V.
    """

    read: AttentionRead
    queries: list[NDArray[np.float32]] = field(default_factory=list)
    spans: list[int] = field(default_factory=list)
    checked: list[NDArray[np.float32]] = field(default_factory=list)
    softmax: list[Path] = field(default_factory=list)
    outputs: list[NDArray[np.float32]] = field(default_factory=list)
    unfused_outputs: list[NDArray[np.float32]] = field(default_factory=list)
    values: Path | None = None


class Collector:
    """Takes attention reads step by step; K is copied once, at the last sampled step.

    The checked steps also keep the model's own softmax, in ``scratch``. Where V is asked for, or
    flash attention leaves no softmax, they keep the attention output, and the last one copies V:
    into the trace if it was asked for, else into ``scratch``.
    """

    def __init__(
        self,
        writer: TraceWriter,
        scratch: Path,
        settings: CaptureSettings,
        selections: OwnSelections,
    ) -> None:
        self._writer = writer
        self._selections = selections
        self._scratch = scratch
        self._settings = settings
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
        require_whole_blocks(read.queries.shape[1], read.key_type)
        record = self._layers.setdefault(read.index, _LayerRecord(read))
        record.read = read
        n_visible = self.steps[-1].n_visible
        selects = self._selections.take(read, n_visible)
        record.spans.append(n_visible if selects else visible_span(read, n_visible))
        record.queries.append(model_basis(read.queries, read.rotation))
        if self._is_checked:
            record.checked.append(read.queries)
            self._keep_softmax(record, read)
        if self._is_last:
            keys = model_basis(read.read_keys(n_visible), read.rotation)
            self._writer.write_array(read.index, "k", keys)

    def take_reference(self, read: AttentionRead) -> None:
        """Keep the softmax that another run has at the open step, for a layer that was taken."""
        if read.shared_keys or not self._is_checked:
            return
        if read.index not in self._layers:
            raise CaptureError(
                f"layer {read.index} attends in a run without flash attention and in none with it, "
                "so one run cannot prove the other. Capture with --kvgate-flash-attn=off."
            )
        self._keep_softmax(self._layers[read.index], read)

    @property
    def wants_values(self) -> bool:
        """Whether V and the attention output are to be read at the open step."""
        settings = self._settings
        return self._is_checked and (settings.values or settings.engine.flash_attention)

    def take_values(self, read: ValueRead) -> None:
        """Keep the attention output of a layer that was taken at the open step, and at last V."""
        record = self._layers[read.index]
        record.outputs.append(model_basis(read.read_output(), read.rotation))
        if not self._is_last:
            return
        values = model_basis(read.read_values(self.steps[-1].n_visible), read.rotation)
        if self._settings.values:
            self._writer.write_array(read.index, "v", values)
        else:
            record.values = self._scratch / f"values-{read.index}.npy"
            np.save(record.values, values)

    def take_reference_values(self, read: ValueRead) -> None:
        """Keep the attention output that another run has at the open step."""
        self._layers[read.index].unfused_outputs.append(read.read_output())

    @property
    def wants_reference_values(self) -> bool:
        """Whether a run without flash attention can prove V: it keeps none that is quantized."""
        settings = self._settings
        same_type = settings.engine.cache_type_v in ("f32", "f16", "bf16")
        return self._is_checked and settings.values and same_type

    def end(self) -> None:
        """Close the step: every layer must have shown itself, as in the steps before."""
        if not self._layers:
            raise CaptureError(
                "no attention over a KV cache was seen in a decode step. Models without attention "
                "(Mamba, RWKV) have no KV pages, so there is nothing to gate."
            )
        spans = {record.spans[-1] for record in self._layers.values()}
        refuse_windows_alone(spans, self.steps[-1].n_visible)
        for index, record in self._layers.items():
            if len(record.queries) != len(self.steps):
                raise CaptureError(
                    f"layer {index} attended in {len(record.queries)} of {len(self.steps)} sampled "
                    "steps; a layer that comes and goes is not supported."
                )
            if self._wants_softmax and len(record.softmax) != len(record.checked):
                raise CaptureError(
                    f"layer {index} shows no softmax in the run without flash attention, so the "
                    "capture is not proved. Capture with --kvgate-flash-attn=off."
                )
            if self.wants_values and len(record.outputs) != len(record.checked):
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
        """Return what the model itself computed, with q as the product may have rounded it."""
        records = [record for _, record in sorted(self._layers.items())]
        roundings = []
        for record in records:
            raw, rotation = np.stack(record.checked), record.read.rotation
            ways = {UNROUNDED: raw, **product_roundings(raw, record.read.key_type)}
            roundings.append({name: model_basis(q, rotation) for name, q in ways.items()})
        outputs = tuple(np.stack(record.outputs) for record in records if record.outputs)
        unfused = tuple(np.stack(r.unfused_outputs) for r in records if r.unfused_outputs)
        values = tuple(record.values for record in records if record.values is not None)
        softmax = tuple(tuple(record.softmax) for record in records)
        return Reference(
            steps=self._settings.checked_steps,
            softmax=softmax if self._wants_softmax else (),
            queries={
                name: tuple(of_layer[name] for of_layer in roundings)
                for name in roundings[0]  # K has one type in all layers
            },
            outputs=outputs or None,
            values=values or None,
            unfused_outputs=unfused or None,
        )

    @property
    def _wants_softmax(self) -> bool:
        return self._settings.prove or not self._settings.engine.flash_attention

    @property
    def _is_checked(self) -> bool:
        return len(self.steps) - 1 in self._settings.checked_steps

    @property
    def _is_last(self) -> bool:
        return len(self.steps) == len(self._settings.steps)

    def _keep_softmax(self, record: _LayerRecord, read: AttentionRead) -> None:
        if read.read_softmax is None:
            return
        path = self._scratch / f"softmax-{read.index}-{len(self.steps)}.npy"
        np.save(path, read.read_softmax()[:, : self.steps[-1].n_visible])
        record.softmax.append(path)

    def _write_layer(
        self, index: int, record: _LayerRecord, sliding_window: int
    ) -> Mapping[str, Any]:
        read = record.read
        n_head, head_dim = read.queries.shape
        self._writer.write_array(index, "q", np.stack(record.queries))
        self._selections.write(self._writer, index, len(self.steps))
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
        if read.sinks is not None:
            self._writer.write_array(index, "sinks", read.sinks)
            entry["sinks"] = True
        if self._settings.values:
            entry["value_dim"] = record.outputs[-1].shape[1]
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
