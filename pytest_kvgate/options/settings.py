"""What the options and ini keys say together, checked before anything runs.

A value comes from the command line, else from the ini file, else from the built-in default. Paths
on the command line are relative to where pytest was started, paths in an ini file to that file.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from pytest_kvgate.options.table import OPTIONS, Option, given_on_command_line
from pytest_kvgate.options.values import (
    ReportTarget,
    check_selectors,
    engine_problem,
    report_problem,
)

#: Where pytest keeps its configuration, in the order in which it looks.
INI_FILES = (
    "pytest.toml",
    ".pytest.toml",
    "pytest.ini",
    ".pytest.ini",
    "pyproject.toml",
    "tox.ini",
    "setup.cfg",
)

#: Options of a capture that a calibration follows, too.
CALIBRATION_OPTIONS = ("ngl", "threads", "cache-type-k", "cache-type-v", "flash-attn")


@dataclass(frozen=True)
class Settings:
    """What the options and ini keys say, validated.

    ``traces`` and ``models`` exclude each other; both empty means nothing can be evaluated.
    ``recent`` is a fraction of the context below 1, else tokens; ``steps`` are the sampled decode
    steps; ``continuations`` are none or one per prompt; ``n_context`` None is the context the model
    was trained with; ``verification`` is "capture" or "reference"; ``loop_tokens`` are predictions
    of a closed loop, ``sparse_tail`` prompt tokens; ``selectors`` None are all;
    ``pool`` is a multiple of a step's pages; ``link`` is in GB/s; ``sweep`` are page sizes.
    """

    models: tuple[Path, ...]
    prompts: tuple[Path, ...]
    continuations: tuple[Path, ...]
    traces: tuple[Path, ...]
    n_context: int | None
    steps: range
    n_gpu_layers: int
    n_threads: int | None
    cache_type_k: str
    cache_type_v: str
    flash_attention: bool
    verification: str
    save: Path | None
    page_size: int
    sinks: int
    recent: float
    budgets: tuple[float, ...]
    selectors: tuple[str, ...] | None
    values: bool
    closed_loop: bool
    loop_tokens: int
    sparse_tail: int
    ignore_eos: bool
    allow_native_sparse: bool
    pool: float
    link: float | None
    sweep: tuple[int, ...]
    verbose: bool
    calibrate: bool
    reports: tuple[ReportTarget, ...]

    def as_reported(self) -> dict[str, Any]:
        """Return the part of the settings that a report states."""
        return {
            "page_size": self.page_size,
            "sinks": self.sinks,
            "recent": self.recent,
            "budgets": list(self.budgets),
            "selectors": list(self.selectors or ()),
            "pool": self.pool,
            "link": self.link,
        }

    @property
    def has_evidence(self) -> bool:
        """Whether there is a model or a trace to evaluate gates on."""
        return bool(self.models or self.traces)


def check_ini_file_was_read(config: pytest.Config) -> None:
    """Refuse a run whose kvgate ini keys pytest never saw.

    pytest looks for its ini file before plugins have declared their options, so it takes the FILE
    of ``--kvgate-model FILE`` for a test path and may settle in that file's folder. A written
    ``--kvgate-model=FILE`` cannot be mistaken.

    Raises:
        pytest.UsageError: an ini file above the working directory has kvgate keys and was not read.
    """
    flags = {option.flag for option in OPTIONS if option.parse is Path}
    apart = [argument for argument in config.invocation_params.args if argument in flags]
    if not apart:
        return
    here = config.invocation_params.dir
    for folder in (here, *here.parents):
        for name in INI_FILES:
            path = folder / name
            if path == config.inipath:
                return
            if path.is_file() and "kvgate_" in path.read_text(encoding="utf-8", errors="replace"):
                raise pytest.UsageError(
                    f"kvgate: pytest took the value of {apart[0]} for a test path, settled in "
                    f"{config.rootpath}, and so did not read the kvgate keys in {path}. Join flag "
                    f"and value with '=', as in {apart[0]}=PATH."
                )


def resolve_settings(config: pytest.Config) -> Settings:
    """Read and validate every option and ini key.

    Raises:
        pytest.UsageError: a value is malformed, or two options contradict each other.
    """
    check_ini_file_was_read(config)
    values = {option.name: _value(config, option) for option in OPTIONS}
    models, traces = values["model"], values["trace"]
    # The command line decides over the ini file also between a model and a saved trace.
    if given_on_command_line(config, "trace") and not given_on_command_line(config, "model"):
        models = ()
    elif given_on_command_line(config, "model") and not given_on_command_line(config, "trace"):
        traces = ()
    if models and traces:
        raise pytest.UsageError(
            "kvgate: both a model and a saved trace are given; give --kvgate-model to capture one, "
            "or --kvgate-trace to judge a saved one."
        )
    _check_combination(config, models, traces, values)
    continuations = _continuations(config, values) if models else ()
    for kind, paths in (("model", models), ("prompt", values["prompt"]), ("trace", traces)):
        places = [path.resolve() for path in paths]
        repeated = [path for number, path in enumerate(paths) if places[number] in places[:number]]
        if repeated:
            raise pytest.UsageError(f"kvgate: --kvgate-{kind} {repeated[0]} is given twice.")
    for path in traces:
        if not path.is_dir():
            raise pytest.UsageError(
                f"kvgate: --kvgate-trace {path} is not a folder; give a folder that "
                "--kvgate-save wrote."
            )
    for kind, paths in (("prompt", values["prompt"]), ("continuation", continuations)):
        _check_files(kind, paths if models else ())
    for target in values["report"]:
        problem = report_problem(target.path)
        if problem is not None:
            raise pytest.UsageError(f"kvgate: --kvgate-report {problem}.")
    save = values["save"]
    if save is not None and save.exists() and not save.is_dir():
        raise pytest.UsageError(f"kvgate: --kvgate-save {save} is a file; a folder is needed.")
    return Settings(
        models=models,
        prompts=values["prompt"],
        continuations=continuations,
        traces=traces,
        n_context=values["ctx"],
        steps=values["steps"],
        n_gpu_layers=values["ngl"],
        n_threads=values["threads"],
        cache_type_k=values["cache-type-k"],
        cache_type_v=values["cache-type-v"],
        flash_attention=values["flash-attn"],
        verification=values["verify"],
        save=save,
        page_size=values["page-size"],
        sinks=values["sinks"],
        recent=values["recent"],
        budgets=values["budgets"],
        selectors=values["selectors"],
        values=values["values"],
        closed_loop=values["closed-loop"],
        loop_tokens=values["loop-tokens"],
        sparse_tail=values["sparse-tail"],
        ignore_eos=values["ignore-eos"],
        allow_native_sparse=values["allow-native-sparse"],
        pool=values["pool"],
        link=values["link"],
        sweep=values["sweep"],
        verbose=values["verbose"],
        calibrate=values["calibrate"],
        reports=values["report"],
    )


def check_selector_names(config: pytest.Config, settings: Settings, known: Collection[str]) -> None:
    """Raise pytest.UsageError unless all listed selectors are known."""
    if settings.selectors is None:
        return
    try:
        check_selectors(settings.selectors, known)
    except ValueError as error:
        option = next(option for option in OPTIONS if option.name == "selectors")
        origin, _, given = _given(config, option)
        raise pytest.UsageError(f"kvgate: {origin} {given!r} {error}.") from None


def _given(config: pytest.Config, option: Option) -> tuple[str, Path, Any]:
    """Return where the text of an option stands, what its paths are relative to, and the text."""
    given = config.getoption(option.ini)
    if given is not None:
        return option.flag, config.invocation_params.dir, given
    given = config.getini(option.ini)
    if given is None or given == "":
        given = option.default
    elif not option.repeatable:  # TOML has numbers and lists where an ini file has text
        items = given if isinstance(given, list) else [given]
        given = ",".join(str(item) for item in items)
    return f"ini key {option.ini}", (config.inipath or config.rootpath / "x").parent, given


def _value(config: pytest.Config, option: Option) -> Any:  # noqa: ANN401 - each has its own type
    origin, base, given = _given(config, option)
    if option.repeatable:
        return tuple(_parsed(option, text, origin, base) for text in given)
    return None if given is None else _parsed(option, given, origin, base)


def _parsed(option: Option, text: str, origin: str, base: Path) -> Any:  # noqa: ANN401
    try:
        value = option.parse(text)
    except ValueError as error:
        raise pytest.UsageError(f"kvgate: {origin} {text!r} {error}.") from None
    try:
        if isinstance(value, Path):
            return base / value.expanduser()
        if isinstance(value, ReportTarget):
            return ReportTarget(value.kind, base / value.path.expanduser())
    except RuntimeError as error:  # there is no such home
        raise pytest.UsageError(f"kvgate: {origin} {text!r}: {error}") from None
    return value


def _continuations(config: pytest.Config, values: Mapping[str, Any]) -> tuple[Path, ...]:
    """Return the continuations, in the order of the prompts; those of the ini file go with its own.

    Raises:
        pytest.UsageError: there are some, but not one per prompt.
    """
    found: tuple[Path, ...] = values["continuation"]
    if given_on_command_line(config, "prompt") and not given_on_command_line(
        config, "continuation"
    ):
        return ()
    if found and len(found) != len(values["prompt"]):
        raise pytest.UsageError(
            f"kvgate: --kvgate-continuation is given {len(found)} times and --kvgate-prompt "
            f"{len(values['prompt'])} times; give no continuation, or one per prompt in the same "
            "order."
        )
    return found


def _check_files(kind: str, paths: tuple[Path, ...]) -> None:
    for path in paths:
        if not path.is_file():
            raise pytest.UsageError(f"kvgate: --kvgate-{kind} {path} does not exist or is no file.")


def _check_combination(
    config: pytest.Config,
    models: tuple[Path, ...],
    traces: tuple[Path, ...],
    values: Mapping[str, Any],
) -> None:
    problem = engine_problem(values["cache-type-v"], flash_attention=values["flash-attn"])
    if models and problem is not None:
        raise pytest.UsageError(f"kvgate: --kvgate-cache-type-v: {problem}.")
    if models and not values["prompt"]:
        raise pytest.UsageError(
            f"kvgate: model {models[0]} needs a prompt to read; give --kvgate-prompt FILE, a text "
            "like the ones the model will serve."
        )
    if models:
        return
    used = CALIBRATION_OPTIONS if values["calibrate"] else ()
    pointless = given_on_command_line(
        config,
        *(option.name for option in OPTIONS if option.capture_only and option.name not in used),
    )
    if pointless:
        why = "a saved trace is already captured" if traces else "--kvgate-model is missing"
        raise pytest.UsageError(f"kvgate: {pointless[0]} has no effect here: {why}.")
