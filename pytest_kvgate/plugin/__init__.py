"""pytest hooks and fixtures; each calls the room that does the work.

Importing this module imports neither numpy nor llama_cpp: a session without gates pays nothing.
"""

from __future__ import annotations

import shutil
from collections.abc import Generator
from typing import TYPE_CHECKING

import pytest

from pytest_kvgate.options import add_options, given_on_command_line
from pytest_kvgate.plugin.items import (
    BROKEN,
    FAILURE,
    GATES,
    ROWS,
    RUNNING,
    broken_evidence,
    chosen,
    comment_on_outcome,
    declared_gates,
    fail_unexcused,
    failure_text,
    failure_texts,
    gates_added_late,
    insist,
    is_involved,
    judge,
    rows_of_failed_setup,
    shorten_summary,
    unanswered_rows,
)
from pytest_kvgate.plugin.reports import VerdictCollector, write_reports
from pytest_kvgate.plugin.scorer import kvgate_scorer
from pytest_kvgate.plugin.state import (
    NO_EVIDENCE,
    STATE,
    State,
    calibrated,
    check_calibration,
    check_loop_options,
    headline,
    open_session,
    require_session,
    settings_of,
    state_of,
    subjects_of,
)

if TYPE_CHECKING:
    from pytest_kvgate.analysis import Profile
    from pytest_kvgate.trace import Trace

__all__ = ["kvgate_profile", "kvgate_scorer", "kvgate_trace"]


def pytest_addoption(parser: pytest.Parser) -> None:
    """Declare the options and ini keys."""
    add_options(parser)


def pytest_addhooks(pluginmanager: pytest.PytestPluginManager) -> None:
    """Declare the hooks that a conftest.py may implement."""
    from pytest_kvgate.plugin import hookspecs  # noqa: PLC0415

    pluginmanager.add_hookspecs(hookspecs)


@pytest.hookimpl(trylast=True)  # after a conftest.py that adds to the ini keys
def pytest_configure(config: pytest.Config) -> None:
    """Register the marker; check what the command line says before anything runs."""
    config.addinivalue_line(
        "markers",
        "kvgate(budget, min_coverage, ...): at a budget (fraction of the context) the selector's "
        "pages must hold min_coverage of the eligible attention mass; without a selector, both "
        "oracle (the ceiling) and landmark must. Also: min_total_mass, max_output_error, "
        "min_hit_rate, max_budget with coverage; in a closed loop max_kl, min_top1, "
        "max_nll_increase; selector, page_size, scope, layers, dense_layers, confidence. "
        "Stackable.",
    )
    state = config.stash[STATE] = State()
    config.pluginmanager.register(VerdictCollector(state), "kvgate-verdicts")
    if given_on_command_line(config):
        subjects_of(config)
        check_calibration(config)


def pytest_unconfigure(config: pytest.Config) -> None:
    """Remove the traces that nobody asked to keep."""
    state = config.stash.get(STATE, None)
    if state is not None and state.folder is not None and state.owns_folder:
        shutil.rmtree(state.folder, ignore_errors=True)


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """Run a gate once per model, and a test of a single trace once per trace."""
    if not is_involved(metafunc.definition, metafunc.fixturenames):
        return
    try:
        subjects = subjects_of(metafunc.config)
    except pytest.UsageError:
        return  # while a module is collected it would pass for an error of the module
    choices: list[tuple[str, tuple[int, int | None]]] = [
        (subject.label, (number, None)) for number, subject in enumerate(subjects)
    ]
    if not {"kvgate_trace", "kvgate_scorer"}.isdisjoint(metafunc.fixturenames):
        choices = [
            (source.label, (number, position))
            for number, subject in enumerate(subjects)
            for position, source in enumerate(subject.sources)
        ]
    if len(choices) > 1:
        if "_kvgate_choice" not in metafunc.fixturenames:
            metafunc.fixturenames.append("_kvgate_choice")
        labels, values = zip(*choices, strict=True)
        ids = [label.replace(" · ", "-") for label in labels]
        metafunc.parametrize("_kvgate_choice", values, ids=ids, indirect=True)


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Check every gate's arguments before any test runs."""
    involved = [item for item in items if is_involved(item, getattr(item, "fixturenames", ()))]
    if not involved:
        return
    state_of(config).involved = True
    try:
        for item in involved:
            item.stash[GATES] = declared_gates(item)
            if not settings_of(config).has_evidence:
                item.add_marker(pytest.mark.skip(reason=NO_EVIDENCE))
        open_session(config, (gate for item in involved for _, gate in item.stash[GATES]))
        check_loop_options(config)
    except pytest.UsageError as error:
        if not hasattr(config, "workeroutput"):
            raise
        # an xdist worker cannot end the run with a usage error; its controller does
        config.workeroutput["kvgate_usage_error"] = str(error)
        items.clear()


def pytest_report_header(config: pytest.Config) -> list[str]:
    """Say in one line what the command line puts to the test."""
    return [headline(config)] if given_on_command_line(config, "model", "trace") else []


def pytest_report_collectionfinish(config: pytest.Config, items: list[pytest.Item]) -> list[str]:
    """Say the same for gates that the ini file or a conftest.py supplies with a model."""
    gates = any(item.stash.get(GATES, ()) for item in items)
    if not gates or given_on_command_line(config, "model", "trace"):
        return []
    return [headline(config)]


@pytest.hookimpl(wrapper=True)
def pytest_runtest_call(item: pytest.Item) -> Generator[None, object, object]:
    """Judge the test's gates, run its body, and fail it if a gate was missed."""
    # what an earlier attempt left, where failed tests are run again
    if BROKEN in item.stash:
        del item.stash[BROKEN]
    if FAILURE in item.stash:
        del item.stash[FAILURE]
    try:
        results = list(judge(item))
    except Exception as error:
        item.stash[BROKEN] = repr(error)
        raise
    failures = [result for result in results if result.verdict != "GO"]
    broken = [result.reason for result in failures if result.verdict == "INVALID"]
    if failures:
        item.stash[FAILURE] = failure_texts(failures)
    if broken:
        item.stash[BROKEN] = broken[0]
    outcome = None
    item.stash[RUNNING] = True
    try:
        outcome = yield
    except (KeyboardInterrupt, SystemExit, pytest.exit.Exception):
        raise
    except BaseException as error:
        # a body that skips does not take a missed gate along, nor an expected failure a broken one
        late = gates_added_late(item)
        if not failures and not late:
            raise
        if not broken and not late and not isinstance(error, pytest.skip.Exception):
            item.add_report_section("call", "kvgate", failure_text(item))
            raise
    finally:
        del item.stash[RUNNING]
    if failures:
        pytest.fail(failure_text(item), pytrace=False)
    if gates_added_late(item):
        fail_unexcused(
            item,
            "kvgate: a gate was added to this test too late to measure what it needs. Declare it "
            "with the decorator, or in pytest_collection_modifyitems without trylast.",
        )
    return outcome


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_runtest_makereport(
    item: pytest.Item, call: pytest.CallInfo[None]
) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    """Let the report carry the verdicts; an xfail excuses a missed gate, not a broken one."""
    report = yield
    if RUNNING in item.stash:  # one part of a test, as subtests report it
        return report
    if call.when != "teardown":
        insist(item, call, report)
        shorten_summary(item, call, report)
    rows = item.stash.get(ROWS, [])
    item.stash[ROWS] = []
    if call.when == "setup" and not report.passed:
        rows = rows_of_failed_setup(item, report)
    comment_on_outcome(report, rows)
    # an attribute of plain values: it travels from an xdist worker with the report
    report.__dict__["kvgate_rows"] = rows
    return report


def pytest_sessionfinish(session: pytest.Session) -> None:
    """Write the reports; a run that was to judge a model but held no gate is not a success."""
    config = session.config
    state = state_of(config)
    if state.session is not None:
        state.documents.update(state.session.documents)
    if hasattr(config, "workeroutput"):
        config.workeroutput["kvgate_documents"] = state.documents
        config.workeroutput["kvgate_used"] = state.used
        config.workeroutput["kvgate_calibration"] = state.calibration
        return
    if state.usage_error is not None:
        raise pytest.UsageError(state.usage_error)
    finished = session.exitstatus in (
        pytest.ExitCode.OK,
        pytest.ExitCode.TESTS_FAILED,
        pytest.ExitCode.NO_TESTS_COLLECTED,
    )
    if config.getoption("collectonly"):
        return
    judged = {row["id"] for row in state.rows}
    for item in getattr(session, "items", ()):  # an xdist controller has none of its own
        if judged.isdisjoint(gate_id for gate_id, _ in item.stash.get(GATES, ())):
            state.rows += unanswered_rows(item, "NOT EVALUATED", "the run ended before its test")
    if not finished:
        return
    asked = given_on_command_line(config, "model", "trace", "calibrate")
    if given_on_command_line(config, "calibrate"):
        calibrated(config)
    if state.involved or state.rows or given_on_command_line(config, "report"):
        write_reports(config)
    judged_any = any(row["verdict"] != "NOT EVALUATED" for row in state.rows)
    reported = bool(given_on_command_line(config, "report")) and bool(state.documents)
    if asked and not (judged_any or state.used or reported or state.problems):
        state.problems.append(f"{asked[0]} was given, but no gate was run: NOTHING WAS EVALUATED.")
        if session.exitstatus == pytest.ExitCode.OK:
            session.exitstatus = pytest.ExitCode.NO_TESTS_COLLECTED
    off = state.calibration is not None and not state.calibration["calibrated"]
    if (state.problems and session.exitstatus == pytest.ExitCode.OK) or off:
        session.exitstatus = pytest.ExitCode.TESTS_FAILED


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """List every gate, and what was measured."""
    state = state_of(terminalreporter.config)
    if not (state.rows or state.documents or state.problems or state.calibration):
        return
    from pytest_kvgate.report.summary import summary_lines  # noqa: PLC0415

    terminalreporter.section("kvgate")
    settings = state.settings
    verbose = settings is not None and settings.verbose
    documents = state.documents.values()
    for line in summary_lines(
        documents, state.rows, state.problems, calibration=state.calibration, verbose=verbose
    ):
        terminalreporter.line(line)
    save = None if settings is None else settings.save
    if save is not None and state.documents:
        terminalreporter.line(f"Captured traces are kept below {save}.")


@pytest.fixture
def kvgate_profile(
    request: pytest.FixtureRequest, _kvgate_choice: tuple[int, int | None] | None
) -> Profile:
    """Pooled profile of the model under test, at the page size of the test's gates."""
    gates = [gate for _, gate in request.node.stash.get(GATES, ())]
    session = require_session(request.config)
    state_of(request.config).used |= not gates
    sizes = {gate.page_size or session.page_size for gate in gates}
    if len(sizes) > 1:
        fail_unexcused(
            request.node,
            f"kvgate_profile is ambiguous: the gates of this test use pages of "
            f"{' and '.join(map(str, sorted(sizes)))} tokens. Split the test, one page size each.",
        )
    page_size = sizes.pop() if sizes else session.page_size
    subject = session.subjects[chosen(request.node, _kvgate_choice, len(session.subjects))[0]]
    with broken_evidence(request.node):
        session.describe(subject, page_size)
        return session.trusted_profile(subject, page_size)


@pytest.fixture
def kvgate_trace(
    request: pytest.FixtureRequest, _kvgate_choice: tuple[int, int | None] | None
) -> Trace:
    """One captured or saved trace; with several, the test runs once for each."""
    session = require_session(request.config)
    state_of(request.config).used |= not request.node.stash.get(GATES, ())
    n_source = sum(len(subject.sources) for subject in session.subjects)
    subject, position = chosen(request.node, _kvgate_choice, n_source)
    with broken_evidence(request.node):
        session.require_calibrated()
        return session.evidence.trace(session.subjects[subject].sources[position or 0])


@pytest.fixture
def _kvgate_choice(request: pytest.FixtureRequest) -> tuple[int, int | None] | None:
    """Which subject, and which of its sources, a test is about; None where it was not asked."""
    choice: tuple[int, int | None] | None = getattr(request, "param", None)
    return choice
