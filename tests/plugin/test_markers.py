"""Wrong markers are usage errors before any test runs."""

from __future__ import annotations

from pathlib import Path

import pytest

import pytest_kvgate

WRONG = {
    "positional": ("0.02, 0.95", "*positional argument 0.02; name every argument*"),
    "unknown": (
        "budget=0.1, min_mass=0.5",
        "*unknown argument 'min_mass'. Accepted: budget, min_coverage, selector, page_size.",
    ),
    "nothing": ("", "*kvgate() needs budget and min_coverage*"),
    "no threshold": ("budget=0.1", "*kvgate() needs min_coverage*"),
    "budget 0": ("budget=0, min_coverage=0.5", "*kvgate(budget=0): budget is a fraction*"),
    "budget 2": ("budget=2, min_coverage=0.5", "*kvgate(budget=2): *above 0 and up to 1."),
    "budget NaN": ("budget=float('nan'), min_coverage=0.5", "*kvgate(budget=nan)*"),
    "budget text": ("budget='2%', min_coverage=0.5", "*kvgate(budget='2%')*"),
    "budget bool": ("budget=True, min_coverage=0.5", "*kvgate(budget=True)*"),
    "coverage 0": ("budget=0.1, min_coverage=0", "*kvgate(min_coverage=0)*"),
    "coverage 95": ("budget=0.1, min_coverage=95", "*kvgate(min_coverage=95)*"),
    "selector": (
        "budget=0.1, min_coverage=0.5, selector='best'",
        "*no such selector. Accepted: oracle, landmark, token-oracle.",
    ),
    "page size 0": ("budget=0.1, min_coverage=0.5, page_size=0", "*kvgate(page_size=0)*"),
    "page size float": ("budget=0.1, min_coverage=0.5, page_size=16.0", "*page_size=16.0*"),
}


@pytest.mark.parametrize(("arguments", "message"), WRONG.values(), ids=WRONG.keys())
@pytest.mark.parametrize("evidence", [True, False], ids=["with a trace", "without"])
def test_wrong_arguments_are_usage_errors(
    pytester: pytest.Pytester, gqa_trace: Path, arguments: str, message: str, evidence: bool
) -> None:
    pytester.makepyfile(
        f"from pytest_kvgate import kvgate\n@kvgate({arguments})\ndef test_gate(): pass\n"
        "def test_other(): pass\n"
    )
    options = [f"--kvgate-trace={gqa_trace}"] if evidence else []
    result = pytester.runpytest(*options)
    assert result.ret == pytest.ExitCode.USAGE_ERROR
    result.stderr.fnmatch_lines([f"ERROR: *::test_gate: {message}"])
    result.assert_outcomes()


def test_the_exported_marker_is_pytests_own() -> None:
    assert pytest_kvgate.kvgate == pytest.mark.kvgate


def test_the_marker_is_registered_and_explained(pytester: pytest.Pytester) -> None:
    result = pytester.runpytest("--markers")
    result.stdout.fnmatch_lines(["@pytest.mark.kvgate(budget, min_coverage, *"])


def test_strict_markers_accept_it(pytester: pytest.Pytester, gqa_trace: Path) -> None:
    pytester.makepyfile(
        "import pytest\n@pytest.mark.kvgate(budget=0.1, min_coverage=0.1)\ndef test_g(): pass"
    )
    result = pytester.runpytest("--strict-markers", f"--kvgate-trace={gqa_trace}")
    result.assert_outcomes(passed=1)
