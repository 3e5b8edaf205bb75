"""The traces in tests/cases against the numbers an independent program computed from them."""

from __future__ import annotations

import json
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from pytest_kvgate.analysis import SELECTORS, PageGrid, Profile, UndefinedError, profile_trace
from pytest_kvgate.trace import load_trace
from tests.plain import PlainProfile, plain_profile

CASES = Path(__file__).parents[1] / "cases"
NAMES = ("alibi-window", "gqa-f16", "sinks-softcap")
TOLERANCE = 1e-5


@cache
def expected(name: str) -> dict[str, Any]:
    document: dict[str, Any] = json.loads((CASES / name / "expected.json").read_text("utf-8"))
    return document


@cache
def profile(name: str) -> Profile:
    document = expected(name)
    budgets = dict.fromkeys(row["budget"] for row in document["coverage"])
    return profile_trace(
        load_trace(CASES / name), PageGrid(**document["settings"]), tuple(budgets), SELECTORS
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


@pytest.mark.parametrize("name", NAMES)
def test_the_plain_judge_says_the_same(name: str) -> None:
    judge = plain(name)

    for row in measured_rows(name, "coverage"):
        for number in ("coverage", "total_mass"):
            value = getattr(judge, number)(row["selector"], row["budget"])
            assert (value is None) == (row[number] is None), row
            if value is not None:
                assert value == pytest.approx(row[number], abs=1e-9), row
    for number in ("support", "hottest", "eligible_mass"):
        assert getattr(judge, number) == pytest.approx(
            expected(name)["attention"][number], rel=1e-9
        )
    assert judge.skipped_units == expected(name)["skipped_units"]
