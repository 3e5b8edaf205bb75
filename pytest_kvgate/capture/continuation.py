"""Continuations: the recorded tokens that a decode follows, instead of choosing its own."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from pytest_kvgate.capture.errors import CaptureError
from pytest_kvgate.capture.files import Chat, read_content
from pytest_kvgate.capture.prompts import Prompt, known_tokens
from pytest_kvgate.engine import Engine


def with_continuation(prompt: Prompt, path: Path) -> Prompt:
    """Return the prompt with the continuation that a file records.

    The file holds a text, token ids, or a chat that ends with an assistant's turn: that turn is the
    continuation, and the turns before it, if there are any, must be those of the prompt. So the
    file of a chat prompt that ends with an answer is its own continuation.

    Raises:
        CaptureError: the file cannot be used.
    """
    content = read_content(path, "continuation")
    if not isinstance(content, Chat):
        if content == prompt.content:
            raise CaptureError(
                f"continuation {path} is what prompt {prompt.name!r} holds already; give what came "
                "after it."
            )
        return replace(prompt, continuation=content)
    if content.answer is None:
        raise CaptureError(
            f"continuation {path} is a chat whose last turn is not the assistant's, so it does not "
            "say what the model answered. End it with that answer, or give a text or token ids."
        )
    asked = prompt.content.asked if isinstance(prompt.content, Chat) else ()
    if content.asked and content.asked != asked:
        raise CaptureError(
            f"continuation {path} is the end of another chat: its turns before the answer are not "
            f"those of prompt {prompt.name!r}. Give the chat that the prompt was taken from, or "
            "the assistant's turn alone."
        )
    if not content.answer.strip():
        raise CaptureError(
            f"continuation {path} ends with an assistant's turn that says nothing. Give a chat "
            "that ends with an answer."
        )
    return replace(prompt, continuation=content.answer)


def forced_tokens(
    engine: Engine, prompt: Prompt, tokens: list[int], steps: range
) -> list[int] | None:
    """Return the tokens that the decode is to follow; None where the model is to choose.

    ``tokens`` are the prompt's. A text that continues a text is cut as the two are when they stand
    together, if a token ends where the prompt does; any other text is cut on its own. Special
    tokens are never parsed in it.

    Raises:
        CaptureError: they run out before the last sampled step, or are not the vocabulary's.
    """
    name = f"the continuation of prompt {prompt.name!r}"
    continuation = prompt.continuation
    if continuation is None:
        return None
    if isinstance(continuation, tuple):
        forced = known_tokens(engine, name, continuation)
    else:
        forced = engine.tokenize_following(continuation)
        if isinstance(prompt.content, str):
            whole = engine.tokenize(prompt.content + continuation)
            if whole[: len(tokens)] == tokens:
                forced = whole[len(tokens) :]
    usable = sum(1 for step in steps if step < len(forced))
    if not usable:
        raise CaptureError(
            f"{name} is {len(forced)} tokens, too short for the first sampled decode step "
            f"({steps[0]}). Give a longer one, or sample earlier --kvgate-steps."
        )
    if usable < len(steps):
        raise CaptureError(
            f"{name} is {len(forced)} tokens, so only {usable} of {len(steps)} sampled steps are "
            f"usable. Ask for --kvgate-steps {steps.start}:{len(forced)}:{steps.step}, or give a "
            "longer one."
        )
    return forced
