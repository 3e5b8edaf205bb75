"""What the selectors' pages hold, unit by unit, in one layer on one page grid.

A unit is one (trace, step, layer, KV head). Steps come in blocks, with all KV heads of the layer;
what the next step needs of the one before is carried from block to block.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from pytest_kvgate.analysis.heads import HeadPages
from pytest_kvgate.analysis.overlap import overlap_with_step_before
from pytest_kvgate.analysis.pages import BUDGET_GRID, BlockPages
from pytest_kvgate.analysis.paging import PagingTally
from pytest_kvgate.analysis.plan import Plan
from pytest_kvgate.analysis.selectors import TOKEN_ORACLE
from pytest_kvgate.analysis.sharing import shared_budget
from pytest_kvgate.analysis.units import PER_BUDGET, LayerNumbers, Units
from pytest_kvgate.trace import Layer, Step

#: A unit with less eligible mass than this has nothing to select; it is skipped and counted.
LEAST_ELIGIBLE_MASS = 1e-12

#: Landmark over the dims that RoPE never turns; measured beside the selectors, never listed.
UNROTATED = "unrotated landmark"

Numbers = dict[str, NDArray[np.float64]]


@dataclass(frozen=True)
class _Before:
    """The last step of the block before; arrays keep an axis of one step."""

    decode_index: int
    orders: tuple[NDArray[np.int64], ...]
    chosen: NDArray[np.int64]
    counted: NDArray[np.bool_]


class LayerTally:
    """Gathers the units of one layer on one page grid, block of steps by block of steps."""

    def __init__(self, layer: Layer, plan: Plan, n_page: int) -> None:
        self._layer, self._plan = layer, plan
        self._page_rows = [row for row, name in enumerate(plan.selectors) if name != TOKEN_ORACLE]
        self._before: _Before | None = None
        self._units: list[Units] = []
        self._skipped = 0
        self._covered = np.zeros((len(plan.selectors), len(BUDGET_GRID)))
        self._total = np.zeros_like(self._covered)
        self._paging = PagingTally(
            len(self._page_rows), layer.n_head_kv, len(plan.budgets), n_page, plan.pool
        )

    def add(self, steps: Sequence[Step], pages: BlockPages, heads: Sequence[HeadPages]) -> None:
        """Take the next steps, with one `HeadPages` per KV head."""
        plan = self._plan
        eligible = np.stack([head.eligible for head in heads])
        total = np.stack([head.total for head in heads])
        counted = eligible >= LEAST_ELIGIBLE_MASS
        shape = (len(plan.selectors), len(plan.budgets), *counted.shape)
        numbers = {name: np.full(shape, np.nan) for name in PER_BUDGET}
        needed = np.full((len(plan.selectors), len(plan.coverages), *counted.shape), np.nan)
        with np.errstate(invalid="ignore", divide="ignore"):  # of units that do not count
            part = eligible / total
        for row, name in enumerate(plan.selectors):
            covered = _by_budget([head.held[name].at_budgets for head in heads])
            numbers["coverage"][row] = covered
            numbers["total_mass"][row] = 1 - part + covered * part
            needed[row] = _by_budget([head.held[name].needed for head in heads])
            on_grid = np.stack([head.held[name].on_grid for head in heads])[counted]
            self._covered[row] += on_grid.sum(axis=0)
            eligible_part = part[counted][:, None]
            self._total[row] += (1 - eligible_part + on_grid * eligible_part).sum(axis=0)
        orders = self._add_selections(numbers, pages, heads, counted)
        self._keep(steps, numbers, needed, heads, counted)
        self._before = _Before(steps[-1].decode_index, orders, pages.chosen[-1:], counted[:, -1:])

    def finish(self) -> LayerNumbers:
        """Return what was gathered."""
        reuse = np.zeros((len(self._plan.selectors), *self._paging.reuse.shape[1:]), dtype=np.int64)
        reuse[self._page_rows] = self._paging.reuse
        return LayerNumbers(
            units=Units.joined(self._units),
            layers=np.array([self._layer.index]),
            n_unit=np.array([sum(len(units.layer) for units in self._units)]),
            covered=self._covered[None],
            total=self._total[None],
            reuse=reuse,
            skipped_units=self._skipped,
        )

    def _add_selections(
        self,
        numbers: Numbers,
        pages: BlockPages,
        heads: Sequence[HeadPages],
        counted: NDArray[np.bool_],
    ) -> tuple[NDArray[np.int64], ...]:
        """Fill in what depends on which pages are selected; return each selector's last order."""
        masses = np.stack([head.page_mass for head in heads])
        orders = []
        for position, row in enumerate(self._page_rows):
            name = self._plan.selectors[row]
            order = np.stack([head.orders[name] for head in heads])
            orders.append(order)
            self._add_overlap(numbers, row, position, order, masses, pages, counted)
            scores = np.stack([head.scores[name] for head in heads])
            numbers["global_coverage"][row], numbers["starved"][row] = shared_budget(
                scores, masses, pages
            )
            for head, measured in enumerate(heads):
                if name in measured.output_errors:
                    errors = np.where(pages.asked > 0, measured.output_errors[name], np.nan)
                    numbers["output_error"][row, :, head] = errors.T
        hits, accesses = self._paging.add(orders, pages, counted)
        numbers["hits"][self._page_rows] = hits
        numbers["accesses"][self._page_rows] = accesses
        return tuple(order[:, -1:] for order in orders)

    def _add_overlap(
        self,
        numbers: Numbers,
        row: int,
        position: int,
        order: NDArray[np.int64],
        masses: NDArray[np.float32],
        pages: BlockPages,
        counted: NDArray[np.bool_],
    ) -> None:
        """Fill in Jaccard overlap and stale coverage of the steps that have one before them."""
        chosen, before = pages.chosen, self._before
        if before is None:
            masses = masses[:, 1:]
        else:
            order = np.concatenate([before.orders[position], order], axis=1)
            chosen = np.concatenate([before.chosen, chosen])
            counted = np.concatenate([before.counted, counted], axis=1)
        n_step = masses.shape[1]
        if n_step:
            jaccard, stale = overlap_with_step_before(order, masses, chosen, counted)
            numbers["jaccard"][row, :, :, -n_step:] = jaccard
            numbers["stale_coverage"][row, :, :, -n_step:] = stale

    def _keep(
        self,
        steps: Sequence[Step],
        numbers: Numbers,
        needed: NDArray[np.float64],
        heads: Sequence[HeadPages],
        counted: NDArray[np.bool_],
    ) -> None:
        """Keep the units that count, and count the others."""
        self._skipped += int((~counted).sum())
        decode = [step.decode_index for step in steps]
        first = self._before.decode_index if self._before is not None else decode[0]
        sampled = np.array([first, *decode], dtype=np.int64)
        lag = sampled[1:] - sampled[:-1]
        unrotated = np.full((len(self._plan.budgets), *counted.shape), np.nan)
        if UNROTATED in heads[0].held:
            unrotated = _by_budget([head.held[UNROTATED].at_budgets for head in heads])
        n_unit = int(counted.sum())
        self._units.append(
            Units(
                trace=np.zeros(n_unit, dtype=np.int64),
                layer=np.full(n_unit, self._layer.index),
                decode_index=np.broadcast_to(np.array(decode), counted.shape)[counted],
                lag=np.broadcast_to(lag, counted.shape)[counted],
                n_head=np.full(n_unit, self._layer.group_size),
                eligible_mass=np.stack([head.eligible_share for head in heads])[counted],
                support=np.stack([head.support for head in heads])[counted],
                hottest=np.stack([head.hottest for head in heads])[counted],
                numbers={name: array[:, :, counted] for name, array in numbers.items()},
                unrotated=unrotated[:, counted],
                needed=needed[:, :, counted],
            )
        )


def _by_budget(of_heads: Sequence[NDArray[np.float64]]) -> NDArray[np.float64]:
    """Turn ``[n_step, n]`` of each head into ``[n, H, n_step]``."""
    return np.moveaxis(np.stack(of_heads), -1, 0)
