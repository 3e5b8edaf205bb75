"""Numpy only: attention masses, pages, selectors, coverage and verification of a trace."""

from pytest_kvgate.analysis.pages import PageGrid
from pytest_kvgate.analysis.profile import (
    NotMeasuredError,
    Profile,
    UndefinedError,
    pool,
    profile_trace,
)
from pytest_kvgate.analysis.selectors import SELECTORS
from pytest_kvgate.analysis.verification import (
    SOFTMAX_REFERENCE,
    SOFTMAX_TOLERANCE,
    verify_softmax,
)

__all__ = [
    "SELECTORS",
    "SOFTMAX_REFERENCE",
    "SOFTMAX_TOLERANCE",
    "NotMeasuredError",
    "PageGrid",
    "Profile",
    "UndefinedError",
    "pool",
    "profile_trace",
    "verify_softmax",
]
