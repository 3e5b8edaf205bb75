"""What a prompt or continuation file may hold, and what is said of one that holds something else.

Text files are in test_refusals.
"""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from pytest_kvgate.capture import CaptureError, Chat, Message, read_prompt

ASKED = {"role": "user", "content": "What is a page?"}
ANSWERED = {"role": "assistant", "content": "A page is a block."}
CHAT = Chat((Message("user", "What is a page?"),))


def written(folder: Path, content: object, name: str = "session.json") -> Path:
    path = folder / name
    text = content if isinstance(content, str) else json.dumps(content)
    path.write_text(text, encoding="utf-8")
    return path


@pytest.mark.parametrize("content", [[ASKED], {"messages": [ASKED]}])
def test_chat_messages_are_read_bare_or_as_messages_of_an_object(
    tmp_path: Path, content: object
) -> None:
    prompt = read_prompt(written(tmp_path, content))
    assert (prompt.name, prompt.kind, prompt.content) == ("session", "chat", CHAT)


@pytest.mark.parametrize("content", [[1, 5, 2], {"tokens": [1, 5, 2]}])
def test_token_ids_are_read_bare_or_as_tokens_of_an_object(tmp_path: Path, content: object) -> None:
    prompt = read_prompt(written(tmp_path, content))
    assert (prompt.name, prompt.kind, prompt.content) == ("session", "tokens", (1, 5, 2))


def test_a_file_of_any_other_suffix_is_a_text(tmp_path: Path) -> None:
    for name in ("session.txt", "session.md", "session", "session.jsonl"):
        prompt = read_prompt(written(tmp_path, [ASKED], name))
        assert (prompt.kind, prompt.content) == ("text", json.dumps([ASKED]))
    assert read_prompt(written(tmp_path, [ASKED], "session.JSON")).kind == "chat"


def test_the_parts_of_a_message_are_joined(tmp_path: Path) -> None:
    parts = [{"type": "text", "text": "What is"}, {"type": "text", "text": "a page?"}]
    prompt = read_prompt(written(tmp_path, [{"role": "user", "content": parts}]))
    assert prompt.content == Chat((Message("user", "What is\na page?"),))


def test_a_recorded_request_is_read_for_its_messages(tmp_path: Path) -> None:
    """Request bodies hold a model's name and sampling settings, and messages ids and dates."""
    message = {**ASKED, "id": "m1", "created": 17, "tool_calls": None}
    request = {"model": "any", "temperature": 0.7, "tools": [], "messages": [message]}
    assert read_prompt(written(tmp_path, request)).content == CHAT


REFUSED = [
    ("[1, 2", "is not valid JSON (Expecting ',' delimiter: line 1 column 6 (char 5))."),
    ("not JSON", "is not valid JSON (Expecting value: line 1 column 1 (char 0)). A .json file"),
    ("[" * 100_000, "is not valid JSON (maximum recursion depth exceeded"),
    ("[" + "1" * 5000 + "]", "is not valid JSON (Exceeds the limit"),
    ("7", "holds 7; accepted: chat messages,"),
    ('"secret"', "holds a text; accepted: chat messages,"),
    ([], "is an empty list; accepted: chat messages,"),
    ({"messages": []}, "is an empty list; accepted: chat messages,"),
    ({"tokens": []}, "is an empty list; accepted: chat messages,"),
    ({"text": "secret"}, "is an object with neither 'messages' nor 'tokens'; one of them is"),
    ({"messages": [ASKED], "tokens": [1]}, "is an object with both 'messages' and 'tokens'"),
    ({"messages": {"0": ASKED}}, ": messages is an object; accepted: a list."),
    ({"messages": "secret"}, ": messages is a text; accepted: a list."),
    ({"messages": [1]}, ": messages[0] is 1; accepted: an object with role and content."),
    ({"tokens": [ASKED]}, ": tokens[0] is an object; accepted: a token id."),
    ([ASKED, 1], ": [1] is 1; accepted: an object with role and content."),
    ([1, ASKED], ": [1] is an object; accepted: a token id, a whole number from 0."),
    ([1, -1], ": [1] is -1; accepted: a token id, a whole number from 0."),
    ([1, 2.0], ": [1] is 2.0; accepted: a token id, a whole number from 0."),
    ([True], ": [0] is true; accepted: a token id, a whole number from 0."),
    ([1, 2**31], ": [1] is 2147483648; accepted: a token id, a whole number from 0."),
    (["secret"], ": [0] is a text; accepted: a token id, a whole number from 0."),
    ([[1, 2]], ": [0] is a list; accepted: a token id, a whole number from 0."),
    ([{"content": "secret"}], ": [0].role is missing; accepted: a name such as"),
    ([{"role": 3, "content": "secret"}], ": [0].role is 3; accepted: a name such as"),
    ([{"role": " ", "content": "secret"}], ": [0].role is an empty text; accepted: a name such as"),
    ([ASKED, {"role": "user"}], ": [1].content is missing; accepted: a text."),
    ([{**ASKED, "content": None}], ": [0].content is null; accepted: a text, or a list of"),
    ([{**ASKED, "content": 12}], ": [0].content is 12; accepted: a text, or a list of"),
    ([{**ASKED, "content": []}], ": [0].content is an empty list; accepted: a text, or a list of"),
    ([{**ASKED, "content": ["secret"]}], ": [0].content[0] is a text; accepted: {"),
    (
        [{**ASKED, "content": [{"type": "image_url", "image_url": {"url": "secret"}}]}],
        ': [0].content[0].type is "image_url"; accepted: "text" alone.',
    ),
    ([{**ASKED, "content": [{"type": "text"}]}], ": [0].content[0].text is null; accepted: a text"),
    ([{**ASKED, "content": [{"text": "secret"}]}], ": [0].content[0].type is missing; accepted:"),
    ('[{"role": "user", "content": "ab\\ud800"}]', ": [0].content is no valid text (character 2)"),
    ({"messages": [ASKED], "tools": [{}]}, "has tools, and tools are not rendered, so the model"),
    ([{**ANSWERED, "tool_calls": [{}]}], "has [0].tool_calls, and tools are not rendered, so the"),
    ([ANSWERED], "is only an assistant's turn, which is dropped, so nothing is left to read."),
]


@pytest.mark.parametrize(("content", "sentence"), REFUSED)
def test_a_json_file_of_another_shape_is_refused_by_the_field(
    tmp_path: Path, content: object, sentence: str
) -> None:
    path = written(tmp_path, content)
    with pytest.raises(CaptureError) as refusal:
        read_prompt(path)
    message = str(refusal.value)
    assert f"prompt {path}" in message
    assert sentence in message
    assert "secret" not in message  # a reason stands in reports


@pytest.mark.parametrize(
    ("text", "says"),
    [
        (
            '[{"role": "user", "content": "one", "content": "two"}]',
            "is not valid JSON (an object has the same key twice)",
        ),
        (
            '{"system": "Be brief.", "messages": [{"role": "user", "content": "hi"}]}',
            "has 'system' beside 'messages', where it would not be read",
        ),
        (
            '[{"role": "user", "content": [{"type": "my secret", "text": "x"}]}]',
            '[0].content[0].type is a text; accepted: "text" alone',
        ),
    ],
)
def test_what_would_be_lost_or_quoted_is_refused_without_quoting(
    tmp_path: Path, text: str, says: str
) -> None:
    path = tmp_path / "chat.json"
    path.write_text(text, encoding="utf-8")
    with pytest.raises(CaptureError) as refusal:
        read_prompt(path)
    assert says in str(refusal.value)
    assert "secret" not in str(refusal.value)
