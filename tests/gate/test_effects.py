"""Verdicts on the next token, and beside them what coverage says."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from pytest_kvgate.analysis import Profile
from pytest_kvgate.analysis.effects import ClosedLoop, LayerShare, LoopRun, TokenEffects, Variant
from pytest_kvgate.gate import GateResult, decide, gate_from_arguments
from tests.gate.profiles import GRID, profile_of, with_coverage

N_TOKEN = 40
BUDGET = 0.4


def effects(kl: float = 0.0, top1: float = 1.0, nll: float = 0.0) -> TokenEffects:
    """Return effects with these means, spread a little over the tokens."""
    spread = np.where(np.arange(N_TOKEN) % 2, 1.1, 0.9)
    return TokenEffects(
        kl=kl * spread,
        agrees=np.arange(N_TOKEN) < round(top1 * N_TOKEN),
        nll_dense=np.ones(N_TOKEN),
        nll_sparse=1 + nll * spread,
        trace=np.zeros(N_TOKEN, dtype=np.int64),
        position=np.arange(N_TOKEN),
    )


def loop_of(
    noise: TokenEffects | None = None,
    *,
    sparse_tail: int = 0,
    dense: tuple[int, ...] = (),
    **runs: TokenEffects,
) -> ClosedLoop:
    """Return a closed loop at one budget: by selector, its effects; layer 1 loses the most."""
    layers = {0: LayerShare(4.0, 8, 2.0, 8), 1: LayerShare(2.0, 8, 4.0, 8)}
    return ClosedLoop(
        noise=noise or effects(kl=0.001),
        runs={
            Variant(GRID.page_size, BUDGET, name, dense): LoopRun(found, layers)
            for name, found in runs.items()
        },
        undefined={},
        paged_layers=(0, 1),
        sparse_tail=sparse_tail,
        fused=False,
    )


@pytest.fixture
def profile(tmp_path: Path) -> Profile:
    return with_coverage(profile_of(tmp_path, n_layer=2), BUDGET, oracle=0.6, landmark=0.5)


def judged(profile: Profile, loop: ClosedLoop, **arguments: Any) -> GateResult:  # noqa: ANN401
    return decide(
        "t.py::t", "tiny", gate_from_arguments((), {"budget": BUDGET, **arguments}), profile, loop
    )


def test_a_kl_below_what_is_allowed_is_go_with_the_coverage_of_the_same_run(
    profile: Profile,
) -> None:
    result = judged(profile, loop_of(oracle=effects(0.01), landmark=effects(0.04)), max_kl=0.05)
    assert result.verdict == "GO"
    assert result.reason == (
        "landmark moves the next token by a KL of 0.0400 at a budget of 40% (coverage 0.3750 in "
        "the same run), 0.0100 below what is allowed."
    )
    assert result.others == {"oracle": pytest.approx(0.01)}
    assert "the prompt was read densely" in result.notes[-1]


def test_a_sparse_tail_needs_no_word_about_the_prompt(profile: Profile) -> None:
    loop = loop_of(oracle=effects(0.01), landmark=effects(0.04), sparse_tail=64)
    assert not any("read densely" in note for note in judged(profile, loop, max_kl=0.05).notes)


def test_where_the_oracle_would_do_the_selector_is_the_problem(profile: Profile) -> None:
    result = judged(profile, loop_of(oracle=effects(0.01), landmark=effects(0.2)), max_kl=0.05)
    assert result.verdict == "NO-GO"
    assert result.reason.startswith(
        "the selector is the problem: landmark moves the next token by a KL of 0.2000 at a budget "
        "of 40% (coverage 0.3750 in the same run), where 0.05 is allowed, and 0.0100 with the "
        "pages of most mass (oracle). The layers that lose the most of their mass: 1 (0.5000), 0 "
        "(0.2500)."
    )


def test_where_the_oracle_would_not_do_no_selector_is_blamed(profile: Profile) -> None:
    result = judged(profile, loop_of(oracle=effects(0.1), landmark=effects(0.2)), max_kl=0.05)
    assert result.verdict == "NO-GO"
    assert "next tokens change too much" in result.reason
    assert "so no better selector of mass would do at this budget" in result.reason


@pytest.mark.parametrize(
    ("demand", "go", "missed"),
    [
        ({"min_top1": 0.9}, effects(top1=0.95), effects(top1=0.85)),
        ({"max_nll_increase": 0.1}, effects(nll=0.05), effects(nll=0.2)),
        ({"max_kl": 0.1, "min_top1": 0.9}, effects(0.05, 0.95), effects(0.05, 0.8)),
    ],
)
def test_top_1_and_nll_are_judged_likewise(
    profile: Profile, demand: dict[str, float], go: TokenEffects, missed: TokenEffects
) -> None:
    for found, verdict in ((go, "GO"), (missed, "NO-GO")):
        loop = loop_of(oracle=found, quest=found)
        assert judged(profile, loop, selector="quest", **demand).verdict == verdict


@pytest.mark.parametrize(
    ("demand", "words"),
    [
        ({"max_kl": 0.009}, "a KL of 0.009 cannot be judged here"),
        ({"min_top1": 0.96}, "a top-1 agreement of 0.96 cannot be judged here"),
        ({"max_nll_increase": 0.015}, "an NLL increase of 0.015 cannot be judged here"),
    ],
)
def test_a_threshold_within_the_noise_is_invalid(
    profile: Profile, demand: dict[str, float], words: str
) -> None:
    noise = effects(kl=0.01, top1=0.95, nll=-0.02)
    nothing = effects()
    result = judged(profile, loop_of(noise, oracle=nothing, landmark=nothing), **demand)
    assert result.verdict == "INVALID"
    assert result.reason.startswith(words)


def test_an_effect_within_the_noise_is_said_to_be_none(profile: Profile) -> None:
    loop = loop_of(effects(kl=0.01), oracle=effects(0.001), landmark=effects(0.005))
    result = judged(profile, loop, max_kl=0.05)
    assert result.verdict == "GO"
    assert any("lies within the noise of 0.0100" in note for note in result.notes)


def test_coverage_that_is_too_strict_is_named(profile: Profile) -> None:
    loop = loop_of(oracle=effects(0.01), landmark=effects(0.02))
    result = judged(profile, loop, max_kl=0.05, min_coverage=0.95)
    assert result.verdict == "NO-GO"
    assert any("may be too strict for this model" in note for note in result.notes)


def test_coverage_that_is_too_lax_is_named(profile: Profile) -> None:
    loop = loop_of(oracle=effects(0.3), landmark=effects(0.5))
    result = judged(profile, loop, max_kl=0.05, min_coverage=0.4)
    assert result.verdict == "NO-GO"
    assert any("it may be too lax for this model" in note for note in result.notes)


def test_the_interval_over_tokens_decides_where_confidence_is_asked_for(profile: Profile) -> None:
    loop = loop_of(oracle=effects(0.05), landmark=effects(0.05))
    (check,) = judged(profile, loop, max_kl=0.0501, confidence=0.95).checks
    assert check.interval is not None
    assert check.interval.low < 0.05 < check.interval.high
    assert check.interval.n == N_TOKEN
    verdicts = {
        allowed: judged(profile, loop, max_kl=allowed, confidence=0.95)
        for allowed in (0.02, 0.0501, 0.2)
    }
    found = [result.verdict for result in verdicts.values()]
    assert found == ["NO-GO", "INCONCLUSIVE", "GO"]
    assert f"over {N_TOKEN} tokens holds the threshold 0.0501" in verdicts[0.0501].reason
    assert any("over tokens of the captured texts" in note for note in verdicts[0.2].notes)


def test_dense_layers_are_left_out_of_coverage(tmp_path: Path) -> None:
    profile = profile_of(tmp_path, n_layer=2)
    loop = loop_of(oracle=effects(0.01), landmark=effects(0.01), dense=(1,))
    arguments = {"max_kl": 0.05, "min_coverage": 0.1, "dense_layers": [1]}
    result = judged(profile, loop, **arguments)
    assert result.verdict == "GO"
    assert result.n_layer == 1
    of_coverage = [check for check in result.checks if check.demand.measure == "coverage"]
    assert [check.observed for check in of_coverage] == [
        profile.coverage(name, BUDGET, [0]) for name in ("oracle", "landmark")
    ]


@pytest.mark.parametrize(
    ("dense", "words"),
    [
        ([7], "layer 7 of dense_layers=[7] holds no unit that counts"),
        ([0, 1], "dense_layers=[0, 1] keeps every layer resident as a whole"),
    ],
)
def test_dense_layers_that_are_none_or_all_are_invalid(
    profile: Profile, dense: list[int], words: str
) -> None:
    loop = loop_of(dense=tuple(dense), oracle=effects(), landmark=effects())
    result = judged(profile, loop, max_kl=0.05, dense_layers=dense)
    assert result.verdict == "INVALID"
    assert result.reason.startswith(words)


def test_a_run_that_is_not_defined_is_invalid_with_its_reason(profile: Profile) -> None:
    loop = loop_of(oracle=effects())
    loop = ClosedLoop(
        loop.noise,
        loop.runs,
        {Variant(GRID.page_size, BUDGET, "landmark"): "40% of 3 tokens is 1 token"},
        (0, 1),
        0,
        False,
    )
    result = judged(profile, loop, max_kl=0.05)
    assert (result.verdict, result.reason) == (
        "INVALID",
        "the closed loop is not defined: 40% of 3 tokens is 1 token",
    )


def test_an_end_of_text_that_the_loop_ignored_is_a_note(profile: Profile) -> None:
    loop = loop_of(oracle=effects(0.01), landmark=effects(0.01))
    result = judged(profile, replace(loop, eos_ignored_from=25), max_kl=0.05)
    assert result.verdict == "GO"
    assert any(
        note.startswith("end of text ignored in the closed loop from decode step 25 on")
        for note in result.notes
    )


def test_noise_of_the_nll_does_not_cancel(profile: Profile) -> None:
    shifts = np.where(np.arange(N_TOKEN) % 2, 0.3, -0.3)
    noise = replace(effects(), nll_sparse=1 + shifts)
    assert noise.mean("nll_increase") == pytest.approx(0)
    nothing = effects()
    result = judged(
        profile, loop_of(noise, oracle=nothing, landmark=nothing), max_nll_increase=0.05
    )
    assert result.verdict == "INVALID"
    assert "an NLL increase of 0.05 cannot be judged here" in result.reason


def test_a_layer_that_reads_another_layers_cache_may_be_kept_dense(profile: Profile) -> None:
    dense = (1, 2)  # layer 2 has no units of its own, but the loop pages it
    loop = replace(
        loop_of(oracle=effects(0.01), landmark=effects(0.01), dense=dense), paged_layers=(0, 1, 2)
    )
    assert judged(profile, loop, max_kl=0.05, dense_layers=[1, 2]).verdict == "GO"
    loop = replace(
        loop_of(oracle=effects(0.01), landmark=effects(0.01), dense=(0, 1)), paged_layers=(0, 1, 2)
    )
    assert judged(profile, loop, max_kl=0.05, dense_layers=[0, 1]).verdict == "GO"
    result = judged(profile, loop, max_kl=0.05, dense_layers=[0, 1, 2])
    assert result.reason.startswith("dense_layers=[0, 1, 2] keeps every layer resident")


@pytest.mark.parametrize(("n_token", "low"), [(10, 0.7225), (64, 0.9434)])
def test_tokens_that_all_agree_are_not_taken_for_certainty(n_token: int, low: float) -> None:
    every = effects()
    few = replace(
        every,
        **{
            name: np.resize(getattr(every, name), n_token)
            for name in ("kl", "agrees", "nll_dense", "nll_sparse", "trace")
        },
        position=np.arange(n_token),
    )
    found = few.interval("top1")
    assert found is not None
    # Wilson (1927): n / (n + z²)
    assert found.low == pytest.approx(low, abs=1e-3)
    assert found.high == 1.0


def test_a_verdict_on_few_tokens_says_so(profile: Profile) -> None:
    every = effects()
    loop = loop_of(every, oracle=every, landmark=every)
    assert not any("tokens only" in note for note in judged(profile, loop, max_kl=0.1).notes)
    cut = replace(
        every,
        kl=every.kl[:8],
        agrees=every.agrees[:8],
        nll_dense=every.nll_dense[:8],
        nll_sparse=every.nll_sparse[:8],
        trace=every.trace[:8],
        position=every.position[:8],
    )
    few = loop_of(cut, oracle=cut, landmark=cut)
    notes = judged(profile, few, max_kl=0.1).notes
    assert "the closed loop compared 8 predicted tokens only" in notes


def test_agreement_of_few_tokens_is_inconclusive(profile: Profile) -> None:
    loop = loop_of(oracle=effects(), landmark=effects())
    result = judged(profile, loop, min_top1=0.99, confidence=0.95)
    assert result.verdict == "INCONCLUSIVE"
    assert "holds the threshold 0.99" in result.reason
