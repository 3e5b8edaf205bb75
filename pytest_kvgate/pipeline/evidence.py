"""The line from sources to profiles: everything is captured and measured once, and kept."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

from pytest_kvgate.analysis import (
    PageGrid,
    Plan,
    Profile,
    pool,
    profile_on_grids,
    require_pages,
    verify_capture,
)
from pytest_kvgate.capture import CaptureError, CaptureSettings, Prompt, capture
from pytest_kvgate.pipeline.errors import EVIDENCE_ERRORS, EvidenceError
from pytest_kvgate.pipeline.sharing import key_of, once
from pytest_kvgate.pipeline.sources import Source, Subject, prompt_of
from pytest_kvgate.trace import Trace, TraceError, load_trace

T = TypeVar("T")


@dataclass
class Evidence:
    """Captures and measures on demand, and remembers the outcome, failures too.

    ``page_sizes`` are those that will be asked for; a trace is measured at all of them in one pass.
    ``folder`` may be shared by several processes (the workers of pytest-xdist): the first one
    captures, the others wait for it and load what it captured. ``save`` keeps the traces there
    instead. ``announce`` is told before a capture begins.
    """

    settings: CaptureSettings
    grid: PageGrid
    page_sizes: tuple[int, ...]
    plan: Plan
    folder: Path
    save: Path | None = None
    announce: Callable[[str], None] = lambda _message: None
    _traces: dict[Source, Trace | Exception] = field(default_factory=dict)
    _profiles: dict[tuple[Source, int], Profile | Exception] = field(default_factory=dict)
    _pooled: dict[tuple[Subject, int], Profile] = field(default_factory=dict)

    def trace(self, source: Source) -> Trace:
        """Return a captured or loaded trace; its verification says whether to believe it.

        Raises:
            EvidenceError: it could not be captured or loaded, now or before.
        """
        if source not in self._traces:
            self._traces[source] = self._obtain(source)
        return _unless_error(self._traces[source])

    def alone(self, subject: Subject, page_size: int) -> tuple[Profile, ...]:
        """Return the profile of each of a subject's sources.

        Raises:
            EvidenceError: one of them could not be captured, loaded or measured.
        """
        return tuple(self._profile(source, page_size) for source in subject.sources)

    def profile(self, subject: Subject, page_size: int) -> Profile:
        """Return the pooled profile of a subject; raises as `alone` does."""
        key = (subject, page_size)
        if key not in self._pooled:
            self._pooled[key] = pool(self.alone(subject, page_size))
        return self._pooled[key]

    def _profile(self, source: Source, page_size: int) -> Profile:
        if (source, page_size) not in self._profiles:
            self._measure(source, tuple(dict.fromkeys((page_size, *self.page_sizes))))
        return _unless_error(self._profiles[source, page_size])

    def _measure(self, source: Source, page_sizes: Sequence[int]) -> None:
        """Profile one source at several page sizes, in one pass over its layers."""
        trace = self.trace(source)
        grids = []
        for size in page_sizes:
            grid = PageGrid(size, self.grid.sinks, self.grid.recent)
            try:
                require_pages(trace, grid)
                grids.append(grid)
            except TraceError as error:  # too short for pages of this size, not for smaller ones
                self._profiles[source, size] = EvidenceError(str(error))
        try:
            for profile in profile_on_grids(trace, grids, self.plan):
                self._profiles[source, profile.grid.page_size] = profile
        except Exception as error:  # raised for every gate, measured only once
            known = isinstance(error, EVIDENCE_ERRORS)
            outcome = EvidenceError(str(error)) if known else error
            self._profiles.update(((source, grid.page_size), outcome) for grid in grids)

    def _obtain(self, source: Source) -> Trace | Exception:
        try:
            if source.trace is not None:
                return load_trace(source.trace)
            return self._capture_once(source)
        except EVIDENCE_ERRORS as error:
            return EvidenceError(str(error))
        except OSError as error:
            return EvidenceError(
                f"{source.label}: {error}. Check the folders and the space that --kvgate-save and "
                "temporary files need."
            )
        except Exception as error:  # raised for every gate, captured only once
            return error

    def _capture_once(self, source: Source) -> Trace:
        assert source.model is not None
        prompt = prompt_of(source)
        # by content: each worker may have been handed a copy of the prompt of its own
        key = key_of(str(source.model.resolve()), repr(prompt), repr(self.settings))
        known = once(self.folder, key, partial(self._capture, source, source.model, prompt))
        if known["error"] is not None:
            raise CaptureError(known["error"])
        return load_trace(known["directory"])

    def _capture(self, source: Source, model: Path, prompt: Prompt) -> dict[str, Any]:
        """Capture now; return where the trace lies, or why there is none."""
        self.announce(f"capturing {source.label}")
        try:
            trace = capture(model, prompt, self.settings, self.save or self.folder, verify_capture)
        except EVIDENCE_ERRORS as error:
            return {"directory": None, "error": str(error)}
        if self.save is not None:
            self.announce(f"kept as {trace.directory}")
        return {"directory": str(trace.directory), "error": None}


def _unless_error(value: T | Exception) -> T:
    if isinstance(value, Exception):
        raise value
    return value
