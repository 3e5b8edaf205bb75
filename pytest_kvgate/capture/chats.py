"""Chats: rendered with the model's own template, as a server would before the model reads them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from datetime import UTC, datetime
from typing import Any

from pytest_kvgate.capture.errors import CaptureError
from pytest_kvgate.capture.files import Message
from pytest_kvgate.engine import Engine

#: The day that a template which states the date is told: the same capture whenever it is made.
TODAY = datetime(2025, 1, 1, tzinfo=UTC)

INSTEAD = "Give the text as the model is to read it, or token ids."


def render(engine: Engine, name: str, messages: Sequence[Message]) -> str:
    """Return the text of a chat, up to and including the cue for the assistant's next turn.

    ``name`` is the prompt's, for sentences. The template is code that comes with the model; it runs
    in jinja2's sandbox.

    Raises:
        CaptureError: the model has no template, or it fails on this chat.
    """
    from llama_cpp.llama_chat_format import Jinja2ChatFormatter  # noqa: PLC0415

    class Formatter(Jinja2ChatFormatter):
        @staticmethod
        def strftime_now(f: str) -> str:
            return TODAY.strftime(f)

    template = engine.chat_template
    if template is None or "{" not in template:  # llama.cpp's short names are not templates
        raise CaptureError(
            f"prompt {name!r} is a chat, and the model has no chat template "
            f"(tokenizer.chat_template) to render it with. {INSTEAD}"
        )
    try:
        formatter = Formatter(template, eos_token=engine.end_text, bos_token=engine.begin_text)
        turns: list[Any] = [asdict(message) for message in messages]
        rendered = str(formatter(messages=turns).prompt)
        rendered.encode()
    except Exception as error:  # whatever the template's code raises
        # a sentence of the template's own; any other might quote the chat, and reasons are reported
        said = f": {error}" if str(error) and str(error) in template else ""
        raise CaptureError(
            f"prompt {name!r}: the model's chat template fails on this chat "
            f"({type(error).__name__}{said}). Change the turns or their roles, or: {INSTEAD}"
        ) from None
    # an answer of before may be shortened, as templates do with what the model thought aloud
    for number, message in enumerate(messages, start=1):
        if message.role in ("system", "user") and message.content.strip() not in rendered:
            raise CaptureError(
                f"prompt {name!r}: the model's chat template leaves out what turn {number} of "
                f"{len(messages)} says, so the model would not read it. {INSTEAD}"
            )
    if not rendered.strip():
        raise CaptureError(
            f"prompt {name!r}: the model's chat template makes nothing of this chat. {INSTEAD}"
        )
    return rendered
