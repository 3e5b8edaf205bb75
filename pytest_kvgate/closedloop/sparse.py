"""Sparse attention in an unmodified engine: each attention node is edited while the graph waits.

Without flash attention the softmax is edited, and the engine multiplies it by V. With it there is
none, so the output is computed from q, K and V and put in the place of the engine's own.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import numpy as np
from numpy.typing import NDArray

from pytest_kvgate.analysis import PageGrid, Selector
from pytest_kvgate.analysis.effects import LayerShare, Variant
from pytest_kvgate.analysis.selection import (
    StepPages,
    attend_to,
    best,
    page_masses,
    token_masses,
)
from pytest_kvgate.analysis.selectors import ORACLE, TOKEN_ORACLE
from pytest_kvgate.closedloop.cells import LayerPages, Mirror
from pytest_kvgate.closedloop.errors import ClosedLoopError
from pytest_kvgate.closedloop.layers import AttentionLayer
from pytest_kvgate.closedloop.tally import Tally
from pytest_kvgate.engine import AttentionNode
from pytest_kvgate.engine.basis import model_basis


class SparseCells:
    """What the sparse runs of one prompt share: pages and cells that were read once.

    ``grid`` returns the page grid of a page size; ``n_last`` is the longest context, in tokens.
    """

    def __init__(
        self, layers: Sequence[AttentionLayer], grid: Callable[[int], PageGrid], n_last: int
    ) -> None:
        self.layers = layers
        self.grid = grid
        self.keys = [Mirror(n_last) for _ in layers]
        self.values = [Mirror(n_last) for _ in layers]
        self._n_last = n_last
        self._pages: dict[int, list[LayerPages]] = {}

    def pages(self, page_size: int) -> list[LayerPages]:
        """Return the pages of each layer at one page size, in tokens."""
        if page_size not in self._pages:
            first, end = self.grid(page_size).eligible(self._n_last)
            self._pages[page_size] = [
                LayerPages(page_size, first, end - first, layer.rotation) for layer in self.layers
            ]
        return self._pages[page_size]

    def rewind(self, n_token: int) -> None:
        """Forget what lies beyond the first ``n_token`` positions."""
        for mirror in (*self.keys, *self.values):
            mirror.rewind(n_token)
        for of_layers in self._pages.values():
            for of_layer in of_layers:
                of_layer.rewind(n_token)


class SparseRun:
    """Edits every attention node of the decode steps of one run.

    ``variant`` None selects everything: an edit that changes nothing. ``registry`` are the page
    selectors by name. ``shares`` is what the pages held so far, by layer index.
    """

    def __init__(
        self, cells: SparseCells, variant: Variant | None, registry: Mapping[str, Selector]
    ) -> None:
        self._cells = cells
        self._variant = variant
        self._registry = registry
        self._n_visible = 0
        self._pages = StepPages(1, 0, 0, 0)
        self._tally = Tally()

    @property
    def needs_queries(self) -> bool:
        """Whether pages are selected by q; the oracles select by the softmax itself."""
        variant = self._variant
        return variant is not None and variant.selector not in (ORACLE, TOKEN_ORACLE)

    def begin(self, n_visible: int) -> None:
        """Open a decode step that sees so many positions."""
        self._tally.close_step()
        self._n_visible = n_visible
        if self._variant is not None:
            grid = self._cells.grid(self._variant.page_size)
            first, end = grid.eligible(n_visible)
            chosen = min(grid.pages_for(self._variant.budget, n_visible), end - first)
            self._pages = StepPages(grid.page_size, first, end, chosen)

    @property
    def shares(self) -> dict[int, LayerShare]:
        """What the pages held so far, by layer index."""
        self._tally.close_step()
        return self._tally.shares

    def edit(self, node: AttentionNode) -> None:
        """Edit one attention node of the open step.

        Raises:
            ClosedLoopError: the step attends in more places than the one that was learned from, or
                nothing that is kept has any weight.
        """
        if node.ordinal >= len(self._cells.layers):
            raise ClosedLoopError(COMES_AND_GOES)
        layer = self._cells.layers[node.ordinal]
        variant = self._variant
        if not layer.paged:
            return
        dense = variant is None or layer.index in variant.dense_layers
        if dense and variant is not None and node.open_softmax is not None:
            return
        weights = self._weights(layer, node)
        kept = None if dense else self._select(layer, node, weights)
        try:
            attend_to(weights, kept, self._pages, has_sink=layer.terms.sinks is not None)
        except ZeroDivisionError:
            raise ClosedLoopError(
                f"layer {layer.index}: nothing that is kept has any weight in the softmax of a "
                f"step with {self._n_visible} tokens, so there is no attention to it to compute. "
                "Keep sinks or a recent window free (--kvgate-sinks, --kvgate-recent)."
            ) from None
        if node.write_softmax is not None:
            node.write_softmax(weights)
        else:
            self._write_output(layer, node, weights)

    def _weights(self, layer: AttentionLayer, node: AttentionNode) -> NDArray[np.float32]:
        """Return the softmax of the node, ``[n_head, n_token or more]``."""
        if node.open_softmax is not None:
            return node.open_softmax()
        assert node.queries is not None
        keys = self._cells.keys[node.ordinal].cells(node.read_keys, self._n_visible)
        return layer.softmax(layer.product_queries(node.queries)[-1], keys)

    def _write_output(
        self, layer: AttentionLayer, node: AttentionNode, weights: NDArray[np.float32]
    ) -> None:
        assert node.read_values is not None
        assert node.write_output is not None
        values = self._cells.values[node.ordinal].cells(node.read_values, self._n_visible)
        by_group = weights.reshape(layer.terms.n_head_kv, -1, self._n_visible)
        node.write_output((by_group @ values).reshape(len(weights), -1))

    def _select(
        self, layer: AttentionLayer, node: AttentionNode, weights: NDArray[np.float32]
    ) -> NDArray[np.bool_]:
        """Return the pages, or the tokens, that each KV head keeps."""
        assert self._variant is not None
        selector, pages, n_head_kv = self._variant.selector, self._pages, layer.terms.n_head_kv
        if selector == TOKEN_ORACLE:
            masses = token_masses(weights, n_head_kv, pages)
            kept = best(masses, pages.chosen * pages.size)
        else:
            masses = scores = page_masses(weights, n_head_kv, pages)
            if selector != ORACLE:
                scores = self._scores(layer, node, self._registry[selector])
            kept = best(scores, pages.chosen)
        if not layer.shared_keys:  # as in a profile, whose traces hold no such layer
            self._tally.add(layer.index, masses, kept, _group_totals(layer, weights))
        return kept

    def _scores(
        self, layer: AttentionLayer, node: AttentionNode, selector: Selector
    ) -> NDArray[np.float32]:
        """Return a selector's score of every eligible page, ``[n_head_kv, n_page]`` float32."""
        assert node.queries is not None
        store = self._cells.pages(self._pages.size)[node.ordinal]
        queries = model_basis(node.queries, layer.rotation)
        by_group = queries.reshape(layer.terms.n_head_kv, 1, -1, queries.shape[-1])
        return selector.scores_of_heads(by_group, store.until(self._pages.end, node.read_keys))


def _group_totals(layer: AttentionLayer, weights: NDArray[np.float32]) -> NDArray[np.float32]:
    """Return the mass of each group on all tokens, ``[n_head_kv]``; a sink takes some of it."""
    n_head_kv = layer.terms.n_head_kv
    if layer.terms.sinks is None:  # a softmax sums to 1
        return np.full(n_head_kv, layer.terms.group_size, dtype=np.float32)
    totals: NDArray[np.float32] = weights.sum(axis=1).reshape(n_head_kv, -1).sum(axis=1)
    return totals


COMES_AND_GOES = (
    "the model does not attend in the same places at every decode step, so its layers cannot be "
    "told apart. That is not supported."
)
