"""Assignments: which layers stay dense and what budget the others get; and a search among them."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Literal

from pytest_kvgate.analysis.effects import Variant
from pytest_kvgate.analysis.estimates import Interval
from pytest_kvgate.analysis.pages import PageGrid
from pytest_kvgate.analysis.resident import Resident

#: Why a search ended: nothing cheaper than its result is left that was not measured; the runs were
#: used up; or more is left than the remaining runs could tell.
Ending = Literal["all-measured", "max-runs", "too-many-left"]


@dataclass(frozen=True)
class Assignment:
    """One assignment as it was measured, beside what it keeps resident.

    ``kl`` is the mean KL(dense‖sparse) in nats, ``kl_interval`` its bootstrap interval, ``top1``
    the share of likeliest tokens that stayed, and ``coverage`` that of the layers that were paged,
    None where they had no eligible mass. ``resident`` is at the last step's context.
    """

    variant: Variant
    kl: float
    kl_interval: Interval | None
    top1: float
    coverage: float | None
    resident: Resident


@dataclass(frozen=True)
class Search:
    """What a search for the cheapest assignment found.

    ``max_kl`` is the limit and ``noise`` the KL of an edit that changes nothing, in nats; means
    over ``n_token`` predictions, the last of which sees ``n_context`` tokens. ``tried`` is in the
    order of the runs, of which ``max_runs`` were allowed; ``undefined`` says of a budget why there
    is nothing to run. ``roomier`` is what the best keeps resident with a pool of ``pool`` times k
    pages, None where there is no best.
    """

    selector: str
    grid: PageGrid
    max_kl: float
    noise: float
    n_token: int
    n_context: int
    paged_layers: tuple[int, ...]
    tried: tuple[Assignment, ...]
    undefined: Mapping[float, str]
    max_runs: int
    ending: Ending
    pool: float
    roomier: Resident | None

    @property
    def best(self) -> Assignment | None:
        """The cheapest that was measured to meet the limit; of equally cheap ones the least KL."""
        return cheapest(self.tried, self.max_kl)

    @property
    def nearest(self) -> Assignment:
        """The one with the least KL; of equal ones the cheapest."""
        return min(self.tried, key=lambda item: (item.kl, item.resident.total))


def cheapest(tried: Iterable[Assignment], max_kl: float) -> Assignment | None:
    """Return the cheapest assignment whose KL is at most ``max_kl``; None where there is none."""
    meeting = [item for item in tried if item.kl <= max_kl]
    return min(meeting, key=lambda item: (item.resident.total, item.kl), default=None)
