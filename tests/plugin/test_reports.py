"""The summary that a person reads and the JSON that a machine reads."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tests.conftest import CASES

GATE = """
from pytest_kvgate import kvgate

@kvgate(budget=0.25, min_coverage=0.95)
def test_no_go():
    pass

@kvgate(budget=0.25, min_coverage=0.2, selector="landmark")
def test_go():
    pass
"""

REPORT_KEYS = {
    "schema",
    "settings",
    "traces",
    "coverage",
    "required_budget",
    "paging",
    "layers",
    "dim_ablation",
    "attention",
    "skipped_units",
    "closed_loop",
    "gates",
}


def report_of(pytester: pytest.Pytester, *options: str) -> dict[str, Any]:
    result = pytester.runpytest(*options, "--kvgate-report=json:out.json")
    assert "INTERNALERROR" not in result.stdout.str()
    report: dict[str, Any] = json.loads((pytester.path / "out.json").read_text("utf-8"))
    return report


def test_the_report_has_every_key_of_its_schema(pytester: pytest.Pytester, gqa_trace: Path) -> None:
    pytester.makepyfile(GATE)
    report = report_of(pytester, f"--kvgate-trace={gqa_trace}")
    assert report["schema"] == "kvgate-report/1"
    assert set(report) >= REPORT_KEYS
    assert {"budget", "selector", "coverage", "ci", "total_mass", "global_coverage", "jaccard",
            "stale_coverage", "output_error"} <= set(report["coverage"][0])  # fmt: skip
    (trace,) = report["traces"]
    assert (trace["n_context"], trace["n_steps"], trace["verification"]) == (643, 4, None)


def test_a_gate_in_the_report_names_the_deciding_selector(
    pytester: pytest.Pytester, gqa_trace: Path
) -> None:
    pytester.makepyfile(test_it=GATE)
    report = report_of(pytester, f"--kvgate-trace={gqa_trace}", "--kvgate-recent=0.05")
    missed, passed = report["gates"]
    assert missed["id"] == "test_it.py::test_no_go"
    assert (missed["budget"], missed["selector"], missed["required"]) == (0.25, "oracle", 0.95)
    assert missed["observed"] == pytest.approx(0.378672, abs=1e-5)
    assert missed["verdict"] == "NO-GO"
    assert missed["reason"].startswith("the ceiling is below the threshold")
    assert [check["selector"] for check in missed["checks"]] == ["oracle", "landmark"]
    assert (passed["selector"], passed["verdict"]) == ("landmark", "GO")
    assert passed["observed"] == pytest.approx(0.356314, abs=1e-5)
    needed = {row["coverage"] for row in report["required_budget"]}
    assert needed == {0.2, 0.5, 0.9, 0.95}


def test_gates_that_were_not_evaluated_are_in_the_report(pytester: pytest.Pytester) -> None:
    pytester.makepyfile(GATE)
    report = report_of(pytester)
    assert [gate["verdict"] for gate in report["gates"]] == ["NOT EVALUATED"] * 2
    assert report["coverage"] == []


def test_a_report_can_be_had_without_any_gate(pytester: pytest.Pytester, gqa_trace: Path) -> None:
    pytester.makepyfile("def test_other(): pass")
    report = report_of(pytester, f"--kvgate-trace={gqa_trace}")
    assert report["gates"] == []
    assert len(report["coverage"]) == 4 * 8


def test_a_gate_at_another_page_size_leaves_the_reports_rows_alone(
    pytester: pytest.Pytester, gqa_trace: Path
) -> None:
    pytester.makepyfile(GATE.replace("budget=0.25", "budget=0.25, page_size=8"))
    report = report_of(pytester, f"--kvgate-trace={gqa_trace}")
    assert report["settings"]["page_size"] == 32
    assert len(report["coverage"]) == 5 * 8
    (other,) = report["other_page_sizes"]
    assert other["settings"]["page_size"] == 8
    assert {gate["page_size"] for gate in report["gates"]} == {8}


def test_a_report_replaces_a_report_and_nothing_else(
    pytester: pytest.Pytester, gqa_trace: Path
) -> None:
    pytester.makepyfile(GATE)
    trace = f"--kvgate-trace={gqa_trace}"
    first = report_of(pytester, trace)
    assert report_of(pytester, trace) == first
    (pytester.path / "notes.json").write_text('{"mine": 1}', encoding="utf-8")
    result = pytester.runpytest(trace, "--kvgate-report=json:notes.json")
    assert result.ret == pytest.ExitCode.USAGE_ERROR
    result.stderr.fnmatch_lines(["*notes.json exists and is not a kvgate report; *"])
    assert (pytester.path / "notes.json").read_text("utf-8") == '{"mine": 1}'


@pytest.mark.parametrize("path", ["missing/out.json", ".", "x" * 300])
def test_a_report_that_cannot_be_written_is_a_usage_error(
    pytester: pytest.Pytester, gqa_trace: Path, path: str
) -> None:
    pytester.makepyfile(GATE)
    result = pytester.runpytest(f"--kvgate-trace={gqa_trace}", f"--kvgate-report=json:{path}")
    assert result.ret == pytest.ExitCode.USAGE_ERROR
    result.stderr.fnmatch_lines(["ERROR: kvgate: --kvgate-report *"])


def test_the_summary_shows_the_tables_within_100_columns(
    pytester: pytest.Pytester, gqa_trace: Path
) -> None:
    pytester.makepyfile(GATE)
    result = pytester.runpytest(
        f"--kvgate-trace={gqa_trace}", "--kvgate-recent=0.05", "--kvgate-budgets=0.1,0.25"
    )
    result.stdout.fnmatch_lines(
        [
            "kvgate: synthetic; 1 saved trace, 32-token pages",
            "*= kvgate =*",
            "synthetic (synthetic)",
            "  gqa-f16: 643 tokens, 4 steps, 2 layers; UNVERIFIED",
            "  32-token pages; free: first 32 tokens and last 5%; eligible mass 0.9156",
            "  a query head spreads its eligible mass over 377 tokens (exp of entropy); *0.0348",
            "  coverage at * 10% * 25% * for 0.2 * for 0.5 * for 0.9 * for 0.95",
            "  oracle * 0.1858 * 0.3786 * 15% * 39.9% * 79.9% * 85%",
            "  landmark * 0.1785 * 0.3563 * 15% * 40% * 79.9% * 85%",
            "  token-oracle * 0.3536 * 0.5391 * 5% * 25% * 70% * 79.9%",
            "  pages per KV head * 2 * 5",
            "  lost at *diffuse *page granularity *landmark *stale, 1 apart *sum",
            "  10% * 0.6260 * 0.1809 * 0.0067 * 0.0162 * 0.8298",
            "  Dense at 25%, to keep resident for 0.95: all 2 layers: in none do the best pages *",
            "NO-GO  *test_no_go",
            "GO     *test_go",
        ]
    )
    summary = result.stdout.str().split("= kvgate =")[1]
    assert max(map(len, summary.splitlines())) <= 100


@pytest.mark.parametrize("arguments", [[], ["-n2"]])
def test_on_ci_a_missed_gate_takes_one_line_of_the_short_summary(
    pytester: pytest.Pytester,
    gqa_trace: Path,
    monkeypatch: pytest.MonkeyPatch,
    arguments: list[str],
) -> None:
    monkeypatch.setenv("CI", "true")  # pytest prints whole messages then
    pytester.makepyfile(
        """
        from pytest_kvgate import kvgate

        @kvgate(budget=0.25, min_coverage=0.95)
        @kvgate(budget=0.1, min_coverage=0.9, selector="landmark")
        def test_two_gates(kvgate_profile):
            pass

        @kvgate(budget=0.25, min_coverage=0.95)
        def test_own_failure(kvgate_profile):
            assert not kvgate_profile, "its own"
        """
    )
    result = pytester.runpytest(f"--kvgate-trace={gqa_trace}", *arguments)
    output = result.stdout.str()
    assert output.count("required    margin") == 3  # every failure still has its table
    summary = output.split("= short test summary info =")[1].splitlines()
    name = "test_on_ci_a_missed_gate_takes_one_line_of_the_short_summary"
    gates = [line for line in summary if "::test_two_gates" in line]
    assert [line.split(" - ", 1)[1] for line in gates] == [
        "kvgate NO-GO: synthetic, budget 25%, pages of 32 tokens (and 1 more)"
    ]
    start = f"FAILED {name}.py::test_own_failure - AssertionError: its own"
    assert any(line.startswith(start) for line in summary)
    assert not any("NO-GO: the ceiling" in line for line in summary)


def test_a_wide_table_is_split_and_not_cut(pytester: pytest.Pytester, gqa_trace: Path) -> None:
    pytester.makepyfile("def test_body(kvgate_profile): pass")
    budgets = ",".join(str(number / 100) for number in range(10, 30))
    other = f"--kvgate-trace={CASES / 'sinks-softcap'}"
    result = pytester.runpytest(f"--kvgate-trace={gqa_trace}", other, f"--kvgate-budgets={budgets}")
    summary = result.stdout.str().split("= kvgate =")[1]
    assert max(map(len, summary.splitlines())) <= 100
    for number in range(10, 30):
        assert f" {number}%" in summary


def test_several_traces_of_a_model_are_pooled_and_each_is_shown_alone(
    pytester: pytest.Pytester,
) -> None:
    pytester.makepyfile("def test_body(kvgate_profile): pass")
    options = [f"--kvgate-trace={CASES / case}" for case in ("gqa-f16", "alibi-window")]
    options += ["--kvgate-recent=0.05", "--kvgate-budgets=0.25"]
    result = pytester.runpytest(*options)
    result.stdout.fnmatch_lines(
        [
            "kvgate: synthetic; 2 saved traces, 32-token pages",
            "*alibi-window: *1 layer; UNVERIFIED",
            "  alibi-window: not paged: layer 1 (sliding window)",
            "*each alone * 25%",
            "*gqa-f16: oracle * 0.3786",
            "*alibi-window: oracle * 0.6767",
        ]
    )
    report = report_of(pytester, *options)
    pooled = next(row for row in report["coverage"] if row["selector"] == "oracle")
    # 16 units of one trace and 8 of the other weigh the same
    assert pooled["coverage"] == pytest.approx((16 * 0.378672 + 8 * 0.676747) / 24, abs=1e-5)
    alone = [trace["coverage"][0]["coverage"] for trace in report["traces"]]
    assert alone == pytest.approx([0.378672, 0.676747], abs=1e-5)


def test_without_model_and_trace_gates_are_skipped_and_said_to_be_not_evaluated(
    pytester: pytest.Pytester,
) -> None:
    pytester.makepyfile(GATE + "\ndef test_body(kvgate_profile): pass\ndef test_other(): pass")
    result = pytester.runpytest("-rs")
    assert result.ret == pytest.ExitCode.OK
    result.assert_outcomes(passed=1, skipped=3)
    result.stdout.fnmatch_lines(
        [
            "kvgate: no model and no trace; gates are NOT EVALUATED",
            "*= kvgate =*",
            "NOT EVALUATED  *::test_no_go",
            "NOT EVALUATED  *::test_go",
            "SKIPPED*NOT EVALUATED*--kvgate-model=FILE*",
        ]
    )


def test_a_gate_whose_setup_fails_is_listed_as_not_evaluated(
    pytester: pytest.Pytester, gqa_trace: Path
) -> None:
    pytester.makepyfile(
        """
        import pytest
        from pytest_kvgate import kvgate

        @pytest.fixture
        def broken():
            raise RuntimeError

        @kvgate(budget=0.25, min_coverage=0.2)
        def test_gate(broken):
            pass
        """
    )
    result = pytester.runpytest(f"--kvgate-trace={gqa_trace}")
    result.assert_outcomes(errors=1)
    result.stdout.fnmatch_lines(["NOT EVALUATED  *test_gate", "*the setup of its test failed"])


def test_quiet_runs_still_list_the_gates(pytester: pytest.Pytester, gqa_trace: Path) -> None:
    pytester.makepyfile(GATE)
    result = pytester.runpytest("-q", f"--kvgate-trace={gqa_trace}")
    result.stdout.fnmatch_lines(["NO-GO  *test_no_go", "GO     *test_go"])


def test_gates_that_the_run_did_not_reach_are_listed(
    pytester: pytest.Pytester, gqa_trace: Path
) -> None:
    pytester.makepyfile(GATE)
    report = report_of(pytester, "-x", f"--kvgate-trace={gqa_trace}")
    assert [gate["verdict"] for gate in report["gates"]] == ["NO-GO", "NOT EVALUATED"]
    assert report["gates"][1]["reason"] == "the run ended before its test"


def test_a_failing_assert_on_the_profile_stays_readable(
    pytester: pytest.Pytester, gqa_trace: Path
) -> None:
    pytester.makepyfile(
        "def test_body(kvgate_profile): assert kvgate_profile.coverage('oracle', 0.1) > 0.9"
    )
    result = pytester.runpytest(f"--kvgate-trace={gqa_trace}", "--kvgate-recent=0.05")
    result.stdout.fnmatch_lines(["*<Profile of synthetic · gqa-f16: 16 units, 32-token pages>*"])
    assert "array(" not in result.stdout.str()


def test_a_report_through_a_link_keeps_the_link(pytester: pytest.Pytester, gqa_trace: Path) -> None:
    pytester.makepyfile(GATE)
    (pytester.path / "out.json").symlink_to("elsewhere.json")
    report_of(pytester, f"--kvgate-trace={gqa_trace}")
    assert (pytester.path / "out.json").is_symlink()
    assert (pytester.path / "elsewhere.json").is_file()
