"""Selectors: how a pager would rank pages for the current query.

A page selector is one small pure function from queries and page keys to one score per page. The two
oracles rank by the attention masses themselves and cannot be built; they are the ceilings.
"""

from __future__ import annotations

import math
import numbers
import zlib
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from types import MappingProxyType
from typing import Any, TypeVar

import numpy as np
from numpy.typing import NDArray

from pytest_kvgate.trace import FloatArray

ORACLE = "oracle"
LANDMARK = "landmark"
TOKEN_ORACLE = "token-oracle"

#: Longer names do not fit into tables.
LONGEST_NAME = 40

Real = TypeVar("Real", bound=np.floating[Any])

#: Seed of the ``random`` selector.
SEED = 20_240_601


def read_only(array: NDArray[Real]) -> NDArray[Real]:
    """Return a view that cannot be written to: selectors share what they are given."""
    view = array.view()
    view.flags.writeable = False
    return view


@dataclass(frozen=True)
class PageKeys:
    """Keys of one KV head, cut into whole pages that follow each other.

    ``rows`` is ``[n_page, page_size, head_dim]`` as stored, float16 or float32; ``first_page`` is
    the number of the first of these pages. The summaries are computed once and kept; they are what
    a pager would store beside a page. A `StackedSelector` may be given several KV heads at once,
    along an axis before all others.
    """

    rows: FloatArray
    first_page: int = 0

    @property
    def keys(self) -> NDArray[np.float32]:
        """All keys, ``[n_page, page_size, head_dim]`` float32."""
        return read_only(np.asarray(self.rows, dtype=np.float32))

    @property
    def numbers(self) -> NDArray[np.int64]:
        """Page numbers, ``[n_page]``; page i holds the positions from ``i · page_size`` on."""
        return np.arange(self.first_page, self.first_page + self.rows.shape[-3])

    def of_head(self, head: int) -> PageKeys:
        """Return the pages of one of several KV heads."""
        return PageKeys(self.rows[head], self.first_page)

    @cached_property
    def mean(self) -> NDArray[np.float32]:
        """Mean key per page, ``[n_page, head_dim]`` float32."""
        mean: NDArray[np.float32] = self.keys.mean(axis=-2)
        return read_only(mean)

    @cached_property
    def maximum(self) -> NDArray[np.float32]:
        """Largest value per dim and page, ``[n_page, head_dim]`` float32."""
        maximum: NDArray[np.float32] = self.keys.max(axis=-2)
        return read_only(maximum)

    @cached_property
    def minimum(self) -> NDArray[np.float32]:
        """Smallest value per dim and page, ``[n_page, head_dim]`` float32."""
        minimum: NDArray[np.float32] = self.keys.min(axis=-2)
        return read_only(minimum)

    @cached_property
    def deviation(self) -> NDArray[np.float32]:
        """Population standard deviation per dim and page, ``[n_page, head_dim]`` float32."""
        distance = self.keys - self.mean[..., None, :]
        np.square(distance, out=distance)
        deviation: NDArray[np.float32] = np.sqrt(distance.mean(axis=-2))
        return read_only(deviation)

    @cached_property
    def center(self) -> NDArray[np.float32]:
        """Middle of the smallest box around a page's keys, ``[n_page, head_dim]`` float32."""
        center: NDArray[np.float32] = (self.maximum + self.minimum) / np.float32(2)
        return read_only(center)

    @cached_property
    def radius(self) -> NDArray[np.float32]:
        """Mean distance from `center` per dim and page, ``[n_page, head_dim]`` float32."""
        distance = self.keys - self.center[..., None, :]
        np.abs(distance, out=distance)
        radius: NDArray[np.float32] = distance.mean(axis=-2)
        return read_only(radius)


#: From ``[n_step, G, head_dim]`` float32 queries of one GQA group, before the scale of the logits,
#: and the page keys of its KV head to scores ``[n_step, n_page]``, the best page highest. A page's
#: score must not depend on the other pages: they come in batches.
PageScore = Callable[[NDArray[np.float32], PageKeys], NDArray[np.floating]]


class SelectorError(ValueError):
    """A selector that is not well-formed; the message says which and why."""


@dataclass(frozen=True)
class Selector:
    """A way to rank pages that a pager could build.

    ``score`` must be a pure function. ``numbers_per_dim`` is how many numbers per head dim it
    stores beside every page and KV head: 1 for a mean key, 2 for a box.
    """

    name: str
    score: PageScore
    numbers_per_dim: float = 0

    def page_bytes(self, head_dim: int) -> float:
        """Return the metadata per page and KV head in bytes, at 2 bytes a number."""
        return 2 * self.numbers_per_dim * head_dim

    def scores(self, queries: NDArray[np.float32], pages: PageKeys) -> NDArray[np.float32]:
        """Return checked scores, ``[n_step, n_page]`` float32.

        Raises:
            SelectorError: the function returned another shape, or values that have no order.
        """
        found = self._score(read_only(queries), pages)
        wanted = (*queries.shape[:-2], pages.rows.shape[-3])
        if found.shape != wanted or found.dtype.kind not in "fiu":
            raise SelectorError(
                f"selector {self.name!r} returned {found.dtype} of shape {found.shape}; scores are "
                f"real numbers of shape [n_step, n_page], here {wanted}."
            )
        # A matrix product may sum equal columns in different orders. Computed in float64 and
        # compared in float32, pages with equal keys tie as the definition says.
        with np.errstate(over="ignore"):
            scores = found.astype(np.float32)
        if np.isnan(scores).any():
            raise SelectorError(
                f"selector {self.name!r} returned NaN for a page, which cannot be ranked; return "
                "minus infinity for a page that comes last."
            )
        return scores

    def scores_of_heads(self, queries: NDArray[np.float32], pages: PageKeys) -> NDArray[np.float32]:
        """Return checked scores of several KV heads at one step, ``[n_head_kv, n_page]`` float32.

        ``queries`` is ``[n_head_kv, 1, G, head_dim]``, and ``pages`` have the KV heads before their
        other axes. Raises as `scores` does.
        """
        return np.concatenate(
            [self.scores(of_head, pages.of_head(head)) for head, of_head in enumerate(queries)]
        )

    def _score(self, queries: NDArray[np.float32], pages: PageKeys) -> NDArray[Any]:
        try:
            return np.asarray(self.score(queries, pages))
        except (Exception, KeyboardInterrupt, SystemExit):
            raise
        except BaseException as error:  # a skip or an xfail would take the gates along
            raise SelectorError(
                f"selector {self.name!r} raised {error!r} instead of scoring pages."
            ) from error


class StackedSelector(Selector):
    """A selector whose score takes several KV heads at once, which saves time at a single step."""

    def scores_of_heads(self, queries: NDArray[np.float32], pages: PageKeys) -> NDArray[np.float32]:
        """Return checked scores of several KV heads at one step, ``[n_head_kv, n_page]`` float32.

        As of `Selector`.
        """
        return self.scores(queries, pages)[:, 0]


def _best_head(queries: NDArray[np.floating], summary: NDArray[np.floating]) -> NDArray[np.float64]:
    """Return ``max_h q_h · s`` of ``[…, n_step, G, m]`` and ``[…, n_page, m]``, in float64."""
    *heads, n_step, group, length = queries.shape
    rows = queries.reshape(*heads, n_step * group, length).astype(np.float64)
    products = rows @ summary.astype(np.float64).swapaxes(-1, -2)
    best: NDArray[np.float64] = products.reshape(*heads, n_step, group, -1).max(axis=-2)
    return best


def landmark(queries: NDArray[np.float32], pages: PageKeys) -> NDArray[np.float64]:
    """Score a page by ``max_h q_h · mean(k)``: one summary key per page.

    The mean-pooled block key of MoBA (Lu et al., 2025), used without training; Landmark Attention
    (Mohtashami and Jaggi, 2023) learns such a key.
    """
    return _best_head(queries, pages.mean)


def quest(queries: NDArray[np.float32], pages: PageKeys) -> NDArray[np.float64]:
    """Score a page by ``max_h Σ_d max(q_d·max_d, q_d·min_d)``, an upper bound of its logits.

    Quest (Tang et al., 2024).
    """
    # q·max where q is positive, q·min where it is negative: one product of twice the length
    signed = np.concatenate([np.maximum(queries, 0), np.minimum(queries, 0)], axis=-1)
    return _best_head(signed, np.concatenate([pages.maximum, pages.minimum], axis=-1))


def mean_std(queries: NDArray[np.float32], pages: PageKeys) -> NDArray[np.float64]:
    """Score a page by ``max_h (q·mean + Σ_d |q_d|·std_d)``, std over the page's keys."""
    both = np.concatenate([queries, np.abs(queries)], axis=-1)
    return _best_head(both, np.concatenate([pages.mean, pages.deviation], axis=-1))


def cuboid_mean(queries: NDArray[np.float32], pages: PageKeys) -> NDArray[np.float64]:
    """Score a page by ``max_h (q·c + Σ_d |q_d|·r_d)``: the box of its keys, tightened.

    c is the centre of the box and r the mean distance from it. The cuboid-mean digest of
    ArkVale (Chen et al., 2024).
    """
    both = np.concatenate([queries, np.abs(queries)], axis=-1)
    return _best_head(both, np.concatenate([pages.center, pages.radius], axis=-1))


def recency(queries: NDArray[np.float32], pages: PageKeys) -> NDArray[np.float64]:
    """Score a page by its number: the latest pages, whatever the query."""
    return np.broadcast_to(pages.numbers.astype(np.float64), (len(queries), len(pages.rows)))


def random(queries: NDArray[np.float32], pages: PageKeys) -> NDArray[np.float64]:
    """Score a page at random: what no knowledge of the query is worth.

    Seeded by the query and the page number, so that it is the same in every run. The mixing is
    that of SplitMix64 (Steele, Lea and Flood, 2014).
    """
    seeds = [zlib.crc32(np.ascontiguousarray(query).tobytes(), SEED) for query in queries]
    mixed = (np.array(seeds, dtype=np.uint64)[:, None] << np.uint64(32)) + pages.numbers.astype(
        np.uint64
    )
    for shift, factor in ((30, 0xBF58476D1CE4E5B9), (27, 0x94D049BB133111EB)):
        mixed = (mixed ^ (mixed >> np.uint64(shift))) * np.uint64(factor)
    mixed ^= mixed >> np.uint64(31)
    return (mixed >> np.uint64(40)).astype(np.float64)


def register(selectors: Iterable[Selector], known: Mapping[str, Selector]) -> dict[str, Selector]:
    """Return the registry ``known`` with more selectors, by name.

    Raises:
        SelectorError: a name is taken, or cannot be written on a command line.
    """
    registry = dict(known)
    for selector in selectors:
        if not isinstance(selector, Selector):
            raise SelectorError(
                f"{selector!r} is no selector; a pytest_kvgate.analysis.Selector is needed."
            )
        name = selector.name
        stored: object = selector.numbers_per_dim
        counted = isinstance(stored, numbers.Real) and 0 <= float(stored) < math.inf
        if not callable(selector.score) or not counted:
            raise SelectorError(
                f"selector {name!r}: score must be a function and numbers_per_dim a number from 0; "
                f"got {selector.score!r} and {stored!r}."
            )
        fits = isinstance(name, str) and len(name) <= LONGEST_NAME
        if not fits or not name.replace("-", "").isalnum():
            raise SelectorError(
                f"selector name {name!r}: up to {LONGEST_NAME} letters, digits and '-' are "
                "accepted, such as 'my-first'."
            )
        if name in registry or name in (ORACLE, TOKEN_ORACLE):
            raise SelectorError(f"there are two selectors named {name!r}; rename one.")
        # plain text and a plain number, not an enum or a scalar of numpy
        registry[str(name)] = replace(
            selector, name=str(name), numbers_per_dim=float(selector.numbers_per_dim)
        )
    return registry


#: Page selectors that a pager could build, by name.
PAGE_SELECTORS: Mapping[str, Selector] = MappingProxyType(
    register(
        (
            StackedSelector(LANDMARK, landmark, numbers_per_dim=1),
            StackedSelector("quest", quest, numbers_per_dim=2),
            StackedSelector("mean-std", mean_std, numbers_per_dim=2),
            StackedSelector("cuboid-mean", cuboid_mean, numbers_per_dim=2),
            Selector("recency", recency),
            Selector("random", random),
        ),
        {},
    )
)

#: Every selector that comes with the package, in the order of the tables.
SELECTORS: tuple[str, ...] = (ORACLE, *PAGE_SELECTORS, TOKEN_ORACLE)


def rank(scores: NDArray[np.float32]) -> NDArray[np.int64]:
    """Return item numbers along the last axis from the best score down; ties go to the lower one.

    ``scores`` is float32 without NaN. Score and number are packed into one integer, whose sort
    needs no stability and is several times faster than a stable argsort.
    """
    bits = (scores + np.float32(0)).view(np.int32)  # + 0: -0.0 ties with 0.0
    # the order of the floats as that of unsigned integers, turned round
    descending = np.where(bits < 0, bits, ~bits ^ np.int32(-(2**31))).view(np.uint32)
    packed = descending.astype(np.uint64) << np.uint64(32)
    packed |= np.arange(scores.shape[-1], dtype=np.uint64)
    packed.sort(axis=-1)
    return (packed & np.uint64(0xFFFFFFFF)).astype(np.int64)
