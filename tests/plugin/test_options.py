"""Every option and ini key: what it does, who wins, and what a bad value says."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest

from pytest_kvgate.options import OPTIONS

GATE = """
from pytest_kvgate import kvgate

@kvgate(budget=0.1, min_coverage=0.1)
def test_gate():
    pass
"""


def settings_of(pytester: pytest.Pytester, *options: str) -> dict[str, Any]:
    """Run with a JSON report and return what it states as settings."""
    pytester.makepyfile(GATE)
    result = pytester.runpytest(*options, "--kvgate-report=json:out.json")
    assert result.ret == pytest.ExitCode.OK, result.stdout.str()
    report = json.loads((pytester.path / "out.json").read_text(encoding="utf-8"))
    settings: dict[str, Any] = report["settings"]
    return settings


def test_the_built_in_defaults(pytester: pytest.Pytester, gqa_trace: Path) -> None:
    settings = settings_of(pytester, f"--kvgate-trace={gqa_trace}")
    assert settings == {
        "page_size": 32,
        "sinks": 32,
        "recent": 0.02,
        "budgets": [0.005, 0.01, 0.02, 0.04, 0.1],
        "selectors": [
            "oracle",
            "landmark",
            "quest",
            "mean-std",
            "cuboid-mean",
            "recency",
            "random",
            "token-oracle",
        ],
        "pool": 2.0,
        "link": None,
    }


@pytest.mark.parametrize(
    ("option", "text", "key", "value"),
    [
        ("page-size", "16", "page_size", 16),
        ("sinks", "4", "sinks", 4),
        ("sinks", "0", "sinks", 0),
        ("recent", "0.25", "recent", 0.25),
        ("recent", "64", "recent", 64),
        ("recent", "0", "recent", 0),
        ("budgets", "0.5,0.25", "budgets", [0.1, 0.25, 0.5]),
        ("selectors", "landmark", "selectors", ["landmark", "oracle"]),
        ("selectors", "token-oracle,oracle", "selectors", ["token-oracle", "oracle", "landmark"]),
        ("selectors", "quest, random", "selectors", ["quest", "random", "oracle", "landmark"]),
        ("pool", "1.5", "pool", 1.5),
        ("pool", "1", "pool", 1.0),
        ("link", "25", "link", 25.0),
    ],
)
def test_a_setting_comes_from_the_command_line_or_the_ini_file(
    pytester: pytest.Pytester,
    gqa_trace: Path,
    option: str,
    text: str,
    key: str,
    value: object,
) -> None:
    trace = f"--kvgate-trace={gqa_trace}"
    assert settings_of(pytester, trace, f"--kvgate-{option}={text}")[key] == value
    pytester.makeini(f"[pytest]\nkvgate_{option.replace('-', '_')} = {text}")
    assert settings_of(pytester, trace)[key] == value


def test_the_command_line_wins_over_the_ini_file(
    pytester: pytest.Pytester, gqa_trace: Path
) -> None:
    pytester.makeini("[pytest]\nkvgate_page_size = 8\nkvgate_sinks = 16")
    settings = settings_of(pytester, f"--kvgate-trace={gqa_trace}", "--kvgate-page-size=16")
    assert (settings["page_size"], settings["sinks"]) == (16, 16)


def test_traces_in_the_ini_file_are_relative_to_it(
    pytester: pytest.Pytester, gqa_trace: Path
) -> None:
    (pytester.path / "saved").symlink_to(gqa_trace.parent)
    pytester.makeini("[pytest]\nkvgate_trace =\n    saved/gqa-f16\n    saved/sinks-softcap")
    inner = pytester.mkdir("inner")
    inner.joinpath("test_gate.py").write_text(GATE, encoding="utf-8")
    result = pytester.runpytest("inner")
    result.assert_outcomes(passed=1)
    result.stdout.fnmatch_lines(["kvgate: synthetic; 2 saved traces, 32-token pages"])


@pytest.mark.parametrize(
    ("option", "text", "message"),
    [
        ("steps", "5", "needs START:STOP:STRIDE in decode steps*"),
        ("steps", "5:5:1", "needs START:STOP:STRIDE*0 <= START < STOP*"),
        ("steps", "0:9:0", "needs START:STOP:STRIDE*STRIDE >= 1*"),
        ("steps", "-1:9:1", "needs START:STOP:STRIDE*"),
        ("steps", "a:b", "needs START:STOP:STRIDE*"),
        ("steps", "0:9:1:7", "needs START:STOP:STRIDE*"),
        ("ctx", "0", "needs a whole number of tokens, 1 or more."),
        ("ngl", "-1", "needs a whole number of layers, 0 or more."),
        ("threads", "two", "needs a whole number of threads, 1 or more."),
        ("cache-type-k", "q4_1", "is no K cache type that can be verified; accepted: f32, f16,*"),
        ("page-size", "0", "needs a whole number of tokens, 1 or more."),
        ("page-size", "1.5", "needs a whole number of tokens, 1 or more."),
        ("sinks", "-1", "needs a whole number of tokens, 0 or more."),
        ("recent", "-0.1", "needs a fraction of the context below 1*"),
        ("recent", "1.5", "needs a fraction of the context below 1*or a whole number of tokens."),
        ("recent", "nan", "needs a fraction of the context below 1*"),
        ("recent", "inf", "needs a fraction of the context below 1*"),
        ("budgets", "0.1,2", "needs comma-separated fractions of the context*"),
        ("budgets", "0", "needs comma-separated fractions*"),
        ("budgets", "", "needs comma-separated fractions*"),
        ("budgets", "nan", "needs comma-separated fractions*"),
        ("selectors", "oracle,best", "names 'best', which is no selector; accepted: oracle,*"),
        ("selectors", "", "names '', which is no selector; accepted: oracle,*"),
        ("pool", "0.5", "needs a multiple of the pages of one step, from 1 to 1000, such as 2."),
        ("pool", "nan", "needs a multiple of the pages of one step*"),
        ("pool", "2x", "needs a multiple of the pages of one step*"),
        (
            "link",
            "0",
            "needs the speed of the link to host memory in GB/s, from 0.001, such as 25.",
        ),
        ("link", "-1", "needs the speed of the link*"),
        ("link", "inf", "needs the speed of the link*"),
        ("link", "25GB", "needs the speed of the link*"),
        ("sweep", "16,0", "needs comma-separated page sizes in tokens, 1 or more, such as 16,32."),
        ("sweep", "16;32", "needs comma-separated page sizes*"),
        ("sweep", "1.5", "needs comma-separated page sizes*"),
        ("report", "out.json", "needs KIND:PATH with KIND one of json."),
        ("report", "xml:out.xml", "needs KIND:PATH with KIND one of json."),
    ],
)
def test_a_malformed_value_is_a_usage_error_that_shows_a_good_one(
    pytester: pytest.Pytester, option: str, text: str, message: str
) -> None:
    pytester.makepyfile(GATE)
    result = pytester.runpytest(f"--kvgate-{option}={text}")
    assert result.ret == pytest.ExitCode.USAGE_ERROR
    result.stderr.fnmatch_lines([f"ERROR: kvgate: --kvgate-{option} '{text}' {message}"])
    if text:
        pytester.makeini(f"[pytest]\nkvgate_{option.replace('-', '_')} = {text}")
        result = pytester.runpytest()
        assert result.ret == pytest.ExitCode.USAGE_ERROR
        result.stderr.fnmatch_lines([f"*kvgate: ini key kvgate_{option.replace('-', '_')} '*"])


def test_a_malformed_ini_key_does_not_disturb_a_run_without_gates(
    pytester: pytest.Pytester,
) -> None:
    pytester.makeini("[pytest]\nkvgate_page_size = many\nkvgate_model = nowhere.gguf")
    pytester.makepyfile("def test_other(): pass")
    result = pytester.runpytest()
    assert result.ret == pytest.ExitCode.OK
    assert "kvgate:" not in result.stdout.str()
    assert "= kvgate =" not in result.stdout.str()


def test_a_missing_model_is_a_usage_error(pytester: pytest.Pytester, prompt: Path) -> None:
    pytester.makepyfile(GATE)
    result = pytester.runpytest("--kvgate-model=nowhere.gguf", f"--kvgate-prompt={prompt}")
    assert result.ret == pytest.ExitCode.USAGE_ERROR
    result.stderr.fnmatch_lines(["ERROR: kvgate: model *nowhere.gguf does not exist; a GGUF*"])


def test_a_file_that_is_no_gguf_is_a_usage_error(pytester: pytest.Pytester, prompt: Path) -> None:
    pytester.makepyfile(GATE)
    pytester.path.joinpath("model.gguf").write_bytes(b"PK\x03\x04 not a model")
    result = pytester.runpytest("--kvgate-model=model.gguf", f"--kvgate-prompt={prompt}")
    assert result.ret == pytest.ExitCode.USAGE_ERROR
    result.stderr.fnmatch_lines(["ERROR: kvgate: model *model.gguf begins with b'PK*not a GGUF*"])


def test_a_model_without_a_prompt_is_a_usage_error(
    pytester: pytest.Pytester, tiny_llama: Path
) -> None:
    pytester.makepyfile(GATE)
    result = pytester.runpytest(f"--kvgate-model={tiny_llama}")
    assert result.ret == pytest.ExitCode.USAGE_ERROR
    result.stderr.fnmatch_lines(["*tiny-llama.gguf needs a prompt to read; give --kvgate-prompt*"])


def test_a_missing_prompt_is_a_usage_error(pytester: pytest.Pytester, tiny_llama: Path) -> None:
    pytester.makepyfile(GATE)
    result = pytester.runpytest(f"--kvgate-model={tiny_llama}", "--kvgate-prompt=none.txt")
    assert result.ret == pytest.ExitCode.USAGE_ERROR
    result.stderr.fnmatch_lines(["*--kvgate-prompt *none.txt does not exist or is no file."])


def test_a_model_and_a_trace_exclude_each_other(
    pytester: pytest.Pytester, gqa_trace: Path, tiny_llama: Path, prompt: Path
) -> None:
    pytester.makepyfile(GATE)
    model = f"--kvgate-model={tiny_llama}"
    result = pytester.runpytest(model, f"--kvgate-prompt={prompt}", f"--kvgate-trace={gqa_trace}")
    assert result.ret == pytest.ExitCode.USAGE_ERROR
    result.stderr.fnmatch_lines(["ERROR: kvgate: both a model and a saved trace are given; *"])


def test_a_trace_on_the_command_line_replaces_a_model_in_the_ini_file(
    pytester: pytest.Pytester, gqa_trace: Path
) -> None:
    pytester.makeini("[pytest]\nkvgate_model = nowhere.gguf\nkvgate_prompt = none.txt")
    pytester.makepyfile(GATE)
    pytester.runpytest(f"--kvgate-trace={gqa_trace}").assert_outcomes(passed=1)


@pytest.mark.parametrize(
    "option",
    [
        "prompt=x.txt",
        "continuation=x.txt",
        "ctx=10",
        "steps=0:9:1",
        "ngl=1",
        "threads=1",
        "ignore-eos",
        "save=kept",
    ],
)
def test_a_capture_option_without_a_capture_is_a_usage_error(
    pytester: pytest.Pytester, gqa_trace: Path, option: str
) -> None:
    pytester.makepyfile(GATE)
    flag = f"--kvgate-{option.split('=', maxsplit=1)[0]}"
    result = pytester.runpytest(f"--kvgate-{option}", f"--kvgate-trace={gqa_trace}")
    assert result.ret == pytest.ExitCode.USAGE_ERROR
    result.stderr.fnmatch_lines([f"*{flag} has no effect here: a saved trace is already captured."])
    result = pytester.runpytest(f"--kvgate-{option}")
    assert result.ret == pytest.ExitCode.USAGE_ERROR
    result.stderr.fnmatch_lines([f"*{flag} has no effect here: --kvgate-model is missing."])


def test_the_same_trace_twice_is_a_usage_error(pytester: pytest.Pytester, gqa_trace: Path) -> None:
    pytester.makepyfile(GATE)
    trace = f"--kvgate-trace={gqa_trace}"
    result = pytester.runpytest(trace, trace)
    assert result.ret == pytest.ExitCode.USAGE_ERROR
    result.stderr.fnmatch_lines(["*--kvgate-trace *gqa-f16 is given twice."])


def test_a_trace_that_is_no_folder_is_a_usage_error(pytester: pytest.Pytester) -> None:
    pytester.makepyfile(GATE)
    result = pytester.runpytest("--kvgate-trace=nowhere")
    assert result.ret == pytest.ExitCode.USAGE_ERROR
    result.stderr.fnmatch_lines(["*--kvgate-trace *nowhere is not a folder;*--kvgate-save wrote."])


def test_a_trace_that_misses_a_file_is_a_usage_error_that_names_it(
    pytester: pytest.Pytester, gqa_trace: Path
) -> None:
    pytester.makepyfile(GATE)
    trace = shutil.copytree(gqa_trace, pytester.path / "copy")
    (trace / "layers" / "001" / "q.npy").unlink()
    result = pytester.runpytest("--kvgate-trace=copy")
    assert result.ret == pytest.ExitCode.USAGE_ERROR
    result.stderr.fnmatch_lines(["ERROR: kvgate: *copy/layers/001/q.npy: is missing.*"])


def test_ini_keys_that_pytest_never_read_stop_the_run(
    pytester: pytest.Pytester, gqa_trace: Path
) -> None:
    """The value of a flag written apart looks like a test path to pytest's search for its ini."""
    pytester.makeini("[pytest]\nkvgate_page_size = 8")
    pytester.makepyfile(GATE)
    result = pytester.runpytest("--kvgate-trace", str(gqa_trace))
    assert result.ret == pytest.ExitCode.USAGE_ERROR
    result.stderr.fnmatch_lines(
        ["*pytest took the value of --kvgate-trace for a test path*did not read*tox.ini*with '='*"]
    )
    result = pytester.runpytest(f"--kvgate-trace={gqa_trace}")
    result.assert_outcomes(passed=1)


def test_help_lists_every_option(pytester: pytest.Pytester) -> None:
    text = pytester.runpytest("--help").stdout.str()
    for option in OPTIONS:
        # argparse may break the line after the flag
        assert f"{option.flag}{'' if option.switch else '='}" in text
        assert f"{option.ini} (" in text


def test_the_same_trace_by_another_path_is_a_usage_error(
    pytester: pytest.Pytester, gqa_trace: Path
) -> None:
    pytester.makepyfile(GATE)
    (pytester.path / "link").symlink_to(gqa_trace)
    result = pytester.runpytest(f"--kvgate-trace={gqa_trace}", "--kvgate-trace=link")
    assert result.ret == pytest.ExitCode.USAGE_ERROR
    result.stderr.fnmatch_lines(["*--kvgate-trace *link is given twice."])


def test_numbers_and_lists_of_a_toml_file_are_understood(
    pytester: pytest.Pytester, gqa_trace: Path
) -> None:
    pytester.makepyprojecttoml(
        "[tool.pytest.ini_options]\nkvgate_budgets = [0.2, 0.3]\nkvgate_page_size = 16\n"
    )
    pytester.makepyfile(GATE)
    # pytest itself warns that a later version will ask for text here
    result = pytester.runpytest_subprocess(
        f"--kvgate-trace={gqa_trace}", "--kvgate-report=json:out.json"
    )
    result.assert_outcomes(passed=1, warnings=0)
    settings = json.loads((pytester.path / "out.json").read_text(encoding="utf-8"))["settings"]
    assert (settings["budgets"], settings["page_size"]) == ([0.1, 0.2, 0.3], 16)
