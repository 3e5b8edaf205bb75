"""Gates on the next token, from a decorator to verdicts, tables and reports."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest

from pytest_kvgate.cli import main
from tests.models import tiny_model
from tests.sparse_models import sparse_model

GATE = """
from pytest_kvgate import kvgate

@kvgate({arguments})
def test_gate():
    pass
"""

#: Keys that every row of a closed loop has.
KEYS = {
    "budget",
    "selector",
    "coverage",
    "kl",
    "kl_ci",
    "top1",
    "nll_dense",
    "nll_sparse",
    "noise_floor",
    "n_tokens",
    "dense_layers",
}


def run(
    pytester: pytest.Pytester, model: Path, prompt: Path, arguments: str, *more: str
) -> pytest.RunResult:
    pytester.makepyfile(GATE.format(arguments=arguments))
    return pytester.runpytest(
        f"--kvgate-model={model}",
        f"--kvgate-prompt={prompt}",
        "--kvgate-steps=0:9:4",
        "--kvgate-threads=1",
        "--kvgate-budgets=0.2",
        "--kvgate-loop-tokens=8",
        "--kvgate-report=json:r.json",
        *more,
    )


def report(pytester: pytest.Pytester) -> dict[str, Any]:
    document: dict[str, Any] = json.loads((pytester.path / "r.json").read_text("utf-8"))
    return document


def text_of(result: pytest.RunResult) -> str:
    """Return the output with its line breaks gone, for a sentence may be broken anywhere."""
    return " ".join(result.stdout.str().split())


def test_a_gate_on_kl_is_judged_and_stands_beside_coverage(
    pytester: pytest.Pytester, tiny_llama: Path, prompt: Path
) -> None:
    result = run(
        pytester, tiny_llama, prompt, "budget=0.2, max_kl=5, min_coverage=0.99, selector='quest'"
    )
    result.assert_outcomes(failed=1)
    text = text_of(result)
    assert "may be too strict for this model" in text
    assert "closed loop: 8 predicted tokens, sparse from the first decode step on" in text
    found = report(pytester)
    (gate,) = found["gates"]
    assert gate["verdict"] == "NO-GO"
    by_measure = {check["measure"]: check for check in gate["checks"]}
    assert by_measure["coverage"]["state"] == "missed"
    assert by_measure["kl"]["state"] == "ok"
    rows = {row["selector"]: row for row in found["closed_loop"]}
    assert set(rows) == {"oracle", "quest"}
    for row in rows.values():
        assert row.keys() >= KEYS
        assert (row["budget"], row["n_tokens"], row["dense_layers"]) == (0.2, 8, [])
        assert row["kl"] > row["noise_floor"] >= 0
        assert row["kl_ci"][0] <= row["kl"] <= row["kl_ci"][1]
        assert row["nll_sparse"] - row["nll_dense"] == pytest.approx(row["nll_increase"])
    assert by_measure["kl"]["observed"] == rows["quest"]["kl"]
    made = found["closed_loop_runs"]["tiny-llama"]
    assert (made["n_tokens"], made["flash_attention"], made["eos_ignored_from"]) == (8, False, None)
    assert made["noise_floor"] == rows["quest"]["noise_floor"]
    assert rows["oracle"]["coverage"] > rows["quest"]["coverage"]


def test_a_missed_gate_says_what_the_oracle_would_have_done(
    pytester: pytest.Pytester, tiny_llama: Path, prompt: Path
) -> None:
    result = run(pytester, tiny_llama, prompt, "budget=0.1, max_kl=1e-4, dense_layers=[0]")
    result.assert_outcomes(failed=1)
    text = text_of(result)
    assert "kvgate NO-GO: tiny-llama, budget 10%, pages of 32 tokens, layer 0 dense" in text
    assert "landmark moves the next token by a KL of" in text
    assert "10% landmark, layer 0 dense" in text
    assert "Traceback" not in result.stdout.str()
    assert {tuple(row["dense_layers"]) for row in report(pytester)["closed_loop"]} == {(0,)}


def test_the_option_measures_without_any_gate(
    pytester: pytest.Pytester, tiny_llama: Path, prompt: Path
) -> None:
    pytester.makepyfile("def test_other(): pass")
    result = pytester.runpytest(
        f"--kvgate-model={tiny_llama}",
        f"--kvgate-prompt={prompt}",
        "--kvgate-steps=0:2",
        "--kvgate-threads=1",
        "--kvgate-closed-loop",
        "--kvgate-loop-tokens=4",
        "--kvgate-sparse-tail=6",
        "--kvgate-budgets=0.01,0.2,1",
        "--kvgate-report=json:r.json",
    )
    assert result.ret == pytest.ExitCode.OK
    text = text_of(result)
    assert "sparse from the last 6 prompt tokens on" in text
    assert "1% oracle, 1% landmark: 1% of 896 tokens is 8 tokens, less than one" in text
    rows = {(row["budget"], row["selector"]): row for row in report(pytester)["closed_loop"]}
    assert len(rows) == 6
    assert rows[0.01, "oracle"]["kl"] is None
    for name in ("oracle", "landmark"):
        assert rows[1.0, name]["kl"] <= rows[1.0, name]["noise_floor"]
        assert rows[0.2, name]["sparse_tail"] == 6


def test_a_saved_trace_cannot_be_run(pytester: pytest.Pytester, gqa_trace: Path) -> None:
    pytester.makepyfile(GATE.format(arguments="budget=0.25, max_kl=0.1"))
    result = pytester.runpytest(f"--kvgate-trace={gqa_trace}")
    result.assert_outcomes(failed=1)
    assert "INVALID" in result.stdout.str()
    assert "is a saved trace, which holds no weights: a closed loop has to run" in text_of(result)
    result = pytester.runpytest(f"--kvgate-trace={gqa_trace}", "--kvgate-closed-loop")
    assert result.ret == pytest.ExitCode.USAGE_ERROR
    result.stderr.fnmatch_lines(["ERROR: *--kvgate-closed-loop has no effect here*"])


def test_an_xfail_does_not_excuse_a_loop_that_cannot_be_run(
    pytester: pytest.Pytester, gqa_trace: Path
) -> None:
    source = GATE.format(arguments="budget=0.25, max_kl=0.1")
    pytester.makepyfile(source.replace("@kvgate", "import pytest\n\n@pytest.mark.xfail\n@kvgate"))
    pytester.runpytest(f"--kvgate-trace={gqa_trace}").assert_outcomes(failed=1)


def test_a_loop_that_fails_leaves_gates_on_attention_alone(
    pytester: pytest.Pytester, tiny_llama: Path, prompt: Path, tmp_path: Path
) -> None:
    continuation = tmp_path / "few.txt"
    continuation.write_text("abcdefghi", encoding="utf-8")
    pytester.makepyfile(
        GATE.format(arguments="budget=0.2, min_coverage=0.01")
        + "\n@kvgate(budget=0.2, max_kl=1)\ndef test_loop(): pass\n"
    )
    result = pytester.runpytest(
        f"--kvgate-model={tiny_llama}",
        f"--kvgate-prompt={prompt}",
        f"--kvgate-continuation={continuation}",
        "--kvgate-steps=0:5:4",
        "--kvgate-threads=1",
    )
    result.assert_outcomes(passed=1, failed=1)
    text = text_of(result)
    assert "is 9 tokens, and 64 predictions need 65. Ask for --kvgate-loop-tokens 8" in text


def test_a_continuation_is_followed(
    pytester: pytest.Pytester, tiny_llama: Path, prompt: Path, tmp_path: Path
) -> None:
    continuation = tmp_path / "more.txt"
    continuation.write_text("zyxwvutsrqponmlk", encoding="utf-8")
    more = f"--kvgate-continuation={continuation}"
    run(pytester, tiny_llama, prompt, "budget=0.2, max_kl=5", more).assert_outcomes(passed=1)
    forced = report(pytester)["closed_loop"]
    run(pytester, tiny_llama, prompt, "budget=0.2, max_kl=5").assert_outcomes(passed=1)
    greedy = report(pytester)["closed_loop"]
    # the likeliest tokens are likelier than what was recorded
    assert forced[0]["nll_dense"] > greedy[0]["nll_dense"]


def test_a_text_that_ends_is_refused_unless_its_end_is_ignored(
    pytester: pytest.Pytester, tmp_path: Path
) -> None:
    model = tiny_model(tmp_path / "countdown.gguf", countdown=True)
    prompt = tmp_path / "p.txt"
    prompt.write_text("x" * 300 + "e", encoding="utf-8")
    pytester.makepyfile(GATE.format(arguments="budget=0.2, max_kl=5"))
    options = (
        f"--kvgate-model={model}",
        f"--kvgate-prompt={prompt}",
        "--kvgate-steps=0:2",
        "--kvgate-threads=1",
        "--kvgate-loop-tokens=8",
    )
    result = pytester.runpytest(*options)
    result.assert_outcomes(failed=1)
    text = text_of(result)
    assert "the model ends its text at decode step 4, so only 3 of 8 predictions" in text
    assert "ask for --kvgate-loop-tokens 3" in text
    pytester.runpytest(*options, "--kvgate-loop-tokens=3").assert_outcomes(passed=1)
    result = pytester.runpytest(*options, "--kvgate-ignore-eos")
    result.assert_outcomes(passed=1)
    assert "END OF TEXT IGNORED from decode step 4 on" in text_of(result)


def test_gates_with_pages_of_their_own_are_run_so(
    pytester: pytest.Pytester, tiny_llama: Path, prompt: Path
) -> None:
    run(pytester, tiny_llama, prompt, "budget=0.1, max_kl=5, page_size=16").assert_outcomes(
        passed=1
    )
    (other,) = report(pytester)["other_page_sizes"]
    assert {row["page_size"] for row in other["closed_loop"]} == {16}
    assert {row["selector"] for row in other["closed_loop"]} == {"oracle", "landmark"}


def test_a_selector_of_ones_own_closes_the_loop_too(
    pytester: pytest.Pytester, tiny_llama: Path, prompt: Path
) -> None:
    pytester.makeconftest(
        """
        def first_key(queries, pages):
            assert queries.ndim == 3 and pages.keys.ndim == 3
            return (queries @ pages.keys[:, 0].T).max(axis=1)

        def pytest_kvgate_selectors(config):
            from pytest_kvgate.analysis import Selector
            return [Selector("first-key", first_key, numbers_per_dim=1)]
        """
    )
    result = run(pytester, tiny_llama, prompt, "budget=0.2, max_kl=5, selector='first-key'")
    result.assert_outcomes(passed=1)
    assert {row["selector"] for row in report(pytester)["closed_loop"]} == {"oracle", "first-key"}


def test_a_natively_sparse_model_is_refused_even_where_its_coverage_is_not(
    pytester: pytest.Pytester, tmp_path: Path, prompt: Path
) -> None:
    model = sparse_model(tmp_path / "sparse.gguf", top_k=64)
    result = run(pytester, model, prompt, "budget=0.2, max_kl=5", "--kvgate-allow-native-sparse")
    result.assert_outcomes(failed=1)
    assert "so there is no closed loop" in text_of(result)
    assert report(pytester)["gates"][0]["verdict"] == "INVALID"


def test_workers_share_one_closed_loop(
    pytester: pytest.Pytester, tiny_llama: Path, prompt: Path
) -> None:
    pytester.makeconftest(
        """
        import pytest_kvgate.pipeline.loops as loops

        class Counted(loops.Loop):
            def __init__(self, *arguments):
                with open("loops.log", "a") as log:
                    log.write("loop\\n")
                super().__init__(*arguments)

        loops.Loop = Counted
        """
    )
    pytester.makepyfile(
        "import pytest\n"
        + GATE.format(arguments="budget=0.2, max_kl=5").replace(
            "def test_gate()", "@pytest.mark.parametrize('number', range(4))\ndef test_gate(number)"
        )
    )
    result = pytester.runpytest_subprocess(
        "-n2",
        f"--kvgate-model={tiny_llama}",
        f"--kvgate-prompt={prompt}",
        "--kvgate-steps=0:2",
        "--kvgate-threads=1",
        "--kvgate-loop-tokens=4",
        "--kvgate-report=json:r.json",
    )
    result.assert_outcomes(passed=4)
    assert (pytester.path / "loops.log").read_text("utf-8").count("loop") == 1
    assert len(report(pytester)["closed_loop"]) == 2


@pytest.mark.parametrize("option", ["--kvgate-sparse-tail=8", "--kvgate-loop-tokens=9"])
def test_options_of_a_loop_without_one_are_usage_errors(
    pytester: pytest.Pytester, tiny_llama: Path, prompt: Path, option: str
) -> None:
    pytester.makepyfile(GATE.format(arguments="budget=0.2, min_coverage=0.1"))
    result = pytester.runpytest(f"--kvgate-model={tiny_llama}", f"--kvgate-prompt={prompt}", option)
    assert result.ret == pytest.ExitCode.USAGE_ERROR
    result.stderr.fnmatch_lines([f"ERROR: *{option.partition('=')[0]} has no effect here*"])


@pytest.mark.parametrize(
    ("option", "words"),
    [
        ("--kvgate-loop-tokens=0", "*needs a whole number of tokens, 1 or more*"),
        ("--kvgate-sparse-tail=-1", "*needs a whole number of tokens, 0 or more*"),
    ],
)
def test_wrong_options_are_usage_errors(
    pytester: pytest.Pytester, tiny_llama: Path, prompt: Path, option: str, words: str
) -> None:
    result = run(pytester, tiny_llama, prompt, "budget=0.2, max_kl=5", option)
    assert result.ret == pytest.ExitCode.USAGE_ERROR
    result.stderr.fnmatch_lines([words])


def test_the_command_prints_the_same_numbers(
    pytester: pytest.Pytester,
    tiny_llama: Path,
    prompt: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    run(pytester, tiny_llama, prompt, "budget=0.2, max_kl=5").assert_outcomes(passed=1)
    by_pytest = report(pytester)["closed_loop"]
    capsys.readouterr()
    out = pytester.path / "command.json"
    arguments = [str(tiny_llama), str(prompt), "--budgets=0.2", "--loop-tokens=8", "--threads=1"]
    assert main(["closed-loop", *arguments, f"--report=json:{out}"]) == 0
    assert "20% landmark" in capsys.readouterr().out
    by_command = json.loads(out.read_text("utf-8"))["closed_loop"]
    for one, other in zip(by_pytest, by_command, strict=True):
        assert one == {**other, "subject": one["subject"]}
    many = ",".join(map(str, range(0, 80, 2)))
    assert main(["closed-loop", *arguments, f"--dense-layers={many}"]) == 1
    table = [line for line in capsys.readouterr().out.splitlines() if line.startswith("  20% ")]
    assert max(map(len, table[:2])) <= 100
    assert main(["closed-loop", *arguments, "--dense-layers=9"]) == 1
    assert "layer 9 of dense_layers=[9] is not paged" in capsys.readouterr().out


def test_the_plan_command_proposes_a_gate_that_holds(
    pytester: pytest.Pytester,
    tiny_llama: Path,
    prompt: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    arguments = ["plan", str(tiny_llama), str(prompt), "--threads=1", "--loop-tokens=8"]
    assert main([*arguments, "--max-kl=0.01", "--budgets=0.1,0.5"]) == 0
    printed = capsys.readouterr()
    assert "It was measured with --kvgate-loop-tokens=8." in printed.out
    assert "run 1 of at most 40: 10%, no layer dense" in printed.err
    found = re.search(r"^  @kvgate\((.*)\)$", printed.out, flags=re.MULTILINE)
    assert found is not None
    result = run(pytester, tiny_llama, prompt, found.group(1))
    result.assert_outcomes(passed=1)
    # what the gate measures is what the plan stated
    kl = re.search(r"Proposal: .* KL (\d\.\d{4})", " ".join(printed.out.split()))
    assert kl is not None
    assert f"KL: landmark {kl.group(1)}" in text_of(result)


@pytest.mark.parametrize(
    ("option", "status", "words"),
    [
        ("--selector=best", 2, "names 'best', which is no selector"),
        ("--max-runs=0", 2, "needs a whole number of runs, 1 or more"),
        ("--max-kl=-1", 2, "needs a number above 0"),
    ],
)
def test_a_plan_that_makes_no_sense_is_refused(
    tiny_llama: Path,
    prompt: Path,
    capsys: pytest.CaptureFixture[str],
    option: str,
    status: int,
    words: str,
) -> None:
    arguments = ["plan", str(tiny_llama), str(prompt), "--max-kl=0.1", "--threads=1"]
    try:
        found = main([*arguments, "--budgets=0.2", "--loop-tokens=2", option])
    except SystemExit as error:
        found = int(str(error.code))
    assert found == status
    assert words in capsys.readouterr().err
