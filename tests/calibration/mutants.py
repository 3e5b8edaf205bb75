"""Break the product on purpose: run a function with one piece of its source replaced."""

from __future__ import annotations

import inspect
import sys
import textwrap
from collections.abc import Callable
from functools import cached_property
from typing import Any

import pytest


def mutate(
    monkeypatch: pytest.MonkeyPatch, function: Callable[..., Any], old: str, new: str
) -> None:
    """Replace ``old``, which must occur once in the source of a function or a method."""
    source = textwrap.dedent(inspect.getsource(function))
    assert source.count(old) == 1, f"{old!r} occurs {source.count(old)} times in {function}"
    code = compile(
        f"from __future__ import annotations\n{source.replace(old, new)}", __file__, "exec"
    )
    scope: dict[str, Any] = {}
    exec(code, function.__globals__, scope)
    replace_everywhere(monkeypatch, function, scope[function.__name__])


def replace_everywhere(
    monkeypatch: pytest.MonkeyPatch, function: Callable[..., Any], replacement: object
) -> None:
    """Put something else in the place of a function, wherever it was imported to."""
    owner, _, name = function.__qualname__.rpartition(".")
    if owner:
        holder = getattr(sys.modules[function.__module__], owner)
        before = vars(holder)[name]
        if isinstance(before, property):
            replacement = property(replacement)  # type: ignore[arg-type]
        elif isinstance(before, cached_property):
            replacement = cached_property(replacement)  # type: ignore[arg-type]
            replacement.__set_name__(holder, name)
        monkeypatch.setattr(holder, name, replacement)
        return
    for module_name, module in list(sys.modules.items()):
        if module_name.startswith("pytest_kvgate") and vars(module).get(name) is function:
            monkeypatch.setattr(module, name, replacement)
