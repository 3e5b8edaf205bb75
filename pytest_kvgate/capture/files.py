"""Files of prompts and continuations: a text, a chat, or token ids, told apart by suffix and shape.

A file that does not end in ``.json`` is a text. A ``.json`` file holds the messages of a chat or
token ids, bare or as ``messages`` or ``tokens`` of an object.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import NoReturn

from pytest_kvgate.capture.errors import CaptureError

#: Token ids are 32-bit in llama.cpp.
LARGEST_ID = 2**31 - 1

ACCEPTED = 'chat messages, [{"role": …, "content": …}, …], or token ids, [1, 2, …]'


@dataclass(frozen=True)
class Message:
    """One turn of a chat."""

    role: str
    content: str


@dataclass(frozen=True)
class Chat:
    """The turns of a chat, in order; there is at least one."""

    messages: tuple[Message, ...]

    @property
    def answer(self) -> str | None:
        """What the assistant says in the last turn, None where somebody else has the last word."""
        last = self.messages[-1]
        return last.content if last.role == "assistant" else None

    @property
    def asked(self) -> tuple[Message, ...]:
        """The turns that the model reads: all but an answer at the end."""
        return self.messages if self.answer is None else self.messages[:-1]


Content = str | Chat | tuple[int, ...]


def read_content(path: Path, purpose: str) -> Content:
    """Read a file; ``purpose``, "prompt" or "continuation", is what sentences call it.

    Raises:
        CaptureError: the file is missing, not UTF-8, empty, or JSON of another shape.
    """
    try:
        text = path.read_bytes().decode("utf-8")  # line ends stay as they are
    except UnicodeDecodeError as error:
        raise CaptureError(
            f"{purpose} {path} is not UTF-8 text (byte {error.start}). Save it as UTF-8."
        ) from error
    except OSError as error:
        raise CaptureError(
            f"{purpose} {path} cannot be read ({error.strerror}); a text file is needed."
        ) from error
    if not text.strip():
        raise CaptureError(f"{purpose} {path} is empty; there must be something to read.")
    if path.suffix.lower() != ".json":
        return text
    return _JsonFile(f"{purpose} {path}").content(text)


#: Parts of a message that are no text, as chat APIs name them.
OTHER_PARTS = ("image", "image_url", "input_image", "input_audio", "audio", "file", "video")


@dataclass(frozen=True)
class _JsonFile:
    """Reads the values of one file; ``name`` begins every sentence on what is wrong with them."""

    name: str

    def content(self, text: str) -> Chat | tuple[int, ...]:
        try:
            values = json.loads(text, object_pairs_hook=_once_each)
        except (ValueError, RecursionError) as error:
            raise CaptureError(
                f"{self.name} is not valid JSON ({error}). A .json file holds {ACCEPTED}; give a "
                "text another suffix, such as .txt."
            ) from error
        if isinstance(values, dict):
            return self._object(values)
        if isinstance(values, list):
            return self._list(values, "")
        raise CaptureError(f"{self.name} holds {_shown(values)}; accepted: {ACCEPTED}.")

    def _object(self, values: Mapping[str, object]) -> Chat | tuple[int, ...]:
        found = [key for key in ("messages", "tokens") if key in values]
        if len(found) != 1:
            both = "both 'messages' and 'tokens'" if found else "neither 'messages' nor 'tokens'"
            raise CaptureError(f"{self.name} is an object with {both}; one of them is needed.")
        self._refuse_tools(values, ("tools", "functions"), "")
        if values.get("system"):
            raise CaptureError(
                f"{self.name} has 'system' beside 'messages', where it would not be read. Make it "
                'the first message, {"role": "system", "content": …}.'
            )
        key, items = found[0], values[found[0]]
        if not isinstance(items, list):
            self._refuse(key, _shown(items), "a list")
        wrong = items and isinstance(items[0], dict) != (key == "messages")
        if wrong:
            wanted = "an object with role and content" if key == "messages" else "a token id"
            self._refuse(f"{key}[0]", _shown(items[0]), wanted)
        return self._list(items, key)

    def _list(self, items: list[object], where: str) -> Chat | tuple[int, ...]:
        if not items:
            place = f"{where!r} of {self.name}" if where else self.name
            raise CaptureError(f"{place} is an empty list; accepted: {ACCEPTED}.")
        if isinstance(items[0], dict):
            return Chat(tuple(self._message(item, f"{where}[{i}]") for i, item in enumerate(items)))
        return tuple(self._token(item, f"{where}[{i}]") for i, item in enumerate(items))

    def _token(self, item: object, where: str) -> int:
        if not isinstance(item, int) or isinstance(item, bool) or not 0 <= item <= LARGEST_ID:
            self._refuse(where, _shown(item), "a token id, a whole number from 0")
        return item

    def _message(self, item: object, where: str) -> Message:
        if not isinstance(item, dict):
            self._refuse(where, _shown(item), "an object with role and content")
        self._refuse_tools(item, ("tool_calls", "function_call"), f"{where}.")
        role = item.get("role")
        if not isinstance(role, str) or not role.strip():
            found = _shown(role) if "role" in item else "missing"
            self._refuse(f"{where}.role", found, 'a name such as "user" or "assistant"')
        if "content" not in item:
            self._refuse(f"{where}.content", "missing", "a text")
        return Message(
            self._text(role, f"{where}.role"), self._content(item["content"], f"{where}.content")
        )

    def _content(self, content: object, where: str) -> str:
        """Return the text of a message; the parts of a list are joined by line ends."""
        if isinstance(content, str):
            return self._text(content, where)
        parts = '{"type": "text", "text": …}'
        if not isinstance(content, list) or not content:
            self._refuse(where, _shown(content), f"a text, or a list of {parts}")
        texts = []
        for number, part in enumerate(content):
            place = f"{where}[{number}]"
            if not isinstance(part, dict):
                self._refuse(place, _shown(part), parts)
            if part.get("type") != "text":
                found = part.get("type")
                kind = "missing" if "type" not in part else _shown(found)
                if found in OTHER_PARTS:
                    kind = f'"{found}"'
                self._refuse(f"{place}.type", kind, '"text" alone')
            if not isinstance(part.get("text"), str):
                self._refuse(f"{place}.text", _shown(part.get("text")), "a text")
            texts.append(self._text(part["text"], f"{place}.text"))
        return "\n".join(texts)

    def _text(self, text: str, where: str) -> str:
        try:
            text.encode()
        except UnicodeEncodeError as error:
            self._refuse(where, f"no valid text (character {error.start})", "Unicode text")
        return text

    def _refuse_tools(self, values: Mapping[str, object], keys: tuple[str, ...], at: str) -> None:
        """Refuse what would be missing from the text that the model really read."""
        for key in keys:
            if values.get(key):
                raise CaptureError(
                    f"{self.name} has {at}{key}, and tools are not rendered, so the model would "
                    "read something else than it did. Give this session as token ids."
                )

    def _refuse(self, where: str, found: str, accepted: str) -> NoReturn:
        raise CaptureError(f"{self.name}: {where} is {found}; accepted: {accepted}.")


def _once_each(pairs: list[tuple[str, object]]) -> dict[str, object]:
    """Make a JSON object; one that says the same key twice means nobody knows what."""
    values = dict(pairs)
    if len(values) < len(pairs):
        raise ValueError("an object has the same key twice")
    return values


def _shown(value: object) -> str:
    """Name a JSON value, short and without the text of a conversation."""
    if isinstance(value, dict):
        return "an object"
    if isinstance(value, list):
        return "a list" if value else "an empty list"
    if isinstance(value, str):
        return "a text" if value.strip() else "an empty text"
    return json.dumps(value)[:40]
