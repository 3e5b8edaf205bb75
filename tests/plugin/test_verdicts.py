"""A gate turns its test red or green, and says why."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.traces import FAILED, PASSED, make_trace, random_layer

GATE = """
from pytest_kvgate import kvgate

@kvgate(budget={budget}, min_coverage={coverage}{more})
def test_gate():
    {body}
"""


def gate(budget: float, coverage: float, more: str = "", body: str = "pass") -> str:
    return GATE.format(budget=budget, coverage=coverage, more=more, body=body)


def run(pytester: pytest.Pytester, trace: Path, *more: str) -> pytest.RunResult:
    return pytester.runpytest(f"--kvgate-trace={trace}", "--kvgate-recent=0.05", *more)


def test_a_gate_that_holds_passes_and_exits_0(pytester: pytest.Pytester, gqa_trace: Path) -> None:
    pytester.makepyfile(gate(0.1, 0.17))
    result = run(pytester, gqa_trace)
    assert result.ret == pytest.ExitCode.OK
    result.assert_outcomes(passed=1)
    result.stdout.fnmatch_lines(
        ["GO  *test_gate", "*oracle 0.1858, landmark 0.1785; required 0.17*"]
    )


def test_a_ceiling_below_the_threshold_fails_and_names_the_budget_that_would_do(
    pytester: pytest.Pytester, gqa_trace: Path
) -> None:
    pytester.makepyfile(gate(0.1, 0.95))
    result = run(pytester, gqa_trace)
    assert result.ret == pytest.ExitCode.TESTS_FAILED
    result.stdout.fnmatch_lines(
        [
            "kvgate NO-GO: synthetic, budget 10%, pages of 32 tokens",
            "*oracle * 0.1858 * 0.9500 * -0.7642 *missed",
            "*landmark * 0.1785 * 0.9500 * -0.7715 *missed",
            "NO-GO: the ceiling is below the threshold: even a perfect selector of 32-token pages*",
            "*so no selector can pass. The smallest budget at which the",
            "ceiling reaches 0.95 is 85%.",
            "Worst layers of oracle: 0 (0.1784), 1 (0.1932).",
            "Other selectors at this budget: quest 0.1780, mean-std 0.1802, cuboid-mean 0.1764, *",
            "random 0.1195, token-oracle 0.3536.",
        ]
    )
    assert "Traceback" not in result.stdout.str()
    assert "plugin" not in result.stdout.str().split("FAILURES")[1].split("= kvgate =")[0]


def test_a_selector_short_of_a_sufficient_ceiling_is_named_as_the_problem(
    pytester: pytest.Pytester, gqa_trace: Path
) -> None:
    pytester.makepyfile(gate(0.1, 0.18))
    result = run(pytester, gqa_trace)
    assert result.ret == pytest.ExitCode.TESTS_FAILED
    result.stdout.fnmatch_lines(
        [
            "*oracle * 0.1858 * 0.1800 * +0.0058 *ok",
            "*landmark * 0.1785 * 0.1800 * -0.0015 *missed",
            "NO-GO: the selector is the problem: landmark holds 0.1785*",
            "the others: oracle 0.1858, quest 0.1780, mean-std 0.1802, cuboid-mean 0.1764, *",
            "0.1195, token-oracle 0.3536. The smallest budget at which landmark reaches 0.18 is *.",
        ]
    )


def test_one_selector_can_be_asked_for_alone(pytester: pytest.Pytester, gqa_trace: Path) -> None:
    pytester.makepyfile(gate(0.1, 0.18, ', selector="oracle"'))
    run(pytester, gqa_trace).assert_outcomes(passed=1)
    pytester.makepyfile(gate(0.1, 0.18, ', selector="landmark"'))
    run(pytester, gqa_trace).assert_outcomes(failed=1)
    pytester.makepyfile(gate(0.1, 0.35, ', selector="token-oracle"'))
    run(pytester, gqa_trace).assert_outcomes(passed=1)


def test_a_gate_may_name_its_own_page_size(pytester: pytest.Pytester, gqa_trace: Path) -> None:
    pytester.makepyfile(gate(0.1, 0.5, ", page_size=8"))
    result = run(pytester, gqa_trace)
    result.stdout.fnmatch_lines(["kvgate NO-GO: synthetic, budget 10%, pages of 8 tokens"])


def test_stacked_gates_are_all_judged_in_reading_order(
    pytester: pytest.Pytester, gqa_trace: Path
) -> None:
    pytester.makepyfile(
        """
        from pytest_kvgate import kvgate

        @kvgate(budget=0.1, min_coverage=0.95)
        @kvgate(budget=0.25, min_coverage=0.3)
        @kvgate(budget=0.25, min_coverage=0.99, selector="token-oracle")
        def test_gate():
            pass
        """
    )
    result = run(pytester, gqa_trace)
    result.assert_outcomes(failed=1)
    result.stdout.fnmatch_lines(
        [
            "kvgate NO-GO: synthetic, budget 10%*",
            "kvgate NO-GO: synthetic, budget 25%*",
            "NO-GO  *test_gate#1",
            "GO     *test_gate#2",
            "NO-GO  *test_gate#3",
        ]
    )


def test_gates_of_a_class_and_of_a_method_add_up(
    pytester: pytest.Pytester, gqa_trace: Path
) -> None:
    pytester.makepyfile(
        """
        from pytest_kvgate import kvgate

        @kvgate(budget=0.25, min_coverage=0.3)
        class TestPaging:
            @kvgate(budget=0.1, min_coverage=0.1)
            def test_gate(self):
                pass
        """
    )
    result = run(pytester, gqa_trace)
    result.assert_outcomes(passed=1)
    result.stdout.fnmatch_lines(["GO  *test_gate#1", "*budget 25%*", "GO  *test_gate#2", "*10%*"])


def test_the_body_runs_too_and_can_fail_a_gate_that_holds(
    pytester: pytest.Pytester, gqa_trace: Path
) -> None:
    pytester.makepyfile(gate(0.1, 0.17, body="assert 1 == 2"))
    result = run(pytester, gqa_trace)
    result.assert_outcomes(failed=1)
    result.stdout.fnmatch_lines(
        ["E  *assert 1 == 2", "GO  *test_gate", "*the gate holds, but its test failed"]
    )


def test_a_missed_gate_shows_beside_a_failing_body(
    pytester: pytest.Pytester, gqa_trace: Path
) -> None:
    pytester.makepyfile(gate(0.1, 0.95, body="assert 1 == 2"))
    result = run(pytester, gqa_trace)
    result.stdout.fnmatch_lines(["E  *assert 1 == 2", "*kvgate*call*", "kvgate NO-GO*"])


def test_a_body_that_skips_does_not_take_a_missed_gate_along(
    pytester: pytest.Pytester, gqa_trace: Path
) -> None:
    pytester.makepyfile(gate(0.1, 0.95, body="import pytest; pytest.skip('later')"))
    run(pytester, gqa_trace).assert_outcomes(failed=1)


def test_a_strict_xfail_keeps_a_no_go_and_notices_when_it_turns(
    pytester: pytest.Pytester, gqa_trace: Path
) -> None:
    decision = "import pytest\n@pytest.mark.xfail(strict=True, reason='NO-GO')"
    source = gate(0.1, 0.95).replace("@kvgate", f"{decision}\n@kvgate")
    pytester.makepyfile(source)
    result = run(pytester, gqa_trace)
    assert result.ret == pytest.ExitCode.OK
    result.assert_outcomes(xfailed=1)
    pytester.makepyfile(source.replace("0.95", "0.15"))
    result = run(pytester, gqa_trace)
    assert result.ret == pytest.ExitCode.TESTS_FAILED
    result.stdout.fnmatch_lines(
        [
            "*XPASS(strict)*",
            "kvgate: every gate of this test is GO now, so the decision that the xfail records no*",
            "GO  *test_gate",
            "*the gate holds, but its test failed",
        ]
    )


@pytest.mark.parametrize("budget", [0.1, 0.001], ids=["failed verification", "below one page"])
def test_an_xfail_does_not_excuse_a_gate_that_could_not_be_judged(
    pytester: pytest.Pytester, tmp_path: Path, budget: float
) -> None:
    layer = random_layer(n_token=640)
    failed = FAILED if budget == 0.1 else PASSED
    trace = make_trace(tmp_path / "trace", [layer], n_visible=[640], verification=failed)
    pytester.makepyfile(
        "import pytest\n"
        + gate(budget, 0.95).replace("@kvgate", "@pytest.mark.xfail(strict=True)\n@kvgate")
    )
    result = run(pytester, trace)
    assert result.ret == pytest.ExitCode.TESTS_FAILED
    result.assert_outcomes(failed=1)
    result.stdout.fnmatch_lines(["kvgate INVALID*", "INVALID  *test_gate"])


def test_no_gate_passes_on_a_trace_that_failed_verification(
    pytester: pytest.Pytester, tmp_path: Path
) -> None:
    layer = random_layer(n_token=640)
    trace = make_trace(tmp_path / "trace", [layer], n_visible=[640], verification=FAILED)
    pytester.makepyfile(gate(1, 0.01))
    result = run(pytester, trace)
    assert result.ret == pytest.ExitCode.TESTS_FAILED
    result.stdout.fnmatch_lines(
        [
            "*failed its verification: recomputed*",
            "*0.25, where 0.001 is*",
            "*640 tokens, 1 step, 1 layer; verification FAILED, error 0.25",
            "*A trace failed its verification, so no number of this model is shown.",
        ]
    )
    assert "oracle total" not in result.stdout.str()


def test_a_wider_tolerance_in_a_trace_buys_nothing(
    pytester: pytest.Pytester, tmp_path: Path
) -> None:
    widened = {**PASSED, "max_abs_error": 0.2, "tolerance": 1.0}
    layer = random_layer(n_token=640)
    trace = make_trace(tmp_path / "trace", [layer], n_visible=[640], verification=widened)
    pytester.makepyfile(gate(1, 0.01))
    result = run(pytester, trace)
    assert result.ret == pytest.ExitCode.TESTS_FAILED
    result.stdout.fnmatch_lines(["kvgate INVALID*", "*0.2, where 0.001 is tolerated*"])


def test_a_profile_from_a_failed_capture_is_not_handed_out(
    pytester: pytest.Pytester, tmp_path: Path
) -> None:
    layer = random_layer(n_token=640)
    trace = make_trace(tmp_path / "trace", [layer], n_visible=[640], verification=FAILED)
    pytester.makepyfile(gate(1, 0.01).replace("test_gate()", "test_gate(kvgate_profile)"))
    result = run(pytester, trace)
    result.assert_outcomes(errors=1)
    result.stdout.fnmatch_lines(
        ["kvgate: *failed its verification: recomputed*", "INVALID  *test_gate", "*failed its*"]
    )
    assert "another exception" not in result.stdout.str()


def test_an_unverified_trace_is_called_so_beside_its_verdict(
    pytester: pytest.Pytester, gqa_trace: Path
) -> None:
    pytester.makepyfile(gate(0.1, 0.17))
    run(pytester, gqa_trace).stdout.fnmatch_lines(
        ["*gqa-f16: 643 tokens, 4 steps, 2 layers; UNVERIFIED", "GO *", "*", "*unverified trace*"]
    )


def test_a_budget_below_one_page_says_how_many_tokens_it_is(
    pytester: pytest.Pytester, tmp_path: Path
) -> None:
    layer = random_layer(n_token=1024)
    trace = make_trace(tmp_path / "trace", [layer], n_visible=[1024], verification=PASSED)
    pytester.makepyfile(gate(0.005, 0.5))
    result = run(pytester, trace)
    assert result.ret == pytest.ExitCode.TESTS_FAILED
    result.stdout.fnmatch_lines(
        ["INVALID: 0.5% of 1024 tokens is 5 tokens, less than one 32-token page*"]
    )


def test_a_prompt_too_short_for_any_page_says_so(pytester: pytest.Pytester, tmp_path: Path) -> None:
    layer = random_layer(n_token=70)
    trace = make_trace(tmp_path / "trace", [layer], n_visible=[70], verification=PASSED)
    pytester.makepyfile(gate(0.9, 0.5))
    result = run(pytester, trace, "--kvgate-recent=32")
    assert result.ret == pytest.ExitCode.TESTS_FAILED
    result.stdout.fnmatch_lines(["*no page is eligible: of 70 tokens the first 32 (sinks)*"])


def test_a_trace_of_windowed_layers_only_gives_no_verdict(
    pytester: pytest.Pytester, tmp_path: Path
) -> None:
    layer = random_layer(n_token=640, window=128)
    trace = make_trace(tmp_path / "trace", [layer], n_visible=[640], verification=PASSED)
    pytester.makepyfile(gate(0.5, 0.1))
    result = run(pytester, trace)
    assert result.ret == pytest.ExitCode.TESTS_FAILED
    result.stdout.fnmatch_lines(["*every layer with a KV cache has a sliding window*"])


def test_margins_are_cut_downwards_as_the_numbers_beside_them(
    pytester: pytest.Pytester, gqa_trace: Path
) -> None:
    pytester.makepyfile(gate(0.1, 0.18582))
    run(pytester, gqa_trace).stdout.fnmatch_lines(["*oracle * 0.1858 * 0.1858 * -0.0001 *missed"])


def test_no_reference_has_a_tolerance_of_its_own(pytester: pytest.Pytester, tmp_path: Path) -> None:
    other = {**PASSED, "reference": "Softmax", "max_abs_error": 0.5, "tolerance": 1e9}
    layer = random_layer(n_token=640)
    trace = make_trace(tmp_path / "trace", [layer], n_visible=[640], verification=other)
    pytester.makepyfile(gate(1, 0.01))
    result = run(pytester, trace)
    result.assert_outcomes(failed=1)
    result.stdout.fnmatch_lines(["kvgate INVALID*"])
