"""Score all pages of a trace, as a pager does before each decode step: the thing to time."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from pytest_kvgate.analysis.selectors import PageKeys, Selector
from pytest_kvgate.trace import Trace


@dataclass(frozen=True, repr=False)
class PageScorer:
    """Scores every whole page of a trace for every sampled step, in all layers that are paged.

    ``heads`` has queries ``[n_step, G, head_dim]`` float32 and the pages of one KV head each. What
    a selector stores beside pages (means, boxes) is computed before, and not by a call.
    """

    selector: Selector
    heads: tuple[tuple[NDArray[np.float32], PageKeys], ...]

    def __repr__(self) -> str:
        return f"<PageScorer {self.selector.name}: {self.n_score} pages>"

    def __call__(self) -> list[NDArray[np.floating]]:
        """Return scores ``[n_step, n_page]`` per layer and KV head."""
        score = self.selector.score
        return [score(queries, pages) for queries, pages in self.heads]

    @property
    def n_score(self) -> int:
        """Pages that one call scores, each step counted."""
        return sum(len(queries) * len(pages.rows) for queries, pages in self.heads)


def page_scorer(trace: Trace, page_size: int, selector: Selector) -> PageScorer:
    """Prepare to score all pages of a trace; ``page_size`` is in tokens.

    Raises:
        SelectorError: the selector returns something else than scores.
    """
    heads = []
    n_page = trace.n_context // page_size
    for layer in trace.paged_layers:
        for kv_head in range(layer.n_head_kv):
            queries = np.asarray(layer.q[:, layer.query_heads(kv_head)], dtype=np.float32)
            rows = layer.k[kv_head, : n_page * page_size]
            pages = PageKeys(rows.reshape(n_page, page_size, layer.head_dim))
            selector.scores(queries, pages)  # computes the summaries that it needs, once
            heads.append((queries, pages))
    return PageScorer(selector, tuple(heads))
