"""Sparse runs of the real model: what attention to selected pages does to the next token."""

from pytest_kvgate.closedloop.errors import ClosedLoopError
from pytest_kvgate.closedloop.layers import NATIVELY_SPARSE
from pytest_kvgate.closedloop.run import Loop, LoopSettings, NextToken
from pytest_kvgate.closedloop.search import MAX_RUNS, propose

__all__ = [
    "MAX_RUNS",
    "NATIVELY_SPARSE",
    "ClosedLoopError",
    "Loop",
    "LoopSettings",
    "NextToken",
    "propose",
]
