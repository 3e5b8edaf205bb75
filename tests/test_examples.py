"""The examples run as they stand, on the real model that they name."""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

EXAMPLES = Path(__file__).parents[1] / "examples"

pytestmark = pytest.mark.slow


def run(folder: Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "pytest", "-rx", str(folder)],
        cwd=folder.parent,
        capture_output=True,
        text=True,
        check=False,
    )


def test_the_examples_print_the_table_and_succeed(tmp_path: Path) -> None:
    result = run(Path(shutil.copytree(EXAMPLES, tmp_path / "examples")))
    assert result.returncode == 0, result.stdout
    assert re.search(r"softmax verified to \d\.\de-0[67]", result.stdout)
    assert re.search(r"coverage at +0.5% +1% +2% +4% +B for 0.5 +B for 0.9 ", result.stdout)
    assert re.search(r"oracle +– +– +0\.\d{4} +0\.\d{4} +\d", result.stdout)
    assert re.search(r"lost at +diffuse +page granularity +landmark +stale, 8 apart", result.stdout)
    assert re.search(r"NO-GO +\S*test_paging_is_worth_building", result.stdout)
    assert "2 passed, 1 xfailed" in result.stdout
    for selector in ("landmark", "quest"):
        assert re.search(rf"test_scoring\[{selector}\] +\d", result.stdout)


def test_the_recorded_decision_is_a_no_go_that_fails_without_its_xfail(tmp_path: Path) -> None:
    folder = Path(shutil.copytree(EXAMPLES, tmp_path / "examples"))
    gate = folder / "test_smollm2_gate.py"
    source = gate.read_text("utf-8")
    bare = re.sub(r"@pytest\.mark\.xfail\(.*?\n\)\n", "", source, flags=re.DOTALL)
    assert bare != source
    gate.write_text(bare, encoding="utf-8")
    result = run(folder)
    assert result.returncode == 1, result.stdout
    assert "NO-GO: the ceiling is below the threshold" in result.stdout
    # the numbers in the recorded reason are the ones that were measured
    reason = re.search(r"oracle (0\.\d+), landmark (0\.\d+)", source)
    measured = re.search(r"oracle (0\.\d+), landmark (0\.\d+);\s+required", result.stdout)
    assert reason is not None
    assert measured is not None
    for recorded, observed in zip(reason.groups(), measured.groups(), strict=True):
        assert float(observed) == pytest.approx(float(recorded), abs=0.1)
