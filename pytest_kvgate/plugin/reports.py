"""Verdicts on their way to where they are shown: collected, and written as reports."""

from __future__ import annotations

from typing import Any

import pytest

from pytest_kvgate.plugin.state import State, capture_folder, open_session, settings_of, state_of


class VerdictCollector:
    """Gathers verdicts where the summary is printed: here, or from the workers of xdist."""

    def __init__(self, state: State) -> None:
        self._state = state

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        """Keep the verdicts that a test's report carries."""
        rows = getattr(report, "kvgate_rows", ())
        if not rows:  # every phase of every bystander's test
            return
        judged = {row["id"] for row in rows}
        # a test that is run again replaces its verdicts
        self._state.rows = [row for row in self._state.rows if row["id"] not in judged]
        self._state.rows += rows

    @pytest.hookimpl(optionalhook=True)
    def pytest_configure_node(self, node: Any) -> None:  # noqa: ANN401 - a type of xdist's own
        """Let all xdist workers share one folder, and with it one capture."""
        node.workerinput["kvgate_folder"] = str(capture_folder(node.config))

    @pytest.hookimpl(optionalhook=True)
    def pytest_testnodedown(self, node: Any, error: object) -> None:  # noqa: ANN401
        """Keep what an xdist worker measured."""
        output = getattr(node, "workeroutput", {})
        self._state.documents.update(output.get("kvgate_documents", {}))
        self._state.calibration = output.get("kvgate_calibration") or self._state.calibration
        self._state.used |= output.get("kvgate_used", False)
        self._state.usage_error = output.get("kvgate_usage_error", self._state.usage_error)


def write_reports(config: pytest.Config) -> None:
    """Write every report that was asked for; what no gate looked at is measured now."""
    from pytest_kvgate.pipeline import EvidenceError  # noqa: PLC0415
    from pytest_kvgate.report.document import report_document, write_report  # noqa: PLC0415

    settings = settings_of(config)
    if not settings.reports:
        return
    state = state_of(config)
    session = state.session
    try:
        session = session or open_session(config, ())
    except pytest.UsageError:
        # workers of xdist may have found a selector in a conftest.py that the controller never read
        if not state.documents:
            raise
    off = state.calibration is not None and not state.calibration["calibrated"]
    if session is not None:
        session.documents.update(state.documents)
        for subject in () if off else session.subjects:
            try:
                session.describe(subject, settings.page_size)
            except EvidenceError as error:
                state.problems.append(str(error))
            except Exception as error:  # of a selector of the user's; gates have failed for it
                state.problems.append(f"{subject.label} could not be measured: {error!r}")
        state.documents = session.documents
    state.problems += [
        f"No number of {document['subject']} is reported: a trace failed its verification."
        for document in state.documents.values()
        if not document["coverage"]
    ]
    document = report_document(
        settings.as_reported(), state.documents.values(), state.rows, state.calibration
    )
    for target in settings.reports:
        try:
            write_report(target.path, document)
        except OSError as error:
            state.problems.append(f"The report {target.path} could not be written: {error}.")
