"""Layers that are not paged, and why."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from pytest_kvgate.trace.fields import Fields

#: Why a layer is not paged. A trace may bring other reasons; they are shown as they stand.
WINDOWED = "sliding window"
RECURRENT = "recurrent"
SHARED = "reads another layer's cache"
NO_ATTENTION = "no attention"


@dataclass(frozen=True)
class UnpagedLayer:
    """A layer that is left out of all numbers, with the reason in a word or two."""

    index: int
    reason: str


def read_cacheless(capture: Fields, attending: Iterable[int]) -> tuple[UnpagedLayer, ...]:
    """Return the layers that have no KV cache of their own, from the ``capture`` of a trace.

    They are the entries of ``unpaged_layers`` beside those in ``attending``, which are the layers
    that the trace holds. Older traces have no such key, only ``shared_kv_layers``, or neither.

    Raises:
        TraceError: an entry is malformed, or a layer stands there twice.
    """
    if "unpaged_layers" in capture.values:
        found = [
            UnpagedLayer(entry.integer("layer", minimum=0), entry.text("reason"))
            for entry in capture.objects("unpaged_layers")
        ]
    else:
        found = [UnpagedLayer(index, SHARED) for index in capture.integers("shared_kv_layers")]
    indices = [layer.index for layer in found]
    if len(set(indices)) != len(indices):
        raise capture.error("unpaged_layers", f"of layers {indices}", "each layer once")
    held = set(attending)
    return tuple(layer for layer in found if layer.index not in held)
