"""The gates of one process: judged on evidence that is gathered once, and reported as documents.

Documents are plain JSON values, so that the workers of pytest-xdist can hand them to the
controller.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING

from pytest_kvgate.analysis import REQUIRED_COVERAGES, PageGrid, Plan, Profile, Selector
from pytest_kvgate.analysis.effects import Variant
from pytest_kvgate.analysis.selectors import LANDMARK, ORACLE, TOKEN_ORACLE
from pytest_kvgate.calibration import calibrate
from pytest_kvgate.capture import CaptureSettings
from pytest_kvgate.closedloop import LoopSettings
from pytest_kvgate.engine import EngineSettings
from pytest_kvgate.gate import Gate, GateResult, decide, distrust_reason, unanswered
from pytest_kvgate.pipeline import (
    Evidence,
    EvidenceError,
    LoopEvidence,
    Subject,
    model_subjects,
    once,
    trace_subjects,
)
from pytest_kvgate.report.document import Document, profile_document
from pytest_kvgate.report.loops import loop_document

if TYPE_CHECKING:
    from pytest_kvgate.options.settings import Settings


def find_subjects(settings: Settings) -> tuple[Subject, ...]:
    """Return the models under test.

    Raises:
        EngineError: a model file is missing or no GGUF file.
        TraceError: a saved trace is not whole.
    """
    return (
        *model_subjects(settings.models, settings.prompts, settings.continuations),
        *trace_subjects(settings.traces),
    )


def capture_settings(settings: Settings) -> CaptureSettings:
    """Return how to capture, as the settings say."""
    return CaptureSettings(
        steps=settings.steps,
        n_context=settings.n_context,
        values=settings.values,
        engine=EngineSettings(
            n_gpu_layers=settings.n_gpu_layers,
            n_threads=settings.n_threads,
            cache_type_k=settings.cache_type_k,
            cache_type_v=settings.cache_type_v,
            flash_attention=settings.flash_attention,
        ),
        prove=settings.verification == "reference",
        ignore_eos=settings.ignore_eos,
        allow_native_sparse=settings.allow_native_sparse,
    )


def calibration_document(
    settings: Settings, folder: Path, announce: Callable[[str], None]
) -> Document:
    """Return what a calibration with these engine settings found.

    Processes that share ``folder`` share one calibration; ``announce`` is told before it begins.
    """

    def make() -> Document:
        announce("calibrating the instrument")
        return calibrate(capture_settings(settings)).as_json()

    return once(folder, "calibration", make)


def gather_evidence(
    settings: Settings, gates: Iterable[Gate], folder: Path, registry: Mapping[str, Selector]
) -> Evidence:
    """Return evidence that measures what the settings list and what the gates need.

    ``registry`` are the page selectors that are known.
    """
    gates = list(gates)
    needed = [name for gate in gates for name in gate.needed_selectors]
    listed = settings.selectors or (ORACLE, *registry, TOKEN_ORACLE)
    wanted = [budget for gate in gates for budget in gate.measured_budgets]
    coverages = {coverage for gate in gates for coverage in gate.wanted_coverages}
    sizes = [gate.page_size for gate in gates if gate.page_size is not None]
    return Evidence(
        settings=replace(
            capture_settings(settings),
            values=settings.values or any(gate.needs_values for gate in gates),
        ),
        grid=PageGrid(settings.page_size, settings.sinks, settings.recent),
        page_sizes=tuple(dict.fromkeys((settings.page_size, *sizes, *swept_sizes(settings)))),
        plan=Plan(
            budgets=tuple(sorted({*settings.budgets, *wanted})),
            selectors=tuple(dict.fromkeys((*listed, *needed))),
            registry=registry,
            coverages=tuple(sorted({*REQUIRED_COVERAGES, *coverages})),
            pool=settings.pool,
        ),
        folder=folder,
        save=settings.save,
    )


def gather_loops(
    settings: Settings, gates: Iterable[Gate], folder: Path, registry: Mapping[str, Selector]
) -> LoopEvidence | None:
    """Return the closed loops that the settings ask for and the gates need; None for none.

    ``registry`` are the page selectors that are known.
    """
    page_size = settings.page_size
    variants = [variant for gate in gates for variant in gate.variants(page_size)]
    if settings.closed_loop:
        listed = settings.selectors or (ORACLE, LANDMARK)
        variants += [
            Variant(page_size, budget, selector)
            for budget in settings.budgets
            for selector in listed
        ]
    if not variants:
        return None
    return LoopEvidence(
        capture=capture_settings(settings),
        settings=LoopSettings(
            n_token=settings.loop_tokens,
            sparse_tail=settings.sparse_tail,
            sinks=settings.sinks,
            recent=settings.recent,
            registry=registry,
        ),
        variants=tuple(dict.fromkeys(variants)),
        folder=folder,
    )


def swept_sizes(settings: Settings) -> tuple[int, ...]:
    """Return the page sizes to compare: none unless something will show them."""
    return settings.sweep if settings.verbose or settings.reports else ()


@dataclass
class GateSession:
    """Judges gates, and keeps one document per model and page size that was looked at.

    ``sweep`` are page sizes to compare, in tokens; ``link`` is the link to host memory in GB/s.
    ``loops`` are the closed loops that something asked for, None for none. ``calibration`` returns
    the outcome of the run's calibration, None where nobody asked for one.
    """

    evidence: Evidence
    subjects: tuple[Subject, ...]
    loops: LoopEvidence | None = None
    sweep: tuple[int, ...] = ()
    link: float | None = None
    calibration: Callable[[], Document] | None = None
    documents: dict[str, Document] = field(default_factory=dict)

    @property
    def page_size(self) -> int:
        """The page size of gates that name none, in tokens."""
        return self.evidence.grid.page_size

    def require_calibrated(self) -> None:
        """Ask for the calibration, if one is wanted.

        Raises:
            EvidenceError: the instrument is off.
        """
        if self.calibration is None:
            return
        outcome = self.calibration()
        if not outcome["calibrated"]:
            raise EvidenceError(
                f"{outcome['summary']}. No number of this run can be believed; `kvgate calibrate` "
                "shows all that were compared."
            )

    def judge(self, gate_id: str, gate: Gate, subject: Subject) -> GateResult:
        """Return the verdict on one model; evidence that cannot be had makes it INVALID."""
        page_size = gate.page_size or self.page_size
        try:
            self.require_calibrated()
            profile = self.evidence.profile(subject, page_size)
            self.describe(subject, page_size)
            loop = None
            if gate.needs_closed_loop and distrust_reason(profile) is None:
                assert self.loops is not None
                loop = self.loops.loop(subject)
        except EvidenceError as error:
            return unanswered(gate_id, subject.label, gate, "INVALID", str(error), page_size)
        return decide(gate_id, subject.label, gate, profile, loop)

    def trusted_profile(self, subject: Subject, page_size: int) -> Profile:
        """Return a profile whose traces did not fail verification.

        Raises:
            EvidenceError: a source could not be had, or is not what the model read; or the
                calibration says that no number can be believed.
        """
        self.require_calibrated()
        profile = self.evidence.profile(subject, page_size)
        distrust = distrust_reason(profile)
        if distrust is not None:
            raise EvidenceError(distrust)
        return profile

    def describe(self, subject: Subject, page_size: int) -> Document:
        """Return the document of one model at a page size, in tokens.

        Raises:
            EvidenceError: a source could not be captured, loaded or measured, or the calibration
                says that no number can be believed.
        """
        self.require_calibrated()
        key = f"{subject.label} at {page_size}"
        if key not in self.documents:
            document = profile_document(
                subject.label,
                self.evidence.profile(subject, page_size),
                self.evidence.alone(subject, page_size),
                self._swept(subject) if page_size == self.page_size else (),
                self.link,
            )
            if document["coverage"]:
                document |= self._looped(subject, page_size)
            self.documents[key] = document
        return self.documents[key]

    def _looped(self, subject: Subject, page_size: int) -> Document:
        """Return what a document says of the closed loop at a page size, or why there is none."""
        if self.loops is None or page_size not in self.loops.page_sizes:
            return {}
        try:
            return loop_document(self.loops.loop(subject), page_size)
        except EvidenceError as error:
            return {"closed_loop_problem": str(error)}

    def _swept(self, subject: Subject) -> list[Profile]:
        """Return the profiles at the page sizes to compare that leave a page to select."""
        profiles = []
        for size in self.sweep:
            try:
                profiles.append(self.evidence.profile(subject, size))
            except EvidenceError:  # the context is too short for pages of this size
                continue
        return profiles
