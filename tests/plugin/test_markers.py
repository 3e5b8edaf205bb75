"""Wrong markers are usage errors before any test runs."""

from __future__ import annotations

from pathlib import Path

import pytest

import pytest_kvgate
from pytest_kvgate.gate import ACCEPTED_ARGUMENTS

WRONG = {
    "positional": ("0.02, 0.95", "*positional argument 0.02; name every argument*"),
    "unknown": (
        "budget=0.1, min_mass=0.5",
        "*unknown argument 'min_mass'. Accepted: budget, min_coverage, min_total_mass, "
        "max_output_error, min_hit_rate, max_kl, min_top1, max_nll_increase, max_budget, coverage, "
        "selector, page_size, scope, layers, dense_layers, confidence.",
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
        "*no such selector. Accepted: oracle, landmark, quest, mean-std, cuboid-mean, recency, "
        "random, token-oracle.",
    ),
    "no demand": ("budget=0.1, selector='oracle'", "*needs min_coverage*min_total_mass, max_out*"),
    "no demand at all": ("scope='p05'", "*needs budget and min_coverage*"),
    "no budget": ("min_hit_rate=0.9", "*kvgate() needs budget for its min_hit_rate, as in *"),
    "a pointless budget": (
        "budget=0.1, max_budget=0.2, coverage=0.9",
        "*(budget=…) has no effect on max_budget; give one of min_coverage, min_total_mass, *",
    ),
    "max_budget alone": (
        "max_budget=0.05",
        "*needs max_budget and coverage together, as in kvgate(max_budget=0.05, coverage=0.9)*",
    ),
    "coverage alone": (
        "budget=0.1, min_coverage=0.5, coverage=0.9",
        "*needs max_budget and coverage together, as in *",
    ),
    "max_budget too small": (
        "max_budget=0.0005, coverage=0.9",
        "*(max_budget=0.0005): required budgets are looked for in steps of 0.1%; 0.001 or more*",
    ),
    "total mass 2": (
        "budget=0.1, min_total_mass=2",
        "*(min_total_mass=2): min_total_mass is a share of the mass, a number above 0 and up to 1.",
    ),
    "hit rate 99": (
        "budget=0.1, min_hit_rate=99",
        "*(min_hit_rate=99): min_hit_rate is a share of the page accesses, a number above 0 and*",
    ),
    "output error 0": (
        "budget=0.1, max_output_error=0",
        "*(max_output_error=0): max_output_error is ‖o'−o‖/‖o‖, a number above 0, such as 0.1.",
    ),
    "a threshold that is None": (
        "budget=0.1, max_output_error=None",
        "*(max_output_error=None): *a number above 0, such as 0.1.",
    ),
    "a second threshold that is None": (
        "budget=0.1, min_coverage=0.5, min_hit_rate=None",
        "*(min_hit_rate=None): min_hit_rate is a share of the page accesses*",
    ),
    "scope": (
        "budget=0.1, min_coverage=0.5, scope='worst'",
        "*(scope='worst'): accepted: mean, worst-layer, p05.",
    ),
    "scope None": (
        "budget=0.1, min_coverage=0.5, scope=None",
        "*(scope=None): accepted: mean, worst-layer, p05.",
    ),
    "no layers": (
        "budget=0.1, min_coverage=0.5, layers=()",
        "*(layers=()): layer indices are needed, whole numbers from 0, such as layers=*3, 7*",
    ),
    "layers as text": ("budget=0.1, min_coverage=0.5, layers='3'", "*(layers='3'): layer indices*"),
    "a single layer": ("budget=0.1, min_coverage=0.5, layers=3", "*(layers=3): layer indices*"),
    "a negative layer": (
        "budget=0.1, min_coverage=0.5, layers=range(-1, 2)",
        "*(layers=range(-1, 2)): layer indices are needed, whole numbers from 0*",
    ),
    "confidence 1": (
        "budget=0.1, min_coverage=0.5, confidence=1",
        "*(confidence=1): the share of intervals that hold the truth is needed, from 0.5 and below "
        "1, such as 0.95.",
    ),
    "confidence 95": ("budget=0.1, min_coverage=0.5, confidence=95", "*(confidence=95): *0.95."),
    "confidence 0.05": (
        "budget=0.1, min_coverage=0.5, confidence=0.05",
        "*(confidence=0.05): *from 0.5 and below 1*",
    ),
    "the hit rate of tokens": (
        "budget=0.1, min_hit_rate=0.9, selector='token-oracle'",
        "*(min_hit_rate=0.9) is about pages, and 'token-oracle' selects tokens; name another *",
    ),
    "the output error of tokens": (
        "budget=0.1, max_output_error=0.1, selector='token-oracle'",
        "*(max_output_error=0.1) is about pages, and 'token-oracle' selects tokens; *",
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
    for name in ACCEPTED_ARGUMENTS:
        assert name in result.stdout.str().split("@pytest.mark.kvgate(")[1].split("@pytest")[0]


def test_strict_markers_accept_it(pytester: pytest.Pytester, gqa_trace: Path) -> None:
    pytester.makepyfile(
        "import pytest\n@pytest.mark.kvgate(budget=0.1, min_coverage=0.1)\ndef test_g(): pass"
    )
    result = pytester.runpytest("--strict-markers", f"--kvgate-trace={gqa_trace}")
    result.assert_outcomes(passed=1)
