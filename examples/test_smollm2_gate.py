"""The decision of one team: no KV paging for SmolLM2-135M at a 2% budget."""

from __future__ import annotations

import pytest

from pytest_kvgate import kvgate


@pytest.mark.xfail(
    strict=True,
    reason="NO-GO on 2,300 tokens of Python source: at a 2% budget oracle 0.2056, landmark 0.1513, "
    "where 0.95 is required; even the ceiling needs a budget of 53.9%.",
)
@kvgate(budget=0.02, min_coverage=0.95)
def test_paging_is_worth_building() -> None:
    """Two percent of the pages, picked by the query, hold 95% of the eligible mass."""
