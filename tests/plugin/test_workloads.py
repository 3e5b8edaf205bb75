"""Chats, token ids, recorded continuations and ignored ends of text, from the command line."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from pytest_kvgate.trace import load_trace
from tests.models import FIRST_BYTE, tiny_model, token_ids
from tests.plugin.test_capture import COUNT, GATE, STEPS, captured

TEMPLATE = (
    "{% for message in messages %}[{{ message['role'] }}]{{ message['content'] }}{{ eos_token }}"
    "{% endfor %}{% if add_generation_prompt %}[assistant]{% endif %}"
)
QUESTION = "thequickbrownfoxjumpsoverthelazydog." * 25
ANSWER = "it jumped over the dog"
CHAT = [{"role": "user", "content": QUESTION}, {"role": "assistant", "content": ANSWER}]
N_CHAT = 1 + len("[user]") + len(QUESTION) + 1 + len("[assistant]")


def written(folder: Path, name: str, content: object) -> Path:
    path = folder / name
    text = content if isinstance(content, str) else json.dumps(content)
    path.write_text(text, encoding="utf-8")
    return path


@pytest.fixture(scope="session")
def chat_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("models") / "tiny-chat.gguf"
    return tiny_model(path, chat_template=TEMPLATE)


@pytest.fixture(scope="session")
def countdown(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a model that follows "d" by "c", "b", "a" and the end of the text."""
    return tiny_model(tmp_path_factory.mktemp("models") / "countdown.gguf", countdown=True)


@pytest.fixture
def ending(tmp_path: Path) -> Path:
    """Return a prompt whose text ends at decode step 3."""
    return written(tmp_path, "ending.txt", "xyz" * 300 + "d")


def secrets_in(text: str) -> list[str]:
    """Return the pieces of the chat that a text holds."""
    pieces = [QUESTION[:12], *ANSWER.split(), "quick"]
    return [piece for piece in pieces if len(piece) > 4 and piece in text]


def test_a_chat_its_answer_and_token_ids_are_pooled_into_one_profile(
    pytester: pytest.Pytester, chat_model: Path, tmp_path: Path
) -> None:
    pytester.makepyfile(GATE)
    chat = written(tmp_path, "chat.json", {"messages": CHAT})
    tokens = written(tmp_path, "ids.json", token_ids(QUESTION))
    text = written(tmp_path, "text.txt", QUESTION)
    more = written(tmp_path, "more.json", [FIRST_BYTE] * 9)
    answer = written(tmp_path, "answer.json", CHAT[1:])
    followed = [f"--kvgate-continuation={path}" for path in (chat, more, answer)]
    options = (f"--kvgate-prompt={tokens}", f"--kvgate-prompt={text}", *followed)
    traces = captured(pytester, chat_model, chat, STEPS, *options)
    assert [trace["workload"] for trace in traces] == [
        {"name": "chat", "n_prompt": N_CHAT, "kind": "chat", "forced": True},
        {"name": "ids", "n_prompt": 901, "kind": "tokens", "forced": True},
        {"name": "text", "n_prompt": 901, "kind": "text", "forced": True},
    ]
    report = (pytester.path / "r.json").read_text("utf-8")
    assert secrets_in(report) == []
    for ids in (token_ids(QUESTION)[:5], [FIRST_BYTE] * 3):
        assert json.dumps(ids)[1:-1] not in json.dumps(json.loads(report))


def test_an_answer_is_followed_only_where_it_is_asked_for(
    pytester: pytest.Pytester, chat_model: Path, tmp_path: Path
) -> None:
    pytester.makepyfile(GATE)
    chat = written(tmp_path, "chat.json", CHAT)
    (trace,) = captured(pytester, chat_model, chat, STEPS)
    assert trace["workload"]["forced"] is False
    (trace,) = captured(pytester, chat_model, chat, STEPS, f"--kvgate-continuation={chat}")
    assert trace["workload"]["forced"] is True


def test_prompts_and_continuations_can_stand_in_the_ini_file(
    pytester: pytest.Pytester, chat_model: Path, prompt: Path
) -> None:
    written(pytester.path, "chat.json", CHAT)
    pytester.makeini(
        "[pytest]\nkvgate_prompt = chat.json\nkvgate_continuation = chat.json\n"
        "kvgate_ignore_eos = true\nkvgate_save = kept"
    )
    pytester.makepyfile(GATE)
    model = f"--kvgate-model={chat_model}"
    pytester.runpytest(model, STEPS).assert_outcomes(passed=1)
    trace = load_trace(pytester.path / "kept" / "tiny-chat-chat")
    assert (trace.workload["kind"], trace.workload["forced"]) == ("chat", True)
    assert secrets_in((trace.directory / "trace.json").read_text("utf-8")) == []
    # a continuation belongs to the prompts beside it, not to one from the command line
    pytester.runpytest(model, f"--kvgate-prompt={prompt}", STEPS).assert_outcomes(passed=1)
    trace = load_trace(pytester.path / "kept" / "tiny-chat-lesson")
    assert (trace.workload["kind"], trace.workload["forced"]) == ("text", False)
    # and a continuation from the command line replaces that of the ini file
    result = pytester.runpytest(model, "--kvgate-continuation=nowhere.json", STEPS)
    assert result.ret == pytest.ExitCode.USAGE_ERROR


@pytest.mark.parametrize("given", [1, 3])
def test_as_many_continuations_as_prompts_are_needed(
    pytester: pytest.Pytester, tiny_llama: Path, prompt: Path, given: int
) -> None:
    pytester.makepyfile(GATE)
    other = written(pytester.path, "other.txt", QUESTION)
    more = [f"--kvgate-continuation={prompt}"] * given
    result = pytester.runpytest(
        f"--kvgate-model={tiny_llama}", f"--kvgate-prompt={prompt}", f"--kvgate-prompt={other}",
        *more,
    )  # fmt: skip
    assert result.ret == pytest.ExitCode.USAGE_ERROR
    result.stderr.fnmatch_lines(
        [
            f"ERROR: kvgate: --kvgate-continuation is given {given} times and --kvgate-prompt 2 "
            "times; give no continuation, or one per prompt in the same order."
        ]
    )


def test_a_missing_continuation_is_a_usage_error(
    pytester: pytest.Pytester, tiny_llama: Path, prompt: Path
) -> None:
    pytester.makepyfile(GATE)
    result = pytester.runpytest(
        f"--kvgate-model={tiny_llama}", f"--kvgate-prompt={prompt}",
        "--kvgate-continuation=none.txt",
    )  # fmt: skip
    assert result.ret == pytest.ExitCode.USAGE_ERROR
    result.stderr.fnmatch_lines(["*--kvgate-continuation *none.txt does not exist or is no file."])


@pytest.mark.parametrize(
    ("name", "content", "sentence"),
    [
        ("chat.json", CHAT, "prompt 'chat' is a chat, and the model has no chat template"),
        ("ids.json", [1, 70000], "prompt 'ids': token 1 is 70000, and the model's vocabulary"),
        ("half.json", '[{"role": ', "half.json is not valid JSON (Expecting value: line 1"),
        ("image.json", [{"role": "user", "content": 7}], "image.json: [0].content is 7; accepted:"),
    ],
)
def test_a_prompt_that_cannot_be_read_fails_its_gate(
    pytester: pytest.Pytester, tiny_llama: Path, name: str, content: object, sentence: str
) -> None:
    pytester.makepyfile("import pytest\n" + GATE.replace("@kvgate", "@pytest.mark.xfail\n@kvgate"))
    path = written(pytester.path, name, content)
    options = (f"--kvgate-model={tiny_llama}", f"--kvgate-prompt={path.name}", STEPS)
    result = pytester.runpytest(*options, "--kvgate-report=json:r.json")
    assert result.ret == pytest.ExitCode.TESTS_FAILED
    output = " ".join(result.stdout.str().split())
    assert "INVALID: prompt " in output
    assert sentence in output
    assert secrets_in((pytester.path / "r.json").read_text("utf-8")) == []


def test_a_text_that_ends_early_names_the_remedies(
    pytester: pytest.Pytester, countdown: Path, ending: Path
) -> None:
    pytester.makepyfile(GATE)
    result = pytester.runpytest(f"--kvgate-model={countdown}", f"--kvgate-prompt={ending}", STEPS)
    assert result.ret == pytest.ExitCode.TESTS_FAILED
    output = " ".join(result.stdout.str().split())
    assert (
        "INVALID: prompt 'ending': the model ends its text at decode step 3, so only 1 of 3 "
        "sampled steps are usable. Ask for --kvgate-steps 0:3:4; cut the prompt where there is "
        "more to say; follow what was recorded with --kvgate-continuation, or let the model go on "
        "past its end with --kvgate-ignore-eos."
    ) in output


@pytest.mark.parametrize("workers", [(), ("-n2",)], ids=["alone", "two workers"])
def test_an_ignored_end_of_text_is_marked_everywhere(
    pytester: pytest.Pytester, countdown: Path, ending: Path, workers: tuple[str, ...]
) -> None:
    missed = GATE.replace("test_gate", "test_missed").replace("min_coverage=0.2", "min_coverage=1")
    pytester.makepyfile(GATE + missed.replace("from pytest_kvgate import kvgate", ""))
    result = pytester.runpytest_subprocess(
        f"--kvgate-model={countdown}", f"--kvgate-prompt={ending}", "--kvgate-ignore-eos", STEPS,
        "--kvgate-save=kept", "--kvgate-report=json:r.json", *workers,
    )  # fmt: skip
    result.assert_outcomes(passed=1, failed=1)
    note = (
        "end of text ignored in countdown · ending from decode step 3 on, so 2 of 3 sampled steps "
        "are of text that the model would not have written"
    )
    output = " ".join(result.stdout.str().split())
    assert "END OF TEXT IGNORED from decode step 3 on" in output
    assert f"Note: {note}." in output  # in the failure
    assert output.count(note) == 3  # and beside both verdicts
    report = json.loads((pytester.path / "r.json").read_text("utf-8"))
    assert report["traces"][0]["workload"]["eos_ignored_from"] == 3
    assert sorted(gate["verdict"] for gate in report["gates"]) == ["GO", "NO-GO"]
    assert all(note in gate["notes"] for gate in report["gates"])
    again = pytester.runpytest("--kvgate-trace=kept/countdown-ending")
    output = " ".join(again.stdout.str().split())
    assert "END OF TEXT IGNORED from decode step 3 on" in output
    assert output.count(note) == 3


def test_nothing_is_said_where_no_end_was_ignored(
    pytester: pytest.Pytester, tiny_llama: Path, prompt: Path
) -> None:
    pytester.makepyfile(GATE)
    (trace,) = captured(pytester, tiny_llama, prompt, STEPS, "--kvgate-ignore-eos")
    assert "eos_ignored_from" not in trace["workload"]
    assert "end of text" not in (pytester.path / "r.json").read_text("utf-8")


def test_a_chat_is_captured_once_by_several_workers(
    pytester: pytest.Pytester, chat_model: Path, tmp_path: Path
) -> None:
    chat = written(tmp_path, "chat.json", CHAT)
    pytester.makeconftest(COUNT)
    pytester.makepyfile(test_one=GATE, test_two=GATE)
    result = pytester.runpytest_subprocess(
        "-n2", f"--kvgate-model={chat_model}", f"--kvgate-prompt={chat}",
        f"--kvgate-continuation={chat}", STEPS,
    )  # fmt: skip
    result.assert_outcomes(passed=2)
    assert (pytester.path / "captures.log").read_text("utf-8").count("capture") == 1
