"""Control patterns: attention that is known by construction, and where it lies on pages.

Keys differ in one number, their *level*, and queries in another, their *strength*: a logit is
strength × level. One layer holds one pattern. Every number that is measured follows from `Controls`
alone.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from fractions import Fraction

#: Decoys: four kinds of page, each the favourite of one selector, as tokens of a page by level.
#: In this order: landmark (highest mean), quest (highest key), mean-std and cuboid-mean.
_DECOYS = ("plateau", "peak", "spread", "box")

#: The steepest logits of the diffuse pattern; their exponentials do not fit into float32.
_STEEP = 120.0


@dataclass(frozen=True)
class PageKind:
    """``count`` pages from page ``first`` on with the same keys in another order.

    ``levels`` are ``(level, tokens)``, page_size tokens together. Page i of them is turned by
    ``turn · i`` tokens.
    """

    first: int
    count: int
    levels: tuple[tuple[float, int], ...]
    turn: int = 0


@dataclass(frozen=True)
class HeadKeys:
    """The keys of one KV head: kinds of eligible pages, single free tokens, and the rest.

    ``free`` are ``(position, level)``; every other token has the level ``background``.
    """

    kinds: tuple[PageKind, ...] = ()
    free: tuple[tuple[int, float], ...] = ()
    background: float = 0.0


@dataclass(frozen=True)
class Pattern:
    """One layer: ``keys`` per KV head, ``strengths`` per query head at the first step."""

    name: str
    keys: tuple[HeadKeys, ...]
    strengths: tuple[float, ...]

    @property
    def is_uniform(self) -> bool:
        """Whether all eligible pages hold the same mass, so that any choice of them does."""
        return not any(head.kinds for head in self.keys)


@dataclass(frozen=True)
class Controls:
    """The parameters of the control model, its prompt and its page grid.

    ``recent`` is a fraction of the context below 1, else tokens; ``budget`` a fraction of the
    context. ``sharpness`` is the logit of a hot token above the background, in nats, and
    ``cooling`` what becomes of the strengths from one sampled step to the next. The first KV head
    has ``cluster`` adjacent hot pages, and ``scattered`` pages with one hot token each.

    Raises:
        ValueError: the patterns do not fit into the context.
    """

    n_head: int = 4
    n_head_kv: int = 2
    page_size: int = 32
    sinks: int = 40
    recent: float = 0.02
    budget: float = 0.04
    n_prompt: int = 2088
    steps: range = range(0, 5, 2)
    sharpness: float = 8.0
    cooling: float = 0.9
    cluster: int = 2
    scattered: int = 48

    def __post_init__(self) -> None:
        whole_groups = 1 <= self.n_head_kv <= self.n_head and self.n_head % self.n_head_kv == 0
        if not whole_groups or self.page_size < 8 or self.page_size % 4 or self.sinks < 1:
            raise ValueError(
                f"{self}: accepted: n_head a multiple of n_head_kv, page_size a multiple of 4 from "
                "8, sinks from 1."
            )
        fewest = min(self.budget_pages(n_visible) for n_visible in self.n_visible)
        _, last = self.eligible(self.n_visible[-1])
        needed = max(
            len(_DECOYS) * (self._most + 1) + self.n_head_kv,
            self.cluster,
            self.scattered,
        )
        if fewest < 1 or last * self.page_size >= self.n_prompt or needed > self._room:
            raise ValueError(
                f"{self}: the patterns do not fit. The budget must buy a page ({fewest}), the "
                f"prompt must reach past the last eligible page ({last}), and {needed} pages must "
                f"fit among the eligible ones less those that recency takes ({self._room})."
            )

    @property
    def n_visible(self) -> tuple[int, ...]:
        """What each sampled step sees, in tokens."""
        return tuple(self.n_prompt + index + 1 for index in self.steps)

    @property
    def group_size(self) -> int:
        """Query heads per KV head."""
        return self.n_head // self.n_head_kv

    def eligible(self, n_visible: int) -> tuple[int, int]:
        """Return the eligible pages ``[first, end)``: ``ceil(S/P) <= i < floor((n-R)/P)``."""
        recent = self.recent
        if recent < 1:
            recent = math.ceil(Fraction(str(recent)) * n_visible)
        return math.ceil(self.sinks / self.page_size), int(n_visible - recent) // self.page_size

    def budget_pages(self, n_visible: int) -> int:
        """Return the pages the budget buys per KV head, ``floor(B·n/P)``."""
        return math.floor(Fraction(str(self.budget)) * n_visible / self.page_size)

    def patterns(self) -> tuple[Pattern, ...]:
        """Return the patterns, layer by layer."""
        heads = range(self.n_head_kv)
        first, _ = self.eligible(self.n_visible[0])
        _, last = self.eligible(self.n_visible[-1])
        sharp = self._strengths(self.sharpness)
        sinks = ((0, 1.0), (first * self.page_size - 1, 1.0))
        recent = tuple((place, 1.0) for place in {last * self.page_size, self.n_prompt - 1})
        return (
            Pattern("clustered", tuple(HeadKeys(self._clustered(head)) for head in heads), sharp),
            Pattern("scattered", tuple(HeadKeys(self._scattered(head)) for head in heads), sharp),
            Pattern(
                "diffuse",
                tuple(HeadKeys(background=1.0) for _ in heads),
                self._strengths(_STEEP, opposed=True),
            ),
            Pattern(
                "sink",
                tuple(HeadKeys(free=sinks) for _ in heads),
                self._strengths(1.4 * self.sharpness),
            ),
            Pattern("recent", tuple(HeadKeys(free=recent) for _ in heads), sharp),
            Pattern(
                "decoys",
                tuple(HeadKeys(self._decoys(head)) for head in heads),
                self._strengths(1.2),
            ),
            Pattern(
                "opposed",
                tuple(HeadKeys(self._opposed(head)) for head in heads),
                self._strengths(self.sharpness, opposed=True),
            ),
            Pattern(
                "outliers",
                tuple(HeadKeys(self._outliers(head)) for head in heads),
                self._strengths(6.0),
            ),
            Pattern(
                "middles",
                tuple(HeadKeys(self._middles(head)) for head in heads),
                self._strengths(3.0),
            ),
            Pattern(
                "tails",
                tuple(HeadKeys(self._tails(head)) for head in heads),
                self._strengths(3.0),
            ),
        )

    def strength(self, pattern: Pattern, head: int, row: int) -> float:
        """Return the strength of a query head at the sampled step number ``row``."""
        return pattern.strengths[head] * self.cooling**row

    @property
    def _most(self) -> int:
        """Pages of the largest budget."""
        return max(self.budget_pages(n_visible) for n_visible in self.n_visible)

    @property
    def _room(self) -> int:
        """Pages for patterns: those eligible at every step, less the last ones, for recency."""
        first, end = self.eligible(self.n_visible[0])
        return end - first - self._most

    def _strengths(self, base: float, *, opposed: bool = False) -> tuple[float, ...]:
        """Return a strength of its own per query head; ``opposed``: every other one negative."""
        return tuple(
            base
            * (1 + 0.3 * head / self.n_head)
            * (-1 if opposed and head % self.group_size % 2 else 1)
            for head in range(self.n_head)
        )

    def _clustered(self, head: int) -> tuple[PageKind, ...]:
        """Whole hot pages side by side, for the first KV head from the first eligible page on."""
        first, _ = self.eligible(self.n_visible[0])
        count = self.cluster - head % self.cluster
        start = first + head * (self.cluster + 1) % (self._room - count + 1)
        return (PageKind(start, count, ((1.0, self.page_size),)),)

    def _scattered(self, head: int) -> tuple[PageKind, ...]:
        """One hot token on each of many pages."""
        first, _ = self.eligible(self.n_visible[0])
        count = max(1, self.scattered - 3 * head)
        return (PageKind(first, count, ((1.0, 1), (0.0, self.page_size - 1)), turn=7 + head),)

    def _decoys(self, head: int) -> tuple[PageKind, ...]:
        """Four kinds of page, one more of each than the budget buys."""
        first, _ = self.eligible(self.n_visible[0])
        size, count = self.page_size, self._most + 1
        levels: Mapping[str, tuple[tuple[float, int], ...]] = {
            "plateau": ((1.0, size),),
            "peak": ((4.0, 1), (-4.0, 1), (0.0, size - 2)),
            "spread": ((2.0, size // 2), (0.0, size // 2 - 1), (-8.0, 1)),
            "box": ((2.0, 1), (0.0, size - 1)),
        }
        return tuple(
            PageKind(first + head + number * count, count, levels[kind], turn=1 + head)
            for number, kind in enumerate(_DECOYS)
        )

    def _opposed(self, head: int) -> tuple[PageKind, ...]:
        """Pages that every other query head of a group looks for, and a few for the others.

        The others look harder, so the best head of a group decides for both kinds of page.
        """
        first, _ = self.eligible(self.n_visible[0])
        size, count = self.page_size, self._most + 1
        return (
            PageKind(first + head, count, ((1.0, size),)),
            PageKind(first + head + count, max(1, self._most // 2), ((-1.0, size),)),
        )

    def _outliers(self, head: int) -> tuple[PageKind, ...]:
        """A high key on each page, of one page on its last token, and pages that are flat.

        The deviation puts the high keys above the flat pages; a variance or a mean distance does
        not.
        """
        size = self.page_size
        flat = 2.0 ** -math.floor(math.log2(size / 4))
        return self._two_kinds(head, ((1.0, 1), (0.0, size - 1)), ((flat, size),), fewer=1)

    def _middles(self, head: int) -> tuple[PageKind, ...]:
        """A high key on each page, and pages with most of their keys in the middle of a wide box.

        The mean distance from the centre puts the high keys first; a deviation does not.
        """
        size, few = self.page_size, self.page_size // 8
        wide = ((2.0, few), (-1.0, few), (0.5, size - 2 * few))
        return self._two_kinds(head, ((1.0, 1), (0.0, size - 1)), wide)

    def _tails(self, head: int) -> tuple[PageKind, ...]:
        """Less than half of a page is high, against flat pages: the mean ranks them, no median."""
        size, high = self.page_size, 3 * self.page_size // 8
        return self._two_kinds(head, ((1.0, high), (0.0, size - high)), ((0.25, size),))

    def _two_kinds(
        self,
        head: int,
        one: tuple[tuple[float, int], ...],
        other: tuple[tuple[float, int], ...],
        fewer: int = 0,
    ) -> tuple[PageKind, ...]:
        """One page more of each kind than the budget buys, ``fewer`` of the first."""
        first, _ = self.eligible(self.n_visible[0])
        count = self._most + 1
        return (
            PageKind(first + head, count - fewer, one, turn=self.page_size - 1),
            PageKind(first + head + count, count, other, turn=1),
        )
