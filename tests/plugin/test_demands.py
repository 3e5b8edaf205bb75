"""What a gate may demand beside a coverage, from a decorator to the text of a failed test."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest

from tests.conftest import CASES
from tests.traces import PASSED, make_trace, random_layer

GATE = """
import pytest
from pytest_kvgate import kvgate

@kvgate({arguments})
def test_gate():
    pass
"""
VALUES = CASES / "sinks-softcap"


def run(pytester: pytest.Pytester, trace: Path, arguments: str, *more: str) -> pytest.RunResult:
    pytester.makepyfile(GATE.format(arguments=arguments))
    return pytester.runpytest(f"--kvgate-trace={trace}", "--kvgate-recent=0.05", *more)


def text_of(result: pytest.RunResult) -> str:
    """Return the output with its line breaks gone, for a sentence may be broken anywhere."""
    return " ".join(result.stdout.str().split())


GO = {
    "min_total_mass": (
        "budget=0.25, min_total_mass=0.3",
        "budget 25%, 32-token pages: total mass: oracle 0.4323, landmark 0.4114; required 0.3000",
    ),
    "min_hit_rate": (
        "budget=0.25, min_hit_rate=0.5",
        "budget 25%, 32-token pages: hit rate: landmark 0.5333; required 0.5000",
    ),
    "max_budget": (
        "max_budget=0.5, coverage=0.5",
        "budget 50%, 32-token pages: budget for 0.5: oracle 39.9%, landmark 40%; allowed 50%",
    ),
    "worst-layer": (
        "budget=0.25, min_coverage=0.3, scope='worst-layer'",
        "32-token pages, worst layer: oracle 0.3471, landmark 0.3391; required 0.3000",
    ),
    "layers": (
        "budget=0.25, min_coverage=0.35, layers=[1]",
        "32-token pages, layer 1: oracle 0.4102, landmark 0.3735; required 0.3500",
    ),
    "quest": (
        "budget=0.25, min_coverage=0.35, selector='quest'",
        "32-token pages: quest 0.3632; required 0.3500",
    ),
    "recency": (
        "budget=0.25, min_coverage=0.25, selector='recency'",
        "32-token pages: recency 0.2733; required 0.2500",
    ),
    "confidence": (
        "budget=0.25, min_coverage=0.2, confidence=0.95",
        "32-token pages, confidence 95%: oracle 0.3786, landmark 0.3563; required 0.2000",
    ),
    "all at once": (
        "budget=0.25, min_coverage=0.2, min_total_mass=0.3, min_hit_rate=0.5, max_budget=0.5, "
        "coverage=0.5",
        "oracle 0.3786, landmark 0.3563; required 0.2000; total mass: oracle 0.4323, landmark "
        "0.4114; required 0.3000; hit rate: landmark 0.5333; required 0.5000; budget for 0.5: "
        "oracle 39.9%, landmark 40%; allowed 50%",
    ),
}


@pytest.mark.parametrize(("arguments", "summary"), GO.values(), ids=GO.keys())
def test_a_gate_that_holds_is_go_with_its_numbers(
    pytester: pytest.Pytester, gqa_trace: Path, arguments: str, summary: str
) -> None:
    result = run(pytester, gqa_trace, arguments)
    result.assert_outcomes(passed=1)
    assert summary in text_of(result)
    result.stdout.fnmatch_lines(["GO  *test_gate"])


NO_GO = {
    "min_total_mass": (
        "budget=0.25, min_total_mass=0.9",
        "total mass of observed required margin ---",
        "NO-GO: the ceiling is below the threshold: even a perfect selector of 32-token pages "
        "holds 0.4323 of all mass at a budget of 25%, so no selector can pass. Required: 0.9.",
    ),
    "min_hit_rate": (
        "budget=0.25, min_hit_rate=0.9",
        "hit rate of observed required margin ---",
        "NO-GO: the pool misses too often: landmark finds 0.5333 of its pages in a pool of 2 × a "
        "step's pages at a budget of 25%, where 0.9 is required. No pool serves 99%: ",
    ),
    "max_budget": (
        "max_budget=0.25, coverage=0.5",
        "budget for 0.5 of observed allowed margin ---",
        "NO-GO: the ceiling is too costly: even a perfect selector of 32-token pages needs a "
        "budget of 39.9% for a coverage of 0.5, so no selector can pass. 25% is allowed.",
    ),
    "max_budget of a selector": (
        "max_budget=0.4, coverage=0.5, selector='recency'",
        "recency 49.8% 40% -9.8% missed",
        "NO-GO: the selector is the problem: recency needs a budget of 49.8% for a coverage of "
        "0.5; the others: oracle 39.9%, landmark 40%, quest 39.9%, ",
    ),
    "worst-layer": (
        "budget=0.25, min_coverage=0.345, scope='worst-layer'",
        "landmark 0.3391 0.3450 -0.0059 missed",
        "NO-GO: the selector is the problem: landmark holds 0.3391 of the eligible mass in the "
        "worst layer at a budget of 25%; the others: oracle 0.3471, ",
    ),
    "p05": (
        "budget=0.25, min_coverage=0.9, scope='p05'",
        "budget 25%, pages of 32 tokens, worst 5% of units",
        " of the eligible mass in the worst twentieth of the units at a budget of 25%, so no ",
    ),
    "layers": (
        "budget=0.25, min_coverage=0.35, layers=[0], selector='oracle'",
        "budget 25%, pages of 32 tokens, layer 0",
        "holds 0.3471 of the eligible mass in the chosen layers at a budget of 25%, so no",
    ),
    "quest": (
        "budget=0.25, min_coverage=0.37, selector='quest'",
        "quest 0.3632 0.3700 -0.0068 missed",
        "NO-GO: the selector is the problem: quest holds 0.3632 of the eligible mass at a budget "
        "of 25%; the others: oracle 0.3786, landmark 0.3563, mean-std 0.3654, ",
    ),
    "confidence": (
        "budget=0.25, min_coverage=0.9, confidence=0.95",
        "coverage of observed interval required margin ---",
        "NO-GO: the ceiling is below the threshold: even a perfect selector of 32-token pages "
        "holds 0.3786 of the eligible mass",
    ),
}


@pytest.mark.parametrize(("arguments", "table", "reason"), NO_GO.values(), ids=NO_GO.keys())
def test_a_gate_that_is_missed_fails_with_its_table_and_reason(
    pytester: pytest.Pytester, gqa_trace: Path, arguments: str, table: str, reason: str
) -> None:
    result = run(pytester, gqa_trace, arguments)
    assert result.ret == pytest.ExitCode.TESTS_FAILED
    assert table in text_of(result)
    assert reason in text_of(result)
    assert "Traceback" not in result.stdout.str()


def test_an_output_error_is_judged_where_v_was_saved(pytester: pytest.Pytester) -> None:
    expected = json.loads((VALUES / "expected.json").read_text("utf-8"))["coverage"]
    error = next(
        row["output_error"]
        for row in expected
        if (row["budget"], row["selector"]) == (0.25, "landmark")
    )
    result = run(pytester, VALUES, f"budget=0.25, max_output_error={error + 0.001}")
    result.assert_outcomes(passed=1)
    written = f"{math.ceil(error * 1e4) / 1e4:.4f}"  # what must stay small is cut upwards
    assert f"output error: landmark {written}; allowed " in text_of(result)
    result = run(pytester, VALUES, f"budget=0.25, max_output_error={error - 0.001}")
    result.assert_outcomes(failed=1)
    assert (
        "NO-GO: attention to a selection is too far from attention to everything: landmark has an "
        f"attention-output error of {written} at a budget of 25%, where "
    ) in text_of(result)


def test_an_output_error_without_v_is_invalid_and_says_how_to_capture_it(
    pytester: pytest.Pytester, gqa_trace: Path
) -> None:
    arguments = "budget=0.25, max_output_error=0.5)\n@pytest.mark.xfail(strict=True"
    result = run(pytester, gqa_trace, arguments)
    result.assert_outcomes(failed=1)
    assert (
        "INVALID: output_error of landmark is undefined: the trace holds no values (V); capture it "
        "with --kvgate-values."
    ) in text_of(result)


def test_a_layer_that_the_model_does_not_have_is_invalid(
    pytester: pytest.Pytester, gqa_trace: Path
) -> None:
    result = run(pytester, gqa_trace, "budget=0.25, min_coverage=0.1, layers=[1, 7]")
    result.assert_outcomes(failed=1)
    result.stdout.fnmatch_lines(["INVALID  *test_gate"])
    assert (
        "INVALID: layer 7 of layers=[1, 7] holds no unit that counts: it is not a layer of this "
        "model with a KV cache and without a sliding window. Accepted: 0-1."
    ) in text_of(result)


def test_a_windowed_layer_cannot_be_chosen(pytester: pytest.Pytester) -> None:
    trace = CASES / "alibi-window"
    result = run(pytester, trace, "budget=0.25, min_coverage=0.1, layers=[1]")
    result.assert_outcomes(failed=1)
    assert "layer 1 of layers=[1] holds no unit that counts" in text_of(result)
    run(pytester, trace, "budget=0.25, min_coverage=0.1, layers=[0]").assert_outcomes(passed=1)


def test_dense_layers_are_named_where_some_layers_could_be_paged(
    pytester: pytest.Pytester, gqa_trace: Path
) -> None:
    result = run(pytester, gqa_trace, "budget=0.25, min_coverage=0.4")
    assert (
        "Dense layers, to keep resident, for even the ceiling is below the threshold there: 0 (1 "
        "of 2)."
    ) in text_of(result)
    assert (
        "Dense at 25%, to keep resident for 0.4: 0 (1 of 2); the others: oracle 0.4102, landmark "
        "0.3735."
    ) not in text_of(result)  # the summary takes the largest coverage that is reported
    assert "Dense at 25%, to keep resident for 0.95: all 2 layers" in text_of(result)


class TestInconclusive:
    # landmark holds 0.3563 of the case's mass at 25%
    ARGUMENTS = "budget=0.25, min_coverage=0.355, confidence=0.95, selector='landmark'"

    def test_it_fails_and_says_what_would_settle_it(
        self, pytester: pytest.Pytester, gqa_trace: Path
    ) -> None:
        result = run(pytester, gqa_trace, self.ARGUMENTS)
        result.assert_outcomes(failed=1)
        result.stdout.fnmatch_lines(
            [
                "kvgate INCONCLUSIVE: synthetic, budget 25%, pages of 32 tokens, confidence 95%",
                "*landmark * 0.3563 * 0.3*..0.3* * 0.3550 * +0.0013 *open",
                "INCONCLUSIVE: landmark holds 0.3563 of the eligible mass at a budget of 25%, *",
                "INCONCLUSIVE  *test_gate",
                "FAILED *test_gate*",
            ]
        )
        text = text_of(result)
        assert text.count("over 4 steps holds the threshold 0.355. If the number stays") == 2
        assert text.count("steps would settle it. More prompts tell more than more steps of") == 2
        assert "the interval rests on 4 steps only" in text

    @pytest.mark.parametrize("strict", [True, False])
    def test_an_xfail_excuses_it_like_a_missed_gate(
        self, pytester: pytest.Pytester, gqa_trace: Path, strict: bool
    ) -> None:
        marked = f"{self.ARGUMENTS})\n@pytest.mark.xfail(strict={strict}"
        result = run(pytester, gqa_trace, marked)
        assert result.ret == pytest.ExitCode.OK
        result.assert_outcomes(xfailed=1)
        result.stdout.fnmatch_lines(["INCONCLUSIVE  *test_gate"])

    def test_a_body_that_skips_does_not_take_it_along(
        self, pytester: pytest.Pytester, gqa_trace: Path
    ) -> None:
        pytester.makepyfile(
            GATE.format(arguments=self.ARGUMENTS).replace("pass", "pytest.skip('later')")
        )
        result = pytester.runpytest(f"--kvgate-trace={gqa_trace}", "--kvgate-recent=0.05")
        result.assert_outcomes(failed=1)
        result.stdout.fnmatch_lines(["kvgate INCONCLUSIVE: *"])

    def test_a_missed_gate_beside_it_decides(
        self, pytester: pytest.Pytester, gqa_trace: Path
    ) -> None:
        arguments = self.ARGUMENTS + ", min_hit_rate=1"
        run(pytester, gqa_trace, arguments).stdout.fnmatch_lines(["NO-GO  *test_gate"])

    def test_one_step_is_not_enough_for_any_confidence(
        self, pytester: pytest.Pytester, tmp_path: Path
    ) -> None:
        trace = make_trace(tmp_path / "t", [random_layer(n_token=640)], [640], verification=PASSED)
        result = run(pytester, trace, "budget=0.25, min_coverage=0.01, confidence=0.5")
        result.assert_outcomes(failed=1)
        assert (
            "but one sampled step gives no interval. Sample more steps (--kvgate-steps) or give "
            "more prompts."
        ) in text_of(result)

    def test_its_interval_is_in_the_report(
        self, pytester: pytest.Pytester, gqa_trace: Path
    ) -> None:
        run(pytester, gqa_trace, self.ARGUMENTS, "--kvgate-report=json:out.json")
        report = json.loads((pytester.path / "out.json").read_text("utf-8"))
        (row,) = report["gates"]
        assert (row["verdict"], row["confidence"]) == ("INCONCLUSIVE", 0.95)
        (found,) = row["checks"]
        assert found["state"] == "open"
        low, high = found["interval"]
        assert low <= 0.355 <= high
        (ci,) = (
            other["ci"]
            for other in report["coverage"]
            if (other["budget"], other["selector"]) == (0.25, "landmark")
        )
        assert found["interval"] == ci


def report_of(pytester: pytest.Pytester, *options: str) -> tuple[pytest.RunResult, dict[str, Any]]:
    result = pytester.runpytest(*options, "--kvgate-report=json:out.json")
    report: dict[str, Any] = json.loads((pytester.path / "out.json").read_text("utf-8"))
    return result, report


def errors_of(report: dict[str, Any]) -> list[float | None]:
    return [
        row["output_error"]
        for row in report["coverage"]
        if (row["budget"], row["selector"]) == (0.25, "landmark")
    ]


class TestCapturedValues:
    STEPS = "--kvgate-steps=0:9:4"

    def test_a_gate_on_the_output_error_turns_the_capture_of_v_on(
        self, pytester: pytest.Pytester, tiny_llama: Path, prompt: Path
    ) -> None:
        pytester.makepyfile(GATE.format(arguments="budget=0.25, max_output_error=2"))
        result, report = report_of(
            pytester,
            f"--kvgate-model={tiny_llama}",
            f"--kvgate-prompt={prompt}",
            self.STEPS,
            "--kvgate-save=kept",
        )
        result.assert_outcomes(passed=1)
        (error,) = errors_of(report)
        assert error is not None
        assert 0 < error < 2
        assert report["gates"][0]["observed"] == error
        assert list((pytester.path / "kept").glob("tiny-llama-lesson/layers/*/v.npy"))

    def test_without_such_a_gate_v_is_captured_on_demand(
        self, pytester: pytest.Pytester, tiny_llama: Path, prompt: Path
    ) -> None:
        pytester.makepyfile(GATE.format(arguments="budget=0.25, min_coverage=0.1"))
        options = (f"--kvgate-model={tiny_llama}", f"--kvgate-prompt={prompt}", self.STEPS)
        _, report = report_of(pytester, *options)
        assert errors_of(report) == [None]
        _, report = report_of(pytester, *options, "--kvgate-values")
        (error,) = errors_of(report)
        assert error is not None
        pytester.makeini("[pytest]\nkvgate_values = true")
        _, again = report_of(pytester, *options)
        assert errors_of(again) == [error]

    def test_values_without_a_capture_have_no_effect(
        self, pytester: pytest.Pytester, gqa_trace: Path
    ) -> None:
        pytester.makepyfile(GATE.format(arguments="budget=0.25, min_coverage=0.1"))
        result = pytester.runpytest("--kvgate-values", f"--kvgate-trace={gqa_trace}")
        assert result.ret == pytest.ExitCode.USAGE_ERROR
        result.stderr.fnmatch_lines(["*--kvgate-values has no effect here: a saved trace is*"])

    def test_workers_capture_v_too(
        self, pytester: pytest.Pytester, tiny_llama: Path, prompt: Path
    ) -> None:
        pytester.makepyfile(GATE.format(arguments="budget=0.25, max_output_error=2"))
        result = pytester.runpytest_subprocess(
            "-n2", f"--kvgate-model={tiny_llama}", f"--kvgate-prompt={prompt}", self.STEPS
        )
        result.assert_outcomes(passed=1)


@pytest.mark.parametrize("switch", ["values", "verbose", "allow_native_sparse"])
def test_a_switch_in_an_ini_file_needs_true_or_false(
    pytester: pytest.Pytester, gqa_trace: Path, switch: str
) -> None:
    pytester.makepyfile(GATE.format(arguments="budget=0.25, min_coverage=0.1"))
    for text in ("false", "off", "True", "yes", "1"):
        pytester.makeini(f"[pytest]\nkvgate_{switch} = {text}")
        pytester.runpytest(f"--kvgate-trace={gqa_trace}").assert_outcomes(passed=1)
    pytester.makeini(f"[pytest]\nkvgate_{switch} = maybe")
    result = pytester.runpytest(f"--kvgate-trace={gqa_trace}")
    assert result.ret == pytest.ExitCode.USAGE_ERROR
    result.stderr.fnmatch_lines(
        [f"*ini key kvgate_{switch} 'maybe' is a switch and needs true or false."]
    )
