"""Sparse runs of the real model: what attention to selected pages does to the next token."""

from pytest_kvgate.closedloop.errors import ClosedLoopError
from pytest_kvgate.closedloop.run import Loop, LoopSettings, NextToken
from pytest_kvgate.closedloop.search import propose

__all__ = ["ClosedLoopError", "Loop", "LoopSettings", "NextToken", "propose"]
