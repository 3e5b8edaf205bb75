"""One tiny model for all engine tests."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.models import tiny_model


@pytest.fixture(scope="session")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_model(tmp_path_factory.mktemp("engine") / "tiny.gguf")
