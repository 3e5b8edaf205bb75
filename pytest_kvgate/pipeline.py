"""The line from sources to profiles, shared by the plugin and the command: no pytest here.

A source is a saved trace, or a model with a prompt to capture. A subject is one model: its sources
are pooled into one profile. Everything is done once and kept.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

from pytest_kvgate.analysis import (
    PageGrid,
    Plan,
    Profile,
    SelectorError,
    pool,
    profile_on_grids,
    require_pages,
    verify_capture,
)
from pytest_kvgate.analysis.wording import distinct
from pytest_kvgate.capture import (
    CaptureError,
    CaptureSettings,
    Prompt,
    capture,
    read_prompt,
    with_continuation,
)
from pytest_kvgate.engine import EngineError, check_model_file, require_llama
from pytest_kvgate.trace import Trace, TraceError, load_trace

T = TypeVar("T")

#: What makes evidence unusable; each says why in a sentence.
EVIDENCE_ERRORS = (CaptureError, EngineError, SelectorError, TraceError)


class EvidenceError(RuntimeError):
    """A trace could not be captured, loaded or measured; the message says why."""


@dataclass(frozen=True)
class Source:
    """A saved ``trace``, or a ``model`` and a ``prompt`` to capture under the name ``workload``.

    ``continuation`` is a file with what the decode is to follow, None to let the model choose.
    """

    label: str
    trace: Path | None = None
    model: Path | None = None
    prompt: Path | None = None
    continuation: Path | None = None
    workload: str | None = None


@dataclass(frozen=True)
class Subject:
    """One model, with the sources that say something about it."""

    label: str
    sources: tuple[Source, ...]


def model_subjects(
    models: Sequence[Path], prompts: Sequence[Path], continuations: Sequence[Path] = ()
) -> tuple[Subject, ...]:
    """Return one subject per model, each with every prompt; ``continuations`` are none or as many.

    Raises:
        EngineError: a file is missing or no GGUF model, or the engine is not installed.
    """
    if models:
        require_llama()
    for model in models:
        check_model_file(model)
    labels = distinct([model.stem for model in models])
    prompt_labels = distinct([prompt.stem for prompt in prompts])
    followed: Sequence[Path | None] = continuations or (None,) * len(prompts)
    return tuple(
        Subject(
            label,
            tuple(
                Source(
                    f"{label} · {prompt_label}",
                    model=model,
                    prompt=prompt,
                    continuation=continuation,
                    workload=prompt_label,
                )
                for prompt, continuation, prompt_label in zip(
                    prompts, followed, prompt_labels, strict=True
                )
            ),
        )
        for model, label in zip(models, labels, strict=True)
    )


def trace_subjects(directories: Sequence[Path]) -> tuple[Subject, ...]:
    """Group saved traces by the model and the K cache type they were captured with.

    Raises:
        TraceError: a trace is not whole.
    """
    groups: dict[str, list[tuple[Trace, Path]]] = {}
    places = [directory.resolve() for directory in directories]
    for number, directory in enumerate(directories):
        if places[number] in places[:number]:
            raise TraceError(f"trace {directory} is given twice; it would count twice.")
        trace = load_trace(directory)
        key = json.dumps([trace.model, trace.capture.get("cache_type_k")], sort_keys=True)
        groups.setdefault(key, []).append((trace, directory))
    labels = distinct([str(members[0][0].model["name"]) for members in groups.values()])
    return tuple(
        Subject(
            label,
            tuple(
                Source(name, trace=path)
                for name, (_, path) in zip(
                    distinct([trace.label for trace, _ in members]), members, strict=True
                )
            ),
        )
        for label, members in zip(labels, groups.values(), strict=True)
    )


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
        assert source.prompt is not None
        prompt = read_prompt(source.prompt)
        if source.workload is not None:
            prompt = replace(prompt, name=source.workload)
        if source.continuation is not None:
            prompt = with_continuation(prompt, source.continuation)
        # by content: each worker may have been handed a copy of the prompt of its own
        parts = (str(source.model.resolve()), repr(prompt), repr(self.settings))
        key = hashlib.sha256("\0".join(parts).encode("utf-8", "surrogateescape")).hexdigest()[:16]
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


def once(folder: Path, name: str, make: Callable[[], dict[str, Any]]) -> dict[str, Any]:
    """Return what ``make`` returns, JSON values, made by the first process that asks for it.

    The processes share ``folder``; the others wait. An exception is not remembered.
    """
    from filelock import FileLock  # noqa: PLC0415 - the llama extra brings it

    outcome = folder / f"{name}.json"
    with FileLock(folder / f"{name}.lock"):
        if not outcome.exists():
            outcome.write_text(json.dumps(make()), encoding="utf-8")
        known: dict[str, Any] = json.loads(outcome.read_text(encoding="utf-8"))
    return known


def _unless_error(value: T | Exception) -> T:
    if isinstance(value, Exception):
        raise value
    return value
