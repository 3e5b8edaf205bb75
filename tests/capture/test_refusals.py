from __future__ import annotations

import tempfile
from pathlib import Path

import pytest

from pytest_kvgate.analysis import verify_capture
from pytest_kvgate.capture import CaptureError, CaptureSettings, Prompt, capture, read_prompt
from pytest_kvgate.engine import EngineError, EngineSettings
from pytest_kvgate.trace import Reference, Trace, Verification
from tests.capture.captures import LETTERS, PROMPT, Captures, random_text
from tests.models import WINDOW


@pytest.fixture
def scratch(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return the folder that temporary files go to during the test."""
    folder = tmp_path / "scratch"
    folder.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(folder))
    return folder


@pytest.fixture
def out(tmp_path: Path, scratch: Path) -> Path:
    """Return an output folder next to ``scratch``."""
    folder = tmp_path / "out"
    folder.mkdir()
    return folder


def attempt(
    model: Path,
    out: Path,
    prompt: Prompt = PROMPT,
    *,
    steps: range = range(4),
    n_context: int | None = None,
) -> Trace:
    engine = EngineSettings(n_threads=1)
    return capture(model, prompt, CaptureSettings(steps, n_context, engine), out, verify_capture)


def assert_nothing_left(out: Path) -> None:
    assert list(out.iterdir()) == []
    assert list((out.parent / "scratch").iterdir()) == []


def test_a_prompt_longer_than_the_asked_context_is_refused(llama: Path, out: Path) -> None:
    with pytest.raises(CaptureError) as refusal:
        attempt(llama, out, n_context=100)
    assert str(refusal.value) == (
        "prompt 'letters' is 121 tokens, and with 4 decode steps it needs 125; the context holds "
        "100 (--kvgate-ctx). Shorten the prompt to 96 tokens, sample fewer --kvgate-steps, or "
        "raise --kvgate-ctx."
    )
    assert_nothing_left(out)


def test_a_prompt_longer_than_the_trained_context_is_refused(llama: Path, out: Path) -> None:
    with pytest.raises(CaptureError) as refusal:
        attempt(llama, out, Prompt("long", random_text(600)))
    assert "601 tokens" in str(refusal.value)
    assert "needs 605; the context holds 512 (the context the model was trained with)" in str(
        refusal.value
    )
    assert "Shorten the prompt to 508 tokens" in str(refusal.value)
    assert_nothing_left(out)


@pytest.mark.parametrize("n_context", [125, 126])
def test_a_prompt_that_just_fits_is_captured(llama: Path, out: Path, n_context: int) -> None:
    assert attempt(llama, out, n_context=n_context).n_context == 125


def test_a_prompt_one_token_too_long_is_refused(llama: Path, out: Path) -> None:
    with pytest.raises(CaptureError, match="needs 125; the context holds 124"):
        attempt(llama, out, n_context=124)
    assert_nothing_left(out)


def test_a_missing_prompt_file_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "missing.txt"
    with pytest.raises(CaptureError) as refusal:
        read_prompt(path)
    assert str(refusal.value) == (
        f"prompt {path} cannot be read (No such file or directory); a text file is needed."
    )


def test_a_folder_as_prompt_is_refused(tmp_path: Path) -> None:
    with pytest.raises(CaptureError, match=r"cannot be read .*; a text file is needed"):
        read_prompt(tmp_path)


@pytest.mark.parametrize("content", [b"", b" \n\t\n"])
def test_an_empty_prompt_file_is_refused(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "empty.txt"
    path.write_bytes(content)
    with pytest.raises(CaptureError) as refusal:
        read_prompt(path)
    assert str(refusal.value) == f"prompt {path} is empty; there must be something to read."


def test_a_prompt_file_that_is_not_utf8_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "latin.txt"
    path.write_bytes("na\u00efve".encode("latin-1"))
    with pytest.raises(CaptureError) as refusal:
        read_prompt(path)
    assert str(refusal.value) == (f"prompt {path} is not UTF-8 text (byte 2). Save it as UTF-8.")


def test_a_prompt_file_names_the_workload(tmp_path: Path) -> None:
    path = tmp_path / "long-chat.txt"
    path.write_text("naïve 日本\n", encoding="utf-8")
    assert read_prompt(path) == Prompt("long-chat", "naïve 日本\n")


def test_a_missing_model_is_refused(tmp_path: Path, out: Path) -> None:
    model = tmp_path / "missing.gguf"
    with pytest.raises(EngineError) as refusal:
        attempt(model, out)
    assert str(refusal.value) == f"model {model} does not exist; a GGUF file is needed."
    assert_nothing_left(out)


def test_a_folder_as_model_is_refused(tmp_path: Path, out: Path) -> None:
    with pytest.raises(EngineError) as refusal:
        attempt(tmp_path, out)
    assert str(refusal.value) == f"model {tmp_path} is a folder; a GGUF file is needed."
    assert_nothing_left(out)


@pytest.mark.parametrize("content", [b"", b"PK\x03\x04 a zip file", b"version https://git-lfs"])
def test_a_file_that_is_no_gguf_file_is_refused(tmp_path: Path, out: Path, content: bytes) -> None:
    model = tmp_path / "model.gguf"
    model.write_bytes(content)
    with pytest.raises(EngineError) as refusal:
        attempt(model, out)
    assert f"begins with {content[:4]!r} and not with b'GGUF'" in str(refusal.value)
    assert "convert_hf_to_gguf.py" in str(refusal.value)
    assert_nothing_left(out)


def test_a_model_cut_short_is_refused_with_the_engines_own_words(
    llama: Path, tmp_path: Path, out: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    whole = llama.read_bytes()
    model = tmp_path / "cut.gguf"
    model.write_bytes(whole[: len(whole) // 2])
    with pytest.raises(EngineError) as refusal:
        attempt(model, out)
    message, words = str(refusal.value).split("Its last words:\n")
    assert str(model) in message
    assert "the file may be truncated" in message
    assert "data is not within the file bounds" in words
    assert_nothing_left(out)
    assert capfd.readouterr() == ("", "")


def test_a_model_cut_within_its_header_is_refused(llama: Path, tmp_path: Path, out: Path) -> None:
    model = tmp_path / "cut.gguf"
    model.write_bytes(llama.read_bytes()[:200])
    with pytest.raises(EngineError, match="the file may be truncated"):
        attempt(model, out)
    assert_nothing_left(out)


def test_an_architecture_that_the_engine_does_not_know_is_refused(
    llama: Path, tmp_path: Path, out: Path
) -> None:
    model = tmp_path / "unknown.gguf"
    model.write_bytes(llama.read_bytes().replace(b"llama", b"lloma"))
    with pytest.raises(EngineError) as refusal:
        attempt(model, out)
    assert "of an architecture this version does not know" in str(refusal.value)
    assert "unknown model architecture: 'lloma'" in str(refusal.value)


def test_text_that_ends_at_the_first_step_is_a_finished_conversation(
    countdown: Path, out: Path
) -> None:
    with pytest.raises(CaptureError) as refusal:
        attempt(countdown, out, Prompt("chat", LETTERS + "a"))
    assert str(refusal.value) == (
        "prompt 'chat' is a finished conversation: the model ends its text at decode step 0, at or "
        "before the first sampled step (0), so 0 of 4 sampled steps are usable. Cut the prompt "
        "where there is still something to say, for example in the middle of an answer; follow "
        "what was recorded with --kvgate-continuation, or let the model go on past its end with "
        "--kvgate-ignore-eos."
    )
    assert_nothing_left(out)


def test_text_that_ends_before_the_first_sampled_step_is_a_finished_conversation(
    countdown: Path, out: Path
) -> None:
    with pytest.raises(CaptureError) as refusal:
        attempt(countdown, out, Prompt("chat", LETTERS + "d"), steps=range(3, 9, 2))
    assert "at decode step 3, at or before the first sampled step (3)" in str(refusal.value)
    assert_nothing_left(out)


def test_text_that_ends_later_names_the_usable_steps(countdown: Path, out: Path) -> None:
    prompt = Prompt("chat", LETTERS + "h")
    with pytest.raises(CaptureError) as refusal:
        attempt(countdown, out, prompt, steps=range(1, 20, 3))
    assert str(refusal.value) == (
        "prompt 'chat': the model ends its text at decode step 7, so only 2 of 7 sampled steps are "
        "usable. Ask for --kvgate-steps 1:7:3; cut the prompt where there is more to say; follow "
        "what was recorded with --kvgate-continuation, or let the model go on past its end with "
        "--kvgate-ignore-eos."
    )
    assert_nothing_left(out)


def test_the_steps_that_a_refusal_names_are_captured(countdown: Path, out: Path) -> None:
    trace = attempt(countdown, out, Prompt("chat", LETTERS + "h"), steps=range(1, 7, 3))
    assert [step.decode_index for step in trace.steps] == [1, 4]


@pytest.mark.parametrize("architecture", ["gemma2", "gpt-oss"])
def test_a_context_within_the_sliding_window_is_refused(
    captures: Captures, out: Path, architecture: str
) -> None:
    prompt = Prompt("short", random_text(WINDOW - 5))
    assert attempt(captures.model(architecture), out, prompt, steps=range(5)).n_context == 33
    with pytest.raises(CaptureError) as refusal:
        attempt(captures.model(architecture), out / "refused", prompt)
    assert str(refusal.value) == (
        "32 tokens fit into this model's sliding window of 32, so layers with a window cannot be "
        "told from those without. Use a prompt longer than the window."
    )
    assert list((out / "refused").iterdir()) == []


@pytest.mark.parametrize("error", [RuntimeError("broken"), KeyboardInterrupt()])
def test_a_verification_that_is_interrupted_leaves_nothing(
    llama: Path, out: Path, error: BaseException
) -> None:
    def verify(_trace: Trace, _reference: Reference) -> Verification:
        raise error

    with pytest.raises(type(error)):
        capture(llama, PROMPT, CaptureSettings(steps=range(1)), out, verify)
    assert_nothing_left(out)


def test_a_refusal_leaves_earlier_traces_alone(llama: Path, out: Path) -> None:
    trace = attempt(llama, out)
    before = {path: path.read_bytes() for path in out.rglob("*") if path.is_file()}
    with pytest.raises(CaptureError):
        attempt(llama, out, n_context=50)
    with pytest.raises(EngineError):
        attempt(llama.with_name("missing.gguf"), out)
    assert {path: path.read_bytes() for path in out.rglob("*") if path.is_file()} == before
    assert list(out.iterdir()) == [trace.directory]


def test_a_good_capture_leaves_no_scratch_files(llama: Path, out: Path, scratch: Path) -> None:
    trace = attempt(llama, out)
    assert list(out.iterdir()) == [trace.directory]
    assert list(scratch.iterdir()) == []


def test_line_ends_reach_the_model_as_they_stand_in_the_file(tmp_path: Path) -> None:
    path = tmp_path / "crlf.txt"
    path.write_bytes(b"one\r\ntwo\rthree\n")
    assert read_prompt(path).content == "one\r\ntwo\rthree\n"
