"""Gates: what must hold of a profile, and the verdict whether it does. Pure functions."""

from pytest_kvgate.gate.arguments import ACCEPTED_ARGUMENTS, GateError, gate_from_arguments
from pytest_kvgate.gate.decision import decide, distrust_reason, unanswered
from pytest_kvgate.gate.model import Check, Demand, Gate, GateResult, Verdict

__all__ = [
    "ACCEPTED_ARGUMENTS",
    "Check",
    "Demand",
    "Gate",
    "GateError",
    "GateResult",
    "Verdict",
    "decide",
    "distrust_reason",
    "gate_from_arguments",
    "unanswered",
]
