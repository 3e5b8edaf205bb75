"""The KV caches behind a model's attention nodes, in bytes."""

from __future__ import annotations

from collections.abc import Sequence

from pytest_kvgate.analysis.findings import CACHE_BYTES
from pytest_kvgate.analysis.resident import LayerCache
from pytest_kvgate.closedloop.layers import AttentionLayer
from pytest_kvgate.engine import Engine


def kv_caches(layers: Sequence[AttentionLayer], engine: Engine) -> tuple[LayerCache, ...]:
    """Return each KV cache once, with the layers that read it, in the order of the graph."""
    readers: dict[int, list[AttentionLayer]] = {}
    for layer in layers:
        readers.setdefault(layer.cache, []).append(layer)
    key_bytes, value_bytes = CACHE_BYTES[engine.cache_type_k], CACHE_BYTES[engine.cache_type_v]
    usual, windowed = engine.value_dims
    caches = []
    for of_cache in readers.values():
        terms = of_cache[0].terms
        paged = of_cache[0].paged
        value_dim = usual if paged else windowed
        caches.append(
            LayerCache(
                layers=tuple(sorted({layer.index for layer in of_cache})),
                n_head_kv=terms.n_head_kv,
                head_dim=terms.head_dim,
                token_bytes=terms.head_dim * key_bytes + value_dim * value_bytes,
                paged=paged,
                window=None if paged else engine.sliding_window or None,
            )
        )
    return tuple(caches)
