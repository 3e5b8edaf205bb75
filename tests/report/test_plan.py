"""A plan as lines and as plain values, and its gate as it would be pasted."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import pytest

from pytest_kvgate.analysis import PageGrid
from pytest_kvgate.analysis.assignment import Assignment, Ending, Search
from pytest_kvgate.analysis.effects import Variant
from pytest_kvgate.analysis.estimates import Interval
from pytest_kvgate.analysis.resident import Resident
from pytest_kvgate.report.plan import gate_text, plan_document, plan_lines

MIB = 2**20


def assignment(
    budget: float, dense: tuple[int, ...], kl: float, mib: float, page_size: int = 32
) -> Assignment:
    return Assignment(
        variant=Variant(page_size, budget, "landmark", dense),
        kl=kl,
        kl_interval=Interval(kl / 2, kl * 1.5, 0.95, 64, "steps"),
        top1=0.9375,
        coverage=0.75,
        resident=Resident((mib - 1) * MIB, MIB, 400 * MIB),
    )


TRIED = (
    assignment(0.02, (), 0.31, 60),
    assignment(0.04, (), 0.1201, 80),
    assignment(0.04, (0, 3), 0.0412, 120),
    assignment(0.04, (0, 3, 5), 0.0312, 140),
)


def search(tried: tuple[Assignment, ...] = TRIED, **changes: object) -> Search:
    values: dict[str, Any] = {
        "selector": "landmark",
        "grid": PageGrid(),
        "max_kl": 0.05,
        "noise": 1.4e-4,
        "n_token": 64,
        "n_context": 2590,
        "paged_layers": tuple(range(30)),
        "tried": tried,
        "undefined": {0.005: "0.5% of 2590 tokens is 12 tokens, less than one 32-token page"},
        "max_runs": 40,
        "ending": "all-measured",
        "pool": 2.0,
        "roomier": Resident(139 * MIB, MIB, 400 * MIB),
        **changes,
    }
    return Search(**values)


def lines(found: Search) -> list[str]:
    return list(plan_lines(plan_document(found)))


def text(found: Search) -> str:
    return " ".join(" ".join(lines(found)).split())


def pasted(gate: str) -> dict[str, object]:
    """Return the arguments of a gate, as a test module would evaluate it."""
    made: dict[str, object] = {}

    def kvgate(**keywords: object) -> object:
        made.update(keywords)
        return lambda function: function

    exec(f"{gate}\ndef test(): ...\n", {"kvgate": kvgate})
    return made


def test_the_cheapest_that_meets_the_limit_is_proposed() -> None:
    found = search()
    assert found.best == TRIED[2]
    said = text(found)
    assert "Proposal: budget 4%, layers 0, 3 dense and 28 of 30 layers paged; KL 0.0412" in said
    assert "Nothing cheaper with these budgets meets the limit: all of it was measured." in said
    assert (
        "Resident at 2590 tokens: 120.0 of 400.0 MiB (30.0%): 119.0 MiB of K and V, 1.0 MiB of the "
        "selector's metadata."
    ) in said
    assert "with a pool of 2 × k pages it is 140.0 MiB (35.0%)" in said
    assert "an edit that changes nothing has 1.4e-04" in said
    assert "Budget 0.5% was not run: 0.5% of 2590 tokens is 12 tokens" in said


def test_of_equally_cheap_assignments_the_one_with_less_kl_is_proposed() -> None:
    twin = assignment(0.04, (1, 3), 0.0411, 120)
    assert search((*TRIED, twin)).best == twin


def test_every_assignment_that_was_tried_has_its_row_in_the_order_of_the_runs() -> None:
    rows = [line.split() for line in lines(search()) if line.startswith("   ") and "%  " in line]
    assert rows == [
        ["2%", "none", "0.3100", "0.9375", "0.7500", "60.0", "15.0%", "over"],
        ["4%", "none", "0.1201", "0.9375", "0.7500", "80.0", "20.0%", "over"],
        ["4%", "0,", "3", "0.0412", "0.9375", "0.7500", "120.0", "30.0%", "proposed"],
        ["4%", "0,", "3,", "5", "0.0312", "0.9375", "0.7500", "140.0", "35.0%", "meets"],
    ]


def test_an_interval_that_reaches_beyond_the_limit_is_pointed_out() -> None:
    assert "reaches beyond the limit" in text(search())
    assert "reaches beyond the limit" not in text(search(max_kl=0.0618))


def test_where_nothing_meets_the_limit_the_nearest_is_named_and_no_gate_given() -> None:
    found = search(max_kl=0.03, roomier=None)
    said = text(found)
    assert "No assignment that was measured meets a KL of 0.03." in said
    assert "Nearest: budget 4%, layers 0, 3, 5 dense and 27 of 30 layers paged" in said
    assert "Every assignment with these budgets that saves anything was measured." in said
    assert "@kvgate" not in said
    assert plan_document(found)["gate"] is None


@pytest.mark.parametrize(
    ("ending", "said"),
    [
        ("max-runs", "because its 40 runs were used up"),
        ("too-many-left", "More cheaper assignments are left than the remaining runs could"),
    ],
)
@pytest.mark.parametrize("max_kl", [0.05, 0.01])
def test_why_a_search_ended_is_said(ending: Ending, said: str, max_kl: float) -> None:
    assert said in text(search(ending=ending, max_kl=max_kl))


def test_the_gate_of_the_proposal_is_one_line_that_can_be_pasted() -> None:
    gate = plan_document(search())["gate"]
    assert gate == (
        '@kvgate(budget=0.04, max_kl=0.05, selector="landmark", page_size=32, dense_layers=[0, 3])'
    )
    assert pasted(gate) == {
        "budget": 0.04,
        "max_kl": 0.05,
        "selector": "landmark",
        "page_size": 32,
        "dense_layers": [0, 3],
    }


@pytest.mark.parametrize("page_size", [16, 32])
@pytest.mark.parametrize("dense", [(), (7,), tuple(range(0, 30, 2)), tuple(range(0, 160, 2))])
def test_a_gate_of_any_length_fits_the_terminal_and_asks_for_what_was_measured(
    dense: tuple[int, ...], page_size: int
) -> None:
    found = assignment(0.125, dense, 0.01, 100, page_size)
    gate = gate_text(found, 0.015)
    assert max(map(len, gate)) <= 98
    made = pasted("\n".join(gate))
    assert made.pop("page_size") == page_size
    assert made.pop("dense_layers", []) == list(dense)
    assert made == {"budget": 0.125, "max_kl": 0.015, "selector": "landmark"}


def test_no_line_is_wider_than_100_columns_however_many_layers_are_dense() -> None:
    many = tuple(range(0, 200, 2))
    for found in (
        search((assignment(0.04, many, 1e-6, 120),), paged_layers=tuple(range(200))),
        search((assignment(0.04, many, 12345.678, 120),), paged_layers=tuple(range(200))),
        search(undefined={0.001: "for a reason that goes on and on " * 6}),
    ):
        assert max(map(len, lines(found))) <= 100


def test_a_small_cache_is_stated_to_a_thousandth_of_a_mib() -> None:
    small = replace(TRIED[2], resident=Resident(0.25 * MIB, 0.125 * MIB, MIB))
    assert "Resident at 2590 tokens: 0.375 of 1.000 MiB (37.5%)" in text(search((small,)))


def test_the_plain_values_are_json_and_say_the_same() -> None:
    document = json.loads(json.dumps(plan_document(search())))
    assert document["best"] == {
        "budget": 0.04,
        "dense_layers": [0, 3],
        "kl": 0.0412,
        "kl_ci": [0.0206, 0.0618],
        "top1": 0.9375,
        "coverage": 0.75,
        "resident": {
            "bytes": 120 * MIB,
            "kv_bytes": 119 * MIB,
            "metadata_bytes": MIB,
            "whole_bytes": 400 * MIB,
            "share": 0.3,
        },
    }
    assert [row["verdict"] for row in document["tried"]] == ["over", "over", "proposed", "meets"]
    assert document["nearest"]["dense_layers"] == [0, 3, 5]
    assert list(plan_lines(document)) == lines(search())
