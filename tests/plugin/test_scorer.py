"""The fixture kvgate_scorer: page scoring, timed by pytest-benchmark."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tests.conftest import CASES
from tests.traces import FAILED, make_trace, random_layer

TIMED = """
def test_scoring(benchmark, kvgate_scorer):
    scores = benchmark(kvgate_scorer("quest", 0.25))
    assert [found.shape for found in scores] == [(4, 20)] * 4
"""
RECENT = "--kvgate-recent=0.05"
FAST = ("--benchmark-max-time=0.01", "--benchmark-min-rounds=2")


def saved(pytester: pytest.Pytester) -> list[dict[str, Any]]:
    """Return what pytest-benchmark saved of each test in its latest run."""
    path = sorted((pytester.path / ".benchmarks").glob("*/*.json"))[-1]
    benchmarks: list[dict[str, Any]] = json.loads(path.read_text("utf-8"))["benchmarks"]
    return benchmarks


def test_a_saved_benchmark_says_what_was_scored_and_what_it_is_worth(
    pytester: pytest.Pytester, gqa_trace: Path
) -> None:
    pytester.makepyfile(TIMED)
    trace = f"--kvgate-trace={gqa_trace}"
    options = (trace, RECENT, "--kvgate-budgets=0.1,0.25", *FAST)
    result = pytester.runpytest_subprocess(*options, "--benchmark-autosave")
    result.assert_outcomes(passed=1)
    (found,) = saved(pytester)
    info = found["extra_info"]
    expected = json.loads((gqa_trace / "expected.json").read_text("utf-8"))["coverage"]
    quest = next(
        row["coverage"] for row in expected if (row["budget"], row["selector"]) == (0.25, "quest")
    )
    assert info["coverage"] == pytest.approx(quest, abs=1e-5)
    # 20 whole pages, 4 steps, 2 layers with 2 KV heads each; quest keeps 2 numbers per dim
    assert info["pages"] == 20 * 4 * 4
    assert info["metadata_bytes"] == 2 * 2 * 16 * 20 * 4
    assert info["pages_per_second"] == pytest.approx(info["pages"] / found["stats"]["mean"])
    assert (info["selector"], info["budget"]) == ("quest", 0.25)
    assert set(info) == {
        "selector",
        "budget",
        "coverage",
        "pages",
        "pages_per_second",
        "metadata_bytes",
    }
    again = pytester.runpytest_subprocess(*options, "--benchmark-compare")
    again.assert_outcomes(passed=1)
    again.stdout.fnmatch_lines_random(  # the faster one comes first
        ["*benchmark: 2 tests*", "test_scoring (0001_*", "test_scoring (NOW*"]
    )


def test_the_numbers_are_plain(pytester: pytest.Pytester, gqa_trace: Path) -> None:
    pytester.makeconftest(
        """
        import numpy as np
        from pytest_kvgate.analysis import Selector

        def pytest_kvgate_selectors(config):
            score = lambda queries, pages: (queries @ pages.mean.T).max(axis=1)
            return [Selector("mine", score, numbers_per_dim=np.float32(1))]
        """
    )
    pytester.makepyfile(
        """
        def test_scoring(benchmark, kvgate_scorer):
            benchmark(kvgate_scorer("mine"))
            kinds = {name: type(value) for name, value in benchmark.extra_info.items()}
            assert kinds == {
                "selector": str, "budget": float, "coverage": float, "pages": int,
                "metadata_bytes": float,
            }
        """
    )
    trace = f"--kvgate-trace={gqa_trace}"
    result = pytester.runpytest_subprocess(
        trace, "--kvgate-budgets=0.25", *FAST, "-n0", "--kvgate-report=json:out.json"
    )
    result.assert_outcomes(passed=1)
    stored = json.loads((pytester.path / "out.json").read_text("utf-8"))["metadata"]
    assert {row["metadata_bytes"] for row in stored if row["selector"] == "mine"} == {2560.0}
    pytester.makepyfile("def test_body(kvgate_profile): pass")
    pytester.runpytest_subprocess(trace, "-n1").assert_outcomes(passed=1)


def test_the_budget_is_that_of_the_gate_or_the_largest_reported(
    pytester: pytest.Pytester, gqa_trace: Path
) -> None:
    pytester.makepyfile(
        """
        from pytest_kvgate import kvgate

        @kvgate(budget=0.1, min_coverage=0.1, page_size=16)
        def test_gated(benchmark, kvgate_scorer):
            scorer = kvgate_scorer()
            benchmark(scorer)
            assert benchmark.extra_info["budget"] == 0.1
            assert scorer.n_score == 40 * 4 * 4

        def test_free(benchmark, kvgate_scorer):
            benchmark(kvgate_scorer())
            assert benchmark.extra_info["selector"] == "landmark"
            assert benchmark.extra_info["budget"] == 0.25

        def test_undefined(benchmark, kvgate_scorer):
            benchmark(kvgate_scorer("random", 0.005))
            assert benchmark.extra_info["coverage"] is None
        """
    )
    options = (f"--kvgate-trace={gqa_trace}", "--kvgate-budgets=0.005,0.25", *FAST)
    pytester.runpytest_subprocess(*options).assert_outcomes(passed=3)


@pytest.mark.parametrize("selector", ["best", "oracle", "token-oracle"])
def test_an_unknown_selector_fails_with_those_there_are(
    pytester: pytest.Pytester, gqa_trace: Path, selector: str
) -> None:
    pytester.makepyfile(
        "import pytest\n@pytest.mark.xfail\ndef test_scoring(benchmark, kvgate_scorer):\n"
        f"    benchmark(kvgate_scorer({selector!r}))"
    )
    result = pytester.runpytest_subprocess(f"--kvgate-trace={gqa_trace}")
    result.assert_outcomes(failed=1)
    result.stdout.fnmatch_lines(
        [
            f"kvgate_scorer('{selector}'): there is no such selector of pages. Accepted: landmark, "
            "quest, mean-std, cuboid-mean, recency, random."
        ]
    )
    assert "Traceback" not in result.stdout.str()


@pytest.mark.parametrize(
    ("options", "source"),
    [
        (("--benchmark-disable",), TIMED),
        (("-n1",), TIMED),  # pytest-benchmark turns itself off in workers
        (("-p", "no:benchmark"), TIMED.replace("benchmark, ", "").replace("benchmark(", "(")
         .replace('0.25))', '0.25))()')),
    ],
    ids=["disabled", "workers", "without pytest-benchmark"],
)  # fmt: skip
def test_scoring_works_where_nothing_is_timed(
    pytester: pytest.Pytester, gqa_trace: Path, options: tuple[str, ...], source: str
) -> None:
    pytester.makepyfile(source)
    result = pytester.runpytest_subprocess(
        f"--kvgate-trace={gqa_trace}", "--kvgate-budgets=0.25", *options
    )
    result.assert_outcomes(passed=1)
    assert result.ret == pytest.ExitCode.OK


def test_a_test_runs_once_for_each_trace(pytester: pytest.Pytester) -> None:
    pytester.makepyfile(
        "def test_scoring(kvgate_scorer):\n    assert len(kvgate_scorer()()) in (2, 4)"
    )
    traces = [f"--kvgate-trace={CASES / case}" for case in ("gqa-f16", "alibi-window")]
    pytester.runpytest(*traces).assert_outcomes(passed=2)


def test_without_a_trace_it_is_skipped(pytester: pytest.Pytester) -> None:
    pytester.makepyfile(TIMED)
    result = pytester.runpytest_subprocess("-rs")
    result.assert_outcomes(skipped=1)
    result.stdout.fnmatch_lines(["SKIPPED*NOT EVALUATED*"])


def test_a_trace_that_failed_verification_is_not_scored(
    pytester: pytest.Pytester, tmp_path: Path
) -> None:
    trace = make_trace(tmp_path / "t", [random_layer(n_token=640)], [640], verification=FAILED)
    pytester.makepyfile("def test_scoring(kvgate_scorer): kvgate_scorer()")
    result = pytester.runpytest(f"--kvgate-trace={trace}")
    result.assert_outcomes(failed=1)
    result.stdout.fnmatch_lines(["kvgate: the capture of tiny · made failed its verification*"])


def test_a_selector_that_was_not_measured_has_no_coverage(
    pytester: pytest.Pytester, gqa_trace: Path
) -> None:
    pytester.makepyfile(TIMED)
    options = ("--kvgate-selectors=landmark", "--kvgate-budgets=0.25", "--benchmark-autosave")
    result = pytester.runpytest_subprocess(f"--kvgate-trace={gqa_trace}", *options, *FAST)
    result.assert_outcomes(passed=1)
    (found,) = saved(pytester)
    assert found["extra_info"]["coverage"] is None
    assert found["extra_info"]["metadata_bytes"] == 2 * 2 * 16 * 20 * 4
