"""What makes evidence unusable."""

from pytest_kvgate.analysis import SelectorError
from pytest_kvgate.capture import CaptureError
from pytest_kvgate.closedloop import ClosedLoopError
from pytest_kvgate.engine import EngineError
from pytest_kvgate.trace import TraceError

#: Each says why in a sentence.
EVIDENCE_ERRORS = (CaptureError, ClosedLoopError, EngineError, SelectorError, TraceError)


class EvidenceError(RuntimeError):
    """A trace could not be captured, loaded or measured; the message says why."""
