"""Small models for closed loops, each written once, and a watch on what loops do."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from pathlib import Path

import pytest

from tests.closedloop.loops import Watch, watching
from tests.models import tiny_model


@pytest.fixture
def watch(monkeypatch: pytest.MonkeyPatch) -> Watch:
    return watching(monkeypatch)


@pytest.fixture(scope="session")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """Return what writes the tiny model of an architecture."""
    folder = tmp_path_factory.mktemp("closedloop")
    return cache(lambda architecture: tiny_model(folder / f"{architecture}.gguf", architecture))
