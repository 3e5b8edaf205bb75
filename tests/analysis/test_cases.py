"""The traces in tests/cases against the numbers an independent program computed from them."""

from __future__ import annotations

import json
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from pytest_kvgate.analysis import SELECTORS, PageGrid, Plan, Profile, UndefinedError, profile_trace
from pytest_kvgate.trace import load_trace
from tests.plain import PlainProfile, plain_profile

CASES = Path(__file__).parents[1] / "cases"
NAMES = ("alibi-window", "gqa-f16", "sinks-softcap")
TOLERANCE = 1e-5
JUDGE_TOLERANCE = 1e-9  # both are float64


@cache
def expected(name: str) -> dict[str, Any]:
    document: dict[str, Any] = json.loads((CASES / name / "expected.json").read_text("utf-8"))
    return document


@cache
def profile(name: str) -> Profile:
    document = expected(name)
    budgets = dict.fromkeys(row["budget"] for row in document["coverage"])
    return profile_trace(
        load_trace(CASES / name), PageGrid(**document["settings"]), Plan(tuple(budgets))
    )


@cache
def plain(name: str) -> PlainProfile:
    return plain_profile(CASES / name, **expected(name)["settings"])


def measured_rows(name: str, table: str) -> list[dict[str, Any]]:
    return [row for row in expected(name)[table] if row["selector"] in SELECTORS]


def test_every_case_is_compared() -> None:
    assert tuple(sorted(path.name for path in CASES.iterdir() if path.is_dir())) == NAMES


@pytest.mark.parametrize("name", NAMES)
def test_every_selector_is_in_the_case(name: str) -> None:
    assert {row["selector"] for row in measured_rows(name, "coverage")} == set(SELECTORS)


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("number", ["coverage", "total_mass"])
def test_numbers_of_every_selector_and_budget(name: str, number: str) -> None:
    measure = getattr(profile(name), number)

    for row in measured_rows(name, "coverage"):
        if row[number] is None:
            with pytest.raises(UndefinedError, match="less than one 32-token page"):
                measure(row["selector"], row["budget"])
        else:
            assert measure(row["selector"], row["budget"]) == pytest.approx(
                row[number], abs=TOLERANCE, rel=0
            ), row


@pytest.mark.parametrize("name", NAMES)
def test_required_budgets(name: str) -> None:
    rows = measured_rows(name, "required_budget")

    found = [profile(name).required_budget(row["selector"], row["coverage"]) for row in rows]

    assert found == [row["budget"] for row in rows]


@pytest.mark.parametrize("name", NAMES)
def test_coverage_per_layer(name: str) -> None:
    for row in expected(name)["layers"]:
        for key, coverage in row.items():
            selector, _, budget = key.partition("@")
            if selector not in SELECTORS:
                continue
            layers = profile(name).layer_coverage(selector, float(budget))
            assert layers[row["layer"]] == pytest.approx(coverage, abs=TOLERANCE, rel=0), key


@pytest.mark.parametrize("name", NAMES)
def test_the_measured_layers_are_those_without_a_window(name: str) -> None:
    layers = profile(name).layer_coverage("oracle", 0.25)

    assert list(layers) == [row["layer"] for row in expected(name)["layers"]]


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("number", ["support", "hottest", "eligible_mass"])
def test_the_shape_of_attention(name: str, number: str) -> None:
    mean = getattr(profile(name), number).mean()

    assert mean == pytest.approx(expected(name)["attention"][number], abs=TOLERANCE, rel=0)


@pytest.mark.parametrize("name", NAMES)
def test_skipped_units(name: str) -> None:
    assert profile(name).skipped_units == expected(name)["skipped_units"]


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
