"""The line from models to closed loops: each prompt is run once, under every selection."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from pytest_kvgate.analysis.effects import ClosedLoop, Variant
from pytest_kvgate.capture import CaptureSettings, Prompt
from pytest_kvgate.capture.choice import Greedy
from pytest_kvgate.capture.continuation import forced_tokens
from pytest_kvgate.capture.reading import fitting_tokens
from pytest_kvgate.capture.sparsity import stated_top_k
from pytest_kvgate.closedloop import (
    NATIVELY_SPARSE,
    ClosedLoopError,
    Loop,
    LoopSettings,
    NextToken,
)
from pytest_kvgate.engine import Engine
from pytest_kvgate.pipeline.errors import EVIDENCE_ERRORS, EvidenceError
from pytest_kvgate.pipeline.sharing import key_of, once
from pytest_kvgate.pipeline.sources import Source, Subject, prompt_of

NEEDS_THE_MODEL = (
    "is a saved trace, which holds no weights: a closed loop has to run the model. Give "
    "--kvgate-model and --kvgate-prompt instead."
)


@dataclass
class LoopEvidence:
    """Runs closed loops on demand, and remembers the outcome, failures too.

    ``variants`` are all that will be asked for: a prompt is read once for all of them. ``folder``
    may be shared by several processes; the first one runs, the others wait. ``announce`` is told
    before a prompt is run.
    """

    capture: CaptureSettings
    settings: LoopSettings
    variants: tuple[Variant, ...]
    folder: Path
    announce: Callable[[str], None] = lambda _message: None
    _loops: dict[Subject, ClosedLoop | Exception] = field(default_factory=dict)

    @property
    def page_sizes(self) -> frozenset[int]:
        """The page sizes that something will be asked of, in tokens."""
        return frozenset(variant.page_size for variant in self.variants)

    def loop(self, subject: Subject) -> ClosedLoop:
        """Return the closed loop of a subject, its prompts pooled.

        Raises:
            EvidenceError: one of its sources could not be run, now or before.
        """
        if subject not in self._loops:
            try:
                parts = [self._of_source(source) for source in subject.sources]
                self._loops[subject] = ClosedLoop.joined(parts)
            except EVIDENCE_ERRORS as error:
                self._loops[subject] = EvidenceError(f"no closed loop: {error}")
            except Exception as error:  # raised for every gate, run only once
                self._loops[subject] = error
        found = self._loops[subject]
        if isinstance(found, Exception):
            raise found
        return found

    def _of_source(self, source: Source) -> ClosedLoop:
        if source.model is None:
            raise ClosedLoopError(f"{source.label} {NEEDS_THE_MODEL}")
        prompt = prompt_of(source)
        wanted = (repr(self.capture), _described(self.settings), repr(self.variants))
        key = key_of("closed loop", str(source.model.resolve()), repr(prompt), *wanted)
        known = once(self.folder, key, partial(self._run, source, source.model, prompt))
        if known["error"] is not None:
            raise ClosedLoopError(known["error"])
        return ClosedLoop.from_json(known["loop"])

    def _run(self, source: Source, model: Path, prompt: Prompt) -> dict[str, Any]:
        n_run = len(self.variants)
        self.announce(
            f"closed loop of {source.label}: {n_run} sparse run{'s' * (n_run != 1)} of "
            f"{self.settings.n_token} tokens"
        )
        try:
            with Engine(model, self.capture.engine) as engine:
                started = start_loop(engine, model.name, prompt, self.capture, self.settings)
                loop = started.compare(self.variants)
        except EVIDENCE_ERRORS as error:
            return {"loop": None, "error": str(error)}
        return {"loop": loop.as_json(), "error": None}


@dataclass(frozen=True)
class StartedLoop:
    """A loop whose dense run is done, and how its tokens were chosen."""

    loop: Loop
    greedy: Greedy | None

    @property
    def eos_ignored_from(self) -> int | None:
        """The first decode step where the model was kept from ending its text, if there is one."""
        return None if self.greedy is None else self.greedy.eos_ignored_from

    def compare(self, variants: tuple[Variant, ...]) -> ClosedLoop:
        """Return the effects of each variant."""
        return replace(self.loop.compare(variants), eos_ignored_from=self.eos_ignored_from)


def start_loop(
    engine: Engine, name: str, prompt: Prompt, capture: CaptureSettings, settings: LoopSettings
) -> StartedLoop:
    """Read a prompt, and make the dense run; ``name`` is the model's.

    Raises:
        CaptureError: the prompt does not fit, or the model has nothing to page.
        ClosedLoopError: the model cannot be run so.
        EngineError: llama.cpp cannot run it.
    """
    if stated_top_k(engine) is not None:
        raise ClosedLoopError(NATIVELY_SPARSE)
    n_decode = settings.n_decode + 1  # the last one is only predicted
    remedy = "compare fewer --kvgate-loop-tokens"
    tokens = fitting_tokens(engine, name, prompt, capture, n_decode, remedy)
    forced = forced_tokens(engine, prompt, tokens, range(1))
    if forced is not None:
        if len(forced) < n_decode:
            raise ClosedLoopError(
                f"the continuation of prompt {prompt.name!r} is {len(forced)} tokens, and "
                f"{settings.n_token} predictions need {n_decode}. Ask for --kvgate-loop-tokens "
                f"{settings.n_token - n_decode + len(forced)}, or give a longer one."
            )
        return StartedLoop(Loop(engine, tokens, lambda i, _: forced[i], settings), None)
    greedy = Greedy(engine, prompt.name, range(n_decode), ignore_eos=True)
    choose = greedy.token if capture.ignore_eos else _until_end(greedy, prompt.name, settings)
    return StartedLoop(Loop(engine, tokens, choose, settings), greedy)


def _until_end(greedy: Greedy, name: str, settings: LoopSettings) -> NextToken:
    """Return a choice that refuses to go on where the model ends its text."""

    def choose(index: int, logits: NDArray[np.float32]) -> int:
        token = greedy.token(index, logits)
        if greedy.eos_ignored_from is not None:
            usable = index - settings.n_decode - 1 + settings.n_token
            ask = f"ask for --kvgate-loop-tokens {usable}; " if usable > 0 else ""
            raise ClosedLoopError(
                f"prompt {name!r}: the model ends its text at decode step {index}, so only "
                f"{max(0, usable)} of {settings.n_token} predictions can be compared. Cut the "
                f"prompt where there is more to say; {ask}follow what was recorded with "
                "--kvgate-continuation, or let the model go on past its end with "
                "--kvgate-ignore-eos."
            )
        return token

    return choose


def _described(settings: LoopSettings) -> str:
    """Write loop settings down in the same way in every process; selectors by name."""
    return repr(replace(settings, registry={})) + repr(sorted(settings.registry))
