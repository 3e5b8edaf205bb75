"""What this process knows of its gates, kept on the config and made when it is first needed."""

from __future__ import annotations

import tempfile
import traceback
from collections.abc import Callable, Iterable, Mapping
from contextlib import nullcontext
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from pytest_kvgate.options import given_on_command_line

if TYPE_CHECKING:
    from pytest_kvgate.analysis import Selector
    from pytest_kvgate.gate import Gate
    from pytest_kvgate.options.settings import Settings
    from pytest_kvgate.pipeline import Subject
    from pytest_kvgate.session import GateSession

NO_EVIDENCE = (
    "kvgate has no model and no trace, so this gate was NOT EVALUATED; give --kvgate-model=FILE "
    "and --kvgate-prompt=FILE, or --kvgate-trace=DIR"
)


@dataclass
class State:
    """What this process knows: settings and evidence on demand, verdicts as they come.

    ``calibration`` is what a calibration found, None before there was one. ``involved``: a test
    with a gate or a kvgate fixture was collected. ``used``: a test without a gate got a fixture,
    and so made its own judgement.
    """

    settings: Settings | None = None
    subjects: tuple[Subject, ...] | None = None
    session: GateSession | None = None
    registry: Mapping[str, Selector] | None = None
    folder: Path | None = None
    owns_folder: bool = False
    involved: bool = False
    used: bool = False
    usage_error: str | None = None
    rows: list[dict[str, Any]] = field(default_factory=list)
    documents: dict[str, dict[str, Any]] = field(default_factory=dict)
    calibration: dict[str, Any] | None = None
    problems: list[str] = field(default_factory=list)


STATE = pytest.StashKey[State]()


def state_of(config: pytest.Config) -> State:
    """Return this session's state."""
    return config.stash[STATE]


def settings_of(config: pytest.Config) -> Settings:
    """Return the validated settings; raises pytest.UsageError where they are not valid."""
    from pytest_kvgate.options.settings import resolve_settings  # noqa: PLC0415

    state = state_of(config)
    if state.settings is None:
        state.settings = resolve_settings(config)
    return state.settings


def registry_of(config: pytest.Config) -> Mapping[str, Selector]:
    """Return the page selectors that come with the package and those that hooks register.

    The hooks are asked once; to be asked for after collection, when every conftest.py is loaded.

    Raises:
        pytest.UsageError: a hook returned something else than selectors with names of their own.
    """
    from pytest_kvgate.analysis import PAGE_SELECTORS, SelectorError  # noqa: PLC0415
    from pytest_kvgate.analysis.selectors import register  # noqa: PLC0415

    state = state_of(config)
    if state.registry is not None:
        return state.registry
    registry: Mapping[str, Selector] = PAGE_SELECTORS
    for found in _registered(config):
        if not isinstance(found, list | tuple):
            raise pytest.UsageError(
                f"kvgate: pytest_kvgate_selectors returned {found!r}; it must return a list of "
                "selectors."
            )
        try:
            registry = register(found, registry)
        except SelectorError as error:
            raise pytest.UsageError(f"kvgate: pytest_kvgate_selectors: {error}") from None
    state.registry = registry
    return registry


def _registered(config: pytest.Config) -> list[object]:
    """Return what each hook returned."""
    try:
        found: list[object] = config.hook.pytest_kvgate_selectors(config=config)
    except (pytest.UsageError, KeyboardInterrupt, SystemExit):
        raise
    except BaseException as error:  # a skip, too
        last = traceback.extract_tb(error.__traceback__)[-1]
        raise pytest.UsageError(
            f"kvgate: pytest_kvgate_selectors raised {error!r} in {last.filename}, line "
            f"{last.lineno}; it must return a list of selectors."
        ) from error
    return found or []


def selector_names(config: pytest.Config) -> tuple[str, ...]:
    """Return the names of all selectors, oracles too, in the order of the tables."""
    from pytest_kvgate.analysis.selectors import ORACLE, TOKEN_ORACLE  # noqa: PLC0415

    return (ORACLE, *registry_of(config), TOKEN_ORACLE)


def subjects_of(config: pytest.Config) -> tuple[Subject, ...]:
    """Return the models under test, none where nothing is given.

    Raises:
        pytest.UsageError: a setting, a model file or a saved trace is not usable.
    """
    state = state_of(config)
    if state.subjects is None:
        settings = settings_of(config)
        if not settings.has_evidence:
            return ()
        from pytest_kvgate.pipeline import EVIDENCE_ERRORS  # noqa: PLC0415
        from pytest_kvgate.session import find_subjects  # noqa: PLC0415

        try:
            state.subjects = find_subjects(settings)
        except EVIDENCE_ERRORS as error:
            raise pytest.UsageError(f"kvgate: {error}") from None
    return state.subjects


def headline(config: pytest.Config) -> str:
    """Say in one line what gates are judged on."""
    subjects = subjects_of(config)
    if not subjects:
        return "kvgate: no model and no trace; gates are NOT EVALUATED"
    models = ", ".join(subject.label for subject in subjects)
    n_source = sum(len(subject.sources) for subject in subjects)
    kind = "saved trace" if settings_of(config).traces else "capture"
    return (
        f"kvgate: {models}; {n_source} {kind}{'s' * (n_source > 1)}, "
        f"{settings_of(config).page_size}-token pages"
    )


def open_session(config: pytest.Config, gates: Iterable[Gate]) -> GateSession | None:
    """Prepare to judge these gates; None where there is nothing to judge them on.

    Raises:
        pytest.UsageError: a setting, a model file, a saved trace or a selector is not usable.
    """
    from pytest_kvgate.options.settings import check_selector_names  # noqa: PLC0415

    settings = settings_of(config)
    if settings.selectors is not None:  # not before: every conftest.py has been loaded by now
        check_selector_names(config, settings, selector_names(config))
    subjects = subjects_of(config)
    if not subjects:
        return None
    from pytest_kvgate.session import (  # noqa: PLC0415
        GateSession,
        gather_evidence,
        gather_loops,
        swept_sizes,
    )

    registry, gates = registry_of(config), list(gates)
    evidence = gather_evidence(settings, gates, capture_folder(config), registry)
    evidence.announce = _announcer(config)
    loops = gather_loops(settings, gates, capture_folder(config), registry)
    if loops is not None:
        loops.announce = _announcer(config)
    calibration = None
    if settings.calibrate:
        check_calibration(config)
        calibration = partial(calibrated, config)
    session = GateSession(
        evidence, subjects, loops, swept_sizes(settings), settings.link, calibration
    )
    state_of(config).session = session
    return session


def check_loop_options(config: pytest.Config) -> None:
    """Raise pytest.UsageError where options of a closed loop are given and nothing closes one."""
    session = state_of(config).session
    pointless = given_on_command_line(config, "loop-tokens", "sparse-tail")
    if pointless and session is not None and session.loops is None:
        raise pytest.UsageError(
            f"kvgate: {pointless[0]} has no effect here: no gate demands anything of the next "
            "token, and --kvgate-closed-loop is not given."
        )


def check_calibration(config: pytest.Config) -> None:
    """Raise pytest.UsageError where a calibration is asked for and the engine is not installed."""
    if not settings_of(config).calibrate:
        return
    from pytest_kvgate.engine import EngineError, require_llama  # noqa: PLC0415

    try:
        require_llama()
    except EngineError as error:
        raise pytest.UsageError(f"kvgate: --kvgate-calibrate: {error}") from None


def calibrated(config: pytest.Config) -> dict[str, Any]:
    """Return the outcome of this run's calibration, which is made once for all its processes."""
    from pytest_kvgate.session import calibration_document  # noqa: PLC0415

    state = state_of(config)
    if state.calibration is None:
        state.calibration = calibration_document(
            settings_of(config), capture_folder(config), _announcer(config)
        )
    return state.calibration


def require_session(config: pytest.Config) -> GateSession:
    """Return the session that judges; skips the running test where there is no evidence."""
    session = state_of(config).session
    if session is None:  # a fixture that was asked for by name while the test ran
        session = open_session(config, ())
    if session is None:
        pytest.skip(NO_EVIDENCE)
    return session


def capture_folder(config: pytest.Config) -> Path:
    """Return the folder for captures: the xdist controller's if this is a worker, else our own."""
    state = state_of(config)
    if state.folder is None:
        given = getattr(config, "workerinput", {}).get("kvgate_folder")
        state.owns_folder = given is None
        state.folder = Path(given or tempfile.mkdtemp(prefix="kvgate-"))
    return state.folder


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
