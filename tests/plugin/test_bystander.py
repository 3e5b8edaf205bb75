"""A session without gates pays nothing and sees nothing."""

from __future__ import annotations

import pytest

HEAVY = ("numpy", "tabulate", "llama_cpp", "gguf", "pytest_kvgate.analysis")


def test_a_run_without_gates_imports_nothing_heavy(pytester: pytest.Pytester) -> None:
    pytester.makepyfile(
        f"""
        import sys

        def test_nothing_heavy():
            assert "pytest_kvgate.plugin" in sys.modules
            assert [name for name in {HEAVY!r} if name in sys.modules] == []
        """
    )
    # hypothesis, installed for these tests, loads numpy where it finds it
    result = pytester.runpytest_subprocess("-Werror", "-p", "no:hypothesispytest")
    result.assert_outcomes(passed=1)
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
