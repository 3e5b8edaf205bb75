"""No run that judged nothing, or judged badly, exits 0."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.traces import FAILED, make_trace, random_layer

GATE = """
from pytest_kvgate import kvgate

@kvgate(budget=0.25, min_coverage={coverage})
def test_gate():
    pass
"""


def test_a_trace_but_no_gate_is_not_a_success(pytester: pytest.Pytester, gqa_trace: Path) -> None:
    pytester.makepyfile("def test_other(): pass")
    result = pytester.runpytest(f"--kvgate-trace={gqa_trace}")
    assert result.ret == pytest.ExitCode.NO_TESTS_COLLECTED
    result.stdout.fnmatch_lines(
        ["--kvgate-trace was given, but no gate was run: NOTHING WAS EVALUATED."]
    )


def test_looking_at_what_would_run_judges_nothing(
    pytester: pytest.Pytester, gqa_trace: Path
) -> None:
    pytester.makepyfile(GATE.format(coverage=0.95))
    result = pytester.runpytest(
        "--collect-only", f"--kvgate-trace={gqa_trace}", "--kvgate-report=json:out.json"
    )
    assert result.ret == pytest.ExitCode.OK
    assert not (pytester.path / "out.json").exists()


def test_a_report_of_evidence_that_cannot_be_had_is_not_a_success(
    pytester: pytest.Pytester, tiny_llama: Path, prompt: Path
) -> None:
    pytester.makepyfile("def test_other(): pass")
    result = pytester.runpytest(
        f"--kvgate-model={tiny_llama}",
        f"--kvgate-prompt={prompt}",
        "--kvgate-ctx=100",
        "--kvgate-report=json:out.json",
    )
    assert result.ret == pytest.ExitCode.TESTS_FAILED
    result.stdout.fnmatch_lines(["*the context of 100 tokens (--kvgate-ctx)*"])


def test_an_interrupted_run_leaves_an_older_report_whole(
    pytester: pytest.Pytester, gqa_trace: Path
) -> None:
    pytester.makepyfile(GATE.format(coverage=0.2))
    options = (f"--kvgate-trace={gqa_trace}", "--kvgate-report=json:out.json")
    pytester.runpytest(*options)
    before = (pytester.path / "out.json").read_bytes()
    pytester.makepyfile(GATE.format(coverage=0.2).replace("pass", "raise KeyboardInterrupt"))
    result = pytester.runpytest_subprocess(*options)
    assert result.ret == pytest.ExitCode.INTERRUPTED
    assert (pytester.path / "out.json").read_bytes() == before


def test_ctrl_c_ends_a_capture_at_once_and_leaves_nothing_behind(
    pytester: pytest.Pytester, tiny_llama: Path, tmp_path: Path
) -> None:
    prompt = tmp_path / "long.txt"
    prompt.write_text("abcdefghi" * 300, encoding="utf-8")
    scratch = tmp_path / "scratch"
    scratch.mkdir()
    pytester.makepyfile(GATE.format(coverage=0.2))
    command = [
        sys.executable, "-m", "pytest", "-s", f"--kvgate-model={tiny_llama}",
        f"--kvgate-prompt={prompt}", "--kvgate-steps=0:1200:1", "--kvgate-save=kept",
    ]  # fmt: skip
    process = subprocess.Popen(
        command,
        cwd=pytester.path,
        env={**os.environ, "TMPDIR": str(scratch)},
        stdout=subprocess.PIPE,
        text=True,
    )
    assert process.stdout is not None
    for line in process.stdout:
        if "capturing" in line:
            break
    time.sleep(0.5)
    process.send_signal(signal.SIGINT)
    rest, _ = process.communicate(timeout=30)
    assert process.returncode == pytest.ExitCode.INTERRUPTED
    assert "KeyboardInterrupt" in rest
    assert "Exception ignored" not in rest
    assert list((pytester.path / "kept").iterdir()) == []
    assert list(scratch.glob("kvgate-*")) == []


def test_a_trace_whose_only_gate_is_skipped_is_not_a_success(
    pytester: pytest.Pytester, gqa_trace: Path
) -> None:
    source = GATE.format(coverage=0.2).replace("@kvgate", "@pytest.mark.skip\n@kvgate")
    pytester.makepyfile("import pytest\n" + source)
    result = pytester.runpytest(f"--kvgate-trace={gqa_trace}")
    result.assert_outcomes(skipped=1)
    assert result.ret == pytest.ExitCode.NO_TESTS_COLLECTED


def test_a_report_that_fails_to_be_written_leaves_the_summary_and_fails_the_run(
    pytester: pytest.Pytester, gqa_trace: Path
) -> None:
    source = GATE.format(coverage=0.1).replace("pass", "os.rmdir('reports')")
    pytester.makepyfile("import os\n" + source)
    pytester.mkdir("reports")
    result = pytester.runpytest(
        f"--kvgate-trace={gqa_trace}", "--kvgate-report=json:reports/a.json"
    )
    assert result.ret == pytest.ExitCode.TESTS_FAILED
    result.stdout.fnmatch_lines(["GO  *test_gate", "The report*", "could not be written*"])


def test_a_folder_for_traces_that_cannot_be_made_fails_with_a_sentence(
    pytester: pytest.Pytester, tiny_llama: Path, prompt: Path
) -> None:
    pytester.makepyfile(GATE.format(coverage=0.1))
    pytester.path.joinpath("file").write_text("mine", encoding="utf-8")
    result = pytester.runpytest(
        f"--kvgate-model={tiny_llama}",
        f"--kvgate-prompt={prompt}",
        "--kvgate-steps=0:5:2",
        "--kvgate-save=file/below",
    )
    result.assert_outcomes(failed=1)
    assert "Check the folders and the space that --kvgate-save" in " ".join(
        result.stdout.str().split()
    )
    assert "Traceback" not in result.stdout.str()


def test_a_gate_that_is_skipped_after_its_profile_was_made_was_not_judged(
    pytester: pytest.Pytester, gqa_trace: Path
) -> None:
    pytester.makepyfile(
        """
        import pytest
        from pytest_kvgate import kvgate

        @pytest.fixture
        def late(kvgate_profile):
            pytest.skip("later")

        @kvgate(budget=0.25, min_coverage=0.95)
        def test_gate(late):
            pass
        """
    )
    result = pytester.runpytest(f"--kvgate-trace={gqa_trace}")
    result.assert_outcomes(skipped=1)
    assert result.ret == pytest.ExitCode.NO_TESTS_COLLECTED


@pytest.mark.parametrize("fixture", ["kvgate_profile", "kvgate_trace"])
def test_a_test_that_judges_by_itself_is_a_judgement(
    pytester: pytest.Pytester, gqa_trace: Path, fixture: str
) -> None:
    pytester.makepyfile(f"def test_body({fixture}): pass")
    assert pytester.runpytest(f"--kvgate-trace={gqa_trace}").ret == pytest.ExitCode.OK


def test_a_report_without_numbers_is_not_a_success(
    pytester: pytest.Pytester, tmp_path: Path
) -> None:
    layer = random_layer(n_token=640)
    trace = make_trace(tmp_path / "trace", [layer], [640], verification=FAILED)
    pytester.makepyfile("def test_other(): pass")
    result = pytester.runpytest(f"--kvgate-trace={trace}", "--kvgate-report=json:out.json")
    assert result.ret == pytest.ExitCode.TESTS_FAILED
    result.stdout.fnmatch_lines(["No number of tiny is reported: a trace failed its verification."])
