"""Which token comes next: the recorded one, or the likeliest."""

from __future__ import annotations

from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from pytest_kvgate.capture.errors import CaptureError
from pytest_kvgate.engine import Engine


class Choice(Protocol):
    """Chooses the token of each decode step."""

    def token(self, index: int, logits: NDArray[np.float32]) -> int:
        """Return the token of decode step ``index`` from the logits ``[n_vocab]`` before it."""

    def as_recorded(self) -> dict[str, bool | int]:
        """Return what the workload of a trace says of it."""


class Forced:
    """Follows recorded tokens; one that ends the text is what happened, and no reason to stop."""

    def __init__(self, tokens: list[int]) -> None:
        self._tokens = tokens

    def token(self, index: int, _logits: NDArray[np.float32]) -> int:
        """Return the recorded token."""
        return self._tokens[index]

    def as_recorded(self) -> dict[str, bool | int]:
        """Say that the decode was forced."""
        return {"forced": True}


class Greedy:
    """Takes the likeliest token.

    Where that is the end of the text, the capture is over; with ``ignore_eos`` the likeliest other
    token is taken instead, and ``eos_ignored_from`` is the first step where that happened.
    """

    def __init__(self, engine: Engine, name: str, steps: range, *, ignore_eos: bool) -> None:
        self._engine = engine
        self._name = name
        self._steps = steps
        self._ignore_eos = ignore_eos
        self.eos_ignored_from: int | None = None

    def token(self, index: int, logits: NDArray[np.float32]) -> int:
        """Return the likeliest token.

        Raises:
            CaptureError: it ends the text, and that is not to be ignored.
        """
        token = int(np.argmax(logits))
        if not self._engine.is_end_of_text(token):
            return token
        if not self._ignore_eos:
            raise CaptureError(_end_of_text(self._name, self._steps, index))
        if self.eos_ignored_from is None:
            self.eos_ignored_from = index
        likeliest = np.argsort(-logits, kind="stable")
        return next(int(token) for token in likeliest if not self._engine.is_end_of_text(token))

    def as_recorded(self) -> dict[str, bool | int]:
        """Say that the model chose, and from which step on it was not allowed to end."""
        ignored = self.eos_ignored_from
        return {"forced": False} | ({} if ignored is None else {"eos_ignored_from": ignored})


def _end_of_text(name: str, steps: range, index: int) -> str:
    usable = sum(1 for step in steps if step < index)
    remedies = (
        "follow what was recorded with --kvgate-continuation, or let the model go on past its end "
        "with --kvgate-ignore-eos"
    )
    if not usable:
        return (
            f"prompt {name!r} is a finished conversation: the model ends its text at decode step "
            f"{index}, at or before the first sampled step ({steps[0]}), so 0 of {len(steps)} "
            "sampled steps are usable. Cut the prompt where there is still something to say, for "
            f"example in the middle of an answer; {remedies}."
        )
    return (
        f"prompt {name!r}: the model ends its text at decode step {index}, so only {usable} "
        f"of {len(steps)} sampled steps are usable. Ask for --kvgate-steps "
        f"{steps.start}:{index}:{steps.step}; cut the prompt where there is more to say; "
        f"{remedies}."
    )
