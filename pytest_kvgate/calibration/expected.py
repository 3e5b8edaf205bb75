"""What a right instrument measures on the control patterns, in closed form.

Every token of a pattern has one of a few levels, and every page is of one of a few kinds, so each
number is a short sum over them: counts times exponentials. Nothing here looks at tokens, and
nothing is shared with the analysis that is checked.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean

from pytest_kvgate.capture import Controls, HeadKeys, Pattern

#: Scores closer than this may tie when they are computed.
SCORE_MARGIN = 1e-3

Levels = Mapping[float, int]


@dataclass(frozen=True)
class Unit:
    """What is expected of one sampled step and KV head.

    ``coverage`` and ``total_mass`` are by selector; the others are means over the query heads of
    the group, ``support`` in tokens.
    """

    coverage: Mapping[str, float]
    total_mass: Mapping[str, float]
    eligible_mass: float
    support: float
    hottest: float


@dataclass(frozen=True)
class _Pages:
    """``count`` pages that are alike: tokens of a page by level, and the mass of one page."""

    count: int
    levels: Levels
    mass: float


def expected_unit(controls: Controls, pattern: Pattern, row: int, kv_head: int) -> Unit:
    """Return what is expected at the sampled step number ``row`` for one KV head.

    Raises:
        ValueError: with these parameters, a selector's choice hangs on a tie.
    """
    keys, n_visible = pattern.keys[kv_head], controls.n_visible[row]
    group = range(kv_head * controls.group_size, (kv_head + 1) * controls.group_size)
    strengths = [controls.strength(pattern, head, row) for head in group]
    first, end = controls.eligible(n_visible)
    kinds = _kinds(keys, end - first, controls.page_size)
    eligible: Counter[float] = Counter()
    for count, levels in kinds:
        eligible.update({level: count * tokens for level, tokens in levels.items()})
    everything = eligible + Counter(level for _, level in keys.free)
    everything[keys.background] += n_visible - everything.total()
    heads = [_masses(strength, everything) for strength in strengths]
    shares = [sum(masses[level] * eligible[level] for level in eligible) for masses in heads]
    group_mass = {level: sum(masses[level] for masses in heads) for level in eligible}
    pages = [
        _Pages(count, levels, sum(group_mass[level] * tokens for level, tokens in levels.items()))
        for count, levels in kinds
    ]
    held = _held(pages, strengths, controls.budget_pages(n_visible))
    if pattern.is_uniform:
        held["random"] = held["recency"]
    held["token-oracle"] = _best(
        [(group_mass[level], eligible[level], group_mass[level]) for level in eligible],
        controls.budget_pages(n_visible) * controls.page_size,
    )
    whole = sum(shares)
    part = whole / len(shares)  # all of a query head's mass is 1
    coverage = {name: mass / whole for name, mass in held.items()}
    return Unit(
        coverage=coverage,
        total_mass={name: 1 - part + part * value for name, value in coverage.items()},
        eligible_mass=part,
        support=fmean(
            _support(masses, eligible, share) for masses, share in zip(heads, shares, strict=True)
        ),
        hottest=fmean(
            max(masses[level] for level in eligible) / share
            for masses, share in zip(heads, shares, strict=True)
        ),
    )


def _kinds(keys: HeadKeys, n_eligible: int, page_size: int) -> list[tuple[int, Levels]]:
    """Return how many eligible pages there are of each kind, those of the background last."""
    kinds: list[tuple[int, Levels]] = [(kind.count, dict(kind.levels)) for kind in keys.kinds]
    rest = n_eligible - sum(count for count, _ in kinds)
    return [*kinds, (rest, {keys.background: page_size})]


def _masses(strength: float, everything: Counter[float]) -> dict[float, float]:
    """Return the mass of one token by level, ``exp(strength · level) / Σ``."""
    top = max(strength * level for level in everything)
    weights = {level: math.exp(strength * level - top) for level in everything}
    total = sum(weights[level] * count for level, count in everything.items())
    return {level: weight / total for level, weight in weights.items()}


def _support(masses: Mapping[float, float], eligible: Counter[float], share: float) -> float:
    """Return exp(entropy) of the eligible mass."""
    entropy = 0.0
    for level, count in eligible.items():
        p = masses[level] / share
        entropy -= count * p * math.log(p)
    return math.exp(entropy)


def _held(pages: Sequence[_Pages], strengths: Sequence[float], k: int) -> dict[str, float]:
    """Return the mass of the k pages that each deterministic selector of pages ranks first."""
    by_mass = _best([(kind.mass, kind.count, kind.mass) for kind in pages], k)
    held = {"oracle": by_mass}
    for name, score in SCORES.items():
        ranked = [
            (max(score(strength, kind.levels) for strength in strengths), kind.count, kind.mass)
            for kind in pages
        ]
        held[name] = _best(ranked, k, SCORE_MARGIN)
    held["recency"] = k * pages[-1].mass  # the last pages are of the background
    return held


def _best(ranked: Sequence[tuple[float, int, float]], k: int, margin: float = 0.0) -> float:
    """Return the mass of the best k items; each is (score, how many there are, mass of one).

    Raises:
        ValueError: scores that decide differ by less than ``margin`` of themselves.
    """
    held, left = 0.0, k
    cut, whole = math.nan, True
    for score, count, mass in sorted(ranked, reverse=True):
        close = abs(cut - score) <= margin * abs(cut)
        if (left and count) or close:
            taken = min(left, count)
            if close and margin and not (whole and taken == count):
                raise ValueError(
                    f"with these parameters pages score {cut:g} and {score:g}, which is too close "
                    "to say which are selected."
                )
            held, left = held + taken * mass, left - taken
            cut, whole = score, taken == count
    return held


def _mean(levels: Levels) -> float:
    tokens = sum(levels.values())
    return sum(level * count for level, count in levels.items()) / tokens


def _landmark(strength: float, levels: Levels) -> float:
    return strength * _mean(levels)


def _quest(strength: float, levels: Levels) -> float:
    return max(strength * max(levels), strength * min(levels))


def _mean_std(strength: float, levels: Levels) -> float:
    mean = _mean(levels)
    variance = _mean_of(levels, lambda level: (level - mean) ** 2)
    return strength * mean + abs(strength) * math.sqrt(variance)


def _cuboid_mean(strength: float, levels: Levels) -> float:
    center = (max(levels) + min(levels)) / 2
    return strength * center + abs(strength) * _mean_of(levels, lambda level: abs(level - center))


def _mean_of(levels: Levels, function: Callable[[float], float]) -> float:
    tokens = sum(levels.values())
    return sum(count * function(level) for level, count in levels.items()) / tokens


#: The score of a page for one query head; a group's is that of its best head.
SCORES: Mapping[str, Callable[[float, Levels], float]] = {
    "landmark": _landmark,
    "quest": _quest,
    "mean-std": _mean_std,
    "cuboid-mean": _cuboid_mean,
}
