"""Every ``--kvgate-*`` option and its ini key."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from pytest_kvgate.options.values import (
    CACHE_TYPES,
    VALUE_CACHE_TYPES,
    parse_budgets,
    parse_cache_type,
    parse_flag,
    parse_link,
    parse_on_off,
    parse_pages,
    parse_pool,
    parse_recent,
    parse_report,
    parse_selectors,
    parse_steps,
    parse_value_cache_type,
    parse_verification,
    whole_number,
)

STEPS_DEFAULT = "0:257:8"


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
    switch: bool = False

    @property
    def flag(self) -> str:
        """The command-line spelling."""
        return f"--kvgate-{self.name}"

    @property
    def ini(self) -> str:
        """The ini key, which is also the name on ``config.option``."""
        return f"kvgate_{self.name.replace('-', '_')}"


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
        "what the model reads first: a UTF-8 text, or a .json file with chat messages or token "
        "ids; repeatable, pooled into one profile",
        Path,
        repeatable=True,
        capture_only=True,
    ),
    Option(
        "continuation",
        "FILE",
        "what the decode is to follow instead of choosing its own tokens: a text, token ids, or a "
        "chat that ends with the answer; repeatable, one per prompt",
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
        "cache-type-v",
        "TYPE",
        f"V cache data type: {', '.join(VALUE_CACHE_TYPES)} [f16]; quantized with flash attention",
        parse_value_cache_type,
        "f16",
        capture_only=True,
    ),
    Option(
        "flash-attn",
        "on|off",
        "flash attention, which leaves no softmax to compare the capture with [off]",
        parse_on_off,
        "off",
        capture_only=True,
    ),
    Option(
        "verify",
        "WITH",
        "capture: with what the capture itself shows; reference: with flash attention, also with "
        "the softmax of a second run without it [capture]",
        parse_verification,
        "capture",
        capture_only=True,
    ),
    Option(
        "values",
        "",
        "capture V too, for the attention-output error; a gate that needs it turns it on",
        parse_flag,
        "false",
        capture_only=True,
        switch=True,
    ),
    Option(
        "ignore-eos",
        "",
        "never choose a token that ends the text; every report says where that changed it",
        parse_flag,
        "false",
        capture_only=True,
        switch=True,
    ),
    Option(
        "allow-native-sparse",
        "",
        "measure models that select for themselves what they attend to, which flatters coverage",
        parse_flag,
        "false",
        capture_only=True,
        switch=True,
    ),
    Option(
        "closed-loop",
        "",
        "run the model with only the selected pages visible, and compare its next tokens; a gate "
        "that needs it turns it on",
        parse_flag,
        "false",
        capture_only=True,
        switch=True,
    ),
    Option(
        "loop-tokens",
        "N",
        "predicted tokens that a closed loop compares [64]",
        whole_number(1, "tokens"),
        "64",
        capture_only=True,
    ),
    Option(
        "sparse-tail",
        "N",
        "last prompt tokens that a closed loop reads under the selection, too [0]",
        whole_number(0, "tokens"),
        "0",
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
        "selectors to report [all; pytest knows those of a conftest.py, too]",
        parse_selectors,
    ),
    Option(
        "pool",
        "X",
        "LRU pool of resident pages, as a multiple of the pages of one step [2]",
        parse_pool,
        "2",
    ),
    Option("link", "GB/S", "speed of the link to host memory, to turn misses into ms", parse_link),
    Option(
        "sweep",
        "N,N,…",
        "page sizes to compare in the details and in reports [8,16,32,64,128]",
        parse_pages,
        "8,16,32,64,128",
    ),
    Option(
        "verbose",
        "",
        "print the tables of details: layers, page sizes, paging, starvation and more",
        parse_flag,
        "false",
        switch=True,
    ),
    Option(
        "calibrate",
        "",
        "first check on control models that the numbers are right; no gate passes if they are not",
        parse_flag,
        "false",
        switch=True,
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
        if option.switch:
            group.addoption(
                option.flag,
                dest=option.ini,
                action="store_const",
                const="true",
                default=None,
                help=option.help,
            )
        else:
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
