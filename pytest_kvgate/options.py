"""Every ``--kvgate-*`` option and ini key: declaration, validation, and the resulting `Settings`.

A value comes from the command line, else from the ini file, else from the built-in default. Paths
on the command line are relative to where pytest was started, paths in an ini file to that file.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

#: The marker ``@kvgate(budget=…, min_coverage=…)``.
kvgate = pytest.mark.kvgate

STEPS_DEFAULT = "0:257:8"
#: K cache types whose rounding of q is known, so that a capture can be verified. q4_1 and q5_1 keep
#: a sum beside each block of q that no rounding of q alone reproduces.
CACHE_TYPES = ("f32", "f16", "bf16", "q8_0", "q5_0", "q4_0", "iq4_nl")
REPORT_KINDS = ("json",)
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


@dataclass(frozen=True)
class ReportTarget:
    """One ``--kvgate-report KIND:PATH``."""

    kind: str
    path: Path


@dataclass(frozen=True)
class Settings:
    """What the options and ini keys say, validated.

    ``traces`` and ``models`` exclude each other; both empty means nothing can be evaluated.
    ``recent`` is a fraction of the context below 1, else tokens; ``steps`` are the sampled decode
    steps; ``n_context`` None is the context the model was trained with.
    """

    models: tuple[Path, ...]
    prompts: tuple[Path, ...]
    traces: tuple[Path, ...]
    n_context: int | None
    steps: range
    n_gpu_layers: int
    n_threads: int | None
    cache_type_k: str
    save: Path | None
    page_size: int
    sinks: int
    recent: float
    budgets: tuple[float, ...]
    selectors: tuple[str, ...]
    reports: tuple[ReportTarget, ...]

    def as_reported(self) -> dict[str, Any]:
        """Return the part of the settings that a report states."""
        return {
            "page_size": self.page_size,
            "sinks": self.sinks,
            "recent": self.recent,
            "budgets": list(self.budgets),
            "selectors": list(self.selectors),
        }

    @property
    def has_evidence(self) -> bool:
        """Whether there is a model or a trace to evaluate gates on."""
        return bool(self.models or self.traces)


@dataclass(frozen=True)
class Option:
    """One option and its ini key, ``--kvgate-page-size`` and ``kvgate_page_size``."""

    name: str
    metavar: str
    help: str
    parse: Callable[[str], Any]
    default: str | None = None
    repeatable: bool = False
    capture_only: bool = False

    @property
    def flag(self) -> str:
        """The command-line spelling."""
        return f"--kvgate-{self.name}"

    @property
    def ini(self) -> str:
        """The ini key, which is also the name on ``config.option``."""
        return f"kvgate_{self.name.replace('-', '_')}"


def parse_steps(text: str) -> range:
    """Parse ``START:STOP:STRIDE`` (STRIDE optional) into sampled decode steps."""
    try:
        start, stop, stride = (int(part) for part in ([*text.split(":"), "1"])[:3])
        well_formed = text.count(":") in (1, 2)
    except ValueError:
        well_formed = False
    if not well_formed or start < 0 or stride < 1 or stop <= start:
        raise ValueError(
            "needs START:STOP:STRIDE in decode steps, with 0 <= START < STOP and STRIDE >= 1, "
            "such as 0:257:8"
        )
    return range(start, stop, stride)


def parse_budgets(text: str) -> tuple[float, ...]:
    """Parse comma-separated fractions of the context into sorted budgets."""
    try:
        budgets = tuple(sorted({float(part) for part in text.split(",")}))
        valid = all(0 < budget <= 1 for budget in budgets)
    except ValueError:
        valid = False
    if not valid:
        raise ValueError(
            "needs comma-separated fractions of the context, each above 0 and up to 1, such as "
            "0.01,0.02"
        )
    return budgets


def parse_selectors(text: str) -> tuple[str, ...]:
    """Parse comma-separated selector names."""
    from pytest_kvgate.analysis import SELECTORS  # noqa: PLC0415 - brings numpy

    names = tuple(dict.fromkeys(part.strip() for part in text.split(",")))
    unknown = [name for name in names if name not in SELECTORS]
    if unknown:
        raise ValueError(
            f"names {unknown[0]!r}, which is no selector; accepted: {', '.join(SELECTORS)}"
        )
    return names


def parse_recent(text: str) -> float:
    """Parse the recent window: a fraction below 1, or a whole number of tokens."""
    try:
        recent = float(text)
    except ValueError:
        recent = math.nan
    if not (0 <= recent < 1 or (recent >= 1 and recent.is_integer())):
        raise ValueError(
            "needs a fraction of the context below 1, such as 0.02, or a whole number of tokens"
        )
    return recent


def parse_report(text: str) -> ReportTarget:
    """Parse ``KIND:PATH``; an existing file is only replaced if it is such a report."""
    kind, colon, path = text.partition(":")
    if kind not in REPORT_KINDS or not colon or not path:
        raise ValueError(f"needs KIND:PATH with KIND one of {', '.join(REPORT_KINDS)}")
    return ReportTarget(kind, Path(path))


def parse_cache_type(text: str) -> str:
    """Check the data type of the K cache."""
    if text not in CACHE_TYPES:
        raise ValueError(
            f"is no K cache type that can be verified; accepted: {', '.join(CACHE_TYPES)}"
        )
    return text


def whole_number(minimum: int, unit: str) -> Callable[[str], int]:
    """Return a parser of whole numbers from ``minimum``."""

    def parse(text: str) -> int:
        try:
            number = int(text)
        except ValueError:
            number = minimum - 1
        if number < minimum:
            raise ValueError(f"needs a whole number of {unit}, {minimum} or more")
        return number

    return parse


OPTIONS: tuple[Option, ...] = (
    Option(
        "model",
        "FILE",
        "GGUF model to capture; repeatable, each is judged on its own",
        Path,
        repeatable=True,
    ),
    Option(
        "prompt",
        "FILE",
        "UTF-8 text the model reads first; repeatable, pooled into one profile",
        Path,
        repeatable=True,
        capture_only=True,
    ),
    Option(
        "trace",
        "DIR",
        "saved trace to judge, with no model; repeatable, pooled per model",
        Path,
        repeatable=True,
    ),
    Option(
        "ctx",
        "N",
        "largest context in tokens [what the model was trained with]",
        whole_number(1, "tokens"),
        capture_only=True,
    ),
    Option(
        "steps",
        "START:STOP:STRIDE",
        f"decode steps to sample [{STEPS_DEFAULT}]",
        parse_steps,
        STEPS_DEFAULT,
        capture_only=True,
    ),
    Option(
        "ngl",
        "N",
        "model layers to put on the GPU [0]",
        whole_number(0, "layers"),
        "0",
        capture_only=True,
    ),
    Option(
        "threads",
        "N",
        "CPU threads [all available]",
        whole_number(1, "threads"),
        capture_only=True,
    ),
    Option(
        "cache-type-k",
        "TYPE",
        f"K cache data type: {', '.join(CACHE_TYPES)} [f16]",
        parse_cache_type,
        "f16",
        capture_only=True,
    ),
    Option(
        "save", "DIR", "keep each captured trace as a folder below DIR", Path, capture_only=True
    ),
    Option("page-size", "N", "tokens per KV page [32]", whole_number(1, "tokens"), "32"),
    Option(
        "sinks", "N", "first tokens that are always resident [32]", whole_number(0, "tokens"), "32"
    ),
    Option(
        "recent",
        "R",
        "recent window: a fraction of the context below 1, else tokens [0.02]",
        parse_recent,
        "0.02",
    ),
    Option(
        "budgets",
        "B,B,…",
        "fractions of the context to report [0.005,0.01,0.02,0.04]",
        parse_budgets,
        "0.005,0.01,0.02,0.04",
    ),
    Option(
        "selectors",
        "S,S,…",
        "selectors to report [oracle,landmark,token-oracle]",
        parse_selectors,
        "oracle,landmark,token-oracle",
    ),
    Option(
        "report",
        "KIND:PATH",
        "write a report, such as json:kvgate.json; repeatable",
        parse_report,
        repeatable=True,
    ),
)


def add_options(parser: pytest.Parser) -> None:
    """Declare every option and its ini key."""
    group = parser.getgroup("kvgate", "KV paging gates (pytest-kvgate)")
    for option in OPTIONS:
        group.addoption(
            option.flag,
            dest=option.ini,
            metavar=option.metavar,
            action="append" if option.repeatable else "store",
            default=None,
            help=option.help,
        )
        meaning = f"{option.help} (as {option.flag})"
        if option.repeatable:
            parser.addini(option.ini, meaning, type="linelist", default=[])
        else:
            parser.addini(option.ini, meaning, type="string", default=None)


def given_on_command_line(config: pytest.Config, *names: str) -> list[str]:
    """Return the flags among ``names`` (all if empty) that the command line gives."""
    return [
        option.flag
        for option in OPTIONS
        if (not names or option.name in names) and config.getoption(option.ini) is not None
    ]


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
    _check_combination(config, models, traces, values["prompt"])
    for kind, paths in (("model", models), ("prompt", values["prompt"]), ("trace", traces)):
        repeated = [path for position, path in enumerate(paths) if path in paths[:position]]
        if repeated:
            raise pytest.UsageError(f"kvgate: --kvgate-{kind} {repeated[0]} is given twice.")
    for path in traces:
        if not path.is_dir():
            raise pytest.UsageError(
                f"kvgate: --kvgate-trace {path} is not a folder; give a folder that "
                "--kvgate-save wrote."
            )
    for path in values["prompt"] if models else ():
        if not path.is_file():
            raise pytest.UsageError(f"kvgate: --kvgate-prompt {path} does not exist or is no file.")
    for target in values["report"]:
        _check_report(target)
    save = values["save"]
    if save is not None and save.exists() and not save.is_dir():
        raise pytest.UsageError(f"kvgate: --kvgate-save {save} is a file; a folder is needed.")
    return Settings(
        models=models,
        prompts=values["prompt"],
        traces=traces,
        n_context=values["ctx"],
        steps=values["steps"],
        n_gpu_layers=values["ngl"],
        n_threads=values["threads"],
        cache_type_k=values["cache-type-k"],
        save=save,
        page_size=values["page-size"],
        sinks=values["sinks"],
        recent=values["recent"],
        budgets=values["budgets"],
        selectors=values["selectors"],
        reports=values["report"],
    )


def _value(config: pytest.Config, option: Option) -> Any:  # noqa: ANN401 - each has its own type
    given = config.getoption(option.ini)
    if given is not None:
        origin, base = option.flag, config.invocation_params.dir
    else:
        origin, base = f"ini key {option.ini}", (config.inipath or config.rootpath / "x").parent
        given = config.getini(option.ini)
        if given is None or given == "":
            given = option.default
    if option.repeatable:
        return tuple(_parsed(option, text, origin, base) for text in given)
    return None if given is None else _parsed(option, given, origin, base)


def _parsed(option: Option, text: str, origin: str, base: Path) -> Any:  # noqa: ANN401
    try:
        value = option.parse(text)
    except ValueError as error:
        raise pytest.UsageError(f"kvgate: {origin} {text!r} {error}.") from None
    if isinstance(value, Path):
        return base / value.expanduser()
    if isinstance(value, ReportTarget):
        return ReportTarget(value.kind, base / value.path.expanduser())
    return value


def _check_combination(
    config: pytest.Config,
    models: tuple[Path, ...],
    traces: tuple[Path, ...],
    prompts: tuple[Path, ...],
) -> None:
    if models and not prompts:
        raise pytest.UsageError(
            f"kvgate: model {models[0]} needs a prompt to read; give --kvgate-prompt FILE, a text "
            "like the ones the model will serve."
        )
    if models:
        return
    pointless = given_on_command_line(
        config, *(option.name for option in OPTIONS if option.capture_only)
    )
    if pointless:
        why = "a saved trace is already captured" if traces else "--kvgate-model is missing"
        raise pytest.UsageError(f"kvgate: {pointless[0]} has no effect here: {why}.")


def _check_report(target: ReportTarget) -> None:
    path = target.path
    if path.is_dir():
        raise pytest.UsageError(f"kvgate: --kvgate-report {path} is a folder; name a file in it.")
    if not path.parent.is_dir():
        raise pytest.UsageError(f"kvgate: --kvgate-report {path}: {path.parent} does not exist.")
    if path.exists() and path.stat().st_size:
        with path.open("rb") as file:
            head = file.read(64)
        if b'"kvgate-report/' not in head:
            raise pytest.UsageError(
                f"kvgate: --kvgate-report {path} exists and is not a kvgate report; it is not "
                "overwritten. Name another file."
            )
