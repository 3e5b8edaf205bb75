"""The traces in tests/cases against the numbers an independent program computed from them."""

from __future__ import annotations

import json
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from pytest_kvgate.analysis import SELECTORS as ALL_SELECTORS
from pytest_kvgate.analysis import PageGrid, Plan, Profile, UndefinedError, profile_trace
from pytest_kvgate.analysis.findings import dim_ablation, gap
from pytest_kvgate.trace import load_trace
from tests.plain import PAGE_SELECTORS, TOKEN_ORACLE, PlainProfile, plain_profile

CASES = Path(__file__).parents[1] / "cases"
NAMES = ("alibi-window", "gqa-f16", "sinks-softcap")
TOLERANCE = 1e-5
JUDGE_TOLERANCE = 1e-9  # both are float64
# all that need no seed
SELECTORS = (*PAGE_SELECTORS, TOKEN_ORACLE)


@cache
def expected(name: str) -> dict[str, Any]:
    document: dict[str, Any] = json.loads((CASES / name / "expected.json").read_text("utf-8"))
    return document


@cache
def profile(name: str, pool: float = 2.0) -> Profile:
    document = expected(name)
    budgets = dict.fromkeys(row["budget"] for row in document["coverage"])
    coverages = dict.fromkeys(row["coverage"] for row in document["required_budget"])
    return profile_trace(
        load_trace(CASES / name),
        PageGrid(**document["settings"]),
        Plan(tuple(budgets), SELECTORS, coverages=tuple(coverages), pool=pool),
    )


@cache
def plain(name: str) -> PlainProfile:
    return plain_profile(CASES / name, **expected(name)["settings"])


def assert_measured(name: str, measure: str, row: dict[str, Any], number: float | None) -> None:
    """Compare one measure of the package with a number of the case, or with its null."""
    of_case = profile(name, row.get("pool", 2.0))
    if number is None:
        with pytest.raises(UndefinedError):
            of_case.measure(measure, row["selector"], row["budget"])
    else:
        value = of_case.measure(measure, row["selector"], row["budget"])
        assert value == pytest.approx(number, abs=TOLERANCE, rel=0), row


def test_every_case_is_compared() -> None:
    assert tuple(sorted(path.name for path in CASES.iterdir() if path.is_dir())) == NAMES


@pytest.mark.parametrize("name", NAMES)
def test_every_selector_but_the_seeded_one_is_in_the_case(name: str) -> None:
    assert set(SELECTORS) == set(ALL_SELECTORS) - {"random"}
    for table in ("coverage", "required_budget"):
        assert {row["selector"] for row in expected(name)[table]} == set(SELECTORS)
    assert {row["selector"] for row in expected(name)["paging"]} == set(PAGE_SELECTORS)


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize(
    "number",
    ["coverage", "total_mass", "global_coverage", "jaccard", "stale_coverage", "output_error"],
)
def test_numbers_of_every_selector_and_budget(name: str, number: str) -> None:
    for row in expected(name)["coverage"]:
        assert_measured(name, number, row, row[number])


@pytest.mark.parametrize("name", NAMES)
def test_a_budget_below_one_page_is_why_coverage_is_undefined(name: str) -> None:
    rows = [row for row in expected(name)["coverage"] if row["coverage"] is None]

    assert rows
    for row in rows:
        for measure in (profile(name).coverage, profile(name).total_mass):
            with pytest.raises(UndefinedError, match="less than one 32-token page"):
                measure(row["selector"], row["budget"])


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("number", ["hit_rate", "missed_pages"])
def test_paging(name: str, number: str) -> None:
    for row in expected(name)["paging"]:
        assert_measured(name, number, row, row[number])


@pytest.mark.parametrize("name", NAMES)
def test_coverage_without_the_rotated_dims(name: str) -> None:
    for row in expected(name)["dim_ablation"]:
        if row["unrotated_coverage"] is not None:
            ablation = dim_ablation(profile(name), row["budget"])
            assert ablation is not None
            assert ablation.unrotated == pytest.approx(
                row["unrotated_coverage"], abs=TOLERANCE, rel=0
            )
        elif profile(name).is_defined(row["budget"]):
            assert dim_ablation(profile(name), row["budget"]) is None
        else:
            with pytest.raises(UndefinedError):
                dim_ablation(profile(name), row["budget"])


def test_only_one_case_has_a_layer_with_both_kinds_of_dims() -> None:
    ablation = dim_ablation(profile("gqa-f16"), 0.25)

    assert ablation is not None
    assert ablation.layers == (1,)
    whole = plain("gqa-f16").rotated_reference(0.25)
    assert ablation.all_dims == pytest.approx(whole, abs=TOLERANCE, rel=0)
    for name in ("alibi-window", "sinks-softcap"):
        assert dim_ablation(profile(name), 0.25) is None


@pytest.mark.parametrize("name", NAMES)
def test_required_budgets(name: str) -> None:
    rows = expected(name)["required_budget"]

    found = [profile(name).required_budget(row["selector"], row["coverage"]) for row in rows]

    assert found == [row["budget"] for row in rows]


@pytest.mark.parametrize("name", NAMES)
def test_coverage_per_layer(name: str) -> None:
    rows = expected(name)["layers"]
    named = {key for row in rows for key in row if key != "layer"}

    assert {key.partition("@")[0] for key in named} == set(SELECTORS)
    for key in named:
        selector, _, budget = key.partition("@")
        layers = profile(name).layer_coverage(selector, float(budget))
        assert list(layers) == [row["layer"] for row in rows]
        for row in rows:
            assert layers[row["layer"]] == pytest.approx(row[key], abs=TOLERANCE, rel=0), key
        worst = profile(name).measure("coverage", selector, float(budget), "worst-layer")
        assert worst == pytest.approx(min(row[key] for row in rows), abs=TOLERANCE, rel=0), key


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("number", ["support", "hottest", "eligible_mass"])
def test_the_shape_of_attention(name: str, number: str) -> None:
    mean = getattr(profile(name), number).mean()

    assert mean == pytest.approx(expected(name)["attention"][number], abs=TOLERANCE, rel=0)


@pytest.mark.parametrize("name", NAMES)
def test_skipped_units(name: str) -> None:
    assert profile(name).skipped_units == expected(name)["skipped_units"]


@pytest.mark.parametrize("name", NAMES)
def test_the_gap_is_that_of_the_plain_judge(name: str) -> None:
    for row in expected(name)["coverage"]:
        judged = plain(name).gap(row["selector"], row["budget"])
        if judged is None:
            continue
        found = gap(profile(name), row["selector"], row["budget"])
        parts = (found.diffuse, found.granularity, found.selector, found.staleness)
        assert parts == pytest.approx(tuple(judged), abs=TOLERANCE, rel=0), row
        assert found.shortfall == pytest.approx(1 - row["stale_coverage"], abs=TOLERANCE, rel=0)


def assert_judged(value: float | None, number: float | None, what: object) -> None:
    assert (value is None) == (number is None), what
    if number is not None:
        assert value == pytest.approx(number, abs=JUDGE_TOLERANCE, rel=0), what


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize(
    "number",
    ["coverage", "total_mass", "global_coverage", "jaccard", "stale_coverage", "output_error"],
)
def test_the_plain_judge_says_the_same(name: str, number: str) -> None:
    measure = getattr(plain(name), number)

    for row in expected(name)["coverage"]:
        assert_judged(measure(row["selector"], row["budget"]), row[number], row)


@pytest.mark.parametrize("name", NAMES)
def test_the_plain_judge_says_the_same_of_required_budgets(name: str) -> None:
    for row in expected(name)["required_budget"]:
        found = plain(name).required_budget(row["selector"], row["coverage"])
        assert (None if found is None else float(found)) == row["budget"], row


@pytest.mark.parametrize("name", NAMES)
def test_the_plain_judge_says_the_same_of_paging(name: str) -> None:
    for row in expected(name)["paging"]:
        paging = plain(name).paging(row["selector"], row["budget"], row["pool"])
        assert paging is not None
        assert_judged(paging.hit_rate, row["hit_rate"], row)
        assert_judged(paging.missed_pages, row["missed_pages"], row)


@pytest.mark.parametrize("name", NAMES)
def test_the_plain_judge_says_the_same_of_rotation(name: str) -> None:
    for row in expected(name)["dim_ablation"]:
        value = plain(name).unrotated_coverage(row["budget"])
        assert_judged(value, row["unrotated_coverage"], row)


@pytest.mark.parametrize("name", NAMES)
def test_the_plain_judge_says_the_same_of_every_layer(name: str) -> None:
    rows = expected(name)["layers"]
    named = {key for row in rows for key in row if key != "layer"}

    for key in named:
        selector, _, budget = key.partition("@")
        layers = plain(name).layer_coverage(selector, budget)
        assert layers is not None
        assert list(layers) == [row["layer"] for row in rows]
        for row in rows:
            assert_judged(layers[row["layer"]], row[key], (row["layer"], key))
        worst = min(row[key] for row in rows)
        assert_judged(plain(name).worst_layer_coverage(selector, budget), worst, key)


@pytest.mark.parametrize("name", NAMES)
def test_the_plain_judge_says_the_same_of_attention_and_skipped_units(name: str) -> None:
    for number in ("support", "hottest", "eligible_mass"):
        assert_judged(getattr(plain(name), number), expected(name)["attention"][number], number)
    assert plain(name).skipped_units == expected(name)["skipped_units"]


@pytest.mark.parametrize("name", NAMES)
def test_the_gap_of_the_plain_judge_adds_up(name: str) -> None:
    for row in expected(name)["coverage"]:
        gap = plain(name).gap(row["selector"], row["budget"])
        stale = row["stale_coverage"]
        assert_judged(None if gap is None else sum(gap), None if stale is None else 1 - stale, row)
        # every sampled step of a case is one decode step after the one before
        assert_judged(plain(name).lag_one_coverage(row["selector"], row["budget"]), stale, row)
