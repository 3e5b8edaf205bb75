"""Natively sparse models: refused by name, or measured with what each query selected for itself."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from pytest_kvgate.capture.errors import CaptureError
from pytest_kvgate.engine import AttentionRead, Engine
from pytest_kvgate.trace import NativeSparsity, TraceWriter

#: What a model keeps in ``<architecture>.attention.…`` whose selection is no mask over a KV cache.
COMPRESSED = {
    "compress_rope_freq_base": "attends to compressed keys beside the latest ones",
    "indexer.kpool": "gathers the keys that its indexer selected in pools",
}


def stated_top_k(engine: Engine) -> int | None:
    """Return the top-k in tokens that a model states for its own indexer, None where it has none.

    Raises:
        CaptureError: the model attends to keys that are not the positions of a KV cache.
    """
    architecture = engine.metadata("general.architecture") or "unknown"

    def stated(key: str) -> int:
        text = engine.metadata(f"{architecture}.attention.{key}")
        return 0 if text is None else int(float(text))

    top_k = stated("indexer.top_k")
    for key, what in COMPRESSED.items():
        if top_k and stated(key):
            raise CaptureError(
                f"{architecture} is natively sparse in a way that is not measured: it {what} "
                f"(its GGUF file has {architecture}.attention.{key}), so its attention masses are "
                "not those of the positions of a KV cache, and there are no pages to gate."
            )
    # MiniMax M3 selects blocks
    return top_k * max(1, stated("indexer.block_size")) or None


class OwnSelections:
    """Keeps which positions the model's own top-k left visible, per layer and sampled step.

    ``top_k`` is what the model states, in tokens, or None. Unless ``allowed``, a natively sparse
    model is refused: here where its file says so, and in `take` where only its graph does.
    """

    def __init__(self, top_k: int | None, *, allowed: bool) -> None:
        self._top_k = top_k
        self._allowed = allowed
        self._rows: dict[int, list[NDArray[np.bool_]]] = {}
        if top_k is not None:
            self._require_allowed(f"top-k of {top_k} tokens")

    def take(self, read: AttentionRead, n_visible: int) -> bool:
        """Keep what one attention read of a step selected; False where its mask is ordinary.

        Raises:
            CaptureError: it is not allowed, or the mask shows what cannot be seen.
        """
        if read.top_k is None:
            return False
        if self._top_k is None:
            self._require_allowed(f"layer {read.index}, top-k of {read.top_k} cells")
            self._top_k = read.top_k
        visible = np.isfinite(read.mask)
        distance = np.arange(1 - n_visible, 1, dtype=np.float32)
        shown = visible[:n_visible]
        wanted = distance[shown] if read.max_bias > 0 else np.float32(0)
        # with flash attention the mask is in half precision
        as_wanted = np.allclose(read.mask[:n_visible][shown], wanted, 2**-11, 0)
        if visible[n_visible:].any() or not shown.any() or not as_wanted:
            raise CaptureError(
                f"layer {read.index} selects {int(visible.sum())} cache cells for itself, and they "
                f"are not among the {n_visible} positions up to the query's own, so cells cannot "
                "be matched to positions."
            )
        self._rows.setdefault(read.index, []).append(shown)
        return True

    def write(self, writer: TraceWriter, layer: int, n_step: int) -> None:
        """Write ``visible.npy`` of a layer that selects for itself; nothing for the others."""
        rows = self._rows.get(layer)
        if rows is None:
            return
        if len(rows) != n_step:
            raise CaptureError(
                f"layer {layer} selects for itself in {len(rows)} of {n_step} sampled steps; that "
                "is not supported. Sample fewer --kvgate-steps."
            )
        visible = np.zeros((n_step, len(rows[-1])), dtype=np.bool_)
        for step, shown in enumerate(rows):
            visible[step, : len(shown)] = shown
        writer.write_array(layer, "visible", visible)

    @property
    def found(self) -> NativeSparsity | None:
        """What a trace states of the selections; None where the model attends to everything."""
        return (
            None if self._top_k is None else NativeSparsity(self._top_k, tuple(sorted(self._rows)))
        )

    def _require_allowed(self, which: str) -> None:
        if not self._allowed:
            raise CaptureError(
                f"this model's attention is natively sparse ({which}): for each query an indexer "
                "of its own selects what it attends to, and hides the rest of a context that is "
                "longer. What is hidden has no mass that a page selector could miss, so coverage "
                "looks better than on a model that attends to everything. With "
                "--kvgate-allow-native-sparse it is measured nevertheless, and every report says "
                "so."
            )
