"""No line of the summary passes 100 columns, whatever is in it."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.traces import PASSED, make_trace, random_layer

GATES = """
from pytest_kvgate import kvgate

@kvgate(budget=0.25, min_coverage=0.2, min_total_mass=0.3, min_hit_rate=0.2, max_budget=0.5,
        coverage=0.5, selector="{selector}")
@kvgate(budget=0.25, min_coverage=0.95, confidence=0.95)
@kvgate(budget=0.25, min_coverage=0.27, confidence=0.95, scope="worst-layer", layers=[0, 2, 3, 5])
def test_g():
    pass
"""

CONFTEST = """
from pytest_kvgate.analysis import Selector

def pytest_kvgate_selectors(config):
    score = lambda queries, pages: (queries @ pages.mean.T).max(axis=1)
    return [Selector({name!r}, score, numbers_per_dim=1)]
"""

MANY = ",".join(str(number / 1000) for number in range(200, 320, 5))


def section_of(result: pytest.RunResult) -> list[str]:
    """Return the lines of the kvgate section."""
    after = result.stdout.str().split("= kvgate =")[1].splitlines()[1:]
    end = next(number for number, line in enumerate(after) if line.startswith("====="))
    return after[:end]


def traces_of(folder: Path, workloads: list[str]) -> list[str]:
    options = []
    for number, workload in enumerate(workloads):
        layers = [
            random_layer(number * 10 + index, n_token=640, n_step=3, index=index, values=True)
            for index in range(6)
        ]
        path = make_trace(
            folder / str(number), layers, workload=workload, verification=PASSED, name="tiny"
        )
        options.append(f"--kvgate-trace={path}")
    return options


@pytest.mark.parametrize(
    ("workloads", "budgets", "name"),
    [
        (["story"], "0.25", "mine"),
        (["story"], MANY, "mine"),
        (["w" * 120, "w" * 119 + "x", "short"], "0.1,0.25", "mine"),
        (["a long name " * 12, "b"], MANY, "mine"),
        (["w" * 40, "other"], "0.1,0.25", "x" * 40),
    ],
    ids=["plain", "many budgets", "long workloads", "long words", "long selector"],
)
@pytest.mark.parametrize("verbose", [True, False], ids=["verbose", "brief"])
def test_no_line_of_the_summary_passes_100_columns(
    pytester: pytest.Pytester,
    tmp_path: Path,
    workloads: list[str],
    budgets: str,
    name: str,
    verbose: bool,
) -> None:
    pytester.makeconftest(CONFTEST.format(name=name))
    pytester.makepyfile(test_it=GATES.format(selector=name))
    options = ["--kvgate-verbose", "--kvgate-sweep=16,32"] if verbose else []
    result = pytester.runpytest(
        *traces_of(tmp_path, workloads),
        f"--kvgate-budgets={budgets}",
        "--kvgate-link=12.5",
        "--kvgate-pool=1.5",
        *options,
    )
    lines = section_of(result)
    assert "INTERNALERROR" not in result.stdout.str()
    assert [line for line in lines if len(line) > 100] == []
    assert any("lost at" in line for line in lines)
    for shown in budgets.split(","):
        assert any(f" {float(shown) * 100:g}%" in line for line in lines), shown


def test_the_failure_of_a_gate_stays_within_100_columns(
    pytester: pytest.Pytester, tmp_path: Path
) -> None:
    name = "x" * 40
    pytester.makeconftest(CONFTEST.format(name=name))
    pytester.makepyfile(test_it=GATES.format(selector=name))
    result = pytester.runpytest(*traces_of(tmp_path, ["story"]))
    failure = result.stdout.str().split("= FAILURES =")[1].split("= kvgate =")[0].splitlines()
    assert [line for line in failure[1:-1] if len(line) > 100] == []


def test_details_are_printed_on_demand(pytester: pytest.Pytester, gqa_trace: Path) -> None:
    pytester.makepyfile("def test_body(kvgate_profile): pass")
    options = (f"--kvgate-trace={gqa_trace}", "--kvgate-recent=0.05", "--kvgate-budgets=0.1,0.25")
    details = [
        "  95% interval at *10% *25%",
        "  total mass at *",
        "  oracle * 0.2551 * 0.4323",
        "  global top-B at *",
        "  landmark * 0.3600",
        "  starved units at *",
        "  overlap (Jaccard) at *",
        "  landmark * 0.2714",
        "  stale coverage at *",
        "  landmark * 0.3398",
        "  lost at *diffuse *page granularity *selector *stale *sum",
        "  landmark at *unrotated dims *all dims",
        "*layer *eligible *support *hottest*",
        "*layer *oracle 10% *landmark 10% *oracle 25% *landmark 25%",
        "  pages of *10% *25%",
        "  pool of 2 × k *hit rate *missed pages *missed bytes/step *pool for 99% *first use",
        "  25% landmark * 0.5333 * 2.33 * ",
        "  selector *metadata of all pages",
        "  landmark * 2.5 KiB",
    ]
    brief = pytester.runpytest(*options)
    assert "total mass at" not in brief.stdout.str()
    verbose = pytester.runpytest(*options, "--kvgate-verbose")
    verbose.stdout.fnmatch_lines(details[:-3])
    verbose.stdout.fnmatch_lines(["  25% landmark * 0.5333 * 2.33 *", *details[-2:]])
    assert "output error at" not in verbose.stdout.str()  # no V was saved
    # all steps are one apart, so that stale coverage says it already
    assert "one step stale at" not in verbose.stdout.str()
    pytester.makeini("[pytest]\nkvgate_verbose = true\nkvgate_link = 0.5\nkvgate_pool = 3")
    from_ini = pytester.runpytest(*options)
    from_ini.stdout.fnmatch_lines(["  pool of 3 × k *hit rate *", "*ms/token at 0.5 GB/s*"])
    wins = pytester.runpytest(*options, "--kvgate-link=2", "--kvgate-pool=1")
    wins.stdout.fnmatch_lines(["  pool of 1 × k *hit rate *", "*ms/token at 2 GB/s*"])
