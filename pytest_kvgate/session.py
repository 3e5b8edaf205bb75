"""The gates of one process: judged on evidence that is gathered once, and reported as documents.

Documents are plain JSON values, so that the workers of pytest-xdist can hand them to the
controller.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

from pytest_kvgate.analysis import PageGrid
from pytest_kvgate.capture import CaptureSettings
from pytest_kvgate.engine import EngineSettings
from pytest_kvgate.gate import Gate, GateResult, decide, unanswered
from pytest_kvgate.pipeline import (
    Evidence,
    EvidenceError,
    Subject,
    model_subjects,
    trace_subjects,
)
from pytest_kvgate.report.document import Document, profile_document

if TYPE_CHECKING:
    from pytest_kvgate.options import Settings


def find_subjects(settings: Settings) -> tuple[Subject, ...]:
    """Return the models under test.

    Raises:
        EngineError: a model file is missing or no GGUF file.
        TraceError: a saved trace is not whole.
    """
    return (
        *model_subjects(settings.models, settings.prompts),
        *trace_subjects(settings.traces),
    )


def gather_evidence(settings: Settings, gates: Iterable[Gate], folder: Path) -> Evidence:
    """Return evidence that measures what the settings list and what the gates need."""
    gates = list(gates)
    needed = [name for gate in gates for name in gate.needed_selectors]
    return Evidence(
        settings=CaptureSettings(
            steps=settings.steps,
            n_context=settings.n_context,
            engine=EngineSettings(
                n_gpu_layers=settings.n_gpu_layers,
                n_threads=settings.n_threads,
                cache_type_k=settings.cache_type_k,
            ),
        ),
        grid=PageGrid(settings.page_size, settings.sinks, settings.recent),
        budgets=tuple(sorted({*settings.budgets, *(gate.budget for gate in gates)})),
        selectors=tuple(dict.fromkeys((*settings.selectors, *needed))),
        folder=folder,
        save=settings.save,
    )


@dataclass
class GateSession:
    """Judges gates, and keeps one document per model that was looked at."""

    evidence: Evidence
    subjects: tuple[Subject, ...]
    thresholds: tuple[float, ...]
    documents: dict[str, Document] = field(default_factory=dict)

    def judge(self, gate_id: str, gate: Gate, subject: Subject) -> GateResult:
        """Return the verdict on one model; evidence that cannot be had makes it INVALID."""
        page_size = gate.page_size or self.evidence.grid.page_size
        try:
            self.describe(subject)
            profile = self.evidence.profile(subject, page_size)
        except EvidenceError as error:
            return unanswered(gate_id, subject.label, gate, "INVALID", str(error), page_size)
        return decide(gate_id, subject.label, gate, profile)

    def describe(self, subject: Subject) -> Document:
        """Return the document of one model at the session's page size.

        Raises:
            EvidenceError: a source could not be captured, loaded or measured.
        """
        if subject.label not in self.documents:
            page_size = self.evidence.grid.page_size
            self.documents[subject.label] = profile_document(
                subject.label,
                self.evidence.profile(subject, page_size),
                self.evidence.alone(subject, page_size),
                self.thresholds,
            )
        return self.documents[subject.label]
