"""The fixtures kvgate_trace and kvgate_profile, and tests over several models and traces."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.conftest import CASES
from tests.traces import PASSED, make_trace, random_layer


def test_the_profile_answers_at_any_budget_of_the_grid(
    pytester: pytest.Pytester, gqa_trace: Path
) -> None:
    pytester.makepyfile(
        """
        import pytest
        from pytest_kvgate.analysis import NotMeasuredError, UndefinedError

        def test_body(kvgate_profile):
            assert kvgate_profile.coverage("oracle", 0.1) == pytest.approx(0.185816, abs=1e-5)
            assert kvgate_profile.total_mass("oracle", 0.1) == pytest.approx(0.255113, abs=1e-5)
            assert kvgate_profile.required_budget("oracle", 0.95) == 0.85
            with pytest.raises(UndefinedError, match="1% of 640 tokens is 6 tokens, less than"):
                kvgate_profile.coverage("oracle", 0.01)
            with pytest.raises(NotMeasuredError, match="Add it to --kvgate-budgets"):
                kvgate_profile.coverage("oracle", 0.1234)
            with pytest.raises(NotMeasuredError, match="'quest' was not measured; .* --kvgate-sel"):
                kvgate_profile.coverage("quest", 0.1)
        """
    )
    result = pytester.runpytest(
        f"--kvgate-trace={gqa_trace}",
        "--kvgate-recent=0.05",
        "--kvgate-selectors=oracle,landmark,token-oracle",
    )
    result.assert_outcomes(passed=1)


def test_the_profile_has_the_page_size_of_the_tests_gates(
    pytester: pytest.Pytester, gqa_trace: Path
) -> None:
    pytester.makepyfile(
        """
        from pytest_kvgate import kvgate

        @kvgate(budget=0.25, min_coverage=0.2, page_size=8)
        def test_gate(kvgate_profile):
            assert kvgate_profile.grid.page_size == 8

        def test_none(kvgate_profile):
            assert kvgate_profile.grid.page_size == 16

        @kvgate(budget=0.25, min_coverage=0.2, page_size=8)
        @kvgate(budget=0.25, min_coverage=0.2)
        def test_two(kvgate_profile):
            pass
        """
    )
    result = pytester.runpytest(f"--kvgate-trace={gqa_trace}", "--kvgate-page-size=16")
    result.assert_outcomes(passed=2, errors=1)
    result.stdout.fnmatch_lines(["kvgate_profile is ambiguous: * pages of 8 and 16 tokens.*"])


def test_the_trace_comes_as_it_was_saved(pytester: pytest.Pytester, gqa_trace: Path) -> None:
    pytester.makepyfile(
        """
        def test_body(kvgate_trace):
            assert [step.n_visible for step in kvgate_trace.steps] == [640, 641, 642, 643]
            assert kvgate_trace.layers[1].k.shape == (2, 643, 16)
            assert kvgate_trace.layers[1].k.dtype == "float16"
        """
    )
    pytester.runpytest(f"--kvgate-trace={gqa_trace}").assert_outcomes(passed=1)


def test_a_test_of_one_trace_runs_once_for_each(pytester: pytest.Pytester) -> None:
    pytester.makepyfile(
        """
        def test_body(kvgate_trace):
            assert kvgate_trace.workload["name"] in ("gqa-f16", "sinks-softcap")

        def test_pooled(kvgate_profile):
            assert len(kvgate_profile.traces) == 2
        """
    )
    options = [f"--kvgate-trace={CASES / case}" for case in ("gqa-f16", "sinks-softcap")]
    result = pytester.runpytest("-v", *options)
    result.assert_outcomes(passed=3)
    result.stdout.fnmatch_lines(["*test_body?synthetic-gqa-f16? PASSED*", "*test_pooled PASSED*"])


def test_every_model_is_judged_on_its_own(pytester: pytest.Pytester, tmp_path: Path) -> None:
    for seed, name in enumerate(("small", "large")):
        layer = random_layer(seed, n_token=640, scale=0.01 + seed)
        make_trace(tmp_path / name, [layer], [640], name=name, verification=PASSED)
    pytester.makepyfile(
        """
        from pytest_kvgate import kvgate

        @kvgate(budget=0.1, min_coverage=0.2, selector="oracle")
        def test_gate():
            pass
        """
    )
    options = [f"--kvgate-trace={tmp_path / name}" for name in ("small", "large")]
    result = pytester.runpytest("-v", *options)
    result.assert_outcomes(passed=1, failed=1)
    result.stdout.fnmatch_lines(
        ["*test_gate?small? FAILED*", "*test_gate?large? PASSED*", "NO-GO  *small?", "GO  *large?"]
    )


def test_a_unittest_method_is_judged_on_every_model(
    pytester: pytest.Pytester, tmp_path: Path
) -> None:
    for seed, name in enumerate(("small", "large")):
        layer = random_layer(seed, n_token=640, scale=0.01 + seed)
        make_trace(tmp_path / name, [layer], [640], name=name, verification=PASSED)
    pytester.makepyfile(
        """
        import unittest
        from pytest_kvgate import kvgate

        class TestPaging(unittest.TestCase):
            @kvgate(budget=0.1, min_coverage=0.2, selector="oracle")
            def test_gate(self):
                pass
        """
    )
    options = [f"--kvgate-trace={tmp_path / name}" for name in ("small", "large")]
    result = pytester.runpytest(*options)
    result.assert_outcomes(failed=1)
    result.stdout.fnmatch_lines(["NO-GO  *", "*small, budget 10%*", "GO  *", "*large, budget 10%*"])


def test_a_fixture_asked_for_while_the_test_runs_works_too(
    pytester: pytest.Pytester, gqa_trace: Path
) -> None:
    pytester.makepyfile(
        """
        def test_body(request):
            assert request.getfixturevalue("kvgate_profile").n_unit == 16
        """
    )
    pytester.runpytest(f"--kvgate-trace={gqa_trace}").assert_outcomes(passed=1)
    pytester.runpytest("-rs").assert_outcomes(skipped=1)


@pytest.mark.parametrize("fixture", ["kvgate_profile", "kvgate_trace"])
def test_a_fixture_asked_for_late_does_not_pick_one_of_several_models(
    pytester: pytest.Pytester, fixture: str
) -> None:
    pytester.makepyfile(f"def test_body(request): request.getfixturevalue({fixture!r})")
    for name in ("one", "two"):
        make_trace(pytester.path / name, [random_layer(n_token=640)], [640], name=name)
    result = pytester.runpytest("--kvgate-trace=one", "--kvgate-trace=two")
    result.assert_outcomes(failed=1)
    result.stdout.fnmatch_lines(["kvgate has 2 models or traces, and this test cannot run once*"])


def test_models_of_one_file_name_are_told_apart(pytester: pytest.Pytester, tmp_path: Path) -> None:
    for folder, name in (("x", "a"), ("y", "a"), ("z", "a-2")):
        layer = random_layer(ord(folder), n_token=640)
        make_trace(tmp_path / folder, [layer], [640], name=name, workload=folder)
        document = tmp_path / folder / "trace.json"
        text = document.read_text("utf-8").replace('"made"', f'"made-{folder}"', 1)
        document.write_text(text, encoding="utf-8")
    pytester.makepyfile("def test_body(kvgate_profile): pass")
    options = [f"--kvgate-trace={tmp_path / folder}" for folder in "xyz"]
    result = pytester.runpytest("-v", *options)
    result.assert_outcomes(passed=3)
    result.stdout.fnmatch_lines(["*test_body?a? *", "*test_body?a-3? *", "*test_body?a-2? *"])
