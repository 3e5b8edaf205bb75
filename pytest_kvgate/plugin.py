"""pytest hooks and fixtures; each calls the room that does the work.

Importing this module imports neither numpy nor llama_cpp: a session without gates pays nothing.
"""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Callable, Generator, Iterable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from pytest_kvgate.options import Settings, add_options, given_on_command_line, resolve_settings

if TYPE_CHECKING:
    from pytest_kvgate.analysis import Profile
    from pytest_kvgate.gate import Gate, GateResult
    from pytest_kvgate.pipeline import Subject
    from pytest_kvgate.session import GateSession
    from pytest_kvgate.trace import Trace

NO_EVIDENCE = (
    "kvgate has no model and no trace, so this gate was NOT EVALUATED; give --kvgate-model=FILE "
    "and --kvgate-prompt=FILE, or --kvgate-trace=DIR"
)


@dataclass
class State:
    """What this process knows: settings and evidence on demand, verdicts as they come."""

    settings: Settings | None = None
    subjects: tuple[Subject, ...] | None = None
    session: GateSession | None = None
    folder: Path | None = None
    owns_folder: bool = False
    involved: bool = False
    usage_error: str | None = None
    rows: list[dict[str, Any]] = field(default_factory=list)
    documents: dict[str, dict[str, Any]] = field(default_factory=dict)
    problems: list[str] = field(default_factory=list)


STATE = pytest.StashKey[State]()
GATES = pytest.StashKey["tuple[tuple[str, Gate], ...]"]()
ROWS = pytest.StashKey[list[dict[str, Any]]]()
#: Set on a test whose gates could not be judged; unlike a missed gate, an xfail does not excuse it.
BROKEN = pytest.StashKey[bool]()


class VerdictCollector:
    """Gathers verdicts where the summary is printed: here, or from the workers of xdist."""

    def __init__(self, state: State) -> None:
        self._state = state

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        """Keep the verdicts that a test's report carries."""
        self._state.rows.extend(getattr(report, "kvgate_rows", ()))

    @pytest.hookimpl(optionalhook=True)
    def pytest_configure_node(self, node: Any) -> None:  # noqa: ANN401 - a type of xdist's own
        """Let all xdist workers share one folder, and with it one capture."""
        node.workerinput["kvgate_folder"] = str(_folder(node.config))

    @pytest.hookimpl(optionalhook=True)
    def pytest_testnodedown(self, node: Any, error: object) -> None:  # noqa: ANN401
        """Keep what an xdist worker measured."""
        output = getattr(node, "workeroutput", {})
        self._state.documents.update(output.get("kvgate_documents", {}))
        self._state.usage_error = output.get("kvgate_usage_error", self._state.usage_error)


def pytest_addoption(parser: pytest.Parser) -> None:
    """Declare the options and ini keys."""
    add_options(parser)


@pytest.hookimpl(trylast=True)  # after a conftest.py that adds to the ini keys
def pytest_configure(config: pytest.Config) -> None:
    """Register the marker; check what the command line says before anything runs."""
    config.addinivalue_line(
        "markers",
        "kvgate(budget, min_coverage, selector=None, page_size=None): at a budget (fraction of the "
        "context) the selector's pages must hold min_coverage of the eligible attention mass; "
        "without a selector, both oracle (the ceiling) and landmark must. Stackable.",
    )
    state = config.stash[STATE] = State()
    config.pluginmanager.register(VerdictCollector(state), "kvgate-verdicts")
    if given_on_command_line(config):
        _subjects(config)


def pytest_unconfigure(config: pytest.Config) -> None:
    """Remove the traces that nobody asked to keep."""
    state = config.stash.get(STATE, None)
    if state is not None and state.folder is not None and state.owns_folder:
        shutil.rmtree(state.folder, ignore_errors=True)


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """Run a gate once per model, and a test of a single trace once per trace."""
    if not _is_involved(metafunc.definition, metafunc.fixturenames):
        return
    subjects = _subjects(metafunc.config)
    choices: list[tuple[str, tuple[int, int | None]]] = [
        (subject.label, (number, None)) for number, subject in enumerate(subjects)
    ]
    if "kvgate_trace" in metafunc.fixturenames:
        choices = [
            (source.label, (number, position))
            for number, subject in enumerate(subjects)
            for position, source in enumerate(subject.sources)
        ]
    if len(choices) > 1:
        if "_kvgate_choice" not in metafunc.fixturenames:
            metafunc.fixturenames.append("_kvgate_choice")
        labels, values = zip(*choices, strict=True)
        metafunc.parametrize("_kvgate_choice", values, ids=labels, indirect=True)


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Check every gate's arguments before any test runs."""
    involved = [item for item in items if _is_involved(item, getattr(item, "fixturenames", ()))]
    if not involved:
        return
    _state(config).involved = True
    try:
        for item in involved:
            item.stash[GATES] = _declared_gates(item)
            if not _settings(config).has_evidence:
                item.add_marker(pytest.mark.skip(reason=NO_EVIDENCE))
        _open_session(config, (gate for item in involved for _, gate in item.stash[GATES]))
    except pytest.UsageError as error:
        if not hasattr(config, "workeroutput"):
            raise
        # an xdist worker cannot end the run with a usage error; its controller does
        config.workeroutput["kvgate_usage_error"] = str(error)
        items.clear()


def pytest_report_header(config: pytest.Config) -> list[str]:
    """Say in one line what the command line puts to the test."""
    return [_headline(config)] if given_on_command_line(config, "model", "trace") else []


def pytest_report_collectionfinish(config: pytest.Config, items: list[pytest.Item]) -> list[str]:
    """Say the same for gates that the ini file or a conftest.py supplies with a model."""
    gates = any(item.stash.get(GATES, ()) for item in items)
    if not gates or given_on_command_line(config, "model", "trace"):
        return []
    return [_headline(config)]


@pytest.hookimpl(wrapper=True)
def pytest_runtest_call(item: pytest.Item) -> Generator[None, object, object]:
    """Judge the test's gates, run its body, and fail it if a gate was missed."""
    try:
        results = list(_judge(item))
    except Exception:
        item.stash[BROKEN] = True
        raise
    failures = [result for result in results if result.verdict != "GO"]
    broken = any(result.verdict == "INVALID" for result in failures)
    if broken:
        item.stash[BROKEN] = True
    outcome = None
    try:
        outcome = yield
    except (KeyboardInterrupt, SystemExit, pytest.exit.Exception):
        raise
    except BaseException as error:
        # a body that skips does not take a missed gate along, nor an expected failure a broken one
        if not failures:
            raise
        if not broken and not isinstance(error, pytest.skip.Exception):
            item.add_report_section("call", "kvgate", _failure_text(failures))
            raise
    if failures:
        pytest.fail(_failure_text(failures), pytrace=False)
    return outcome


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_runtest_makereport(
    item: pytest.Item, call: pytest.CallInfo[None]
) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    """Let the report carry the verdicts; an xfail excuses a missed gate, not a broken one."""
    report = yield
    if call.excinfo is not None and item.stash.get(BROKEN, False):
        if hasattr(report, "wasxfail"):
            del report.wasxfail
        if report.outcome == "skipped":
            report.outcome = "failed"
            report.longrepr = str(call.excinfo.value)
    if call.when == "setup" and not report.passed:
        _mark_not_evaluated(item, report)
    if ROWS in item.stash:
        # an attribute of plain values: it travels from an xdist worker with the report
        report.__dict__["kvgate_rows"] = item.stash[ROWS]
        del item.stash[ROWS]
    return report


def pytest_sessionfinish(session: pytest.Session) -> None:
    """Write the reports; a run that was to judge a model but held no gate is not a success."""
    config = session.config
    state = _state(config)
    if state.session is not None:
        state.documents.update(state.session.documents)
    if hasattr(config, "workeroutput"):
        config.workeroutput["kvgate_documents"] = state.documents
        return
    if state.usage_error is not None:
        raise pytest.UsageError(state.usage_error)
    finished = session.exitstatus in (
        pytest.ExitCode.OK,
        pytest.ExitCode.TESTS_FAILED,
        pytest.ExitCode.NO_TESTS_COLLECTED,
    )
    if not finished or config.getoption("collectonly"):
        return
    asked = given_on_command_line(config, "model", "trace")
    if state.involved or state.rows or given_on_command_line(config, "report"):
        _write_reports(config)
    if asked and not state.rows and not state.documents:
        state.problems.append(f"{asked[0]} was given, but no gate was run: NOTHING WAS EVALUATED.")
        if session.exitstatus == pytest.ExitCode.OK:
            session.exitstatus = pytest.ExitCode.NO_TESTS_COLLECTED
    if state.problems and session.exitstatus == pytest.ExitCode.OK:
        session.exitstatus = pytest.ExitCode.TESTS_FAILED


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """List every gate, and what was measured."""
    state = _state(terminalreporter.config)
    if not (state.rows or state.documents or state.problems):
        return
    from pytest_kvgate.report.summary import summary_lines  # noqa: PLC0415

    terminalreporter.section("kvgate")
    for line in summary_lines(state.documents.values(), state.rows, state.problems):
        terminalreporter.line(line)
    save = None if state.settings is None else state.settings.save
    if save is not None and state.documents:
        terminalreporter.line(f"Captured traces are kept below {save}.")


@pytest.fixture
def kvgate_profile(
    request: pytest.FixtureRequest, _kvgate_choice: tuple[int, int | None]
) -> Profile:
    """Pooled profile of the model under test, at the page size of the test's gates."""
    gates = [gate for _, gate in request.node.stash.get(GATES, ())]
    session = _require_session(request.config)
    sizes = {gate.page_size or session.page_size for gate in gates}
    if len(sizes) > 1:
        pytest.fail(
            f"kvgate_profile is ambiguous: the gates of this test use pages of "
            f"{' and '.join(map(str, sorted(sizes)))} tokens. Split the test, one page size each.",
            pytrace=False,
        )
    page_size = sizes.pop() if sizes else session.page_size
    subject = session.subjects[_kvgate_choice[0]]
    with _broken_evidence(request.node):
        session.describe(subject, page_size)
        return session.trusted_profile(subject, page_size)


@pytest.fixture
def kvgate_trace(request: pytest.FixtureRequest, _kvgate_choice: tuple[int, int | None]) -> Trace:
    """One captured or saved trace; with several, the test runs once for each."""
    session = _require_session(request.config)
    subject, position = _kvgate_choice
    with _broken_evidence(request.node):
        return session.evidence.trace(session.subjects[subject].sources[position or 0])


@pytest.fixture
def _kvgate_choice(request: pytest.FixtureRequest) -> tuple[int, int | None]:
    """Which subject, and which of its sources, a test is about."""
    choice: tuple[int, int | None] = getattr(request, "param", (0, None))
    return choice


def _state(config: pytest.Config) -> State:
    return config.stash[STATE]


def _settings(config: pytest.Config) -> Settings:
    state = _state(config)
    if state.settings is None:
        state.settings = resolve_settings(config)
    return state.settings


def _subjects(config: pytest.Config) -> tuple[Subject, ...]:
    state = _state(config)
    if state.subjects is None:
        settings = _settings(config)
        if not settings.has_evidence:
            return ()
        from pytest_kvgate.pipeline import EVIDENCE_ERRORS  # noqa: PLC0415
        from pytest_kvgate.session import find_subjects  # noqa: PLC0415

        try:
            state.subjects = find_subjects(settings)
        except EVIDENCE_ERRORS as error:
            raise pytest.UsageError(f"kvgate: {error}") from None
    return state.subjects


def _headline(config: pytest.Config) -> str:
    subjects = _subjects(config)
    if not subjects:
        return "kvgate: no model and no trace; gates are NOT EVALUATED"
    models = ", ".join(subject.label for subject in subjects)
    n_source = sum(len(subject.sources) for subject in subjects)
    kind = "saved trace" if _settings(config).traces else "capture"
    return (
        f"kvgate: {models}; {n_source} {kind}{'s' * (n_source > 1)}, "
        f"{_settings(config).page_size}-token pages"
    )


def _open_session(config: pytest.Config, gates: Iterable[Gate]) -> GateSession | None:
    """Prepare to judge these gates; None where there is nothing to judge them on."""
    subjects = _subjects(config)
    if not subjects:
        return None
    from pytest_kvgate.session import GateSession, gather_evidence  # noqa: PLC0415

    gates = list(gates)
    evidence = gather_evidence(_settings(config), gates, _folder(config))
    evidence.announce = _announcer(config)
    thresholds = tuple(sorted({gate.min_coverage for gate in gates}))
    session = GateSession(evidence, subjects, thresholds)
    _state(config).session = session
    return session


def _require_session(config: pytest.Config) -> GateSession:
    session = _state(config).session
    if session is None:  # a fixture that was asked for by name while the test ran
        session = _open_session(config, ())
    if session is None:
        pytest.skip(NO_EVIDENCE)
    return session


def _folder(config: pytest.Config) -> Path:
    """Return the folder for captures: the xdist controller's if this is a worker, else our own."""
    state = _state(config)
    if state.folder is None:
        given = getattr(config, "workerinput", {}).get("kvgate_folder")
        state.owns_folder = given is None
        state.folder = Path(given or tempfile.mkdtemp(prefix="kvgate-"))
    return state.folder


def _is_involved(node: pytest.Item, fixturenames: Iterable[str]) -> bool:
    """Whether a test has a gate or uses a kvgate fixture."""
    wanted = ("kvgate_profile", "kvgate_trace")
    return node.get_closest_marker("kvgate") is not None or any(
        name in wanted for name in fixturenames
    )


def _declared_gates(item: pytest.Item) -> tuple[tuple[str, Gate], ...]:
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


def _judge(item: pytest.Item) -> Iterator[GateResult]:
    """Judge an item's gates on its model, or on every model where it is not parametrized."""
    gates = item.stash.get(GATES, ())
    session = _state(item.config).session
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


def _failure_text(failures: Iterable[GateResult]) -> str:
    from pytest_kvgate.report.failure import gate_failure  # noqa: PLC0415

    return "\n\n".join("\n".join(gate_failure(result)) for result in failures)


def _mark_not_evaluated(item: pytest.Item, report: pytest.TestReport) -> None:
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


def _write_reports(config: pytest.Config) -> None:
    """Write every report that was asked for; what no gate looked at is measured now."""
    from pytest_kvgate.pipeline import EvidenceError  # noqa: PLC0415
    from pytest_kvgate.report.document import report_document, write_report  # noqa: PLC0415

    settings = _settings(config)
    if not settings.reports:
        return
    state = _state(config)
    session = state.session or _open_session(config, ())
    if session is not None:
        session.documents.update(state.documents)
        for subject in session.subjects:
            try:
                session.describe(subject, settings.page_size)
            except EvidenceError as error:
                state.problems.append(str(error))
        state.documents = session.documents
    document = report_document(settings.as_reported(), state.documents.values(), state.rows)
    for target in settings.reports:
        write_report(target.path, document)


def _announcer(config: pytest.Config) -> Callable[[str], None]:
    """Return a function that prints a line past pytest's capture, where there is a terminal."""
    terminal = config.pluginmanager.getplugin("terminalreporter")
    capture = config.pluginmanager.getplugin("capturemanager")

    def announce(message: str) -> None:
        if terminal is None or terminal.verbosity < 0:
            return
        with nullcontext() if capture is None else capture.global_and_fixture_disabled():
            terminal.ensure_newline()
            terminal.write_line(f"kvgate: {message}")

    return announce


@contextmanager
def _broken_evidence(item: pytest.Item) -> Iterator[None]:
    """Turn an `EvidenceError` into a failure without traceback that no xfail excuses."""
    from pytest_kvgate.pipeline import EvidenceError  # noqa: PLC0415

    try:
        yield
    except EvidenceError as error:
        item.stash[BROKEN] = True
        pytest.fail(f"kvgate: {error}", pytrace=False)
