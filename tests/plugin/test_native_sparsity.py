"""A natively sparse model from the command line: refused, or allowed and marked everywhere."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from pytest_kvgate.cli import main
from pytest_kvgate.trace import load_trace
from tests.sparse_models import sparse_model
from tests.traces import PASSED, LayerArrays, make_trace, random_layer

TOP_K = 64
STEPS = "--kvgate-steps=0:9:4"
ALLOW = "--kvgate-allow-native-sparse"
NOTE = (
    f"natively sparse attention, top-k of {TOP_K} tokens: in layers 0-1 a query attends to no "
    "more than the model selects for it; what that hides has no mass, so coverage looks better"
)

GATES = """
from pytest_kvgate import kvgate

@kvgate(budget=0.25, min_coverage=0.01)
def test_go():
    pass

@kvgate(budget=0.05, min_coverage=0.9999)
def test_no_go():
    pass
"""


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("sparse") / "sparse.gguf"
    return sparse_model(path, top_k=TOP_K)


def in_one_line(text: str) -> str:
    return " ".join(text.split())


def test_without_the_flag_the_gate_is_invalid_and_says_why(
    pytester: pytest.Pytester, model: Path, prompt: Path
) -> None:
    pytester.makepyfile(GATES)
    result = pytester.runpytest(f"--kvgate-model={model}", f"--kvgate-prompt={prompt}", STEPS)
    result.assert_outcomes(failed=2)
    output = in_one_line(result.stdout.str())
    assert "INVALID" in output
    assert "this model's attention is natively sparse (top-k of 64 tokens)" in output
    assert "With --kvgate-allow-native-sparse it is measured nevertheless" in output


@pytest.mark.parametrize("by", ["flag", "ini"])
def test_with_the_flag_every_report_is_marked(
    pytester: pytest.Pytester, model: Path, prompt: Path, by: str
) -> None:
    pytester.makepyfile(GATES)
    if by == "ini":
        pytester.makeini("[pytest]\nkvgate_allow_native_sparse = true")
    result = pytester.runpytest(
        f"--kvgate-model={model}",
        f"--kvgate-prompt={prompt}",
        STEPS,
        "--kvgate-save=traces",
        "--kvgate-report=json:r.json",
        *([ALLOW] if by == "flag" else []),
    )
    result.assert_outcomes(passed=1, failed=1)
    output = in_one_line(result.stdout.str())
    # beside the trace, beside both verdicts, and in the failure
    assert output.count(NOTE) == 4
    assert f"Note: {NOTE}." in output
    report = json.loads((pytester.path / "r.json").read_text("utf-8"))
    (trace,) = report["traces"]
    assert trace["native_sparse"] == {"top_k": TOP_K, "layers": [0, 1]}
    assert trace["capture"]["native_sparse"] == trace["native_sparse"]
    assert trace["verification"]["max_abs_error"] < 1e-5
    assert [gate["verdict"] for gate in report["gates"]] == ["GO", "NO-GO"]
    assert [gate["notes"] for gate in report["gates"]] == [[NOTE], [NOTE]]

    # the saved trace stays marked where nobody allows anything
    pytester.makeini("[pytest]")
    again = pytester.runpytest("--kvgate-trace=traces/sparse-lesson")
    again.assert_outcomes(passed=1, failed=1)
    assert in_one_line(again.stdout.str()).count(NOTE) == 4


def test_the_flag_marks_no_ordinary_model(
    pytester: pytest.Pytester, tiny_llama: Path, prompt: Path
) -> None:
    pytester.makepyfile(GATES)
    result = pytester.runpytest(
        f"--kvgate-model={tiny_llama}",
        f"--kvgate-prompt={prompt}",
        STEPS,
        ALLOW,
        "--kvgate-report=json:r.json",
    )
    assert "natively sparse" not in result.stdout.str()
    (trace,) = json.loads((pytester.path / "r.json").read_text("utf-8"))["traces"]
    assert trace["native_sparse"] is None


def test_the_flag_has_no_effect_on_a_saved_trace(
    pytester: pytest.Pytester, gqa_trace: Path
) -> None:
    pytester.makepyfile(GATES)
    result = pytester.runpytest(f"--kvgate-trace={gqa_trace}", ALLOW)
    assert result.ret == pytest.ExitCode.USAGE_ERROR
    result.stderr.fnmatch_lines(
        [f"*{ALLOW} has no effect here: a saved trace is already captured*"]
    )


def test_one_sparse_trace_marks_the_gate_on_a_pool(
    pytester: pytest.Pytester, tmp_path: Path
) -> None:
    layer = random_layer(1, n_token=640)
    visible = random_layer(2, n_token=640).k[:1, :, 0] > 0
    visible[0, 0] = True
    sparse = LayerArrays(layer.k, layer.q, visible=visible)
    for name, layers in (("plain", [layer]), ("sparse", [sparse])):
        make_trace(tmp_path / name, layers, workload=name, verification=PASSED)
    pytester.makepyfile(GATES)
    result = pytester.runpytest(*(f"--kvgate-trace={tmp_path / n}" for n in ("plain", "sparse")))
    output = in_one_line(result.stdout.str())
    note = f"natively sparse attention, top-k of {int(visible.sum())} tokens: in layer 0 a query"
    assert output.count(note) == 4


def test_the_command_captures_it_with_the_flag_only(
    model: Path, prompt: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    arguments = ["capture", str(model), str(prompt), str(tmp_path / "traces"), "--steps=0:9:4"]
    assert main(arguments) == 1
    assert "this model's attention is natively sparse (top-k of 64" in capsys.readouterr().err
    assert main([*arguments, "--allow-native-sparse"]) == 0
    assert NOTE in in_one_line(capsys.readouterr().out)
    trace = tmp_path / "traces" / "sparse-lesson"
    assert load_trace(trace).native_sparsity is not None
    assert main(["profile", str(trace)]) == 0
    assert NOTE in in_one_line(capsys.readouterr().out)
