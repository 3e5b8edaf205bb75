"""The definitions of a coverage profile, written out plainly: the judge of the fast code.

Everything is float64 and a loop; nothing is shared with the package. A number the user wrote
(a budget, a recent window) is the decimal it reads as, and pages are counted in fractions.
"""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from dataclasses import dataclass
from fractions import Fraction
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np

LEAST_ELIGIBLE_MASS = 1e-12


def decimal(written: float | str) -> Fraction:
    return Fraction(str(written))


def recent_tokens(recent: float | str, n: int) -> int:
    r = decimal(recent)
    return math.ceil(r * n) if r < 1 else int(r)


def eligible_pages(page_size: int, sinks: int, recent: float | str, n: int) -> list[int]:
    first = math.ceil(Fraction(sinks, page_size))
    end = math.floor(Fraction(n - recent_tokens(recent, n), page_size))
    return [page for page in range(n) if first <= page < end]


def budget_pages(budget: float | str, n: int, page_size: int) -> int:
    return math.floor(decimal(budget) * n / page_size)


@dataclass(frozen=True)
class PlainLayer:
    n_head: int
    n_head_kv: int
    head_dim: int
    scale: float
    softcap: float | None
    alibi_slopes: list[float] | None
    window: int | None
    k: list[list[list[float]]]
    q: list[list[list[float]]]
    sinks: list[float] | None


def dot(a: Sequence[float], b: Sequence[float]) -> float:
    return math.fsum(x * y for x, y in zip(a, b, strict=True))


def head_masses(layer: PlainLayer, step: int, head: int, n: int) -> list[float]:
    """Return ``p_j`` for the ``n`` visible positions of one query head."""
    keys = layer.k[head // (layer.n_head // layer.n_head_kv)]
    logits: list[float | None] = []
    for j in range(n):
        x = layer.scale * dot(layer.q[step][head], keys[j])
        if layer.softcap is not None:
            x = layer.softcap * math.tanh(x / layer.softcap)
        if layer.alibi_slopes is not None:
            x -= layer.alibi_slopes[head] * (n - 1 - j)
        seen = layer.window is None or j > n - 1 - layer.window
        logits.append(x if seen else None)
    top = max(x for x in logits if x is not None)
    if layer.sinks is not None:
        top = max(top, layer.sinks[head])
    weights = [0.0 if x is None else math.exp(x - top) for x in logits]
    total = math.fsum(weights)
    if layer.sinks is not None:
        total += math.exp(layer.sinks[head] - top)
    return [weight / total for weight in weights]


def entropy(shares: Sequence[float]) -> float:
    return -math.fsum(share * math.log(share) for share in shares if share > 0)


@dataclass(frozen=True)
class PlainUnit:
    """One (step, layer, KV head): the masses of its query heads, and what they say of pages."""

    layer: int
    n: int
    page_size: int
    pages: list[int]
    masses: list[list[float]]
    queries: list[list[float]]
    keys: list[list[float]]

    @cached_property
    def token_mass(self) -> list[float]:
        return [math.fsum(head[j] for head in self.masses) for j in range(self.n)]

    def positions(self, page: int) -> range:
        return range(page * self.page_size, (page + 1) * self.page_size)

    @cached_property
    def page_mass(self) -> dict[int, float]:
        return {
            page: math.fsum(self.token_mass[j] for j in self.positions(page)) for page in self.pages
        }

    @cached_property
    def eligible(self) -> float:
        return math.fsum(self.page_mass.values())

    @property
    def is_skipped(self) -> bool:
        return self.eligible < LEAST_ELIGIBLE_MASS

    def landmark_score(self, page: int) -> float:
        rows = [self.keys[j] for j in self.positions(page)]
        mean = [math.fsum(row[d] for row in rows) / len(rows) for d in range(len(rows[0]))]
        return max(dot(query, mean) for query in self.queries)

    @cached_property
    def ranked(self) -> dict[str, list[int]]:
        """Pages, for token-oracle positions, from the best down; ties go to the lower one."""
        scores = {
            "oracle": self.page_mass,
            "landmark": {page: self.landmark_score(page) for page in self.pages},
            "token-oracle": {
                j: self.token_mass[j] for page in self.pages for j in self.positions(page)
            },
        }
        return {
            selector: sorted(score, key=lambda item: (-score[item], item))
            for selector, score in scores.items()
        }

    def selected_mass(self, selector: str, k: int) -> float:
        if selector == "token-oracle":
            tokens = self.ranked[selector][: k * self.page_size]
            return math.fsum(self.token_mass[j] for j in tokens)
        return math.fsum(self.page_mass[page] for page in self.ranked[selector][:k])

    def coverage(self, selector: str, k: int) -> float:
        return self.selected_mass(selector, k) / self.eligible

    def total_mass(self, selector: str, k: int) -> float:
        everything = math.fsum(self.token_mass)
        free = everything - self.eligible
        return (free + self.selected_mass(selector, k)) / everything

    def head_shares(self) -> list[list[float]]:
        """Return the eligible mass of every query head, normalised to 1."""
        shares = []
        for head in self.masses:
            masses = [head[j] for page in self.pages for j in self.positions(page)]
            total = math.fsum(masses)
            shares.append([mass / total for mass in masses])
        return shares

    @property
    def support(self) -> float:
        shares = self.head_shares()
        return math.fsum(math.exp(entropy(share)) for share in shares) / len(shares)

    @property
    def hottest(self) -> float:
        shares = self.head_shares()
        return math.fsum(max(share) for share in shares) / len(shares)

    @property
    def eligible_mass(self) -> float:
        """The eligible share of the mass on real tokens, a mean over query heads."""
        shares = [
            math.fsum(head[j] for page in self.pages for j in self.positions(page))
            / math.fsum(head)
            for head in self.masses
        ]
        return math.fsum(shares) / len(shares)


@dataclass(frozen=True)
class PlainProfile:
    page_size: int
    n_visible: list[int]
    units: list[PlainUnit]
    skipped_units: int

    def _mean(self, values: Sequence[float]) -> float:
        return math.fsum(values) / len(values)

    def is_defined(self, budget: float | str) -> bool:
        """Whether the budget buys a page at every sampled step."""
        return all(budget_pages(budget, n, self.page_size) > 0 for n in self.n_visible)

    def coverage(self, selector: str, budget: float | str) -> float | None:
        if not self.is_defined(budget):
            return None
        return self.coverage_with_nothing_as_zero(selector, budget)

    def total_mass(self, selector: str, budget: float | str) -> float | None:
        if not self.is_defined(budget):
            return None
        return self._mean(
            [
                unit.total_mass(selector, budget_pages(budget, unit.n, self.page_size))
                for unit in self.units
            ]
        )

    def coverage_with_nothing_as_zero(self, selector: str, budget: float | str) -> float:
        return self._mean(
            [
                unit.coverage(selector, budget_pages(budget, unit.n, unit.page_size))
                for unit in self.units
            ]
        )

    def required_budget(self, selector: str, coverage: float) -> str | None:
        for step in range(1, 1001):
            budget = f"{step / 1000:.3f}"
            if self.coverage_with_nothing_as_zero(selector, budget) >= coverage:
                return budget
        return None

    @property
    def support(self) -> float:
        return self._mean([unit.support for unit in self.units])

    @property
    def hottest(self) -> float:
        return self._mean([unit.hottest for unit in self.units])

    @property
    def eligible_mass(self) -> float:
        return self._mean([unit.eligible_mass for unit in self.units])


def _numbers(path: Path) -> Any:  # noqa: ANN401 - nested lists of any depth
    return np.load(path).astype(np.float64).tolist()


def read_layer(directory: Path, fields: dict[str, Any]) -> PlainLayer:
    folder = directory / "layers" / f"{fields['index']:03d}"
    sinks = folder / "sinks.npy"
    return PlainLayer(
        n_head=fields["n_head"],
        n_head_kv=fields["n_head_kv"],
        head_dim=fields["head_dim"],
        scale=fields["scale"],
        softcap=fields["softcap"],
        alibi_slopes=fields["alibi_slopes"],
        window=fields["window"],
        k=_numbers(folder / "k.npy"),
        q=_numbers(folder / "q.npy"),
        sinks=_numbers(sinks) if sinks.exists() else None,
    )


def plain_profile(directory: Path, page_size: int, sinks: int, recent: float | str) -> PlainProfile:
    """Measure a trace directory; layers with a sliding window are left out."""
    document = json.loads((directory / "trace.json").read_text(encoding="utf-8"))
    units = []
    for fields in document["layers"]:
        if fields["window"] is not None:
            continue
        layer = read_layer(directory, fields)
        group = layer.n_head // layer.n_head_kv
        for step, at in enumerate(document["steps"]):
            n = at["n_visible"]
            for kv_head in range(layer.n_head_kv):
                heads = range(kv_head * group, (kv_head + 1) * group)
                units.append(
                    PlainUnit(
                        layer=fields["index"],
                        n=n,
                        page_size=page_size,
                        pages=eligible_pages(page_size, sinks, recent, n),
                        masses=[head_masses(layer, step, head, n) for head in heads],
                        queries=[layer.q[step][head] for head in heads],
                        keys=layer.k[kv_head],
                    )
                )
    counted = [unit for unit in units if not unit.is_skipped]
    n_visible = [at["n_visible"] for at in document["steps"]]
    return PlainProfile(page_size, n_visible, counted, len(units) - len(counted))
