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


#: ``  4% landmark        0.2789  0.1719  0.1089..0.2473   0.8750``
LOOP_ROW = re.compile(
    r"^ +(\d+%) (oracle|landmark|quest) +(\d\.\d+) +(\S+) +\S+ +(\d\.\d+) ", re.MULTILINE
)


def loop_rows(text: str) -> dict[tuple[str, str], tuple[float, float, float]]:
    """Return coverage, KL and top-1 by budget and selector."""
    return {
        (budget, selector): (float(coverage), float(kl), float(top1))
        for budget, selector, coverage, kl, top1 in LOOP_ROW.findall(text)
    }


def test_the_closed_loop_prints_the_table_of_the_readme_and_draws_it(tmp_path: Path) -> None:
    picture = tmp_path / "kl.png"
    result = subprocess.run(
        [sys.executable, str(EXAMPLES / "closed_loop.py"), str(picture)],
        capture_output=True,
        text=True,
        check=False,
    )
    assert result.returncode == 0, result.stderr
    assert picture.read_bytes().startswith(b"\x89PNG")
    found = loop_rows(result.stdout)
    stated = loop_rows((EXAMPLES.parent / "README.md").read_text("utf-8"))
    assert found.keys() == stated.keys()
    for key, (coverage, kl, top1) in found.items():
        # other Python versions have another source to read
        assert coverage == pytest.approx(stated[key][0], abs=0.05)
        assert kl == pytest.approx(stated[key][1], rel=0.7)
        assert top1 == pytest.approx(stated[key][2], abs=0.1)
    noise = re.search(r"an edit of nothing: KL (\S+),", result.stdout.replace("\n  ", " "))
    assert noise is not None
    for selector in ("oracle", "landmark", "quest"):
        assert found["100%", selector][:2] == (1.0, float(noise.group(1)))
        assert found["2%", selector][1] > found["10%", selector][1] > found["40%", selector][1]
