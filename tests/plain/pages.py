"""Which pages are eligible, how many a budget buys, and what a selector sees of one.

A number the user wrote (a budget, a recent window, a pool) is the decimal it reads as, and pages
are counted in fractions.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from fractions import Fraction
from functools import cache

from .layer import dot


@cache
def decimal(written: float | str) -> Fraction:
    return Fraction(str(written))


def recent_tokens(recent: float | str, n: int) -> int:
    r = decimal(recent)
    return math.ceil(r * n) if r < 1 else int(r)


def eligible_pages(page_size: int, sinks: int, recent: float | str, n: int) -> list[int]:
    first = math.ceil(Fraction(sinks, page_size))
    end = math.floor(Fraction(n - recent_tokens(recent, n), page_size))
    return [page for page in range(n) if first <= page < end]


def positions(page: int, page_size: int) -> range:
    return range(page * page_size, (page + 1) * page_size)


@cache
def budget_pages(budget: float | str, n: int, page_size: int) -> int:
    return math.floor(decimal(budget) * n / page_size)


@dataclass(frozen=True)
class PageSummary:
    """What can be kept of the keys of one page, per dimension."""

    mean: list[float]
    std: list[float]
    low: list[float]
    high: list[float]
    centre: list[float]
    radius: list[float]


def summarise(keys: Sequence[Sequence[float]]) -> PageSummary:
    size = len(keys)
    columns = list(zip(*keys, strict=True))
    mean = [math.fsum(column) / size for column in columns]
    std = [
        math.sqrt(math.fsum((k - m) ** 2 for k in column) / size)
        for column, m in zip(columns, mean, strict=True)
    ]
    low, high = [min(column) for column in columns], [max(column) for column in columns]
    centre = [(top + bottom) / 2 for top, bottom in zip(high, low, strict=True)]
    radius = [
        math.fsum(abs(k - c) for k in column) / size
        for column, c in zip(columns, centre, strict=True)
    ]
    return PageSummary(mean, std, low, high, centre, radius)


def landmark(query: Sequence[float], page: PageSummary) -> float:
    return dot(query, page.mean)


def quest(query: Sequence[float], page: PageSummary) -> float:
    return math.fsum(
        max(q * top, q * bottom) for q, top, bottom in zip(query, page.high, page.low, strict=True)
    )


def mean_std(query: Sequence[float], page: PageSummary) -> float:
    return dot(query, page.mean) + dot([abs(q) for q in query], page.std)


def cuboid_mean(query: Sequence[float], page: PageSummary) -> float:
    return dot(query, page.centre) + dot([abs(q) for q in query], page.radius)


# what a query head gives a page; a page's score is the best of the group's heads
HEAD_SCORES: dict[str, Callable[[Sequence[float], PageSummary], float]] = {
    "landmark": landmark,
    "quest": quest,
    "mean-std": mean_std,
    "cuboid-mean": cuboid_mean,
}
PAGE_SELECTORS = ("oracle", *HEAD_SCORES, "recency")
TOKEN_ORACLE = "token-oracle"
# the dimension ablation: landmark without the rotated dimensions
UNROTATED = "unrotated-landmark"
