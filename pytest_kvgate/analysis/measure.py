"""One pass over each layer of a trace: every number of every unit, on one page grid or several.

K is read once per block of steps, and the steps of an ordinary capture are one block. Beyond the
memory-mapped trace, memory is bounded by the weights of a block (`BLOCK_LOGITS`), its page scores
(`BLOCK_SCORES`), and what is kept of each unit.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from queue import SimpleQueue

import numpy as np
from numpy.typing import NDArray

from pytest_kvgate.analysis.coverage import UNROTATED, LayerTally
from pytest_kvgate.analysis.heads import HeadPages, head_pages
from pytest_kvgate.analysis.masses import (
    BLOCK_LOGITS,
    LONGEST_TILE,
    GroupAttention,
    GroupSoftmax,
    key_tiles,
    single_precision,
)
from pytest_kvgate.analysis.pages import BlockPages, PageGrid, block_pages
from pytest_kvgate.analysis.plan import Plan
from pytest_kvgate.analysis.selectors import (
    LANDMARK,
    ORACLE,
    TOKEN_ORACLE,
    PageKeys,
    Selector,
    landmark,
    read_only,
)
from pytest_kvgate.analysis.threads import Workers
from pytest_kvgate.analysis.units import LayerNumbers
from pytest_kvgate.trace import Layer, Step, TraceError

#: Scores and masses of pages held at once, in float32 values; bounds a block of steps to 128 MiB.
BLOCK_SCORES = 32 * 2**20


def measure_layer(
    layer: Layer,
    steps: tuple[Step, ...],
    grids: Sequence[PageGrid],
    plan: Plan,
    threads: Workers,
) -> list[LayerNumbers]:
    """Measure one layer on several page grids.

    Raises:
        TraceError: the layer's q or K hold values that are not finite.
        SelectorError: a registered selector returned something else than scores.
    """
    n_last = steps[-1].n_visible
    tallies = []
    for grid in grids:
        first, end = grid.eligible(n_last)
        tallies.append(LayerTally(layer, plan, end - first))
    n_thread = min(threads.count, layer.n_head_kv)
    stores: SimpleQueue[NDArray[np.float32]] = SimpleQueue()
    for block in step_blocks(layer, len(steps), n_last, grids, plan, n_thread):
        n_visible = [step.n_visible for step in steps[block]]
        pages = [block_pages(grid, plan.budgets, n_visible, n_last) for grid in grids]
        if not block.start:  # the first block is the largest; fresh memory costs time
            for _ in range(n_thread):
                stores.put(np.empty(len(n_visible) * layer.group_size * n_last, dtype=np.float32))
        measure = partial(_measure_head, layer, block, n_visible, pages, plan, stores)
        heads = list(threads.executor.map(measure, range(layer.n_head_kv)))
        for number, tally in enumerate(tallies):
            tally.add(steps[block], pages[number], [head[number] for head in heads])
    return [tally.finish() for tally in tallies]


def compatible(grids: Sequence[PageGrid]) -> Iterator[list[int]]:
    """Group page grids, as positions, whose pages fit whole into common tiles of the context."""
    left = list(range(len(grids)))
    while left:
        group: list[int] = []
        multiple = 1
        for position in left:
            together = math.lcm(multiple, grids[position].page_size)
            if not group or together <= LONGEST_TILE:
                group.append(position)
                multiple = together
        yield group
        left = [position for position in left if position not in group]


def step_blocks(
    layer: Layer,
    n_step: int,
    n_token: int,
    grids: Sequence[PageGrid],
    plan: Plan,
    n_thread: int,
) -> Iterator[slice]:
    """Cut the steps into blocks whose weights and page scores fit into memory."""
    per_step = n_thread * layer.group_size * n_token / BLOCK_LOGITS
    n_page = layer.n_head_kv * sum(n_token // grid.page_size + 1 for grid in grids)
    per_step = max(per_step, n_page * (len(plan.selectors) + 2) / BLOCK_SCORES)
    size = max(1, int(1 / per_step))
    for start in range(0, n_step, size):
        yield slice(start, min(start + size, n_step))


def _measure_head(
    layer: Layer,
    block: slice,
    n_visible: Sequence[int],
    pages: Sequence[BlockPages],
    plan: Plan,
    stores: SimpleQueue[NDArray[np.float32]],
    kv_head: int,
) -> list[HeadPages]:
    """Stream the context past one KV head's queries once; return its pages on every grid.

    The memory for its weights is borrowed from ``stores``.
    """
    store = stores.get()
    try:
        return _stream_head(layer, block, n_visible, pages, plan, store, kv_head)
    finally:
        stores.put(store)


def _stream_head(
    layer: Layer,
    block: slice,
    n_visible: Sequence[int],
    pages: Sequence[BlockPages],
    plan: Plan,
    store: NDArray[np.float32],
    kv_head: int,
) -> list[HeadPages]:
    n_token = n_visible[-1]
    queries = np.asarray(layer.q[block, layer.query_heads(kv_head)], dtype=np.float32)
    selectors = _page_selectors(layer, plan)
    scores = [
        {name: np.zeros((len(queries), grid.n_page), dtype=np.float32) for name in selectors}
        for grid in pages
    ]
    cuts = [cut for grid in pages for cut in (grid.positions.start, *grid.ends.tolist())]
    softmax = GroupSoftmax(layer, kv_head, queries, n_visible, store, cuts, block.start)
    multiple = math.lcm(*(grid.grid.page_size for grid in pages))
    for tile in key_tiles(n_token, queries.shape[0] * queries.shape[1], multiple):
        keys = single_precision(layer.k[kv_head, tile])
        values = None if layer.v is None else single_precision(layer.v[kv_head, tile])
        softmax.add(tile.start, keys, values)
        for grid, found in zip(pages, scores, strict=True):
            _score_tile(tile.start, keys, queries, grid, selectors, found)
    attention = softmax.finish()
    _require_finite_values(layer, kv_head, attention)
    token_mass = attention.token_masses()
    names = (*plan.selectors, UNROTATED) if UNROTATED in selectors else plan.selectors
    return [
        head_pages(
            attention,
            token_mass,
            grid,
            names,
            plan.coverages,
            found,
            None if layer.v is None else layer.v[kv_head],
        )
        for grid, found in zip(pages, scores, strict=True)
    ]


def _require_finite_values(layer: Layer, kv_head: int, attention: GroupAttention) -> None:
    """Raise TraceError where V made an output that is not a finite number."""
    if attention.output is not None and not np.isfinite(attention.output).all():
        raise TraceError(
            f"layer {layer.index}, KV head {kv_head}: Σ p·v is not a finite number, so V holds "
            "broken values. Capture it again."
        )


def _score_tile(
    start: int,
    keys: NDArray[np.float32],
    queries: NDArray[np.float32],
    pages: BlockPages,
    selectors: Mapping[str, Selector],
    scores: Mapping[str, NDArray[np.float32]],
) -> None:
    """Score the eligible pages that lie whole in this tile."""
    size = pages.grid.page_size
    first = max(start // size, pages.first)
    end = min((start + len(keys)) // size, pages.first + pages.n_page)
    if first >= end:
        return
    rows = keys[first * size - start : end * size - start]
    batch = PageKeys(read_only(rows.reshape(end - first, size, -1)), first)
    for name, selector in selectors.items():
        at = slice(first - pages.first, end - pages.first)
        scores[name][:, at] = selector.scores(queries, batch)


def _page_selectors(layer: Layer, plan: Plan) -> dict[str, Selector]:
    """Return the page selectors to score this layer's pages with."""
    names = [name for name in plan.selectors if name not in (ORACLE, TOKEN_ORACLE)]
    selectors = {name: plan.registry[name] for name in names}
    dims = layer.unrotated_dims
    if dims is not None and LANDMARK in selectors:

        def unrotated(queries: NDArray[np.float32], pages: PageKeys) -> NDArray[np.floating]:
            return landmark(queries[..., dims], PageKeys(pages.rows[..., dims], pages.first_page))

        selectors[UNROTATED] = Selector(UNROTATED, unrotated)
    return selectors
