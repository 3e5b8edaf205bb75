"""Workers of pytest-xdist share one capture, and their verdicts come together."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.plugin.test_capture import COUNT

GATES = """
import pytest
from pytest_kvgate import kvgate

@kvgate(budget=0.25, min_coverage=0.2)
@pytest.mark.parametrize("number", range(6))
def test_gate(number):
    pass

@kvgate(budget=0.25, min_coverage=0.99)
def test_missed():
    pass
"""


def test_workers_share_one_capture(
    pytester: pytest.Pytester, tiny_llama: Path, prompt: Path
) -> None:
    pytester.makeconftest(COUNT)
    pytester.makepyfile(GATES)
    result = pytester.runpytest_subprocess(
        "-n2",
        "-Werror",
        f"--kvgate-model={tiny_llama}",
        f"--kvgate-prompt={prompt}",
        "--kvgate-steps=0:9:4",
        "--kvgate-report=json:out.json",
    )
    result.assert_outcomes(passed=6, failed=1)
    assert (pytester.path / "captures.log").read_text("utf-8").count("capture") == 1
    result.stdout.fnmatch_lines(["tiny-llama (llama, F32)", "NO-GO  *test_missed"])
    report = json.loads((pytester.path / "out.json").read_text("utf-8"))
    assert sorted(gate["verdict"] for gate in report["gates"]) == ["GO"] * 6 + ["NO-GO"]
    assert len(report["traces"]) == 1


def test_wrong_markers_are_a_usage_error_in_workers_too(
    pytester: pytest.Pytester, gqa_trace: Path
) -> None:
    pytester.makepyfile(GATES.replace("budget=0.25", "budget=25"))
    result = pytester.runpytest_subprocess("-n2", f"--kvgate-trace={gqa_trace}")
    assert result.ret == pytest.ExitCode.USAGE_ERROR
    result.stderr.fnmatch_lines(["ERROR: *kvgate(budget=25): budget is a fraction*"])


def test_a_report_needs_no_gate_in_the_workers(pytester: pytest.Pytester, gqa_trace: Path) -> None:
    pytester.makepyfile("def test_other(): pass")
    result = pytester.runpytest_subprocess(
        "-n2", f"--kvgate-trace={gqa_trace}", "--kvgate-report=json:out.json"
    )
    assert result.ret == pytest.ExitCode.OK
    report = json.loads((pytester.path / "out.json").read_text("utf-8"))
    assert len(report["coverage"]) == 4 * 8


def test_the_controller_notices_that_no_gate_was_run(
    pytester: pytest.Pytester, gqa_trace: Path
) -> None:
    pytester.makepyfile("def test_other(): pass")
    result = pytester.runpytest_subprocess("-n2", f"--kvgate-trace={gqa_trace}")
    assert result.ret == pytest.ExitCode.NO_TESTS_COLLECTED


def test_workers_with_copies_of_one_prompt_share_one_capture(
    pytester: pytest.Pytester, tiny_llama: Path, prompt: Path
) -> None:
    pytester.makeconftest(
        COUNT
        + f"""
import shutil, tempfile

def pytest_configure(config):
    folder = tempfile.mkdtemp(dir={str(pytester.mkdir("prompts"))!r})
    config.addinivalue_line("kvgate_model", {str(tiny_llama)!r})
    config.addinivalue_line("kvgate_prompt", shutil.copy({str(prompt)!r}, folder))
"""
    )
    pytester.makepyfile(GATES)
    result = pytester.runpytest_subprocess("-n2", "--kvgate-steps=0:9:4")
    result.assert_outcomes(passed=6, failed=1)
    assert (pytester.path / "captures.log").read_text("utf-8").count("capture") == 1
