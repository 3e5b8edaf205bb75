"""The page grid: which pages compete for the budget, and how many a budget buys."""

from __future__ import annotations

from fractions import Fraction
from math import floor

import pytest

from pytest_kvgate.analysis import PageGrid
from pytest_kvgate.analysis.pages import BUDGET_GRID
from pytest_kvgate.analysis.wording import cost, exact, part, percent, share


@pytest.mark.parametrize(
    ("n", "tokens"),
    [(100, 2), (101, 3), (150, 3), (151, 4), (1, 1)],
)
def test_a_recent_fraction_is_rounded_up_to_tokens(n: int, tokens: int) -> None:
    assert PageGrid(recent=0.02).recent_tokens(n) == tokens


def test_a_recent_fraction_is_the_decimal_that_was_written() -> None:
    # in binary floating point 0.07 * 100 is 7.000000000000001, which would round up to 8
    assert 0.07 * 100 > 7
    assert PageGrid(recent=0.07).recent_tokens(100) == 7


@pytest.mark.parametrize("n", [1, 40, 5000])
def test_a_recent_window_from_one_up_is_tokens(n: int) -> None:
    assert PageGrid(recent=1).recent_tokens(n) == 1
    assert PageGrid(recent=64).recent_tokens(n) == 64


def test_no_recent_window() -> None:
    assert PageGrid(recent=0).recent_tokens(1000) == 0
    assert PageGrid(page_size=10, sinks=0, recent=0).eligible(1000) == (0, 100)


@pytest.mark.parametrize(
    ("sinks", "first"),
    [(0, 0), (1, 1), (31, 1), (32, 1), (33, 2), (64, 2), (65, 3)],
)
def test_a_page_that_holds_a_sink_is_free(sinks: int, first: int) -> None:
    assert PageGrid(page_size=32, sinks=sinks, recent=0).eligible(320) == (first, 10)


@pytest.mark.parametrize(
    ("n", "recent", "end"),
    [
        (320, 0, 10),
        (319, 0, 9),
        (351, 0, 10),
        (320, 1, 9),
        (320, 32, 9),
        (320, 33, 8),
        (352, 32, 10),
        (351, 32, 9),
    ],
)
def test_a_page_that_reaches_into_the_recent_window_is_free(n: int, recent: int, end: int) -> None:
    assert PageGrid(page_size=32, sinks=0, recent=recent).eligible(n) == (0, end)


def test_a_fractional_recent_window_decides_by_its_rounded_up_tokens() -> None:
    grid = PageGrid(page_size=32, sinks=32, recent=0.05)

    # 5% of 337 is 16.85, so 17 tokens are recent and 320 are left; of 336 also 17, and 319
    assert grid.eligible(337) == (1, 10)
    assert grid.eligible(336) == (1, 9)


@pytest.mark.parametrize(
    ("grid", "n"),
    [
        (PageGrid(page_size=32, sinks=32, recent=0.02), 64),
        (PageGrid(page_size=32, sinks=500, recent=0.02), 400),
        (PageGrid(page_size=32, sinks=0, recent=500), 400),
        (PageGrid(page_size=32, sinks=0, recent=0), 31),
    ],
)
def test_the_range_is_empty_where_no_page_is_eligible(grid: PageGrid, n: int) -> None:
    first, end = grid.eligible(n)

    assert first == end


def test_two_percent_of_1600_tokens_is_exactly_one_page() -> None:
    grid = PageGrid(page_size=32)

    assert grid.pages_for(0.02, 1600) == 1
    assert grid.pages_for(0.02, 1599) == 0


@pytest.mark.parametrize(
    ("budget", "n", "page_size", "pages"),
    [
        (0.29, 3200, 32, 29),
        (0.29, 100, 1, 29),
        (0.57, 100, 1, 57),
        (0.58, 100, 1, 58),
        (0.07, 100, 7, 1),
        (0.001, 32000, 32, 1),
        (0.1, 320, 32, 1),
        (0.3, 320, 32, 3),
        (1.0, 320, 32, 10),
        (1.0, 351, 32, 10),
    ],
)
def test_a_budget_buys_the_pages_of_its_decimal(
    budget: float, n: int, page_size: int, pages: int
) -> None:
    assert PageGrid(page_size=page_size).pages_for(budget, n) == pages


def test_binary_floats_would_lose_pages_that_the_decimal_buys() -> None:
    assert floor(0.29 * 100) == 28
    assert floor(Fraction(0.29) * 3200 / 32) == 28
    assert PageGrid(page_size=32).pages_for(0.29, 3200) == 29


def test_a_budget_that_is_not_whole_pages_is_rounded_down() -> None:
    grid = PageGrid(page_size=32)

    assert grid.pages_for(0.02, 3199) == 1
    assert grid.pages_for(0.02, 3200) == 2
    assert grid.pages_for(0.999, 320) == 9


def test_a_budget_below_one_page_buys_none() -> None:
    grid = PageGrid(page_size=32)

    assert grid.pages_for(0.005, 1024) == 0
    assert grid.pages_for_all((0.005, 0.03125, 0.5), [1024, 64]).tolist() == [[0, 1, 16], [0, 0, 1]]


def test_a_shortfall_is_said_in_tokens() -> None:
    assert PageGrid(page_size=32).shortfall(0.005, 1024) == (
        "0.5% of 1024 tokens is 5 tokens, less than one 32-token page"
    )


def test_the_budget_grid_is_every_tenth_of_a_percent_exactly() -> None:
    assert len(BUDGET_GRID) == 1000
    assert [exact(budget) for budget in BUDGET_GRID] == [
        Fraction(step, 1000) for step in range(1, 1001)
    ]


@pytest.mark.parametrize(
    ("fraction", "text"),
    [
        (0.005, "0.5%"),
        (0.02, "2%"),
        (0.1, "10%"),
        (1.0, "100%"),
        (0.29, "29%"),
        (0.07, "7%"),
        (0.366, "36.6%"),
        (0.0125, "1.25%"),
        (0.00001, "0.001%"),
        (0, "0%"),
    ],
)
def test_percent_is_as_short_as_it_can_be(fraction: float, text: str) -> None:
    assert percent(fraction) == text


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (0.94999, "0.9499"),
        (0.95, "0.9500"),
        (0.57, "0.5700"),
        (0.29, "0.2900"),
        (0.99999, "0.9999"),
        (1.0, "1.0000"),
        (0.0, "0.0000"),
        (1e-5, "0.0000"),
        (None, "–"),
    ],
)
def test_a_share_is_cut_to_four_digits_and_not_rounded(value: float | None, text: str) -> None:
    assert share(value) == text


def test_every_share_of_four_digits_is_written_as_it_is() -> None:
    assert [share(step / 10000) for step in range(10001)] == [
        f"{step // 10000}.{step % 10000:04d}" for step in range(10001)
    ]


@pytest.mark.parametrize(
    ("value", "text"),
    [(0.1, "0.1000"), (0.10000001, "0.1001"), (0.2, "0.2000"), (1.5, "1.5000"), (0.0, "0.0000")],
)
def test_what_must_stay_small_is_cut_upwards(value: float, text: str) -> None:
    assert cost(value) == text
    assert cost(None) == "–"


def test_every_cost_of_four_digits_is_written_as_it_is() -> None:
    assert [cost(step / 10000) for step in range(10001)] == [
        f"{step // 10000}.{step % 10000:04d}" for step in range(10001)
    ]


def test_parts_of_a_sum_are_rounded_so_that_they_add_up() -> None:
    assert [part(value) for value in (0.42439, 0.36966, -0.00254, None)] == [
        "0.4244",
        "0.3697",
        "-0.0025",
        "–",
    ]
