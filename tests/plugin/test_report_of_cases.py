"""The JSON report of each case against the numbers an independent program computed from it."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.conftest import CASES
from tests.traces import FAILED, PASSED, make_trace, random_layer

NAMES = ("alibi-window", "gqa-f16", "sinks-softcap")
MEASURES = (
    "coverage",
    "total_mass",
    "global_coverage",
    "jaccard",
    "stale_coverage",
    "output_error",
)


def report_of(pytester: pytest.Pytester, *options: str) -> dict[str, Any]:
    result = pytester.runpytest(*options, "--kvgate-report=json:out.json")
    assert "INTERNALERROR" not in result.stdout.str()
    report: dict[str, Any] = json.loads((pytester.path / "out.json").read_text("utf-8"))
    return report


@pytest.fixture
def expected(request: pytest.FixtureRequest) -> dict[str, Any]:
    path = CASES / request.getfixturevalue("case") / "expected.json"
    document: dict[str, Any] = json.loads(path.read_text("utf-8"))
    return document


@pytest.fixture
def report(pytester: pytest.Pytester, case: str, expected: dict[str, Any]) -> dict[str, Any]:
    pytester.makepyfile("def test_body(kvgate_profile): pass")
    settings = expected["settings"]
    budgets = sorted({row["budget"] for row in expected["coverage"]})
    return report_of(
        pytester,
        f"--kvgate-trace={CASES / case}",
        f"--kvgate-page-size={settings['page_size']}",
        f"--kvgate-sinks={settings['sinks']}",
        f"--kvgate-recent={settings['recent']}",
        f"--kvgate-budgets={','.join(map(str, budgets))}",
        "--kvgate-sweep=32,64",
    )


def agree(found: float | None, wanted: float | None) -> bool:
    """Whether two numbers agree, None with None alone."""
    if found is None or wanted is None:
        return found is wanted
    # effective supports are in the hundreds
    return math.isclose(found, wanted, rel_tol=1e-7, abs_tol=1e-5)


@pytest.mark.parametrize("case", NAMES)
def test_the_report_agrees_with_everything_that_is_expected(
    report: dict[str, Any], expected: dict[str, Any]
) -> None:
    coverage = {(row["budget"], row["selector"]): row for row in report["coverage"]}
    for row in expected["coverage"]:
        found = coverage[row["budget"], row["selector"]]
        for name in MEASURES:
            assert agree(found[name], row[name]), (name, found[name], row)
    paging = {(row["budget"], row["selector"]): row for row in report["paging"]}
    assert expected["paging"]
    for row in expected["paging"]:
        found = paging[row["budget"], row["selector"]]
        assert found["pool"] == row["pool"]
        assert agree(found["hit_rate"], row["hit_rate"]), row
        assert agree(found["missed_pages"], row["missed_pages"]), row
    ablation = {row["budget"]: row["unrotated_coverage"] for row in report["dim_ablation"]}
    for row in expected["dim_ablation"]:
        assert agree(ablation[row["budget"]], row["unrotated_coverage"]), row
    needed = {
        (row["selector"], row["coverage"]): row["budget"] for row in report["required_budget"]
    }
    for row in expected["required_budget"]:
        assert needed[row["selector"], row["coverage"]] == row["budget"], row
    layers = {
        (row["layer"], f"{row['selector']}@{row['budget']}"): row["coverage"]
        for row in report["layers"]
    }
    for row in expected["layers"]:
        for key in row.keys() - {"layer"}:
            assert agree(layers[row["layer"], key], row[key]), (row["layer"], key)
    for key, value in expected["attention"].items():
        assert agree(report["attention"][key], value), key
    assert report["skipped_units"] == expected["skipped_units"]


@pytest.mark.parametrize("case", ["sinks-softcap"])
def test_the_output_error_is_reported_where_v_was_saved(
    report: dict[str, Any], expected: dict[str, Any]
) -> None:
    wanted = [row["output_error"] for row in expected["coverage"]]
    assert sum(value is not None for value in wanted) == 2 * 6  # two budgets buy a page
    assert all(
        row["output_error"] is None
        for row in report["coverage"]
        if row["selector"] == "token-oracle"
    )


@pytest.mark.parametrize("case", NAMES)
def test_an_interval_is_two_numbers_around_the_mean_or_null(report: dict[str, Any]) -> None:
    for row in report["coverage"]:
        if row["coverage"] is None:
            assert row["ci"] is None
        else:
            low, high = row["ci"]
            assert low <= row["coverage"] <= high
    assert any(row["ci"] is not None for row in report["coverage"])


def test_one_step_gives_no_interval(pytester: pytest.Pytester, tmp_path: Path) -> None:
    layer = random_layer(n_token=640)
    trace = make_trace(tmp_path / "trace", [layer], n_visible=[640], verification=PASSED)
    pytester.makepyfile("def test_body(kvgate_profile): pass")
    report = report_of(pytester, f"--kvgate-trace={trace}", "--kvgate-budgets=0.25")
    assert all(row["coverage"] is not None for row in report["coverage"])
    assert {row["ci"] for row in report["coverage"]} == {None}
    assert {row["stale_coverage"] for row in report["coverage"]} == {None}
    assert report["paging"] == []


def test_a_sum_of_losses_is_what_the_stale_selection_misses(
    pytester: pytest.Pytester, gqa_trace: Path
) -> None:
    pytester.makepyfile("def test_body(kvgate_profile): pass")
    report = report_of(pytester, f"--kvgate-trace={gqa_trace}", "--kvgate-budgets=0.1,0.25")
    stale = {(row["budget"], row["selector"]): row["stale_coverage"] for row in report["coverage"]}
    assert len(report["gap"]) == 2 * 6
    for row in report["gap"]:
        parts = [row[key] for key in ("diffuse", "granularity", "selection", "staleness")]
        assert row["shortfall"] == pytest.approx(sum(parts))
        assert row["shortfall"] == pytest.approx(1 - stale[row["budget"], row["selector"]])


def test_a_link_turns_missed_bytes_into_milliseconds(
    pytester: pytest.Pytester, gqa_trace: Path
) -> None:
    pytester.makepyfile("def test_body(kvgate_profile): pass")
    options = (f"--kvgate-trace={gqa_trace}", "--kvgate-budgets=0.1", "--kvgate-recent=0.05")
    without = report_of(pytester, *options)["paging"]
    slow = report_of(pytester, *options, "--kvgate-link=2")["paging"]
    assert {row["ms_per_token"] for row in without} == {None}
    assert [row["ms_per_token"] for row in slow] == [row["missed_bytes"] / 2e6 for row in slow]
    oracle = slow[0]
    # K and V of f16: 32 tokens of 16 numbers; 2 layers with 2 KV heads
    assert oracle["missed_bytes"] == pytest.approx(oracle["missed_pages"] * 4 * 32 * 16 * 2 * 2)


def test_the_pool_changes_hits_and_nothing_else(pytester: pytest.Pytester, gqa_trace: Path) -> None:
    pytester.makepyfile("def test_body(kvgate_profile): pass")
    options = (f"--kvgate-trace={gqa_trace}", "--kvgate-budgets=0.1", "--kvgate-recent=0.05")
    small = report_of(pytester, *options, "--kvgate-pool=1")
    large = report_of(pytester, *options, "--kvgate-pool=4")
    assert small["coverage"] == large["coverage"]
    assert small["paging"][0]["hit_rate"] < large["paging"][0]["hit_rate"]
    assert small["paging"][0]["pool_for_99"] == large["paging"][0]["pool_for_99"]
    assert (small["settings"]["pool"], large["settings"]["pool"]) == (1.0, 4.0)


def test_page_sizes_are_compared_where_a_report_or_details_show_them(
    pytester: pytest.Pytester, gqa_trace: Path
) -> None:
    pytester.makepyfile("def test_body(kvgate_profile): pass")
    options = (f"--kvgate-trace={gqa_trace}", "--kvgate-budgets=0.25", "--kvgate-recent=0.05")
    report = report_of(pytester, *options, "--kvgate-sweep=16,32,512")
    found = {(row["page_size"], row["selector"]): row["coverage"] for row in report["sweep"]}
    # pages of 512 tokens: none is eligible, so they are left out
    assert {size for size, _ in found} == {16, 32}
    at_32 = {row["selector"]: row["coverage"] for row in report["coverage"]}
    assert {name: value for (size, name), value in found.items() if size == 32} == at_32
    assert found[16, "oracle"] > found[32, "oracle"]
    assert report["other_page_sizes"] == []
    written = f"{found[16, 'oracle']:.8f}"[:6]  # cut, not rounded
    result = pytester.runpytest(*options, "--kvgate-sweep=16,32", "--kvgate-verbose")
    result.stdout.fnmatch_lines(["*pages of * 25%", f"*16 tokens: oracle*{written}*"])
    assert "pages of" not in pytester.runpytest(*options, "--kvgate-sweep=16").stdout.str()


def numbers_below(value: object) -> Iterator[float]:
    if isinstance(value, float):
        yield value
    elif isinstance(value, dict | list):
        for item in value.values() if isinstance(value, dict) else value:
            yield from numbers_below(item)


def test_no_number_of_a_failed_trace_is_anywhere_in_the_report(
    pytester: pytest.Pytester, tmp_path: Path
) -> None:
    layers = [random_layer(seed, n_token=640, n_step=4, index=seed, values=True) for seed in (0, 1)]
    trace = make_trace(tmp_path / "trace", layers, verification=FAILED)
    pytester.makepyfile(
        """
        from pytest_kvgate import kvgate

        @kvgate(budget=0.25, min_coverage=0.2, max_output_error=0.7, page_size=16)
        @kvgate(max_budget=0.5, coverage=0.3, confidence=0.9)
        def test_gate():
            pass
        """
    )
    report = report_of(pytester, f"--kvgate-trace={trace}", "--kvgate-link=25")
    assert [gate["verdict"] for gate in report["gates"]] == ["INVALID", "INVALID"]
    for document in (report, *report["other_page_sizes"]):
        for key in (
            "coverage",
            "required_budget",
            "paging",
            "metadata",
            "layers",
            "dense_layers",
            "dim_ablation",
            "gap",
            "sweep",
        ):
            assert document[key] == [], key
        assert set(document["attention"].values()) == {None}
    assert len(report["other_page_sizes"]) == 1
    for gate in report["gates"]:
        assert {check["observed"] for check in gate["checks"]} == {None}
        assert {check["interval"] for check in gate["checks"]} == {None}
        assert {check["state"] for check in gate["checks"]} == {None}
        assert (gate["others"], gate["worst_layers"], gate["dense_layers"]) == ({}, [], [])
    for key in ("settings", "gates", "traces", "other_page_sizes"):
        del report[key]
    assert list(numbers_below(report)) == []


def test_a_gate_at_another_page_size_has_a_whole_document(
    pytester: pytest.Pytester, gqa_trace: Path
) -> None:
    pytester.makepyfile(
        """
        from pytest_kvgate import kvgate

        @kvgate(budget=0.25, min_coverage=0.2, page_size=8)
        @kvgate(budget=0.25, min_coverage=0.2, page_size=16)
        def test_gate():
            pass
        """
    )
    report = report_of(pytester, f"--kvgate-trace={gqa_trace}", "--kvgate-recent=0.05")
    assert report["settings"]["page_size"] == 32
    others = report["other_page_sizes"]
    assert sorted(other["settings"]["page_size"] for other in others) == [8, 16]
    for other in others:
        assert {row["budget"] for row in other["coverage"]} == {0.005, 0.01, 0.02, 0.04, 0.25}
        assert other["paging"]
        assert other["gap"]
        # page sizes are compared once, at the session's
        assert other["sweep"] == []
    at = {row["page_size"]: row["coverage"] for row in report["sweep"] if row["budget"] == 0.25}
    assert set(at) == {8, 16, 32, 64, 128}


def test_a_report_of_workers_is_the_report_of_one_process(
    pytester: pytest.Pytester, gqa_trace: Path
) -> None:
    """What a worker hands over must be plain: execnet carries no numbers of numpy."""
    pytester.makepyfile(
        """
        from pytest_kvgate import kvgate

        @kvgate(budget=0.25, min_coverage=0.2, min_total_mass=0.2, min_hit_rate=0.2, layers=[0, 1])
        def test_gate(kvgate_profile):
            pass

        @kvgate(budget=0.25, min_coverage=0.9, scope="worst-layer", confidence=0.9, page_size=16)
        @kvgate(max_budget=0.5, coverage=0.3, scope="p05", confidence=0.9)
        def test_more():
            pass
        """
    )
    trace = f"--kvgate-trace={gqa_trace}"
    alone = report_of(pytester, trace)
    result = pytester.runpytest_subprocess("-n2", trace, "--kvgate-report=json:workers.json")
    assert "INTERNALERROR" not in result.stdout.str()
    workers = json.loads((pytester.path / "workers.json").read_text("utf-8"))
    for report in (alone, workers):
        report["gates"].sort(key=lambda gate: gate["id"])
    assert len(alone["gates"]) == 3
    assert workers == alone
