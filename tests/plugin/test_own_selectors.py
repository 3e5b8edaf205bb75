"""Selectors of the user's own, registered by a conftest.py."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

CONFTEST = """
from pytest_kvgate.analysis import Selector

def like_landmark(queries, pages):
    return (queries @ pages.mean.T).max(axis=1)

def pytest_kvgate_selectors(config):
    return [Selector("mine", like_landmark, numbers_per_dim=1)]
"""

GATE = """
from pytest_kvgate import kvgate

@kvgate(budget=0.25, min_coverage=0.35, selector="mine")
def test_gate(kvgate_profile):
    ours, theirs = (kvgate_profile.coverage(name, 0.25) for name in ("mine", "landmark"))
    assert abs(ours - theirs) < 1e-9
"""


def options(trace: Path, *more: str) -> tuple[str, ...]:
    return (f"--kvgate-trace={trace}", "--kvgate-recent=0.05", *more)


def test_it_is_measured_listed_and_gated_by_name(
    pytester: pytest.Pytester, gqa_trace: Path
) -> None:
    pytester.makeconftest(CONFTEST)
    pytester.makepyfile(GATE)
    more = ("--kvgate-verbose", "--kvgate-report=json:out.json", "--kvgate-link=25")
    result = pytester.runpytest(*options(gqa_trace, *more))
    result.assert_outcomes(passed=1)
    result.stdout.fnmatch_lines(
        [
            "  landmark * 0.3563 *",
            "  mine * 0.3563 *",
            "  token-oracle * 0.5391 *",
            "GO  *test_gate",
            "*mine 0.3563; required 0.3500",
        ]
    )
    report = json.loads((pytester.path / "out.json").read_text("utf-8"))
    named = {
        key: {row["selector"] for row in report[key]}
        for key in ("coverage", "required_budget", "paging", "metadata", "layers", "gap", "sweep")
    }
    assert all("mine" in names for names in named.values()), named
    stored = {row["selector"]: row["metadata_bytes"] for row in report["metadata"]}
    assert stored["mine"] == stored["landmark"] == 2 * 2 * 20 * 16 * 2  # layers, heads, pages, dims
    (gate,) = report["gates"]
    assert (gate["selector"], gate["verdict"]) == ("mine", "GO")


def test_a_missed_gate_names_it_as_the_problem(pytester: pytest.Pytester, gqa_trace: Path) -> None:
    pytester.makeconftest(CONFTEST)
    pytester.makepyfile(GATE.replace("0.35,", "0.37,"))
    result = pytester.runpytest(*options(gqa_trace))
    result.assert_outcomes(failed=1)
    result.stdout.fnmatch_lines(
        ["NO-GO: the selector is the problem: mine holds 0.3563 of the eligible mass at a budget*"]
    )


def test_workers_measure_it_too(pytester: pytest.Pytester, gqa_trace: Path) -> None:
    pytester.makeconftest(CONFTEST)
    pytester.makepyfile(GATE)
    result = pytester.runpytest_subprocess(
        "-n2", *options(gqa_trace, "--kvgate-selectors=oracle,mine", "--kvgate-report=json:o.json")
    )
    result.assert_outcomes(passed=0, failed=1)  # the body asks for landmark, which is not listed
    result.stdout.fnmatch_lines(["*selector 'landmark' was not measured; measured: oracle, mine.*"])
    listed = "--kvgate-selectors=landmark,mine"
    result = pytester.runpytest_subprocess("-n2", *options(gqa_trace, listed))
    result.assert_outcomes(passed=1)
    result.stdout.fnmatch_lines(["  mine * 0.3563 *", "GO  *test_gate"])


@pytest.mark.parametrize("workers", [(), ("-n2",)], ids=["one process", "workers"])
@pytest.mark.parametrize("where", ["command line", "ini", "nowhere"])
def test_a_conftest_in_a_subfolder_may_register_one(
    pytester: pytest.Pytester, gqa_trace: Path, where: str, workers: tuple[str, ...]
) -> None:
    folder = pytester.mkpydir("deep").joinpath("deeper")
    folder.mkdir()
    (folder / "conftest.py").write_text(CONFTEST, encoding="utf-8")
    (folder / "test_gate.py").write_text(GATE, encoding="utf-8")
    pytester.makepyfile(
        """
        from pytest_kvgate import kvgate

        @kvgate(budget=0.25, min_coverage=0.3, selector="oracle")
        def test_other_folder(kvgate_profile):
            assert "mine" in kvgate_profile.selectors
        """
    )
    if where == "ini":
        pytester.makeini("[pytest]\nkvgate_selectors = oracle,landmark,mine")
    listed = ("--kvgate-selectors=oracle,landmark,mine",) if where == "command line" else ()
    more = (*listed, *workers, "--kvgate-report=json:out.json")
    result = pytester.runpytest_subprocess(*options(gqa_trace, *more))
    result.assert_outcomes(passed=2)
    result.stdout.fnmatch_lines(["  mine * 0.3563*"])
    report = json.loads((pytester.path / "out.json").read_text("utf-8"))
    assert "mine" in {row["selector"] for row in report["coverage"]}


def test_the_hook_is_asked_once(pytester: pytest.Pytester, gqa_trace: Path) -> None:
    pytester.makeconftest(
        CONFTEST.replace("config):\n", "config):\n    with open('asked', 'a') as f: f.write('x')\n")
    )
    pytester.makepyfile(
        GATE + GATE.replace("test_gate", "test_again") + "\ndef test_scorer(kvgate_scorer):\n"
        "    kvgate_scorer('mine')()\n"
    )
    result = pytester.runpytest(*options(gqa_trace, "--kvgate-selectors=landmark,mine"))
    result.assert_outcomes(passed=3)
    assert (pytester.path / "asked").read_text("utf-8") == "x"


def test_the_hook_is_not_asked_where_there_is_no_gate(
    pytester: pytest.Pytester, gqa_trace: Path
) -> None:
    pytester.makeconftest("def pytest_kvgate_selectors(config): raise RuntimeError('why me')")
    pytester.makepyfile("def test_other(): pass")
    pytester.runpytest().assert_outcomes(passed=1)
    result = pytester.runpytest(f"--kvgate-trace={gqa_trace}")
    assert result.ret == pytest.ExitCode.NO_TESTS_COLLECTED
    assert "why me" not in result.stdout.str()


WRONG = {
    "a name of the package": (
        "[Selector('landmark', score)]",
        "there are two selectors named 'landmark'; rename one.",
    ),
    "the ceiling": (
        "[Selector('oracle', score)]",
        "there are two selectors named 'oracle'; rename one.",
    ),
    "a name twice": (
        "[Selector('mine', score), Selector('mine', score)]",
        "there are two selectors named 'mine'; rename one.",
    ),
    "a name with a comma": (
        "[Selector('a,b', score)]",
        "selector name 'a,b': up to 40 letters, digits and '-' are accepted, such as*",
    ),
    "an empty name": (
        "[Selector('', score)]",
        "selector name '': up to 40 letters*",
    ),
    "a name that is no text": (
        "[Selector(3, score)]",
        "selector name 3: up to 40 letters*",
    ),
    "a function": (
        "[score]",
        "<function score at *> is no selector; a pytest_kvgate.analysis.S*",
    ),
    "a single selector": ("Selector('mine', score)", "returned Selector(name='mine', *list of*"),
    "a name instead of a list": ("'mine'", "returned 'mine'; it must return a list of selectors."),
    "raising": (
        "[1 / 0]",
        "raised ZeroDivisionError('division by zero') in *conftest.py, line 6; it must return a *",
    ),
}


@pytest.mark.parametrize(("returned", "message"), WRONG.values(), ids=WRONG.keys())
def test_what_the_hook_returns_wrongly_is_a_usage_error(
    pytester: pytest.Pytester, gqa_trace: Path, returned: str, message: str
) -> None:
    pytester.makeconftest(
        f"""
        from pytest_kvgate.analysis import Selector

        def score(queries, pages): pass

        def pytest_kvgate_selectors(config):
            return {returned}
        """
    )
    pytester.makepyfile(GATE)
    result = pytester.runpytest(*options(gqa_trace))
    assert result.ret == pytest.ExitCode.USAGE_ERROR
    result.stderr.fnmatch_lines([f"ERROR: kvgate: pytest_kvgate_selectors*{message}"])
    result.assert_outcomes()


def test_workers_pass_a_usage_error_on(pytester: pytest.Pytester, gqa_trace: Path) -> None:
    pytester.makeconftest("def pytest_kvgate_selectors(config): return 3")
    pytester.makepyfile(GATE)
    result = pytester.runpytest_subprocess("-n2", *options(gqa_trace))
    assert result.ret == pytest.ExitCode.USAGE_ERROR
    result.stderr.fnmatch_lines(["ERROR: *pytest_kvgate_selectors returned 3; it must return*"])


def test_a_hook_of_two_conftests_adds_up(pytester: pytest.Pytester, gqa_trace: Path) -> None:
    pytester.makeconftest(CONFTEST)
    folder = pytester.mkdir("inner")
    (folder / "conftest.py").write_text(CONFTEST.replace('"mine"', '"other-1"'), encoding="utf-8")
    (folder / "test_gate.py").write_text(
        GATE + GATE.replace('"mine"', '"other-1"').replace("test_gate", "test_other"),
        encoding="utf-8",
    )
    pytester.runpytest(*options(gqa_trace)).assert_outcomes(passed=2)
    (folder / "conftest.py").write_text(CONFTEST, encoding="utf-8")
    result = pytester.runpytest(*options(gqa_trace))
    assert result.ret == pytest.ExitCode.USAGE_ERROR
    result.stderr.fnmatch_lines(["*pytest_kvgate_selectors: there are two selectors named 'mine'*"])


SCORES = {
    "the wrong shape": (
        "queries.sum(axis=2)",
        "selector 'mine' returned float32 of shape (4, 2); scores are real numbers of shape "
        "[n_step, n_page], here (4, ",
    ),
    "NaN": (
        "pages.mean.sum(axis=1) * float('nan') + queries[:, 0, :1]",
        "selector 'mine' returned NaN for a page, which cannot be ranked; return minus infinity "
        "for a page that comes last.",
    ),
    "nothing": ("None", "selector 'mine' returned object of shape (); scores are real numbers"),
    "truth": (
        "(pages.mean.sum(axis=1) + queries[:, 0, :1]) > 0",
        "selector 'mine' returned bool of shape (4, ",
    ),
}


@pytest.mark.parametrize(("returned", "message"), SCORES.values(), ids=SCORES.keys())
def test_scores_that_rank_nothing_make_the_gates_invalid(
    pytester: pytest.Pytester, gqa_trace: Path, returned: str, message: str
) -> None:
    pytester.makeconftest(CONFTEST.replace("(queries @ pages.mean.T).max(axis=1)", returned))
    pytester.makepyfile("import pytest\n" + GATE.replace("@kvgate", "@pytest.mark.xfail\n@kvgate"))
    result = pytester.runpytest(*options(gqa_trace, "--kvgate-report=json:out.json"))
    result.assert_outcomes(errors=1)  # the fixture cannot be had, and no xfail excuses that
    assert message in " ".join(result.stdout.str().split())
    result.stdout.fnmatch_lines(["INVALID  *test_gate"])
    assert "Traceback" not in result.stdout.str()
    report = json.loads((pytester.path / "out.json").read_text("utf-8"))
    assert report["coverage"] == []


def test_a_selector_that_raises_shows_where_and_spares_the_rest_of_the_run(
    pytester: pytest.Pytester, gqa_trace: Path
) -> None:
    pytester.makeconftest(
        CONFTEST.replace("(queries @ pages.mean.T).max(axis=1)", "queries @ pages.mean")
    )
    gate = GATE.replace("kvgate_profile", "").partition("    ours")[0] + "    pass\n"
    pytester.makepyfile(
        "import pytest\n"
        + gate.replace("@kvgate", "@pytest.mark.xfail\n@kvgate")
        + "\ndef test_other(): pass\n"
    )
    result = pytester.runpytest(*options(gqa_trace, "--kvgate-report=json:out.json"))
    result.assert_outcomes(passed=1, failed=1)
    result.stdout.fnmatch_lines(
        ["conftest.py:4: ValueError", "*= kvgate =*", "synthetic could not be measured: ValueErr*"]
    )
    assert "INTERNALERROR" not in result.stdout.str()
    report = json.loads((pytester.path / "out.json").read_text("utf-8"))
    assert report["coverage"] == []
