"""The kvgate command: the same stages without pytest around them."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from pytest_kvgate.cli import main
from pytest_kvgate.trace import load_trace
from tests.conftest import CASES
from tests.models import tiny_model
from tests.traces import FAILED, make_trace, random_layer


def test_capture_writes_a_verified_trace_and_prints_where(
    tiny_llama: Path, prompt: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    arguments = [str(tiny_llama), str(prompt), str(tmp_path / "traces"), "--steps", "0:9:4"]
    assert main(["capture", *arguments, "--cache-type-k", "q8_0"]) == 0
    where, verified = capsys.readouterr().out.splitlines()
    trace = load_trace(where)
    assert trace.n_context == 910
    assert trace.capture["cache_type_k"] == "q8_0"
    assert verified.startswith("verification passed: the recomputed softmax and the model's own")


def test_profile_prints_the_tables_and_writes_the_report(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    report = tmp_path / "out.json"
    options = ["--recent", "0.05", "--budgets", "0.1,0.25", "--report", f"json:{report}"]
    assert main(["profile", str(CASES / "gqa-f16"), *options]) == 0
    output = capsys.readouterr().out
    lines = [line.split() for line in output.splitlines()]
    assert lines[5][:6] == ["coverage", "at", "10%", "25%", "B", "for"]
    assert ["landmark", "0.1785", "0.3563"] in [line[:3] for line in lines]
    assert ["token-oracle", "0.3536", "0.5391"] in [line[:3] for line in lines]
    rows = json.loads(report.read_text("utf-8"))["coverage"]
    assert rows[0]["coverage"] == pytest.approx(0.185816, abs=1e-5)


def test_a_model_that_is_missing_is_a_sentence_and_exit_1(
    prompt: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["capture", str(tmp_path / "no.gguf"), str(prompt), str(tmp_path)]) == 1
    assert "no.gguf does not exist; a GGUF file is needed." in capsys.readouterr().err


def test_a_capture_that_failed_verification_is_exit_1(
    tiny_llama: Path,
    prompt: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("pytest_kvgate.analysis.verification.SOFTMAX_TOLERANCE", 1e-12)
    arguments = [str(tiny_llama), str(prompt), str(tmp_path / "traces"), "--steps", "0:9:4"]
    assert main(["capture", *arguments]) == 1
    assert "verification failed" in capsys.readouterr().out


def test_a_trace_that_is_missing_is_a_sentence_and_exit_1(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["profile", str(tmp_path / "none")]) == 1
    assert "a trace is a folder with trace.json" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("option", "message"),
    [
        ("--budgets=7", "'7' needs comma-separated fractions"),
        ("--page-size=0", "'0' needs a whole"),
    ],
)
def test_a_malformed_option_shows_a_good_one(
    option: str, message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as ended:
        main(["profile", str(CASES / "gqa-f16"), option])
    assert ended.value.code == 2
    assert message in capsys.readouterr().err


def test_the_installed_command_explains_itself() -> None:
    command = Path(sys.executable).with_name("kvgate")
    result = subprocess.run([command, "--help"], capture_output=True, text=True, check=True)
    assert "capture" in result.stdout
    assert "profile" in result.stdout


def test_no_number_of_a_failed_trace_is_shown(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    layer = random_layer(n_token=640)
    trace = make_trace(tmp_path / "trace", [layer], n_visible=[640], verification=FAILED)
    report = tmp_path / "out.json"
    assert main(["profile", str(trace), "--budgets=0.25", f"--report=json:{report}"]) == 1
    assert "so no number of this model is shown" in capsys.readouterr().out
    document = json.loads(report.read_text("utf-8"))
    assert (document["coverage"], document["layers"]) == ([], [])
    assert document["attention"]["eligible_mass"] is None


def test_a_folder_of_traces_is_told_from_a_trace(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    make_trace(tmp_path / "traces" / "mine", [random_layer(n_token=64)], n_visible=[64])
    assert main(["profile", str(tmp_path / "traces")]) == 1
    assert "It holds traces, though: name one of mine in it." in capsys.readouterr().err


def test_a_report_of_the_command_overwrites_nothing_else(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    mine = tmp_path / "mine.json"
    mine.write_text('{"mine": 1}', encoding="utf-8")
    with pytest.raises(SystemExit):
        main(["profile", str(CASES / "gqa-f16"), f"--report=json:{mine}"])
    assert "is not a kvgate report; it is not overwritten" in capsys.readouterr().err
    assert mine.read_text("utf-8") == '{"mine": 1}'


def test_the_same_trace_twice_does_not_count_twice(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["profile", str(CASES / "gqa-f16"), str(CASES / "gqa-f16")]) == 1
    assert "is given twice; it would count twice." in capsys.readouterr().err


def test_profile_prints_details_and_reports_them(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    report = tmp_path / "out.json"
    options = ["--recent=0.05", "--budgets=0.1,0.25", "--sweep=16,32", "--link=25", "--pool=3"]
    trace = str(CASES / "gqa-f16")
    assert main(["profile", trace, *options, "--verbose", f"--report=json:{report}"]) == 0
    output = capsys.readouterr().out
    for heading in ("95% interval at", "total mass at", "pages of", "pool of 3 × k", "25 GB/s"):
        assert heading in output
    assert max(map(len, output.splitlines())) <= 100
    document = json.loads(report.read_text("utf-8"))
    assert (document["settings"]["pool"], document["settings"]["link"]) == (3.0, 25.0)
    assert {row["page_size"] for row in document["sweep"]} == {16, 32}
    assert all(row["ms_per_token"] is not None for row in document["paging"])
    assert main(["profile", trace, *options]) == 0
    assert "total mass at" not in capsys.readouterr().out


def test_an_unknown_selector_of_the_command_is_shown_with_those_there_are(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert main(["profile", str(CASES / "gqa-f16"), "--selectors=oracle,best"]) == 2
    assert capsys.readouterr().err == (
        "kvgate: --selectors 'oracle,best' names 'best', which is no selector; accepted: oracle, "
        "landmark, quest, mean-std, cuboid-mean, recency, random, token-oracle.\n"
    )


@pytest.mark.parametrize("values", [True, False])
def test_capture_writes_v_on_demand(
    tiny_llama: Path, prompt: Path, tmp_path: Path, values: bool
) -> None:
    arguments = [str(tiny_llama), str(prompt), str(tmp_path / "traces"), "--steps=0:9:4"]
    assert main(["capture", *arguments, *(["--values"] if values else [])]) == 0
    (trace,) = (tmp_path / "traces").iterdir()
    assert all((layer.v is not None) == values for layer in load_trace(trace).layers)


@pytest.mark.parametrize("selectors", ["quest", "landmark,token-oracle", "token-oracle"])
def test_profile_does_without_the_oracle(
    capsys: pytest.CaptureFixture[str], selectors: str
) -> None:
    options = ["--recent", "0.05", "--budgets", "0.1", "--selectors", selectors, "--verbose"]
    assert main(["profile", str(CASES / "gqa-f16"), *options]) == 0
    output = capsys.readouterr().out
    assert selectors.split(",", maxsplit=1)[0] in output
    assert "Dense" not in output


def test_capture_reads_a_chat_and_follows_its_answer(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    template = "{% for message in messages %}[{{ message.content }}]{% endfor %}"
    model = tiny_model(tmp_path / "chat.gguf", chat_template=template)
    chat = tmp_path / "chat.json"
    turns = [("user", "thequickbrownfox" * 20), ("assistant", "abcdefghij")]
    chat.write_text(
        json.dumps([{"role": role, "content": content} for role, content in turns]),
        encoding="utf-8",
    )
    arguments = ["capture", str(model), str(chat), str(tmp_path / "traces")]
    assert main([*arguments, f"--continuation={chat}", "--steps=0:9:4", "--ignore-eos"]) == 0
    where, _verified = capsys.readouterr().out.splitlines()
    assert load_trace(where).workload == {
        "name": "chat",
        "n_prompt": 1 + 16 * 20 + 2,
        "kind": "chat",
        "forced": True,
    }
    assert main([*arguments, f"--continuation={chat}", "--steps=0:99:4"]) == 1
    assert capsys.readouterr().err == (
        "kvgate: the continuation of prompt 'chat' is 10 tokens, so only 3 of 25 sampled steps are "
        "usable. Ask for --kvgate-steps 0:10:4, or give a longer one.\n"
    )


def test_capture_says_from_where_on_it_ignored_the_end_of_the_text(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    model = tiny_model(tmp_path / "countdown.gguf", countdown=True)
    prompt = tmp_path / "ending.txt"
    prompt.write_text("xyz" * 100 + "d", encoding="utf-8")
    arguments = ["capture", str(model), str(prompt), str(tmp_path / "traces"), "--steps=0:9:4"]
    assert main(arguments) == 1
    assert "past its end with --kvgate-ignore-eos." in capsys.readouterr().err
    assert main([*arguments, "--ignore-eos"]) == 0
    where, said, _verified = capsys.readouterr().out.splitlines()
    assert said == "end of text ignored from decode step 3 on"
    assert load_trace(where).eos_ignored_from == 3
