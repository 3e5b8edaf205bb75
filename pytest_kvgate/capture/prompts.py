"""Prompts: what the model reads before its decode steps are sampled."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from pytest_kvgate.capture.chats import render
from pytest_kvgate.capture.errors import CaptureError
from pytest_kvgate.capture.files import Chat, Content, read_content
from pytest_kvgate.engine import Engine


@dataclass(frozen=True)
class Prompt:
    """A prompt by name, and the recorded ``continuation`` that the decode is to follow, if any.

    Neither content, a text, a chat or token ids, ever reaches a trace or a report.
    """

    name: str
    content: Content
    continuation: str | tuple[int, ...] | None = None

    @property
    def kind(self) -> str:
        """What the content is: text, chat or tokens."""
        if isinstance(self.content, Chat):
            return "chat"
        return "text" if isinstance(self.content, str) else "tokens"


def read_prompt(path: Path) -> Prompt:
    """Read a text, a chat or token ids; the file's name without suffix names the workload.

    Raises:
        CaptureError: the file is missing, not UTF-8, empty, or JSON of another shape.
    """
    content = read_content(path, "prompt")
    if isinstance(content, Chat) and not content.asked:
        raise CaptureError(
            f"prompt {path} is only an assistant's turn, which is dropped, so nothing is left to "
            "read. Give the turns before it, too."
        )
    return Prompt(path.stem, content)


def prompt_tokens(engine: Engine, prompt: Prompt) -> list[int]:
    """Return the token ids that the model reads.

    Raises:
        CaptureError: a chat that this model cannot render, or ids that its vocabulary has not.
        EngineError: the model cannot tokenize.
    """
    if isinstance(prompt.content, str):
        return engine.tokenize(prompt.content)
    if isinstance(prompt.content, Chat):
        return engine.tokenize_rendered(render(engine, prompt.name, prompt.content.asked))
    return known_tokens(engine, f"prompt {prompt.name!r}", prompt.content)


def known_tokens(engine: Engine, name: str, tokens: tuple[int, ...]) -> list[int]:
    """Return the tokens if the vocabulary has them all; else raise CaptureError on ``name``."""
    for position, token in enumerate(tokens):
        if not 0 <= token < engine.n_vocab:
            raise CaptureError(
                f"{name}: token {position} is {token}, and the model's vocabulary ends at "
                f"{engine.n_vocab - 1}. Token ids are those of the model's own tokenizer; record "
                "them with this model, or give a text."
            )
    return list(tokens)
