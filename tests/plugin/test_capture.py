"""A model and a prompt in, a verdict out: the real engine, from the command line."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from pytest_kvgate.trace import load_trace
from tests.models import tiny_model

GATE = """
from pytest_kvgate import kvgate

@kvgate(budget=0.25, min_coverage=0.2)
def test_gate():
    pass
"""

COUNT = """
import pytest_kvgate.pipeline.evidence
from pytest_kvgate.pipeline.evidence import capture

def counted(*arguments):
    with open("captures.log", "a") as log:
        log.write("capture\\n")
    return capture(*arguments)

pytest_kvgate.pipeline.evidence.capture = counted
"""

STEPS = "--kvgate-steps=0:9:4"


def captured(pytester: pytest.Pytester, model: Path, prompt: Path, *options: str) -> list[Any]:
    """Run a gate with these options and return the report's traces."""
    result = pytester.runpytest(
        f"--kvgate-model={model}", f"--kvgate-prompt={prompt}", "--kvgate-report=json:r.json",
        *options,
    )  # fmt: skip
    assert result.ret == pytest.ExitCode.OK, result.stdout.str() + result.stderr.str()
    traces: list[Any] = json.loads((pytester.path / "r.json").read_text("utf-8"))["traces"]
    return traces


def test_a_model_is_captured_verified_and_judged(
    pytester: pytest.Pytester, tiny_llama: Path, prompt: Path
) -> None:
    pytester.makepyfile(GATE)
    (trace,) = captured(pytester, tiny_llama, prompt, STEPS)
    assert trace["model"]["name"] == "tiny-llama"
    assert trace["model"]["architecture"] == "llama"
    assert trace["workload"] == {
        "name": "lesson",
        "n_prompt": 901,
        "kind": "text",
        "forced": False,
    }
    assert (trace["n_context"], trace["n_steps"]) == (910, 3)
    assert trace["verification"]["status"] == "passed"
    assert trace["verification"]["max_abs_error"] < 1e-5
    assert trace["capture"]["flash_attention"] is False
    assert trace["capture"]["cache_type_k"] == "f16"


def test_33_steps_are_sampled_by_default(
    pytester: pytest.Pytester, tiny_llama: Path, prompt: Path
) -> None:
    pytester.makepyfile(GATE)
    (trace,) = captured(pytester, tiny_llama, prompt)
    assert (trace["n_steps"], trace["n_context"]) == (33, 901 + 257)


@pytest.mark.parametrize("cache_type", ["f32", "bf16", "q8_0", "q4_0"])
def test_the_cache_type_is_passed_on(
    pytester: pytest.Pytester, tiny_llama: Path, prompt: Path, cache_type: str
) -> None:
    pytester.makepyfile(GATE)
    option = f"--kvgate-cache-type-k={cache_type}"
    (trace,) = captured(pytester, tiny_llama, prompt, STEPS, option)
    assert trace["capture"]["cache_type_k"] == cache_type
    assert trace["verification"]["max_abs_error"] < 1e-5


def test_threads_and_gpu_layers_are_passed_on(
    pytester: pytest.Pytester, tiny_llama: Path, prompt: Path
) -> None:
    pytester.makepyfile(GATE)
    options = (STEPS, "--kvgate-threads=1", "--kvgate-ngl=2")
    (trace,) = captured(pytester, tiny_llama, prompt, *options)
    assert (trace["capture"]["n_threads"], trace["capture"]["n_gpu_layers"]) == (1, 2)


def test_everything_can_stand_in_the_ini_file(
    pytester: pytest.Pytester, tiny_llama: Path, prompt: Path
) -> None:
    pytester.makeini(
        f"""
        [pytest]
        kvgate_model = {tiny_llama}
        kvgate_prompt = {prompt}
        kvgate_steps = 0:5:2
        kvgate_ctx = 2000
        kvgate_ngl = 1
        kvgate_threads = 1
        kvgate_cache_type_k = q8_0
        kvgate_save = kept
        kvgate_report = json:r.json
        """
    )
    pytester.makepyfile(GATE)
    result = pytester.runpytest()
    result.assert_outcomes(passed=1)
    result.stdout.fnmatch_lines(["kvgate: tiny-llama; 1 capture, 32-token pages"])
    (trace,) = json.loads((pytester.path / "r.json").read_text("utf-8"))["traces"]
    assert trace["n_steps"] == 3
    assert trace["capture"]["cache_type_k"] == "q8_0"
    assert trace["capture"]["n_threads"] == 1
    assert trace["capture"]["n_gpu_layers"] == 1
    assert load_trace(pytester.path / "kept" / "tiny-llama-lesson").n_context == 906


def test_a_conftest_can_supply_the_model(
    pytester: pytest.Pytester, tiny_llama: Path, prompt: Path
) -> None:
    pytester.makeconftest(
        f"""
        def pytest_configure(config):
            config.addinivalue_line("kvgate_model", {str(tiny_llama)!r})
            config.addinivalue_line("kvgate_prompt", {str(prompt)!r})
        """
    )
    pytester.makepyfile(GATE)
    pytester.runpytest("--kvgate-steps=0:5:2").assert_outcomes(passed=1)


def test_a_saved_trace_gives_the_same_verdict_without_the_model(
    pytester: pytest.Pytester, tiny_llama: Path, prompt: Path
) -> None:
    pytester.makepyfile(GATE)
    captured(pytester, tiny_llama, prompt, STEPS, "--kvgate-save=kept")
    first = json.loads((pytester.path / "r.json").read_text("utf-8"))
    result = pytester.runpytest(
        "--kvgate-trace=kept/tiny-llama-lesson", "--kvgate-report=json:again.json"
    )
    result.assert_outcomes(passed=1)
    again = json.loads((pytester.path / "again.json").read_text("utf-8"))
    for key in ("coverage", "required_budget", "layers", "attention", "traces", "gates"):
        assert again[key] == first[key]


def test_saving_again_overwrites_nothing(
    pytester: pytest.Pytester, tiny_llama: Path, prompt: Path
) -> None:
    pytester.makepyfile(GATE)
    for _ in range(2):
        captured(pytester, tiny_llama, prompt, STEPS, "--kvgate-save=kept")
    assert sorted(path.name for path in (pytester.path / "kept").iterdir()) == [
        "tiny-llama-lesson",
        "tiny-llama-lesson-2",
    ]


def test_nothing_is_kept_where_nobody_asked(
    pytester: pytest.Pytester,
    tiny_llama: Path,
    prompt: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    scratch = tmp_path / "scratch"
    scratch.mkdir()
    monkeypatch.setattr("tempfile.tempdir", str(scratch))
    pytester.makepyfile(GATE)
    captured(pytester, tiny_llama, prompt, STEPS)
    assert list(scratch.iterdir()) == []


def test_gates_of_one_session_share_one_capture(
    pytester: pytest.Pytester, tiny_llama: Path, prompt: Path
) -> None:
    pytester.makeconftest(COUNT)
    pytester.makepyfile(
        test_one=GATE,
        test_two=GATE.replace("budget=0.25", "budget=0.5, page_size=16"),
        test_three="def test_body(kvgate_profile, kvgate_trace): pass",
    )
    result = pytester.runpytest_subprocess(
        f"--kvgate-model={tiny_llama}", f"--kvgate-prompt={prompt}", STEPS
    )
    result.assert_outcomes(passed=3)
    assert (pytester.path / "captures.log").read_text("utf-8").count("capture") == 1


def test_a_capture_that_fails_is_tried_once_and_fails_every_gate(
    pytester: pytest.Pytester, tiny_llama: Path, prompt: Path
) -> None:
    pytester.makeconftest(COUNT)
    pytester.makepyfile(
        "import pytest\n" + GATE.replace("@kvgate", "@pytest.mark.xfail\n@kvgate"),
        test_two=GATE,
        test_three="def test_body(kvgate_profile): pass",
    )
    result = pytester.runpytest_subprocess(
        f"--kvgate-model={tiny_llama}", f"--kvgate-prompt={prompt}", STEPS, "--kvgate-ctx=500"
    )
    assert result.ret == pytest.ExitCode.TESTS_FAILED
    result.assert_outcomes(failed=2, errors=1)
    result.stdout.fnmatch_lines(
        ["INVALID: prompt 'lesson' is 901 tokens, and with 9 decode steps it needs 910; the*"]
    )
    assert (pytester.path / "captures.log").read_text("utf-8").count("capture") == 1


def test_a_finished_conversation_fails_and_says_so(
    pytester: pytest.Pytester, tmp_path: Path
) -> None:
    model = tiny_model(tmp_path / "countdown.gguf", countdown=True)
    prompt = tmp_path / "done.txt"
    prompt.write_text("xyz" * 100 + "a", encoding="utf-8")
    pytester.makepyfile(GATE)
    result = pytester.runpytest(f"--kvgate-model={model}", f"--kvgate-prompt={prompt}", STEPS)
    assert result.ret == pytest.ExitCode.TESTS_FAILED
    result.stdout.fnmatch_lines(["INVALID: prompt 'done' is a finished conversation: the model*"])


def test_a_truncated_model_fails_with_the_engines_last_words(
    pytester: pytest.Pytester, tiny_llama: Path, prompt: Path
) -> None:
    pytester.path.joinpath("cut.gguf").write_bytes(tiny_llama.read_bytes()[:400_000])
    pytester.makepyfile(GATE)
    result = pytester.runpytest("--kvgate-model=cut.gguf", f"--kvgate-prompt={prompt}", STEPS)
    assert result.ret == pytest.ExitCode.TESTS_FAILED
    output = result.stdout.str()
    assert "could not load" in output
    assert "truncated" in output
    assert "not within the file bounds" in " ".join(output.split())


def test_without_llama_a_capture_is_a_usage_error_that_names_the_extra(
    pytester: pytest.Pytester, tiny_llama: Path, prompt: Path
) -> None:
    pytester.makepyfile(GATE)
    # a stand-in that is not there: importing it fails as it does where it is not installed
    pytester.path.joinpath("sitecustomize.py").write_text(
        "import sys\nsys.modules['llama_cpp'] = None\n", encoding="utf-8"
    )
    pytester._monkeypatch.setenv("PYTHONPATH", str(pytester.path))
    result = pytester.runpytest_subprocess(
        f"--kvgate-model={tiny_llama}", f"--kvgate-prompt={prompt}"
    )
    assert result.ret == pytest.ExitCode.USAGE_ERROR
    result.stderr.fnmatch_lines(
        ["ERROR: kvgate: *'llama_cpp', which is not installed. Run: pip install 'pytest-kvgate*"]
    )


def test_without_llama_saved_traces_are_judged(pytester: pytest.Pytester, gqa_trace: Path) -> None:
    pytester.makepyfile(GATE)
    pytester.path.joinpath("sitecustomize.py").write_text(
        "import sys\nfor name in ('llama_cpp', 'gguf', 'filelock'): sys.modules[name] = None\n",
        encoding="utf-8",
    )
    pytester._monkeypatch.setenv("PYTHONPATH", str(pytester.path))
    result = pytester.runpytest_subprocess(f"--kvgate-trace={gqa_trace}")
    result.assert_outcomes(passed=1)


def test_the_engine_prints_nothing_of_its_own(
    pytester: pytest.Pytester, tiny_llama: Path, prompt: Path
) -> None:
    pytester.makepyfile(GATE)
    result = pytester.runpytest_subprocess(
        "-s", f"--kvgate-model={tiny_llama}", f"--kvgate-prompt={prompt}", STEPS
    )
    result.assert_outcomes(passed=1)
    assert result.stderr.str() == ""
    result.stdout.fnmatch_lines(["kvgate: capturing tiny-llama · lesson"])
    assert "llama_" not in result.stdout.str()


def test_two_prompts_of_one_name_are_told_apart(
    pytester: pytest.Pytester, tiny_llama: Path, prompt: Path
) -> None:
    other = pytester.mkdir("other") / prompt.name
    other.write_text("abcdefg" * 120, encoding="utf-8")
    pytester.makepyfile(GATE)
    traces = captured(pytester, tiny_llama, prompt, STEPS, f"--kvgate-prompt={other}")
    assert [trace["workload"]["name"] for trace in traces] == ["lesson", "lesson-2"]
