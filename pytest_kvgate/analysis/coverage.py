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
from pytest_kvgate.analysis.pages import BUDGET_GRID, BlockPages
from pytest_kvgate.analysis.paging import N_POOL, LruPool, pool_histogram
from pytest_kvgate.analysis.plan import Plan
from pytest_kvgate.analysis.selectors import TOKEN_ORACLE, rank
from pytest_kvgate.analysis.units import PER_BUDGET, LayerNumbers, Units
from pytest_kvgate.analysis.wording import exact
from pytest_kvgate.trace import Layer, Step

#: A unit with less eligible mass than this has nothing to select; it is skipped and counted.
LEAST_ELIGIBLE_MASS = 1e-12

#: Landmark over the dims that RoPE never turns; measured beside the selectors, never listed.
UNROTATED = "unrotated landmark"


@dataclass(frozen=True)
class _Before:
    """The last step of the block before: its decode index, orders per selector and choices."""

    decode_index: int
    counted: NDArray[np.bool_]
    orders: dict[str, NDArray[np.int64]]
    chosen: NDArray[np.int64]


class LayerTally:
    """Gathers the units of one layer on one page grid, block of steps by block of steps."""

    def __init__(self, layer: Layer, plan: Plan, n_page: int) -> None:
        self._layer, self._plan = layer, plan
        self._n_page = n_page
        self._before: _Before | None = None
        self._units: list[Units] = []
        self._skipped = 0
        n_selector, n_budget = len(plan.selectors), len(plan.budgets)
        self._covered = np.zeros((n_selector, len(BUDGET_GRID)))
        self._total = np.zeros_like(self._covered)
        self._pools = {
            place: LruPool(n_page)
            for place in np.ndindex(n_selector, n_budget, layer.n_head_kv)
            if plan.selectors[place[0]] != TOKEN_ORACLE
        }
        pool = exact(plan.pool)
        self._pool = pool.numerator, pool.denominator
        self._reuse = np.zeros((n_selector, n_budget, N_POOL + 2), dtype=np.int64)

    def add(self, steps: Sequence[Step], pages: BlockPages, heads: Sequence[HeadPages]) -> None:
        """Take the next steps, with one `HeadPages` per KV head."""
        plan = self._plan
        eligible = np.stack([head.eligible for head in heads])
        total = np.stack([head.total for head in heads])
        counted = eligible >= LEAST_ELIGIBLE_MASS
        with_page = np.where(pages.asked > 0, 1.0, np.nan)
        shape = (len(plan.selectors), len(plan.budgets), *counted.shape)
        numbers = {name: np.full(shape, np.nan) for name in PER_BUDGET}
        needed = np.full((len(plan.selectors), len(plan.coverages), *counted.shape), np.nan)
        with np.errstate(invalid="ignore", divide="ignore"):  # of units that do not count
            eligible_part = eligible / total
        for row, name in enumerate(plan.selectors):
            curves = np.stack([head.curves[name] for head in heads])
            on_grid = _read(curves, pages.on_grid)
            covered = np.moveaxis(_read(curves, pages.chosen) * with_page, -1, 0)
            numbers["coverage"][row] = covered
            numbers["total_mass"][row] = 1 - eligible_part + covered * eligible_part
            self._covered[row] += on_grid[counted].sum(axis=0)
            part = eligible_part[counted][:, None]
            self._total[row] += (1 - part + on_grid[counted] * part).sum(axis=0)
            for column, coverage in enumerate(plan.coverages):
                reached = on_grid >= coverage
                first = np.array(BUDGET_GRID)[reached.argmax(axis=-1)]
                needed[row, column] = np.where(reached.any(axis=-1), first, np.nan)
            if name == TOKEN_ORACLE:
                continue
            self._add_overlap(numbers, row, name, pages, heads, counted)
            self._add_global(numbers, row, name, pages, heads)
            self._add_paging(numbers, row, name, pages, heads, counted)
            for head, measured in enumerate(heads):
                if name in measured.output_errors:
                    numbers["output_error"][row, :, head] = (
                        measured.output_errors[name] * with_page
                    ).T
        self._keep(steps, numbers, needed, self._unrotated(pages, heads, with_page), heads, counted)
        self._before = _Before(
            steps[-1].decode_index,
            counted[:, -1:],
            {
                name: np.stack([head.orders[name][-1:] for head in heads])
                for name in plan.selectors
                if name != TOKEN_ORACLE
            },
            pages.chosen[-1:],
        )

    def finish(self) -> LayerNumbers:
        """Return what was gathered."""
        return LayerNumbers(
            units=Units.joined(self._units),
            layers=np.array([self._layer.index]),
            n_unit=np.array([sum(len(units.layer) for units in self._units)]),
            covered=self._covered[None],
            total=self._total[None],
            reuse=self._reuse,
            skipped_units=self._skipped,
        )

    def _add_overlap(
        self,
        numbers: dict[str, NDArray[np.float64]],
        row: int,
        name: str,
        pages: BlockPages,
        heads: Sequence[HeadPages],
        counted: NDArray[np.bool_],
    ) -> None:
        """Fill in Jaccard and stale coverage of the steps that have one before them."""
        orders = np.stack([head.orders[name] for head in heads])
        chosen, before = pages.chosen, self._before
        if before is not None:
            orders = np.concatenate([before.orders[name], orders], axis=1)
            chosen = np.concatenate([before.chosen, chosen])
            counted = np.concatenate([before.counted, counted], axis=1)
        if orders.shape[1] < 2:
            return
        place = np.empty_like(orders)
        np.put_along_axis(place, orders, np.arange(self._n_page)[None, None], axis=-1)
        widest = int(chosen.max(initial=0))
        place_before = np.take_along_axis(place[:, :-1], orders[:, 1:, :widest], axis=-1)
        masses = np.stack([head.page_mass for head in heads])[:, -(orders.shape[1] - 1) :]
        stale = np.zeros((*masses.shape[:2], widest + 1))
        held = np.take_along_axis(masses, orders[:, :-1, :widest], axis=-1)
        np.cumsum(held, axis=-1, dtype=np.float64, out=stale[..., 1:])
        with np.errstate(invalid="ignore", divide="ignore"):
            stale /= masses.sum(axis=-1, dtype=np.float64)[..., None]
        both = counted[:, 1:] & counted[:, :-1]
        for column in range(chosen.shape[1]):
            now, then = chosen[1:, column], chosen[:-1, column]
            shared = (place_before < then[:, None]) & (np.arange(widest) < now[:, None])
            common = shared.sum(axis=-1)
            valid = both & (now > 0) & (then > 0)
            union = np.maximum(now + then - common, 1)
            at = (row, column, slice(None), slice(-len(now), None))
            numbers["jaccard"][at] = np.where(valid, common / union, np.nan)
            kept = _read(stale, then[:, None])[..., 0]
            numbers["stale_coverage"][at] = np.where(valid, kept, np.nan)

    def _add_global(
        self,
        numbers: dict[str, NDArray[np.float64]],
        row: int,
        name: str,
        pages: BlockPages,
        heads: Sequence[HeadPages],
    ) -> None:
        """Fill in the coverage of a layer's best (head, page) pairs, and who got none of them."""
        n_head, n_step = len(heads), len(pages.chosen)
        scores = np.stack([head.scores[name] for head in heads], axis=-1)
        scores = np.where(pages.is_eligible[..., None], scores, np.float32(-np.inf))
        masses = np.stack([head.page_mass for head in heads], axis=-1).reshape(n_step, -1)
        # (page, head) pairs in the order of ties: the lower page, then the lower head
        widest = int(pages.chosen.max(initial=0)) * n_head
        order = rank(scores.reshape(n_step, -1))[:, :widest]
        held = np.take_along_axis(masses, order, axis=1).astype(np.float64)
        unit = np.arange(n_step)[:, None] * n_head + order % n_head
        whole = np.stack([head.page_mass.sum(axis=1, dtype=np.float64) for head in heads])
        for column in range(pages.chosen.shape[1]):
            taken = np.arange(widest) < pages.chosen[:, column, None] * n_head
            count = np.bincount(unit[taken], minlength=n_step * n_head).reshape(n_step, n_head).T
            mass = np.bincount(unit[taken], held[taken], minlength=n_step * n_head)
            with np.errstate(invalid="ignore", divide="ignore"):
                coverage = mass.reshape(n_step, n_head).T / whole
            defined = pages.asked[:, column] > 0
            numbers["global_coverage"][row, column] = np.where(defined, coverage, np.nan)
            numbers["starved"][row, column] = np.where(defined, count == 0, np.nan)

    def _add_paging(
        self,
        numbers: dict[str, NDArray[np.float64]],
        row: int,
        name: str,
        pages: BlockPages,
        heads: Sequence[HeadPages],
        counted: NDArray[np.bool_],
    ) -> None:
        """Run the LRU pools over the steps."""
        for column, head in np.ndindex(pages.chosen.shape[1], len(heads)):
            pool, order = self._pools[row, column, head], heads[head].orders[name]
            needed, sizes = [], []
            for step in np.flatnonzero(counted[head] & (pages.chosen[:, column] > 0)):
                k, asked = int(pages.chosen[step, column]), int(pages.asked[step, column])
                is_new, capacity = pool.is_new, asked * self._pool[0] // self._pool[1]
                hits, found = pool.access(order[step, :k], capacity)
                if not is_new:  # the first selection only fills the pool
                    numbers["hits"][row, column, head, step] = hits
                    numbers["accesses"][row, column, head, step] = k
                    needed.append(found)
                    sizes.append(np.full(k, asked))
            if needed:
                self._reuse[row, column] += pool_histogram(
                    np.concatenate(needed), np.concatenate(sizes)
                )

    def _unrotated(
        self, pages: BlockPages, heads: Sequence[HeadPages], with_page: NDArray[np.float64]
    ) -> NDArray[np.float64]:
        """Return coverage of landmark without rotated dims, ``[n_budget, H, n_step]``, or NaN."""
        if UNROTATED not in heads[0].curves:
            return np.full((len(self._plan.budgets), len(heads), len(pages.chosen)), np.nan)
        curves = np.stack([head.curves[UNROTATED] for head in heads])
        return np.moveaxis(_read(curves, pages.chosen) * with_page, -1, 0)

    def _keep(
        self,
        steps: Sequence[Step],
        numbers: dict[str, NDArray[np.float64]],
        needed: NDArray[np.float64],
        unrotated: NDArray[np.float64],
        heads: Sequence[HeadPages],
        counted: NDArray[np.bool_],
    ) -> None:
        """Keep the units that count, and count the others."""
        self._skipped += int((~counted).sum())
        decode = [step.decode_index for step in steps]
        first = self._before.decode_index if self._before is not None else decode[0]
        places = np.array([first, *decode], dtype=np.int64)
        lag = places[1:] - places[:-1]
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


def _read(curves: NDArray[np.float64], pages: NDArray[np.int64]) -> NDArray[np.float64]:
    """Read ``[H, n_step, n + 1]`` curves at ``[n_step, m]`` numbers of pages."""
    wanted = np.broadcast_to(pages, (len(curves), *pages.shape))
    return np.take_along_axis(curves, wanted, axis=-1)
