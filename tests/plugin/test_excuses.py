"""What excuses a gate and what does not: skips, xfails, a late marker, a setup that breaks."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.plugin.test_verdicts import gate, run


@pytest.mark.parametrize(
    "skip",
    [
        "raise unittest.SkipTest('x')",
        "import pytest; pytest.importorskip('no_such_module_here')",
    ],
)
def test_no_kind_of_skip_takes_a_missed_gate_along(
    pytester: pytest.Pytester, gqa_trace: Path, skip: str
) -> None:
    pytester.makepyfile("import unittest\n" + gate(0.1, 0.95, body=skip))
    result = run(pytester, gqa_trace)
    result.assert_outcomes(failed=1)
    result.stdout.fnmatch_lines(["kvgate NO-GO*"])


@pytest.mark.parametrize("where", ["setUp", "test_gate"])
def test_a_unittest_skip_does_not_take_a_missed_gate_along(
    pytester: pytest.Pytester, gqa_trace: Path, where: str
) -> None:
    methods = {"setUp": "pass", "test_gate": "pass", where: "self.skipTest('x')"}
    pytester.makepyfile(
        f"""
        import unittest
        from pytest_kvgate import kvgate

        class TestPaging(unittest.TestCase):
            def setUp(self):
                {methods["setUp"]}

            @kvgate(budget=0.1, min_coverage=0.95)
            def test_gate(self):
                {methods["test_gate"]}
        """
    )
    result = run(pytester, gqa_trace)
    result.assert_outcomes(failed=1)
    result.stdout.fnmatch_lines(["kvgate NO-GO*"])


def test_an_xfail_does_not_excuse_a_setup_that_breaks(
    pytester: pytest.Pytester, gqa_trace: Path
) -> None:
    pytester.makepyfile(
        """
        import pytest
        from pytest_kvgate import kvgate

        @pytest.fixture
        def broken():
            raise RuntimeError("no such luck")

        @pytest.mark.xfail(strict=True)
        @kvgate(budget=0.1, min_coverage=0.95)
        def test_gate(broken):
            pass
        """
    )
    result = run(pytester, gqa_trace)
    assert result.ret == pytest.ExitCode.TESTS_FAILED
    result.stdout.fnmatch_lines(["*no such luck*", "NOT EVALUATED  *test_gate"])


def test_a_gate_added_while_the_test_runs_fails_it(
    pytester: pytest.Pytester, gqa_trace: Path
) -> None:
    pytester.makepyfile(
        """
        import pytest

        @pytest.fixture
        def late(request):
            request.applymarker(pytest.mark.kvgate(budget=0.1, min_coverage=0.95))

        def test_gate(late):
            pass
        """
    )
    result = run(pytester, gqa_trace, "--kvgate-report=json:out.json")
    result.assert_outcomes(failed=1)
    result.stdout.fnmatch_lines(["kvgate: a gate was added to this test too late*"])


def test_a_budget_that_buys_every_eligible_page_is_said_to_select_nothing(
    pytester: pytest.Pytester, gqa_trace: Path
) -> None:
    pytester.makepyfile(gate(0.1, 1))
    result = run(pytester, gqa_trace, "--kvgate-sinks=576")
    result.assert_outcomes(passed=1)
    result.stdout.fnmatch_lines(["GO  *", "*the budget buys every eligible page, so nothing was*"])


def test_subtests_are_left_to_themselves(pytester: pytest.Pytester, gqa_trace: Path) -> None:
    pytester.makepyfile(
        """
        import pytest
        from pytest_kvgate import kvgate

        @pytest.mark.xfail(strict=True)
        @kvgate(budget=0.1, min_coverage=0.95)
        def test_recorded(subtests):
            with subtests.test("a"):
                pytest.skip("later")
        """
    )
    result = run(pytester, gqa_trace)
    assert result.ret == pytest.ExitCode.OK
    result.stdout.fnmatch_lines(["NO-GO  *test_recorded"])
    assert "every gate of this test is GO" not in result.stdout.str()


@pytest.mark.parametrize("body", ["pass", "import pytest; pytest.skip('later')"])
def test_neither_xfail_nor_skip_excuses_a_gate_added_late(
    pytester: pytest.Pytester, gqa_trace: Path, body: str
) -> None:
    pytester.makeconftest(
        """
        import pytest

        @pytest.hookimpl(trylast=True)
        def pytest_collection_modifyitems(items):
            for item in items:
                item.add_marker(pytest.mark.kvgate(budget=0.1, min_coverage=0.95))
        """
    )
    marks = "@pytest.mark.xfail(strict=True)\n@kvgate"
    source = gate(0.1, 0.1, body=body).replace("@kvgate", marks)
    pytester.makepyfile("import pytest\n" + source)
    result = run(pytester, gqa_trace)
    assert result.ret == pytest.ExitCode.TESTS_FAILED
    result.stdout.fnmatch_lines(["kvgate: a gate was added to this test too late*"])


def test_a_setup_that_breaks_under_an_xfail_keeps_its_traceback(
    pytester: pytest.Pytester, gqa_trace: Path
) -> None:
    pytester.makepyfile(
        """
        import pytest
        from pytest_kvgate import kvgate

        @pytest.fixture
        def broken():
            raise RuntimeError

        @pytest.mark.xfail
        @kvgate(budget=0.1, min_coverage=0.1)
        def test_gate(broken):
            pass
        """
    )
    result = run(pytester, gqa_trace)
    result.assert_outcomes(errors=1)
    result.stdout.fnmatch_lines(["*raise RuntimeError", "*The xfail of this test excuses a*"])
