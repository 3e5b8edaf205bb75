"""A session without gates pays nothing and sees nothing."""

from __future__ import annotations

import pytest

HEAVY = ("numpy", "tabulate", "llama_cpp", "gguf", "pytest_kvgate.analysis")


def test_a_run_without_gates_imports_nothing_heavy_to_its_very_end(
    pytester: pytest.Pytester,
) -> None:
    pytester.makeconftest(
        f"""
        import atexit, sys

        def tell():
            print("plugin loaded:", "pytest_kvgate.plugin" in sys.modules)
            print("heavy:", [name for name in {HEAVY!r} if name in sys.modules])

        atexit.register(tell)
        """
    )
    pytester.makepyfile(
        """
        import pytest

        def test_passes(): pass

        @pytest.mark.skip
        def test_skipped(): pass

        @pytest.mark.xfail
        def test_xfails(): assert False

        @pytest.fixture
        def broken(): raise RuntimeError

        def test_errs(broken): pass
        """
    )
    # hypothesis, installed for these tests, loads numpy where it finds it
    result = pytester.runpytest_subprocess("-Werror", "-p", "no:hypothesispytest")
    result.assert_outcomes(passed=1, skipped=1, xfailed=1, errors=1)
    result.stdout.fnmatch_lines(["plugin loaded: True", "heavy: ??"])
    assert "kvgate:" not in result.stdout.str()
    assert "= kvgate =" not in result.stdout.str()


def test_the_version_can_be_asked_for_without_anything_heavy(pytester: pytest.Pytester) -> None:
    script = pytester.makepyfile(
        f"""
        import sys, pytest
        pytest.main(["--version", "--version", "-p", "no:hypothesispytest"])
        print([name for name in {HEAVY!r} if name in sys.modules])
        """
    )
    result = pytester.runpython(script)
    assert result.ret == 0
    result.stdout.fnmatch_lines(["[[]]"])


def test_a_hook_for_selectors_costs_a_run_without_gates_nothing(
    pytester: pytest.Pytester,
) -> None:
    pytester.makeconftest(
        f"""
        import atexit, sys

        def pytest_kvgate_selectors(config):
            from pytest_kvgate.analysis import Selector
            raise RuntimeError("the hook was called")

        atexit.register(
            lambda: print("heavy:", [name for name in {HEAVY!r} if name in sys.modules])
        )
        """
    )
    pytester.makeini("[pytest]\nkvgate_selectors = mine\nkvgate_verbose = true")
    pytester.makepyfile("def test_passes(): pass")
    result = pytester.runpytest_subprocess("-Werror", "-p", "no:hypothesispytest")
    result.assert_outcomes(passed=1)
    result.stdout.fnmatch_lines(["heavy: ??"])
    assert "the hook was called" not in result.stdout.str() + result.stderr.str()


def test_an_xpass_without_gates_is_pytests_own_business(pytester: pytest.Pytester) -> None:
    pytester.makepyfile("import pytest\n@pytest.mark.xfail(strict=True)\ndef test_x(): pass")
    result = pytester.runpytest()
    result.assert_outcomes(failed=1)
    assert "kvgate:" not in result.stdout.str()
