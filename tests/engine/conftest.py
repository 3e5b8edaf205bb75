"""One tiny model and one graph for all engine tests."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.engine.graphs import Graph
from tests.models import tiny_model


@pytest.fixture(scope="session")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_model(tmp_path_factory.mktemp("engine") / "tiny.gguf")


@pytest.fixture
def graph() -> Iterator[Graph]:
    made = Graph()
    yield made
    made.free()
