"""The line from sources to profiles and closed loops, shared by the plugin and the command.

No pytest here. A source is a saved trace, or a model with a prompt to capture. A subject is one
model: its sources are pooled. Everything is done once and kept.
"""

from pytest_kvgate.pipeline.errors import EVIDENCE_ERRORS, EvidenceError
from pytest_kvgate.pipeline.evidence import Evidence
from pytest_kvgate.pipeline.loops import LoopEvidence, start_loop
from pytest_kvgate.pipeline.sharing import once
from pytest_kvgate.pipeline.sources import (
    Source,
    Subject,
    model_subjects,
    prompt_of,
    trace_subjects,
)

__all__ = [
    "EVIDENCE_ERRORS",
    "Evidence",
    "EvidenceError",
    "LoopEvidence",
    "Source",
    "Subject",
    "model_subjects",
    "once",
    "prompt_of",
    "start_loop",
    "trace_subjects",
]
