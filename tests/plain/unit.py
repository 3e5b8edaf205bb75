"""One (step, layer, KV head) of a trace."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from functools import cached_property

from .layer import dot
from .pages import HEAD_SCORES, TOKEN_ORACLE, UNROTATED, PageSummary, positions

LEAST_ELIGIBLE_MASS = 1e-12


def entropy(shares: Sequence[float]) -> float:
    return -math.fsum(share * math.log(share) for share in shares if share > 0)


@dataclass(frozen=True, eq=False)
class PlainUnit:
    """One (step, layer, KV head): the masses of its query heads, and what they say of pages."""

    layer: int
    step: int
    decode_index: int
    kv_head: int
    n: int
    page_size: int
    n_rot: int
    rotated_last: bool
    head_dim: int
    has_sink: bool
    pages: list[int]
    masses: list[list[float]]
    queries: list[list[float]]
    summaries: dict[int, PageSummary]
    values: list[list[float]] | None
    previous: PlainUnit | None = field(repr=False)
    """The same head at the sampled step before; None at the first, and where that was skipped."""

    @cached_property
    def token_mass(self) -> list[float]:
        return [math.fsum(head[j] for head in self.masses) for j in range(self.n)]

    @cached_property
    def eligible_tokens(self) -> list[int]:
        return [j for page in self.pages for j in positions(page, self.page_size)]

    @cached_property
    def page_mass(self) -> dict[int, float]:
        return {
            page: math.fsum(self.token_mass[j] for j in positions(page, self.page_size))
            for page in self.pages
        }

    @cached_property
    def eligible(self) -> float:
        return math.fsum(self.page_mass.values())

    @property
    def is_skipped(self) -> bool:
        return self.eligible < LEAST_ELIGIBLE_MASS

    @property
    def is_partly_rotated(self) -> bool:
        return 0 < self.n_rot < self.head_dim

    @cached_property
    def scores(self) -> dict[str, dict[int, float]]:
        """What each selector gives each eligible page, and the token-oracle each token."""
        scores = {
            "oracle": self.page_mass,
            "recency": {page: float(page) for page in self.pages},
            TOKEN_ORACLE: {j: self.token_mass[j] for j in self.eligible_tokens},
        }
        for selector, head_score in HEAD_SCORES.items():
            scores[selector] = {
                page: max(head_score(query, self.summaries[page]) for query in self.queries)
                for page in self.pages
            }
        if self.is_partly_rotated:
            n_kept = self.head_dim - self.n_rot
            kept = slice(n_kept) if self.rotated_last else slice(self.n_rot, None)
            scores[UNROTATED] = {
                page: max(
                    dot(query[kept], self.summaries[page].mean[kept]) for query in self.queries
                )
                for page in self.pages
            }
        return scores

    @cached_property
    def ranked(self) -> dict[str, list[int]]:
        """Pages, for token-oracle positions, from the best down; ties go to the lower one."""
        return {
            selector: sorted(score, key=lambda item: (-score[item], item))
            for selector, score in self.scores.items()
        }

    def chosen(self, selector: str, k: int) -> set[int]:
        """The pages a page selector takes on its own budget."""
        return set(self.ranked[selector][:k])

    @cached_property
    def _mass_of_best(self) -> dict[str, list[float]]:
        """The mass that each selector holds with 0, 1, 2, … pages, all of them at the end."""
        held = {}
        for selector, ranked in self.ranked.items():
            is_of_tokens = selector == TOKEN_ORACLE
            mass = self.scores[TOKEN_ORACLE] if is_of_tokens else self.page_mass
            size = self.page_size if is_of_tokens else 1
            held[selector] = [
                math.fsum(mass[item] for item in ranked[: k * size])
                for k in range(len(self.pages) + 1)
            ]
        return held

    def selected_mass(self, selector: str, k: int) -> float:
        return self._mass_of_best[selector][min(k, len(self.pages))]

    def coverage(self, selector: str, k: int) -> float:
        return self.selected_mass(selector, k) / self.eligible

    def coverage_of(self, pages: Iterable[int]) -> float:
        """The covered share for a page set from elsewhere; pages not eligible here drop out."""
        held = math.fsum(self.page_mass[page] for page in pages if page in self.page_mass)
        return held / self.eligible

    def total_mass(self, selector: str, k: int) -> float:
        everything = math.fsum(self.token_mass)
        free = everything - self.eligible
        return (free + self.selected_mass(selector, k)) / everything

    def _output(self, masses: Sequence[float], kept: Sequence[int], total: float) -> list[float]:
        """``Σ_{kept} p_j v_j / total``; zero where a model's own top-k hid all that is kept."""
        assert self.values is not None
        rows = [self.values[j] for j in kept]
        weights = [masses[j] for j in kept]
        return [dot(weights, column) / (total or 1.0) for column in zip(*rows, strict=True)]

    @cached_property
    def full_outputs(self) -> list[list[float]]:
        return [self._output(masses, range(self.n), 1.0) for masses in self.masses]

    def output_errors(self, selector: str, k: int) -> list[float]:
        """Return the relative error of the attention output of every query head."""
        dropped_pages = set(self.pages) - self.chosen(selector, k)
        dropped = {j for page in dropped_pages for j in positions(page, self.page_size)}
        kept = [j for j in range(self.n) if j not in dropped]
        errors = []
        for masses, full in zip(self.masses, self.full_outputs, strict=True):
            sink_share = 1 - math.fsum(masses) if self.has_sink else 0.0
            output = self._output(masses, kept, math.fsum(masses[j] for j in kept) + sink_share)
            errors.append(math.dist(output, full) / math.hypot(*full))
        return errors

    def head_shares(self) -> list[list[float]]:
        """Return the eligible mass of every query head, normalised to 1."""
        shares = []
        for head in self.masses:
            masses = [head[j] for j in self.eligible_tokens]
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
            math.fsum(head[j] for j in self.eligible_tokens) / math.fsum(head)
            for head in self.masses
        ]
        return math.fsum(shares) / len(shares)
