"""The fixture ``kvgate_scorer``: scoring to be timed by pytest-benchmark."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

import pytest

from pytest_kvgate.plugin.items import GATES, broken_evidence, chosen, fail_unexcused
from pytest_kvgate.plugin.state import registry_of, require_session, state_of

if TYPE_CHECKING:
    from pytest_kvgate.analysis.scoring import PageScorer


@pytest.fixture
def kvgate_scorer(
    request: pytest.FixtureRequest, _kvgate_choice: tuple[int, int | None] | None
) -> Iterator[Callable[..., PageScorer]]:
    """Return ``scorer(selector, budget=None)``: a callable that scores all pages of a trace.

    With the ``benchmark`` fixture in the same test, its ``extra_info`` gets the selector's coverage
    at the budget (that of the test's gate, else the largest that is reported), the metadata bytes
    it needs, and, once timed, the pages it scores per second. With several traces, the test runs
    once for each.
    """
    from pytest_kvgate.analysis import NotMeasuredError, UndefinedError  # noqa: PLC0415
    from pytest_kvgate.analysis.findings import metadata_bytes  # noqa: PLC0415
    from pytest_kvgate.analysis.scoring import page_scorer  # noqa: PLC0415

    session = require_session(request.config)
    item = request.node
    gates = [gate for _, gate in item.stash.get(GATES, ())]
    state_of(request.config).used |= not gates
    n_source = sum(len(subject.sources) for subject in session.subjects)
    at, position = chosen(item, _kvgate_choice, n_source)
    subject = session.subjects[at]
    timer: Any = None
    if "benchmark" in request.fixturenames:
        timer = request.getfixturevalue("benchmark")
    made: list[PageScorer] = []

    def scorer(selector: str = "landmark", budget: float | None = None) -> PageScorer:
        registry = registry_of(request.config)
        if not isinstance(selector, str) or selector not in registry:
            fail_unexcused(
                item,
                f"kvgate_scorer({selector!r}): there is no such selector of pages. Accepted: "
                f"{', '.join(registry)}.",
            )
        number = isinstance(budget, int | float) and 0 < budget <= 1
        if budget is not None and not number:
            fail_unexcused(
                item,
                f"kvgate_scorer(budget={budget!r}): a budget is a fraction of the context, above 0 "
                "and up to 1.",
            )
        page_size = gates[0].page_size if gates else None
        page_size = page_size or session.page_size
        with broken_evidence(item):
            session.trusted_profile(subject, page_size)
            profile = session.evidence.alone(subject, page_size)[position or 0]
            found = page_scorer(profile.traces[0], page_size, registry[selector])
        if timer is not None:
            asked = budget or (gates[0].budget if gates else None) or profile.budgets[-1]
            try:
                coverage: float | None = profile.coverage(selector, asked)
            except (NotMeasuredError, UndefinedError):
                coverage = None
            timer.extra_info.update(
                selector=selector,
                budget=float(asked),
                coverage=coverage,
                metadata_bytes=float(metadata_bytes(profile, selector) or 0),
                pages=found.n_score,
            )
        made.append(found)
        return found

    yield scorer
    timing = getattr(timer, "stats", None)
    if timing is not None and made:
        timer.extra_info["pages_per_second"] = made[-1].n_score / timing.stats.mean
