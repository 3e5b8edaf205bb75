"""What all tests share: pytest inside pytest, the cases, and a tiny model."""

from __future__ import annotations

from pathlib import Path

import llama_cpp  # noqa: F401 - see below
import pytest

# pytester forgets what was imported during a run; imported here, the heavy modules load once.
import pytest_kvgate.report.failure
import pytest_kvgate.report.summary
import pytest_kvgate.session  # noqa: F401
from tests.models import tiny_model

pytest_plugins = ["pytester"]

CASES = Path(__file__).parent / "cases"


@pytest.fixture(autouse=True)
def _plain_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    """Keep from the inner runs what the machine or the outer run tells pytest."""
    for name in (
        "BUILD_NUMBER",
        "CI",
        "COLUMNS",
        "FORCE_COLOR",
        "NO_COLOR",
        "PYTEST_ADDOPTS",
        "PYTEST_DISABLE_PLUGIN_AUTOLOAD",
        "PYTEST_PLUGINS",
        "PYTEST_THEME",
        "PYTEST_XDIST_TESTRUNUID",
        "PYTEST_XDIST_WORKER",
        "PYTEST_XDIST_WORKER_COUNT",
        "PYTHONWARNINGS",
    ):
        monkeypatch.delenv(name, raising=False)


@pytest.fixture(scope="session")
def tiny_llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A llama-architecture model of about 1 MB, three layers, 4 query and 2 KV heads."""
    return tiny_model(tmp_path_factory.mktemp("models") / "tiny-llama.gguf")


@pytest.fixture
def prompt(tmp_path: Path) -> Path:
    """A prompt of 901 tokens for the tiny models: a leading token and one per byte."""
    path = tmp_path / "lesson.txt"
    path.write_text("thequickbrownfoxjumpsoverthelazydog." * 25, encoding="utf-8")
    return path


@pytest.fixture
def gqa_trace() -> Path:
    """The case with two grouped-query layers, 640 to 643 tokens in four steps."""
    return CASES / "gqa-f16"
