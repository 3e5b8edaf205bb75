"""Flash attention as a user meets it: what stands beside a verdict, and what proves it."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from pytest_kvgate.cli import main
from pytest_kvgate.trace import load_trace

GATE = """
    from pytest_kvgate import kvgate

    @kvgate(budget=0.2, min_coverage=0.01)
    def test_paging():
        pass
"""


def run(pytester: pytest.Pytester, model: Path, prompt: Path, *options: str) -> pytest.RunResult:
    pytester.makepyfile(GATE)
    return pytester.runpytest(
        f"--kvgate-model={model}",
        f"--kvgate-prompt={prompt}",
        "--kvgate-steps=0:9:4",
        "--kvgate-threads=1",
        "--kvgate-selectors=oracle,landmark",
        "--kvgate-report=json:out.json",
        *options,
    )


def report(pytester: pytest.Pytester) -> dict[str, list[dict[str, object]]]:
    document: dict[str, list[dict[str, object]]] = json.loads(
        (pytester.path / "out.json").read_text(encoding="utf-8")
    )
    return document


def test_a_verdict_on_flash_attention_says_that_it_is_smoke_tested_only(
    pytester: pytest.Pytester, tiny_llama: Path, prompt: Path
) -> None:
    result = run(pytester, tiny_llama, prompt, "--kvgate-flash-attn=on")
    result.assert_outcomes(passed=1)
    output = result.stdout.str()
    assert "SMOKE-TESTED ONLY: attention output to" in output
    assert "smoke-tested only: flash attention leaves no softmax" in output
    document = report(pytester)
    (trace,) = document["traces"]
    assert trace["smoke_tested"] is True
    notes = document["gates"][0]["notes"]
    assert isinstance(notes, list)
    assert any("--kvgate-verify=reference proves it" in note for note in notes)


def test_a_proof_takes_the_mark_away_and_shows_every_layer(
    pytester: pytest.Pytester, tiny_llama: Path, prompt: Path
) -> None:
    result = run(
        pytester,
        tiny_llama,
        prompt,
        "--kvgate-flash-attn=on",
        "--kvgate-cache-type-k=q8_0",
        "--kvgate-cache-type-v=q8_0",
        "--kvgate-verify=reference",
    )
    result.assert_outcomes(passed=1)
    output = result.stdout.str()
    assert "smoke-tested" not in output.lower()
    assert "softmax without flash attention verified to" in output
    result.stdout.re_match_lines(
        [r".*lesson: layer +error of softmax without flash attention +tolerated", r" +0 .* ok"]
    )
    document = report(pytester)
    (trace,) = document["traces"]
    assert trace["smoke_tested"] is False
    verification = trace["verification"]
    assert isinstance(verification, dict)
    assert len(verification["layer_errors"]) == 2
    assert max(verification["layer_errors"]) < 1e-5
    assert document["gates"][0]["notes"] == []


def test_a_saved_fused_trace_keeps_its_mark(
    pytester: pytest.Pytester, tiny_llama: Path, prompt: Path
) -> None:
    run(pytester, tiny_llama, prompt, "--kvgate-flash-attn=on", "--kvgate-save=traces")
    result = pytester.runpytest(
        "--kvgate-trace=traces/tiny-llama-lesson", "--kvgate-selectors=oracle,landmark"
    )
    result.assert_outcomes(passed=1)
    result.stdout.fnmatch_lines(["*smoke-tested only*"])


def test_a_trace_cannot_buy_the_wide_tolerance_of_flash_attention(
    pytester: pytest.Pytester, tiny_llama: Path, prompt: Path
) -> None:
    run(pytester, tiny_llama, prompt, "--kvgate-save=traces")
    path = pytester.path / "traces/tiny-llama-lesson/trace.json"
    document = json.loads(path.read_text(encoding="utf-8"))
    document["verification"] = {
        "max_abs_error": 0.2,
        "tolerance": 0.25,
        "reference": "attention output",
        "status": "passed",
    }
    path.write_text(json.dumps(document), encoding="utf-8")
    result = pytester.runpytest(f"--kvgate-trace={path.parent}")
    result.assert_outcomes(failed=1)
    result.stdout.fnmatch_lines(["*differ by up to 0.2, where 0.001 is tolerated.*"])


def test_a_fused_trace_does_not_lose_its_mark_by_another_name(
    pytester: pytest.Pytester, tiny_llama: Path, prompt: Path
) -> None:
    run(pytester, tiny_llama, prompt, "--kvgate-flash-attn=on", "--kvgate-save=traces")
    path = pytester.path / "traces/tiny-llama-lesson/trace.json"
    document = json.loads(path.read_text(encoding="utf-8"))
    document["verification"] = {
        "max_abs_error": 1e-7,
        "tolerance": 1e-3,
        "reference": "softmax",
        "status": "passed",
    }
    path.write_text(json.dumps(document), encoding="utf-8")
    result = pytester.runpytest(f"--kvgate-trace={path.parent}")
    result.assert_outcomes(passed=1)
    result.stdout.fnmatch_lines(["*smoke-tested only*"])


@pytest.mark.parametrize(
    ("option", "message"),
    [
        ("--kvgate-cache-type-v=q8_0", "a q8_0 V cache needs flash attention (on)"),
        ("--kvgate-cache-type-v=int8", "is no V cache type; accepted: f32, f16"),
        ("--kvgate-flash-attn=yes", "needs on or off"),
        ("--kvgate-verify=twice", "is no verification; accepted: capture, reference"),
    ],
)
def test_wrong_settings_are_usage_errors(
    pytester: pytest.Pytester, tiny_llama: Path, prompt: Path, option: str, message: str
) -> None:
    result = run(pytester, tiny_llama, prompt, option)
    assert result.ret == pytest.ExitCode.USAGE_ERROR
    assert message in result.stderr.str()


def test_the_verify_command_proves_a_capture_layer_by_layer(
    tiny_llama: Path, prompt: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    arguments = ["verify", str(tiny_llama), str(prompt), "--steps", "0:9:4", "--threads", "1"]
    assert main(arguments) == 0
    lines = capsys.readouterr().out.splitlines()
    assert " ".join(lines[0].split()) == (
        "lesson: layer error of softmax without flash attention tolerated"
    )
    assert [line.split()[0] for line in lines[2:4]] == ["0", "1"]
    assert [line.split()[-1] for line in lines[2:4]] == ["ok", "ok"]
    assert lines[-1].startswith(
        "verification passed: the recomputed softmax without flash attention and the model's own"
    )
    assert main([*arguments[:3], str(tmp_path / "kept"), *arguments[3:]]) == 0
    trace = load_trace(capsys.readouterr().out.splitlines()[0])
    assert trace.capture["flash_attention"] is True
    assert trace.verification is not None
    assert trace.verification.reference == "softmax without flash attention"


def test_the_capture_command_says_what_was_not_proved(
    tiny_llama: Path, prompt: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    arguments = ["capture", str(tiny_llama), str(prompt), str(tmp_path), "--steps", "0:2"]
    assert main([*arguments, "--threads", "1", "--flash-attn", "on"]) == 0
    assert capsys.readouterr().out.splitlines()[-1].startswith("smoke-tested only: ")
    assert main([*arguments, "--threads", "1"]) == 0
    assert "smoke" not in capsys.readouterr().out


def test_the_verify_command_also_knows_plain_attention(
    tiny_llama: Path, prompt: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    arguments = ["verify", str(tiny_llama), str(prompt), "--steps", "0:2", "--threads", "1"]
    assert main([*arguments, "--flash-attn", "off"]) == 0
    assert "the recomputed softmax and the model's own" in capsys.readouterr().out


def test_commands_refuse_a_quantized_v_cache_without_flash_attention(
    tiny_llama: Path, prompt: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    arguments = ["capture", str(tiny_llama), str(prompt), str(tmp_path / "traces")]
    assert main([*arguments, "--cache-type-v", "q8_0"]) == 1
    assert "a q8_0 V cache needs flash attention (on)" in capsys.readouterr().err
    assert not (tmp_path / "traces").exists()
