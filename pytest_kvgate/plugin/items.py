"""A test and its gates: which it declares, how they are judged, what its report carries."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import pytest

from pytest_kvgate.plugin.state import state_of

if TYPE_CHECKING:
    from pytest_kvgate.gate import Gate, GateResult

GATES = pytest.StashKey["tuple[tuple[str, Gate], ...]"]()
ROWS = pytest.StashKey[list[dict[str, Any]]]()
#: Set on a test whose gates could not be judged; unlike a missed gate, an xfail does not excuse it.
BROKEN = pytest.StashKey[bool]()


def is_involved(node: pytest.Item, fixturenames: Iterable[str]) -> bool:
    """Whether a test has a gate or uses a kvgate fixture."""
    wanted = ("kvgate_profile", "kvgate_trace")
    return node.get_closest_marker("kvgate") is not None or any(
        name in wanted for name in fixturenames
    )


def declared_gates(item: pytest.Item) -> tuple[tuple[str, Gate], ...]:
    """Return a test's gates with their ids, from the outermost marker in."""
    from pytest_kvgate.gate import GateError, gate_from_arguments  # noqa: PLC0415

    markers = list(item.iter_markers("kvgate"))[::-1]
    gates = []
    for number, marker in enumerate(markers, start=1):
        try:
            gate = gate_from_arguments(marker.args, marker.kwargs)
        except GateError as error:
            raise pytest.UsageError(f"{item.nodeid}: {error}") from None
        gates.append((item.nodeid if len(markers) == 1 else f"{item.nodeid}#{number}", gate))
    return tuple(gates)


def judge(item: pytest.Item) -> Iterator[GateResult]:
    """Judge an item's gates on its model, or on every model where it is not parametrized."""
    gates = item.stash.get(GATES, ())
    session = state_of(item.config).session
    if not gates or session is None:
        return
    from pytest_kvgate.report.document import gate_row  # noqa: PLC0415

    callspec = getattr(item, "callspec", None)
    choice = None if callspec is None else callspec.params.get("_kvgate_choice")
    subjects = session.subjects if choice is None else (session.subjects[choice[0]],)
    rows = item.stash.setdefault(ROWS, [])
    for subject in subjects:
        for gate_id, gate in gates:
            result = session.judge(gate_id, gate, subject)
            rows.append(gate_row(result))
            yield result


def failure_text(failures: Iterable[GateResult]) -> str:
    """Return the whole text of a test that failed for its gates."""
    from pytest_kvgate.report.failure import gate_failure  # noqa: PLC0415

    return "\n\n".join("\n".join(gate_failure(result)) for result in failures)


def mark_not_evaluated(item: pytest.Item, report: pytest.TestReport) -> None:
    """Give every gate of a test that never ran a row that says so."""
    from pytest_kvgate.gate import unanswered  # noqa: PLC0415
    from pytest_kvgate.report.document import gate_row  # noqa: PLC0415

    longrepr = report.longrepr
    reason = longrepr[2] if isinstance(longrepr, tuple) else "the setup of its test failed"
    reason = reason.removeprefix("Skipped: ")
    item.stash[ROWS] = [
        gate_row(unanswered(gate_id, "", gate, "NOT EVALUATED", reason))
        for gate_id, gate in item.stash.get(GATES, ())
    ]


@contextmanager
def broken_evidence(item: pytest.Item) -> Iterator[None]:
    """Turn an `EvidenceError` into a failure without traceback that no xfail excuses."""
    from pytest_kvgate.pipeline import EvidenceError  # noqa: PLC0415

    try:
        yield
    except EvidenceError as error:
        item.stash[BROKEN] = True
        pytest.fail(f"kvgate: {error}", pytrace=False)
