"""What makes two captures the same one."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from pytest_kvgate.analysis import PageGrid, Plan
from pytest_kvgate.capture import CaptureSettings
from pytest_kvgate.engine import EngineSettings
from pytest_kvgate.pipeline import Evidence, Source
from tests.models import FIRST_BYTE

SETTINGS = CaptureSettings(range(0, 3, 2), engine=EngineSettings(n_threads=1))


def folder_of(source: Source, folder: Path, settings: CaptureSettings = SETTINGS) -> str:
    """Capture in a fresh process' stead and return the name of the trace's folder."""
    evidence = Evidence(settings, PageGrid(), (32,), Plan((0.5,)), folder)
    return evidence.trace(source).directory.name


def test_a_capture_is_taken_for_another_only_where_nothing_differs(
    tiny_llama: Path, prompt: Path, tmp_path: Path
) -> None:
    shared = tmp_path / "shared"
    shared.mkdir()
    text, tokens = tmp_path / "more.txt", tmp_path / "more.json"
    text.write_text("\0\0\0", encoding="utf-8")
    tokens.write_text(f"[{FIRST_BYTE}, {FIRST_BYTE}, {FIRST_BYTE}, 9]", encoding="utf-8")
    source = Source("s", model=tiny_llama, prompt=prompt)
    first = folder_of(source, shared)
    assert folder_of(source, shared) == first
    others = [
        folder_of(replace(source, continuation=text), shared),
        folder_of(replace(source, continuation=tokens), shared),
        folder_of(source, shared, replace(SETTINGS, ignore_eos=True)),
        folder_of(source, shared, replace(SETTINGS, values=True)),
        folder_of(source, shared, replace(SETTINGS, steps=range(2))),
        folder_of(source, shared, replace(SETTINGS, engine=EngineSettings(0, 1, "q8_0"))),
    ]
    assert len({first, *others}) == 1 + len(others)
    assert folder_of(replace(source, continuation=text), shared) == others[0]
