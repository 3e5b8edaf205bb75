"""A captured trace: what attention read at sampled decode steps, on disk and in memory."""

from pytest_kvgate.trace.errors import TraceError
from pytest_kvgate.trace.model import (
    UNROUNDED,
    FloatArray,
    Layer,
    NativeSparsity,
    Reference,
    Step,
    Trace,
    Verification,
)
from pytest_kvgate.trace.reader import load_trace
from pytest_kvgate.trace.unpaged import UnpagedLayer
from pytest_kvgate.trace.writer import TraceWriter

__all__ = [
    "UNROUNDED",
    "FloatArray",
    "Layer",
    "NativeSparsity",
    "Reference",
    "Step",
    "Trace",
    "TraceError",
    "TraceWriter",
    "UnpagedLayer",
    "Verification",
    "load_trace",
]
