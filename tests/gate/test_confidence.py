"""Gates that ask for confidence: an interval decides, or says what more data would."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Literal

import numpy as np
import pytest

from pytest_kvgate.analysis import Interval, PageGrid, Plan, Profile, pool, profile_trace
from pytest_kvgate.gate import Check, Demand, Gate, GateResult
from pytest_kvgate.gate.model import DemandedMeasure, Verdict
from pytest_kvgate.trace import load_trace
from tests.gate.profiles import judged
from tests.traces import PASSED, make_trace, random_layer

State = Literal["ok", "missed", "open"]


def check(
    measure: DemandedMeasure,
    threshold: float,
    observed: float | None,
    interval: tuple[float, float] | None,
    *,
    required: float | None = None,
    selector: str = "landmark",
) -> Check:
    """Make a check with an interval; ``required`` is what it is compared with, if not threshold."""
    return Check(
        Demand(measure, threshold),
        selector,
        observed,
        confident=True,
        interval=None if interval is None else Interval(*interval, 0.95, 20, "steps"),
        interval_required=threshold if required is None else required,
    )


@pytest.fixture(scope="module")
def profile(tmp_path_factory: pytest.TempPathFactory) -> Profile:
    """Six layers at 12 steps; at 25% oracle holds 0.2816 and landmark 0.2596."""
    layers = [random_layer(index, n_token=640, n_step=12, index=index) for index in range(6)]
    directory = make_trace(tmp_path_factory.mktemp("trace") / "t", layers, verification=PASSED)
    plan = Plan((0.25, 0.5), ("oracle", "landmark", "token-oracle"))
    return profile_trace(load_trace(directory), PageGrid(), plan)


class TestState:
    @pytest.mark.parametrize(
        ("observed", "interval", "state"),
        [
            (0.93, (0.91, 0.95), "ok"),
            (0.93, (0.90, 0.95), "ok"),  # the threshold itself is enough
            (0.93, (0.89, 0.95), "open"),
            (0.88, (0.86, 0.91), "open"),
            (0.88, (0.86, 0.90), "open"),
            (0.88, (0.86, 0.899), "missed"),
            (0.88, None, "open"),
            (0.99, None, "open"),
        ],
    )
    def test_what_must_be_at_least(
        self, observed: float, interval: tuple[float, float] | None, state: State
    ) -> None:
        assert check("coverage", 0.9, observed, interval).state == state
        assert check("hit_rate", 0.9, observed, interval).state == state

    @pytest.mark.parametrize(
        ("observed", "interval", "state"),
        [
            (0.08, (0.07, 0.09), "ok"),
            (0.08, (0.07, 0.10), "ok"),
            (0.08, (0.07, 0.11), "open"),
            (0.12, (0.10, 0.13), "open"),
            (0.12, (0.101, 0.13), "missed"),
            (0.12, None, "open"),
        ],
    )
    def test_what_must_be_at_most(
        self, observed: float, interval: tuple[float, float] | None, state: State
    ) -> None:
        assert check("output_error", 0.1, observed, interval).state == state

    @pytest.mark.parametrize(
        ("observed", "interval", "state"),
        [
            # the coverage at the budget allowed decides: 0.9 is demanded, with 5% allowed
            (0.03, (0.91, 0.95), "ok"),
            (0.048, (0.89, 0.95), "open"),
            (0.052, (0.85, 0.91), "open"),
            (0.08, (0.80, 0.85), "missed"),
            (None, (0.80, 0.85), "missed"),
            (None, (0.80, 0.95), "open"),
            (0.03, None, "open"),
        ],
    )
    def test_a_required_budget(
        self, observed: float | None, interval: tuple[float, float] | None, state: State
    ) -> None:
        assert check("required_budget", 0.05, observed, interval, required=0.9).state == state

    @pytest.mark.parametrize(
        ("observed", "interval"),
        [(0.905, (0.85, 0.899)), (0.895, (0.901, 0.95))],
        ids=["number above", "number below"],
    )
    def test_a_number_and_its_interval_on_different_sides_decide_nothing(
        self, observed: float, interval: tuple[float, float]
    ) -> None:
        """The interval of the worst of many layers lies below the worst layer, as it may."""
        assert check("coverage", 0.9, observed, interval).state == "open"

    def test_without_confidence_the_number_decides(self) -> None:
        demand = Demand("output_error", 0.1)

        assert Check(demand, "landmark", 0.1).state == "ok"
        assert Check(demand, "landmark", 0.1001).state == "missed"
        assert Check(demand, "landmark", None).state == "missed"


def result_of(*checks: Check, verdict: Verdict = "NO-GO") -> GateResult:
    return GateResult("id", "tiny", Gate(0.02, 0.9, confidence=0.95), 32, checks, verdict, "", {})


class TestDecidingCheck:
    tight = check("coverage", 0.9, 0.91, (0.905, 0.92))
    easy = check("coverage", 0.9, 0.99, (0.98, 1.0), selector="oracle")
    open = check("coverage", 0.9, 0.91, (0.88, 0.94))
    open_too = check("hit_rate", 0.9, 0.88, (0.85, 0.94))
    missed = check("output_error", 0.1, 0.5, (0.4, 0.6))

    def test_what_missed_comes_before_what_is_open(self) -> None:
        assert result_of(self.easy, self.open, self.tight, self.missed).deciding is self.missed

    def test_what_is_open_comes_before_what_is_tight(self) -> None:
        assert result_of(self.tight, self.easy, self.open).deciding is self.open

    def test_the_first_of_several_decides(self) -> None:
        assert result_of(self.open, self.open_too).deciding is self.open
        assert result_of(self.open_too, self.open).deciding is self.open_too

    def test_the_tightest_decides_where_all_are_met(self) -> None:
        assert result_of(self.easy, self.tight).deciding is self.tight


class TestVerdict:
    def test_a_clear_go(self, profile: Profile) -> None:
        result = judged(profile, budget=0.25, min_coverage=0.2, confidence=0.95)

        assert result.verdict == "GO"
        for found in result.checks:
            assert found.interval is not None
            assert 0.2 <= found.interval.low <= (found.observed or 0) <= found.interval.high
        assert result.reason.startswith("landmark holds 0.2596 of the eligible mass")
        assert result.notes == (
            "the interval is over steps of the captured texts; they resemble each other, so it "
            "says less of other texts than several prompts would",
        )

    def test_a_clear_no_go(self, profile: Profile) -> None:
        result = judged(profile, budget=0.25, min_coverage=0.5, confidence=0.95)

        assert result.verdict == "NO-GO"
        assert [found.state for found in result.checks] == ["missed", "missed"]
        assert result.reason.startswith("the ceiling is below the threshold: even a perfect")

    def test_too_few_data_say_how_many_would_settle_it(self, profile: Profile) -> None:
        result = judged(profile, budget=0.25, min_coverage=0.255, confidence=0.95)

        assert result.verdict == "INCONCLUSIVE"
        assert [found.state for found in result.checks] == ["ok", "open"]
        interval = result.deciding.interval
        assert interval is not None
        found = re.fullmatch(
            r"landmark holds 0\.2596 of the eligible mass at a budget of 25%, but the 95% interval "
            r"\[(0\.25\d\d), (0\.27\d\d)\] over 12 steps holds the threshold 0\.255\. "
            r"If the number stays where it is, about (\d+) steps would settle it\. "
            r"More prompts tell more than more steps of one\.",
            result.reason,
        )
        assert found is not None, result.reason
        assert float(found[1]) == pytest.approx(interval.low, abs=5.1e-5)
        # an interval narrows with the square root of the number of steps
        observed = result.deciding.observed
        assert observed is not None
        half = max(interval.high - observed, observed - interval.low)
        assert half * np.sqrt(12 / int(found[3])) <= observed - 0.255
        unit = 10 ** (len(found[3]) - 2)  # more than two digits would say more than is known
        assert int(found[3]) % unit == 0
        assert half * np.sqrt(12 / (int(found[3]) - unit)) > observed - 0.255

    def test_what_lies_on_the_threshold_is_settled_by_nothing(self, profile: Profile) -> None:
        exactly = profile.coverage("landmark", 0.25)
        gate = {"budget": 0.25, "selector": "landmark", "confidence": 0.95}

        result = judged(profile, min_coverage=exactly, **gate)

        assert result.verdict == "INCONCLUSIVE"
        assert "It lies on the threshold, which no amount of data settles. More" in result.reason

    def test_without_confidence_the_same_numbers_decide(self, profile: Profile) -> None:
        assert judged(profile, budget=0.25, min_coverage=0.255).verdict == "GO"
        assert judged(profile, budget=0.25, min_coverage=0.265).verdict == "NO-GO"

    def test_less_confidence_needs_less(self, profile: Profile) -> None:
        verdicts = [
            judged(profile, budget=0.25, min_coverage=0.255, confidence=confidence).verdict
            for confidence in (0.5, 0.99)
        ]

        assert verdicts == ["GO", "INCONCLUSIVE"]

    def test_a_required_budget_is_decided_by_the_coverage_at_the_budget_allowed(
        self, profile: Profile
    ) -> None:
        gate = {"coverage": 0.27, "selector": "landmark", "confidence": 0.95}

        wide = judged(profile, max_budget=0.5, **gate)
        open_ = judged(profile, max_budget=0.25, **gate)

        assert wide.verdict == "GO"
        assert wide.deciding.interval == profile.interval("coverage", "landmark", 0.5)
        assert open_.verdict == "INCONCLUSIVE"
        assert re.match(
            r"landmark needs a budget of 25\.\d% for a coverage of 0\.27, but the 95% interval of "
            r"its coverage at 25% \[0\.25\d\d, 0\.27\d\d\] over 12 steps holds the threshold 0\.27",
            open_.reason,
        )

    def test_a_worst_layer_may_lie_outside_its_interval(self, tmp_path: Path) -> None:
        """Drawn again, another layer is the worst one: the interval lies lower."""
        layers = [random_layer(index, n_token=640, n_step=12, index=index) for index in range(24)]
        trace = make_trace(tmp_path / "t", layers, verification=PASSED)
        plan = Plan((0.25,), ("oracle", "landmark"))
        profile = profile_trace(load_trace(trace), PageGrid(), plan)
        gate = {"scope": "worst-layer", "selector": "landmark", "confidence": 0.5, "budget": 0.25}
        worst = profile.measure("coverage", "landmark", 0.25, "worst-layer")
        found = profile.interval("coverage", "landmark", 0.25, "worst-layer", None, 0.5)
        assert found is not None
        assert found.high < worst

        result = judged(profile, min_coverage=(found.high + worst) / 2, **gate)

        assert result.verdict == "INCONCLUSIVE"
        assert "over 12 steps lies on the other side of the threshold 0.25" in result.reason

    def test_one_step_gives_no_interval(self, tmp_path: Path) -> None:
        trace = make_trace(tmp_path / "t", [random_layer(n_token=640)], [640], verification=PASSED)
        profile = profile_trace(load_trace(trace), PageGrid(), Plan((0.25,)))

        result = judged(profile, budget=0.25, min_coverage=0.2, confidence=0.95)

        assert result.verdict == "INCONCLUSIVE"
        assert result.reason.endswith(
            "but one sampled step gives no interval. Sample more steps (--kvgate-steps) or give "
            "more prompts."
        )
        assert result.notes == ()

    def test_five_prompts_are_drawn_whole(self, tmp_path: Path) -> None:
        profiles = []
        for number in range(5):
            layer = random_layer(number, n_token=640, n_step=2)
            name = f"prompt-{number}"
            trace = make_trace(tmp_path / name, [layer], workload=name, verification=PASSED)
            profiles.append(profile_trace(load_trace(trace), PageGrid(), Plan((0.25,))))

        pooled = pool(profiles)
        interval = pooled.interval("coverage", "landmark", 0.25)
        assert interval is not None
        threshold = round(interval.low * 0.7 + pooled.coverage("landmark", 0.25) * 0.3, 6)

        result = judged(pooled, budget=0.25, min_coverage=threshold, confidence=0.95)

        assert result.verdict == "INCONCLUSIVE"
        assert f" over 5 traces holds the threshold {threshold:g}. " in result.reason
        assert result.reason.endswith(" traces would settle it.")
        assert result.notes == ("the interval rests on 5 traces only",)
