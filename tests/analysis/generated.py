"""Traces of every shape, cut into tiles and blocks of every size, and their two profiles."""

from __future__ import annotations

import math
import tempfile
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from itertools import accumulate
from pathlib import Path

import numpy as np
import pytest
from hypothesis import strategies as st

from pytest_kvgate.analysis import PageGrid, Plan, UndefinedError, masses, measure
from pytest_kvgate.analysis.profile import Profile
from pytest_kvgate.trace import Trace, load_trace
from tests.plain import PAGE_SELECTORS, TOKEN_ORACLE, PlainProfile, PlainUnit, plain_profile
from tests.traces import LayerArrays, make_trace

TOLERANCE = 1e-5
#: What the plain judge knows: all but the seeded one.
SELECTORS = (*PAGE_SELECTORS, TOKEN_ORACLE)
POOLS = (1.0, 1.5, 2.0, 3.0)
#: Selectors whose scores are rounded: scores may rank either way that differ by no more than this,
#: relative and absolute. (The smallest masses vanish in float32.)
ROUNDED = {"oracle": (1e-5, 1e-35), "mean-std": (0.0, 1e-3)}


@dataclass(frozen=True)
class Limits:
    """How many steps a block has, and how many tokens a tile."""

    block_logits: int
    block_scores: int
    tile_logits: int
    shortest_tile: int
    longest_tile: int
    sum_length: int

    @contextmanager
    def applied(self) -> Iterator[None]:
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(measure, "BLOCK_LOGITS", self.block_logits)
            patch.setattr(measure, "BLOCK_SCORES", self.block_scores)
            patch.setattr(masses, "TILE_LOGITS", self.tile_logits)
            patch.setattr(masses, "SHORTEST_TILE", self.shortest_tile)
            patch.setattr(masses, "SUM_LENGTH", self.sum_length)
            for module in (masses, measure):
                patch.setattr(module, "LONGEST_TILE", self.longest_tile)
            yield


@dataclass(frozen=True)
class Setup:
    layers: list[LayerArrays]
    n_visible: list[int]
    decode_indices: list[int]
    grids: list[PageGrid]
    budgets: tuple[float, ...]
    limits: Limits

    @property
    def grid(self) -> PageGrid:
        return self.grids[0]

    @contextmanager
    def written(self, *others: Setup) -> Iterator[list[Path]]:
        """Write this trace and others to disk for a while."""
        with tempfile.TemporaryDirectory() as folder:
            yield [
                make_trace(
                    Path(folder) / str(number),
                    setup.layers,
                    setup.n_visible,
                    decode_indices=setup.decode_indices,
                )
                for number, setup in enumerate((self, *others))
            ]

    @contextmanager
    def loaded(self) -> Iterator[tuple[Trace, list[PlainProfile]]]:
        """Give the trace, and the plain profile on every grid."""
        with self.written() as (directory,):
            yield load_trace(directory), [plain_on(directory, grid) for grid in self.grids]

    def plan(self, pool: float = 2.0, coverages: tuple[float, ...] = ()) -> Plan:
        return Plan(self.budgets, SELECTORS, coverages=coverages, pool=pool)


def plain_on(directory: Path, grid: PageGrid) -> PlainProfile:
    return plain_profile(directory, grid.page_size, grid.sinks, grid.recent)


@st.composite
def limits(draw: st.DrawFn) -> Limits:
    return Limits(
        block_logits=draw(st.sampled_from([1, 200, 500, 2**20])),
        block_scores=draw(st.sampled_from([1, 2000, 2**20])),
        tile_logits=draw(st.sampled_from([1, 64, 256])),
        shortest_tile=draw(st.integers(1, 20)),
        longest_tile=draw(st.integers(5, 60)),
        sum_length=draw(st.sampled_from([2, 7, 256])),
    )


@st.composite
def layers(
    draw: st.DrawFn, index: int, n_token: int, n_step: int, unit: int, *, windowed: bool
) -> LayerArrays:
    n_head_kv, group = draw(st.integers(1, 3)), draw(st.integers(1, 3))
    n_head, head_dim = n_head_kv * group, draw(st.integers(1, 5))
    rng = np.random.default_rng(draw(st.integers(0, 2**32 - 1)))
    # K is unit·i/16 or unit·i/128 and q is i/8 with whole i, and every page size divides the unit:
    # the mean, the box and the mean distance from its centre are then exact in float32, and so are
    # their products with q, so the scores of all but oracle and mean-std are equal or well apart.
    parts = draw(st.sampled_from([16, 128]))
    k = rng.integers(-parts, parts + 1, (n_head_kv, n_token, head_dim)) * unit / parts
    q = rng.integers(-16, 17, (n_step, n_head, head_dim)) / 8
    # Some units see next to nothing of the eligible pages. Not both ways at once: where logits of
    # more than a hundred compete, float32 has no more than five digits left of a mass.
    turned_away = draw(st.sampled_from([None, "by the first token", "by distance"]))
    if turned_away == "by the first token":
        # at some steps all heads look at the first token only, which is free where there are sinks
        first_token = np.zeros((n_head_kv, n_token, 1))
        first_token[:, 0] = unit
        looks = np.where(rng.random((n_step, 1, 1)) < 0.4, 128.0, 0.0)
        k = np.concatenate([k, first_token], axis=2)
        q = np.concatenate([q, np.broadcast_to(looks, (n_step, n_head, 1))], axis=2)
        head_dim += 1
    dtype = draw(st.sampled_from(["float16", "float32"]))
    values = None
    if draw(st.integers(0, 3)):  # mostly
        values = rng.uniform(0.5, 2.0, (n_head_kv, n_token, draw(st.integers(1, 4))))
        # one sign per dim: were an output next to zero, its relative error would be all rounding
        values *= rng.choice([-1, 1], (n_head_kv, 1, values.shape[2]))
    has_alibi, has_sinks = draw(st.booleans()), draw(st.booleans())
    slopes = rng.uniform(0.001, 0.1, n_head) if has_alibi else None
    if slopes is not None and turned_away == "by distance":
        slopes[:group] = 2.5  # of the first KV head
    return LayerArrays(
        k=k.astype(dtype),
        q=q.astype(np.float32),
        index=index,
        scale=draw(st.sampled_from([0.25, 0.5, 0.7])) / unit,
        softcap=draw(st.sampled_from([None, 1.5, 20.0])),
        alibi_slopes=None if slopes is None else tuple(float(slope) for slope in slopes),
        window=draw(st.integers(1, n_token + 5)) if windowed else None,
        n_rot=draw(st.integers(0, head_dim)),
        rotated_last=draw(st.booleans()),
        v=None if values is None else values.astype(dtype),
        sinks=rng.uniform(-3, 3, n_head).astype(np.float32) if has_sinks else None,
    )


@st.composite
def selective(draw: st.DrawFn, layer: LayerArrays, n_visible: Sequence[int]) -> LayerArrays:
    """Let a layer without a window hide what its own top-k might, or leave it as it is."""
    if layer.window is not None or draw(st.integers(0, 2)):
        return layer
    n_token = layer.k.shape[1]
    rng = np.random.default_rng(draw(st.integers(0, 2**32 - 1)))
    visible = rng.random((len(n_visible), n_token)) < draw(st.sampled_from([0.1, 0.5, 0.9, 1.0]))
    first, last = sorted(draw(st.tuples(st.integers(0, n_token), st.integers(0, n_token))))
    visible[draw(st.integers(0, len(n_visible) - 1)), first:last] = False  # whole tiles too
    for row, n in zip(visible, n_visible, strict=True):
        row[n:] = False
        row[rng.integers(n)] = True
    return replace(layer, visible=visible)


@st.composite
def setups(draw: st.DrawFn, n_grid: int = 1) -> Setup:
    unit = draw(st.sampled_from([4, 5, 6, 7, 8, 9, 12]))
    sizes = draw(
        st.lists(
            st.sampled_from([size for size in range(1, unit + 1) if unit % size == 0]),
            min_size=n_grid,
            max_size=n_grid,
        )
    )
    sinks = draw(st.integers(0, 2 * sizes[0]))
    recent = draw(
        st.one_of(
            st.integers(1, 12).map(float),
            st.integers(0, 300).map(lambda thousandths: thousandths / 1000),
        )
    )
    # long enough for two eligible pages at the last step, whatever is free
    shortest = math.ceil((sinks + 3 * max(sizes) + 13) / 0.7)
    n_token = draw(st.integers(shortest, shortest + 20))
    n_step = draw(st.sampled_from([3, 4, 2, 4, 1]))
    earliest = draw(st.sampled_from([n_token // 2, n_token - 6]))
    n_visible = sorted(
        draw(st.sets(st.integers(earliest, n_token), min_size=n_step, max_size=n_step)) | {n_token}
    )[-n_step:]
    if n_step > 1 and not draw(st.integers(0, 3)):
        n_visible[0] = max(sizes)  # no page may be eligible yet
    strides = draw(
        st.lists(st.sampled_from([1, 1, 2, 5]), min_size=n_step - 1, max_size=n_step - 1)
    )
    windowed = draw(st.sampled_from([[False], [False, False], [True, False], [False, False]]))
    drawn = [
        draw(
            layers(2 * index + 1, n_token, n_step, unit, windowed=is_windowed).flatmap(
                lambda layer: selective(layer, n_visible)
            )
        )
        for index, is_windowed in enumerate(windowed)
    ]
    least = math.ceil(1000 * max(sizes) / n_visible[0])
    budgets = draw(
        st.lists(
            st.one_of(
                st.integers(min(least, 1000), 1000), st.integers(1, 1000), st.just(least)
            ).map(lambda thousandths: min(thousandths, 1000) / 1000),
            min_size=1,
            max_size=3,
            unique=True,
        )
    )
    return Setup(
        drawn,
        n_visible,
        list(accumulate(strides, initial=draw(st.integers(0, 3)))),
        [PageGrid(size, sinks, recent) for size in sizes],
        tuple(sorted(budgets)),
        draw(limits()),
    )


def of_layer(plain: PlainProfile, layer: int) -> PlainProfile:
    """Return what the judge measured of one layer."""
    return replace(plain, all_units=[unit for unit in plain.all_units if unit.layer == layer])


def judged(
    plain: PlainProfile, name: str, selector: str, budget: float, pool: float = 2.0
) -> float | None:
    """Return one measure by the name the package gives it."""
    if name in ("hit_rate", "missed_pages"):
        paging = plain.paging(selector, budget, pool)
        return None if paging is None else float(getattr(paging, name))
    value: float | None = getattr(plain, name)(selector, budget)
    return value


def assert_measure(
    fast: Profile,
    number: float | None,
    name: str,
    selector: str,
    budget: float,
    scope: str = "mean",
    layer: int | None = None,
) -> None:
    """Compare a measure of the package with the judge's number, or with undefined."""
    only = None if layer is None else [layer]
    asked = (name, selector, budget, scope, only)
    if number is None:
        with pytest.raises(UndefinedError):
            fast.measure(*asked)  # type: ignore[arg-type] # the scope is a plain string here
    else:
        value = fast.measure(*asked)  # type: ignore[arg-type]
        assert value == pytest.approx(number, abs=TOLERANCE, rel=TOLERANCE), asked


def is_decided(plain: PlainProfile, selector: str, budget: float) -> bool:
    """Whether no rounding decides which pages any unit selects."""
    return selector not in ROUNDED or all(
        _apart(selector, unit.scores[selector].values(), plain.k(budget, unit))
        for unit in plain.units
    )


def is_decided_for_all(plain: PlainProfile, selector: str) -> bool:
    """Whether no rounding decides which pages any unit selects at any budget."""
    return selector not in ROUNDED or all(
        _apart(selector, unit.scores[selector].values(), k)
        for unit in plain.units
        for k in range(1, len(unit.pages))
    )


def is_decided_globally(plain: PlainProfile, selector: str, budget: float) -> bool:
    """Whether no rounding decides which (head, page) pairs a layer selects at any step."""
    if selector not in ROUNDED:
        return True
    groups: dict[tuple[int, int], list[PlainUnit]] = {}
    for unit in plain.all_units:
        groups.setdefault((unit.step, unit.layer), []).append(unit)
    return all(
        _apart(
            selector,
            [score for unit in units for score in unit.scores[selector].values()],
            plain.k(budget, units[0]) * len(units),
        )
        for units in groups.values()
    )


def _apart(selector: str, scores: Iterable[float], k: int) -> bool:
    ranked: Sequence[float] = sorted(scores, reverse=True)
    if not 0 < k < len(ranked):
        return True
    last, next_one = ranked[k - 1], ranked[k]
    relative, absolute = ROUNDED[selector]
    return last - next_one > relative * abs(last) + absolute
