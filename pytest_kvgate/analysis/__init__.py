"""Numpy only: attention masses, pages, selectors, coverage and verification of a trace."""

from pytest_kvgate.analysis.estimates import SCOPES, Interval, Scope
from pytest_kvgate.analysis.pages import PageGrid
from pytest_kvgate.analysis.plan import REQUIRED_COVERAGES, Plan
from pytest_kvgate.analysis.profile import (
    MEASURES,
    NotMeasuredError,
    Profile,
    UndefinedError,
)
from pytest_kvgate.analysis.profiling import (
    pool,
    profile_on_grids,
    profile_trace,
    require_pages,
)
from pytest_kvgate.analysis.selectors import (
    PAGE_SELECTORS,
    SELECTORS,
    PageKeys,
    Selector,
    SelectorError,
)
from pytest_kvgate.analysis.verification import (
    SOFTMAX_REFERENCE,
    SOFTMAX_TOLERANCE,
    verify_capture,
)

__all__ = [
    "MEASURES",
    "PAGE_SELECTORS",
    "REQUIRED_COVERAGES",
    "SCOPES",
    "SELECTORS",
    "SOFTMAX_REFERENCE",
    "SOFTMAX_TOLERANCE",
    "Interval",
    "NotMeasuredError",
    "PageGrid",
    "PageKeys",
    "Plan",
    "Profile",
    "Scope",
    "Selector",
    "SelectorError",
    "UndefinedError",
    "pool",
    "profile_on_grids",
    "profile_trace",
    "require_pages",
    "verify_capture",
]
