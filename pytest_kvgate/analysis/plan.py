"""What a profile is to hold."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from pytest_kvgate.analysis.selectors import PAGE_SELECTORS, SELECTORS, Selector

#: Coverages whose required budget every profile states per unit, beside each gate's.
REQUIRED_COVERAGES = (0.5, 0.9, 0.95)


@dataclass(frozen=True)
class Plan:
    """What to measure.

    ``budgets`` are fractions of the context, ascending; ``selectors`` are names, those of pages
    found in ``registry``; ``coverages`` are those that a unit's required budget is kept for;
    ``pool`` is the size of the simulated LRU pool as a multiple of a step's pages.
    """

    budgets: tuple[float, ...]
    selectors: tuple[str, ...] = SELECTORS
    registry: Mapping[str, Selector] = field(default_factory=lambda: PAGE_SELECTORS)
    coverages: tuple[float, ...] = REQUIRED_COVERAGES
    pool: float = 2.0
