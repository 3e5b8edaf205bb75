"""What there is to look at: models with prompts, or saved traces, grouped by model."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from pytest_kvgate.analysis.wording import distinct
from pytest_kvgate.capture import Prompt, read_prompt, with_continuation
from pytest_kvgate.engine import check_model_file, require_llama
from pytest_kvgate.trace import Trace, TraceError, load_trace


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


def prompt_of(source: Source) -> Prompt:
    """Read the prompt of a source that has a model, with the continuation that it names.

    Raises:
        CaptureError: a file cannot be used.
    """
    assert source.prompt is not None
    prompt = read_prompt(source.prompt)
    if source.workload is not None:
        prompt = replace(prompt, name=source.workload)
    if source.continuation is not None:
        prompt = with_continuation(prompt, source.continuation)
    return prompt
