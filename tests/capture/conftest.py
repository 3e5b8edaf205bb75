"""Tiny models and captures, each made once per test run."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.capture.captures import Captures
from tests.models import Shape, tiny_model


@pytest.fixture(scope="session")
def captures(tmp_path_factory: pytest.TempPathFactory) -> Captures:
    return Captures(tmp_path_factory.mktemp("captures"))


@pytest.fixture(scope="session")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_model(tmp_path_factory.mktemp("llama") / "tiny.gguf", shape=Shape(n_context=512))


@pytest.fixture(scope="session")
def countdown(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a model that answers "...d" with "c", "b", "a" and the end of the text."""
    return tiny_model(tmp_path_factory.mktemp("countdown") / "countdown.gguf", countdown=True)
