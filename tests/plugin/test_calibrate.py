"""``--kvgate-calibrate``: no gate passes on an instrument that is off."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest

from pytest_kvgate.cli import main

GATES = """
import pytest
from pytest_kvgate import kvgate

@kvgate(budget=0.25, min_coverage=0.2)
@pytest.mark.parametrize("number", range(2))
def test_gate(number):
    pass

@pytest.mark.xfail
@kvgate(budget=0.25, min_coverage=0.2)
def test_expected_to_miss():
    pass

def test_own_judgement(kvgate_profile):
    assert kvgate_profile.coverage("oracle", 0.25) > 0.2

def test_own_arrays(kvgate_trace):
    assert kvgate_trace.layers
"""

GO = """
from pytest_kvgate import kvgate

@kvgate(budget=0.25, min_coverage=0.2)
def test_gate():
    pass
"""

#: Nothing is masked at the end of the context, so every number is too good.
BROKEN = """
import pytest

from pytest_kvgate.analysis.pages import PageGrid

patch = pytest.MonkeyPatch()

def pytest_configure(config):
    patch.setattr(PageGrid, "recent_tokens", lambda self, n_visible: 0)

def pytest_unconfigure(config):
    patch.undo()
"""

#: Counts the calibrations of all processes of a run.
COUNTED = """
import pytest

import pytest_kvgate.session
from pytest_kvgate.session import calibrate

patch = pytest.MonkeyPatch()

def counted(*arguments):
    with open("calibrations.log", "a") as log:
        log.write("calibration\\n")
    return calibrate(*arguments)

def pytest_configure(config):
    patch.setattr(pytest_kvgate.session, "calibrate", counted)

def pytest_unconfigure(config):
    patch.undo()
"""


def report(pytester: pytest.Pytester) -> Any:  # noqa: ANN401 - JSON
    return json.loads((pytester.path / "out.json").read_text("utf-8"))


def count(pytester: pytest.Pytester) -> int:
    return (pytester.path / "calibrations.log").read_text("utf-8").count("calibration")


@pytest.mark.parametrize("workers", [(), ("-n2",)], ids=["alone", "xdist"])
def test_one_calibration_stands_above_the_verdicts_and_in_the_report(
    pytester: pytest.Pytester, tiny_llama: Path, prompt: Path, workers: tuple[str, ...]
) -> None:
    pytester.makeconftest(COUNTED)
    pytester.makepyfile(GATES.replace("@pytest.mark.xfail\n", ""))
    arguments = (
        *workers,
        "--kvgate-calibrate",
        f"--kvgate-model={tiny_llama}",
        f"--kvgate-prompt={prompt}",
        "--kvgate-steps=0:9:4",
        "--kvgate-threads=1",
        "--kvgate-cache-type-k=q8_0",
        "--kvgate-report=json:out.json",
    )
    run = pytester.runpytest_subprocess if workers else pytester.runpytest
    result = run(*arguments)
    result.assert_outcomes(passed=5)
    result.stdout.fnmatch_lines(
        [
            "tiny-llama (llama, F32)",
            "instrument calibrated: 10 control patterns*worst difference *e-0[0-9]",
            "GO  *test_gate*",
        ]
    )
    assert count(pytester) == 1
    calibration = report(pytester)["calibration"]
    assert calibration["calibrated"] is True
    assert calibration["worst_difference"] < 1e-5
    assert calibration["settings"]["cache_type_k"] == "q8_0"
    assert calibration["settings"]["n_threads"] == 1
    assert {row["pattern"] for row in calibration["comparisons"]} >= {"clustered", "opposed"}
    assert all(row["ok"] for row in calibration["comparisons"])


@pytest.mark.parametrize("workers", [(), ("-n2",)], ids=["alone", "xdist"])
def test_no_gate_passes_on_an_instrument_that_is_off(
    pytester: pytest.Pytester, gqa_trace: Path, workers: tuple[str, ...]
) -> None:
    pytester.makeconftest(BROKEN)
    pytester.makepyfile(GATES)
    arguments = (*workers, f"--kvgate-trace={gqa_trace}", "--kvgate-report=json:out.json")
    run = pytester.runpytest_subprocess if workers else pytester.runpytest
    result = run(*arguments)
    assert result.ret == pytest.ExitCode.OK, "without a calibration, nobody notices"
    assert report(pytester)["calibration"] is None

    result = run("--kvgate-calibrate", *arguments)
    result.assert_outcomes(failed=3, errors=2)
    assert result.ret == pytest.ExitCode.TESTS_FAILED
    result.stdout.fnmatch_lines(
        ["*instrument OFF: *recent*, expected *", "INVALID  *test_gate*", "*instrument OFF: *"]
    )
    assert "oracle      " not in result.stdout.str()
    found = report(pytester)
    assert [gate["verdict"] for gate in found["gates"]] == ["INVALID"] * 3
    assert all("instrument OFF" in gate["reason"] for gate in found["gates"])
    assert found["coverage"] == []
    assert found["calibration"]["calibrated"] is False
    off = {row["pattern"] for row in found["calibration"]["comparisons"] if not row["ok"]}
    assert "recent" in off


def test_a_saved_trace_is_judged_by_an_analysis_that_is_calibrated(
    pytester: pytest.Pytester, gqa_trace: Path
) -> None:
    pytester.makepyfile(GO)
    pytester.makeini("[pytest]\nkvgate_calibrate = true")
    result = pytester.runpytest(f"--kvgate-trace={gqa_trace}")
    result.assert_outcomes(passed=1)
    result.stdout.fnmatch_lines(["instrument calibrated: *", "GO  *test_gate"])


def test_a_calibration_that_crashes_is_off_with_the_reason(
    pytester: pytest.Pytester, gqa_trace: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_arguments: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("pytest_kvgate.calibration.run.write_control_model", full)
    pytester.makepyfile(GO)
    result = pytester.runpytest("--kvgate-calibrate", f"--kvgate-trace={gqa_trace}")
    result.assert_outcomes(failed=1)
    result.stdout.fnmatch_lines(["instrument OFF: *No space left on device", "INVALID  *"])


@pytest.mark.parametrize("source", ["trace", "nothing"])
def test_a_calibration_without_a_gate_judges_nothing(
    pytester: pytest.Pytester, gqa_trace: Path, source: str
) -> None:
    pytester.makepyfile("def test_other(): pass")
    given = [f"--kvgate-trace={gqa_trace}"] if source == "trace" else []
    result = pytester.runpytest("--kvgate-calibrate", *given)
    result.assert_outcomes(passed=1)
    assert result.ret == pytest.ExitCode.NO_TESTS_COLLECTED
    option = source if given else "calibrate"
    result.stdout.fnmatch_lines(
        [
            "instrument calibrated: *",
            f"--kvgate-{option} was given, but no gate was run: NOTHING WAS EVALUATED.",
        ]
    )


def test_an_instrument_that_is_off_fails_a_run_without_gates(pytester: pytest.Pytester) -> None:
    pytester.makeconftest(BROKEN)
    pytester.makepyfile("def test_other(): pass")
    result = pytester.runpytest("--kvgate-calibrate")
    assert result.ret == pytest.ExitCode.TESTS_FAILED
    result.stdout.fnmatch_lines(["instrument OFF: *"])


def test_the_numbers_alone_are_not_reported_by_an_instrument_that_is_off(
    pytester: pytest.Pytester, gqa_trace: Path
) -> None:
    pytester.makeconftest(BROKEN)
    pytester.makeini("[pytest]\nkvgate_calibrate = true")
    pytester.makepyfile("def test_other(): pass")
    result = pytester.runpytest(f"--kvgate-trace={gqa_trace}", "--kvgate-report=json:out.json")
    assert result.ret == pytest.ExitCode.TESTS_FAILED
    result.stdout.fnmatch_lines(["instrument OFF: *"])
    assert report(pytester)["coverage"] == []
    assert report(pytester)["calibration"]["calibrated"] is False


def test_looking_at_what_would_run_calibrates_nothing(
    pytester: pytest.Pytester, gqa_trace: Path
) -> None:
    pytester.makeconftest(COUNTED)
    pytester.makepyfile(GO)
    result = pytester.runpytest(
        "--collect-only", "--kvgate-calibrate", f"--kvgate-trace={gqa_trace}"
    )
    assert result.ret == pytest.ExitCode.OK
    assert not (pytester.path / "calibrations.log").exists()


def test_the_ini_key_disturbs_no_run_without_evidence(pytester: pytest.Pytester) -> None:
    pytester.makeconftest(COUNTED)
    pytester.makeini("[pytest]\nkvgate_calibrate = true")
    pytester.makepyfile(GO)
    result = pytester.runpytest()
    result.assert_outcomes(skipped=1)
    assert not (pytester.path / "calibrations.log").exists()


@pytest.mark.parametrize("where", ["option", "ini"])
def test_a_calibration_without_llama_cpp_is_a_usage_error(
    pytester: pytest.Pytester, gqa_trace: Path, monkeypatch: pytest.MonkeyPatch, where: str
) -> None:
    monkeypatch.setitem(sys.modules, "llama_cpp", None)
    pytester.makepyfile(GO)
    option = ["--kvgate-calibrate"]
    if where == "ini":
        option = []
        pytester.makeini("[pytest]\nkvgate_calibrate = true")
    result = pytester.runpytest(f"--kvgate-trace={gqa_trace}", *option)
    assert result.ret == pytest.ExitCode.USAGE_ERROR
    result.stderr.fnmatch_lines(
        ["ERROR: kvgate: --kvgate-calibrate: *'llama_cpp', which is not installed. Run: pip *"]
    )


def test_the_command_prints_every_comparison_and_the_outcome(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert main(["calibrate", "--cache-type-k=q8_0", "--threads=1", "--ngl=0"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert "q8_0 K cache; budget 4%, 32-token pages;" in lines[0]
    assert "These are fixed; only the engine's options can be chosen." in lines[1]
    assert lines[3].split() == [
        *("pattern", "measure", "selector", "expected", "measured", "difference")
    ]
    rows = [line.split() for line in lines]
    assert ["coverage", "token-oracle", "0.9814", "0.9814"] in [row[:4] for row in rows]
    assert ["diffuse", "eligible", "mass", "0.9437", "0.9437"] in [row[:5] for row in rows]
    assert lines[-1].startswith("instrument calibrated: 10 control patterns")
    assert max(map(len, lines)) <= 100


def test_the_command_calibrates_flash_attention(capsys: pytest.CaptureFixture[str]) -> None:
    options = ["--flash-attn=on", "--cache-type-k=q8_0", "--cache-type-v=q8_0", "--threads=1"]
    assert main(["calibrate", *options]) == 0
    output = capsys.readouterr().out
    assert "q8_0 K cache, flash attention;" in output
    assert "capture      attention output error" in output
    assert output.splitlines()[-1].startswith("instrument calibrated: 10 control patterns")
    assert main(["calibrate", "--cache-type-v=q8_0"]) == 1
    assert "a q8_0 V cache needs flash attention" in capsys.readouterr().err


def test_the_command_says_what_is_off_and_exits_1(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(
        "pytest_kvgate.analysis.pages.PageGrid.recent_tokens", lambda _grid, _n_visible: 0
    )
    assert main(["calibrate", "--threads=1"]) == 1
    output = capsys.readouterr().out
    assert "\ninstrument OFF: " in output
    off = [line for line in output.splitlines() if line.endswith("OFF")]
    assert len(off) > 10
    assert max(map(len, output.splitlines())) <= 100


def test_the_command_needs_llama_cpp(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "llama_cpp", None)
    assert main(["calibrate"]) == 1
    assert "'llama_cpp', which is not installed. Run: pip install" in capsys.readouterr().err


@pytest.mark.parametrize("option", ["--page-size=16", "--ctx=100", "--steps=0:9:1"])
def test_the_command_takes_engine_options_only(
    option: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit):
        main(["calibrate", option])
    assert "unrecognized arguments" in capsys.readouterr().err


def test_a_calibration_beside_a_saved_trace_follows_the_engine_options(
    pytester: pytest.Pytester, gqa_trace: Path
) -> None:
    pytester.makepyfile(GATES.replace("@pytest.mark.xfail\n", ""))
    options = ("--kvgate-threads=1", "--kvgate-flash-attn=on", "--kvgate-cache-type-v=q8_0")
    arguments = (f"--kvgate-trace={gqa_trace}", "--kvgate-report=json:out.json", *options)
    refused = pytester.runpytest(*arguments)
    assert refused.ret == pytest.ExitCode.USAGE_ERROR
    pytester.runpytest(*arguments, "--kvgate-calibrate")
    settings = report(pytester)["calibration"]["settings"]
    assert (settings["flash_attention"], settings["cache_type_v"]) == (True, "q8_0")
    assert settings["n_threads"] == 1
