"""Say of each layer that is not paged why."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from typing import Any

from pytest_kvgate.trace.unpaged import NO_ATTENTION, RECURRENT, SHARED, WINDOWED


def unpaged_layers(
    n_layer: int,
    layers: Iterable[Mapping[str, Any]],
    shared: Collection[int],
    recurrent: Collection[int],
) -> list[Mapping[str, Any]]:
    """Return ``{"layer", "reason"}`` for every layer of a model that is not paged, in order.

    ``layers`` are the entries of trace.json for the layers that read a KV cache of their own,
    ``shared`` the layers that read another one's, ``recurrent`` those that keep a state. A layer
    that attends and keeps a state as well is paged. What is left does not attend (an FFN alone).
    """
    windows = {entry["index"]: entry["window"] for entry in layers}
    reasons = {index: WINDOWED for index, window in windows.items() if window is not None}
    for index in range(n_layer):
        if index in shared:
            reasons[index] = SHARED
        elif index not in windows:
            reasons[index] = RECURRENT if index in recurrent else NO_ATTENTION
    return [{"layer": index, "reason": reason} for index, reason in sorted(reasons.items())]
