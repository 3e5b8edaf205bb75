"""A test and its gates: which it declares, how they are judged, what its report carries."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, NoReturn

import pytest

from pytest_kvgate.plugin.state import selector_names, state_of

if TYPE_CHECKING:
    from pytest_kvgate.gate import Gate, GateResult, Verdict

GATES = pytest.StashKey["tuple[tuple[str, Gate], ...]"]()
ROWS = pytest.StashKey[list[dict[str, Any]]]()
#: Why a test's gates could not be judged; unlike a missed gate, an xfail does not excuse it.
BROKEN = pytest.StashKey[str]()
#: Set while a test's body runs.
RUNNING = pytest.StashKey[bool]()
#: The texts of the gates that did not hold, one each.
FAILURE = pytest.StashKey[tuple[str, ...]]()


def is_involved(node: pytest.Item, fixturenames: Iterable[str]) -> bool:
    """Whether a test has a gate or uses a kvgate fixture."""
    wanted = ("kvgate_profile", "kvgate_trace", "kvgate_scorer")
    return node.get_closest_marker("kvgate") is not None or any(
        name in wanted for name in fixturenames
    )


def declared_gates(item: pytest.Item) -> tuple[tuple[str, Gate], ...]:
    """Return a test's gates with their ids, from the outermost marker in."""
    from pytest_kvgate.gate import GateError, gate_from_arguments  # noqa: PLC0415

    markers = list(item.iter_markers("kvgate"))[::-1]
    if not markers:
        return ()
    names = selector_names(item.config)
    gates = []
    for number, marker in enumerate(markers, start=1):
        try:
            gate = gate_from_arguments(marker.args, marker.kwargs, names)
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


def failure_texts(failures: Iterable[GateResult]) -> tuple[str, ...]:
    """Return what to say of each gate that did not hold."""
    from pytest_kvgate.report.failure import gate_failure  # noqa: PLC0415

    return tuple("\n".join(gate_failure(result)) for result in failures)


def failure_text(item: pytest.Item) -> str:
    """Return the whole text of a test that failed for its gates."""
    texts = item.stash[FAILURE]
    return "\n\n".join(texts)


def shorten_summary(
    item: pytest.Item, call: pytest.CallInfo[None], report: pytest.TestReport
) -> None:
    """Let a missed gate take one line of the short test summary.

    Where the environment says CI, pytest prints the whole message there, tables and all, which
    stand right above. The failure itself keeps its text.
    """
    crash = getattr(report.longrepr, "reprcrash", None)
    if call.excinfo is None or crash is None or FAILURE not in item.stash:
        return
    if str(call.excinfo.value) != failure_text(item):
        return  # the body failed on its own account
    first, *others = item.stash[FAILURE]
    crash.message = first.partition("\n")[0]
    if others:
        crash.message += f" (and {len(others)} more)"


def gates_added_late(item: pytest.Item) -> bool:
    """Whether the test got a gate after collection, when no gate can be prepared any more."""
    return len(list(item.iter_markers("kvgate"))) != len(item.stash.get(GATES, ()))


def insist(item: pytest.Item, call: pytest.CallInfo[None], report: pytest.TestReport) -> None:
    """Turn a report into a failure where something hides what became of the test's gates.

    An xfail excuses a missed gate, not one that could not be judged; and no kind of skip, not even
    unittest's, takes a missed gate along.
    """
    if call.excinfo is None or not (BROKEN in item.stash or item.stash.get(GATES, ())):
        return
    xfailed = hasattr(report, "wasxfail")
    skipped = report.skipped and not xfailed
    asked_for = isinstance(call.excinfo.value, (pytest.skip.Exception, pytest.xfail.Exception))
    setup_broke = call.when == "setup" and xfailed and not asked_for
    if BROKEN in item.stash or setup_broke or (skipped and FAILURE in item.stash):
        if xfailed:
            del report.wasxfail
            report.sections.append(
                ("kvgate", "The xfail of this test excuses a missed gate and nothing else.")
            )
        if isinstance(report.longrepr, tuple):  # the reason of a skip
            missed = FAILURE in item.stash
            report.longrepr = failure_text(item) if missed else item.stash.get(BROKEN, "")
        report.outcome = "failed"


def fail_unexcused(item: pytest.Item, text: str) -> NoReturn:
    """Fail the running test without traceback, in a way that no xfail and no skip excuses."""
    item.stash[BROKEN] = text
    pytest.fail(text, pytrace=False)


def chosen(
    item: pytest.Item, choice: tuple[int, int | None] | None, n_choice: int
) -> tuple[int, int | None]:
    """Return the choice, or the only one there is."""
    if choice is None and n_choice > 1:
        fail_unexcused(
            item,
            f"kvgate has {n_choice} models or traces, and this test cannot run once for each: it "
            "asks for the fixture while it runs. Name kvgate_profile or kvgate_trace among its "
            "arguments.",
        )
    return choice or (0, None)


def unanswered_rows(item: pytest.Item, verdict: Verdict, reason: str) -> list[dict[str, Any]]:
    """Return a row for every gate of a test that could not be judged."""
    gates = item.stash.get(GATES, ())
    if not gates:  # a bystander, which must not pay for the imports
        return []
    from pytest_kvgate.gate import unanswered  # noqa: PLC0415
    from pytest_kvgate.report.document import gate_row  # noqa: PLC0415

    return [gate_row(unanswered(gate_id, "", gate, verdict, reason)) for gate_id, gate in gates]


def rows_of_failed_setup(item: pytest.Item, report: pytest.TestReport) -> list[dict[str, Any]]:
    """Return the rows of a test that never ran, with the reason why."""
    broken = item.stash.get(BROKEN, None)
    if broken is not None:
        return unanswered_rows(item, "INVALID", broken)
    if hasattr(report, "wasxfail"):
        return unanswered_rows(item, "NOT EVALUATED", f"its xfail kept it: {report.wasxfail}")
    longrepr = report.longrepr
    reason = longrepr[2] if isinstance(longrepr, tuple) else "the setup of its test failed"
    return unanswered_rows(item, "NOT EVALUATED", reason.removeprefix("Skipped: "))


def comment_on_outcome(report: pytest.TestReport, rows: list[dict[str, Any]]) -> None:
    """Say what a failed test means whose gates all hold."""
    if not rows or not report.failed or any(row["verdict"] != "GO" for row in rows):
        return
    for row in rows:
        row["notes"].append("the gate holds, but its test failed")
    if isinstance(report.longrepr, str) and report.longrepr.startswith("[XPASS(strict)]"):
        report.longrepr += (
            "\nkvgate: every gate of this test is GO now, so the decision that the xfail records "
            "no longer holds. Look at the numbers, and remove the xfail."
        )


@contextmanager
def broken_evidence(item: pytest.Item) -> Iterator[None]:
    """Turn an `EvidenceError` into a failure without traceback that no xfail excuses."""
    from pytest_kvgate.pipeline import EvidenceError  # noqa: PLC0415

    try:
        yield
    except EvidenceError as error:
        item.stash[BROKEN] = str(error)
        raise pytest.fail.Exception(f"kvgate: {error}", pytrace=False) from None
