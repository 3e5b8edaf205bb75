"""The verdict of a gate on a coverage, with its reason."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from pytest_kvgate.analysis import PageGrid, Plan, pool, profile_trace
from pytest_kvgate.gate import Check, Demand, Gate
from pytest_kvgate.gate import unanswered as unanswered_gate
from pytest_kvgate.trace import load_trace
from tests.gate.profiles import (
    BUDGETS,
    GRID,
    LISTED,
    MASSES,
    judged,
    profile_of,
    with_coverage,
)
from tests.traces import FAILED, PASSED, layer_of_logits, layer_of_masses, make_trace


class TestGo:
    def test_both_selectors_reach_the_threshold(self, tmp_path: Path) -> None:
        result = judged(profile_of(tmp_path), budget=0.4, min_coverage=0.8)

        assert result.verdict == "GO"
        assert [check.selector for check in result.checks] == ["oracle", "landmark"]
        assert all(check.passed for check in result.checks)
        assert [check.observed for check in result.checks] == pytest.approx([5 / 6, 5 / 6])
        assert result.others == {"token-oracle": pytest.approx(0.9)}
        assert (result.gate_id, result.subject) == ("test_gate.py::test_it", "tiny")
        assert result.page_size == 2
        assert result.notes == ()

    def test_the_reason_names_the_tightest_selector_and_its_margin(self, tmp_path: Path) -> None:
        profile = with_coverage(profile_of(tmp_path), 0.4, oracle=0.9775, landmark=0.96)

        result = judged(profile, budget=0.4, min_coverage=0.95)

        assert result.reason == (
            "landmark holds 0.9600 of the eligible mass at a budget of 40%, "
            "0.0100 above the threshold."
        )
        assert result.deciding.selector == "landmark"

    @pytest.mark.parametrize("threshold", [0.95, 0.1, 0.7, 1.0])
    def test_exactly_the_threshold_passes(self, tmp_path: Path, threshold: float) -> None:
        profile = with_coverage(profile_of(tmp_path), 0.4, oracle=threshold, landmark=threshold)

        result = judged(profile, budget=0.4, min_coverage=threshold)

        assert result.verdict == "GO"
        assert [check.margin for check in result.checks] == [0, 0]

    def test_a_hair_below_the_threshold_does_not_pass(self, tmp_path: Path) -> None:
        below = math.nextafter(0.95, 0)
        profile = with_coverage(profile_of(tmp_path), 0.4, oracle=0.99, landmark=below)

        assert judged(profile, budget=0.4, min_coverage=0.95).verdict == "NO-GO"

    def test_all_of_the_mass_passes_where_every_page_is_bought(self, tmp_path: Path) -> None:
        assert judged(profile_of(tmp_path), budget=0.6, min_coverage=1).verdict == "GO"

    def test_only_the_named_selector_must_reach_it(self, tmp_path: Path) -> None:
        result = judged(profile_of(tmp_path), budget=0.2, min_coverage=0.45, selector="oracle")

        assert result.verdict == "GO"
        assert [check.selector for check in result.checks] == ["oracle"]
        assert set(result.others) == {"landmark", "token-oracle"}


class TestNoGo:
    def test_a_ceiling_below_the_threshold_names_the_smallest_sufficient_budget(
        self, tmp_path: Path
    ) -> None:
        profile = with_coverage(profile_of(tmp_path), 0.2, oracle=0.5, landmark=0.3125)

        result = judged(profile, budget=0.2, min_coverage=0.8)

        assert result.verdict == "NO-GO"
        assert result.reason == (
            "the ceiling is below the threshold: even a perfect selector of 2-token pages holds "
            "0.5000 of the eligible mass at a budget of 20%, so no selector can pass. "
            "The smallest budget at which the ceiling reaches 0.8 is 40%."
        )
        assert result.deciding.selector == "oracle"
        assert result.deciding.margin == pytest.approx(-0.3)

    def test_the_named_budget_is_enough_and_a_tenth_of_a_percent_less_is_not(
        self, tmp_path: Path
    ) -> None:
        result = judged(
            profile_of(tmp_path, budgets=(0.2, 0.399, 0.4)), budget=0.2, min_coverage=0.8
        )
        profile = profile_of(tmp_path, budgets=(0.399, 0.4), workload="again")

        assert "reaches 0.8 is 40%." in result.reason
        assert judged(profile, budget=0.4, min_coverage=0.8).verdict == "GO"
        assert judged(profile, budget=0.399, min_coverage=0.8).verdict == "NO-GO"

    def test_a_named_selector_under_a_low_ceiling_is_not_to_blame(self, tmp_path: Path) -> None:
        result = judged(profile_of(tmp_path), budget=0.2, min_coverage=0.8, selector="landmark")

        assert result.verdict == "NO-GO"
        assert [check.selector for check in result.checks] == ["landmark"]
        assert result.reason.startswith("the ceiling is below the threshold")
        assert "The smallest budget at which the ceiling reaches 0.8 is 40%." in result.reason
        assert result.others["oracle"] == pytest.approx(0.5)

    def test_a_selector_short_of_a_good_ceiling_is_the_problem(self, tmp_path: Path) -> None:
        profile = with_coverage(
            profile_of(tmp_path), 0.2, oracle=0.5, landmark=0.3125, token_oracle=0.65
        )

        result = judged(profile, budget=0.2, min_coverage=0.45)

        assert result.verdict == "NO-GO"
        assert [check.passed for check in result.checks] == [True, False]
        assert result.deciding.selector == "landmark"
        assert result.reason == (
            "the selector is the problem: landmark holds 0.3125 of the eligible mass at a budget "
            "of 20%; the others: oracle 0.5000, token-oracle 0.6500. "
            "The smallest budget at which landmark reaches 0.45 is 40%."
        )

    def test_no_budget_is_named_where_none_is_enough(self, tmp_path: Path) -> None:
        profile = profile_of(tmp_path)
        numbers = replace(profile.numbers, covered=np.minimum(profile.numbers.covered, 0.75))
        profile = replace(profile, numbers=numbers)

        result = judged(profile, budget=0.2, min_coverage=0.8)

        assert result.reason.endswith("No budget lets the ceiling reach 0.8.")

    def test_the_worst_layers_come_worst_first(self, tmp_path: Path) -> None:
        profile = profile_of(tmp_path, n_layer=5)
        landmark, budget = profile.selectors.index("landmark"), profile.budgets.index(0.2)
        profile = with_coverage(profile, 0.2, landmark=0.22)
        covered = profile.numbers.units.numbers["coverage"]
        covered[landmark, budget] = [0.4, 0.1, 0.3, 0.1, 0.2]

        result = judged(profile, budget=0.2, min_coverage=0.45)

        assert result.deciding.selector == "landmark"
        assert result.worst_layers == ((1, 0.1), (3, 0.1), (4, 0.2))


class TestPrintedNumbers:
    def test_a_ceiling_just_below_is_not_printed_as_the_threshold(self, tmp_path: Path) -> None:
        profile = with_coverage(profile_of(tmp_path), 0.4, oracle=0.94999, landmark=0.9)

        reason = judged(profile, budget=0.4, min_coverage=0.95).reason

        assert "holds 0.9499 of" in reason

    def test_a_selector_just_below_is_not_printed_as_the_threshold(self, tmp_path: Path) -> None:
        profile = with_coverage(
            profile_of(tmp_path), 0.4, oracle=0.99996, landmark=0.94999, token_oracle=0.99999
        )

        reason = judged(profile, budget=0.4, min_coverage=0.95).reason

        assert "landmark holds 0.9499 of" in reason
        assert "oracle 0.9999, token-oracle 0.9999." in reason

    def test_a_margin_is_not_printed_larger_than_it_is(self, tmp_path: Path) -> None:
        profile = with_coverage(profile_of(tmp_path), 0.4, oracle=0.99, landmark=0.95996)

        reason = judged(profile, budget=0.4, min_coverage=0.95).reason

        assert "landmark holds 0.9599 of" in reason
        assert "0.0099 above the threshold" in reason

    def test_a_number_of_four_digits_is_printed_as_it_is(self, tmp_path: Path) -> None:
        profile = with_coverage(profile_of(tmp_path), 0.4, oracle=0.57, landmark=0.29)

        reason = judged(profile, budget=0.4, min_coverage=0.5).reason

        assert "landmark holds 0.2900 of" in reason
        assert "oracle 0.5700," in reason


class TestInvalid:
    def test_a_failed_verification(self, tmp_path: Path) -> None:
        profile = profile_of(tmp_path, verification=FAILED)

        result = judged(profile, budget=0.4, min_coverage=0.1)

        assert result.verdict == "INVALID"
        assert result.reason.startswith(
            "the capture of tiny · story failed its verification: recomputed softmax and the "
            "model's own differ by up to 0.25, where 0.001 is tolerated."
        )
        assert [check.observed for check in result.checks] == [None, None]
        assert not any(check.passed for check in result.checks)
        assert result.others == {}
        assert result.worst_layers == ()

    def test_a_verification_that_is_not_a_number(self, tmp_path: Path) -> None:
        profile = profile_of(tmp_path, verification={**FAILED, "max_abs_error": None})

        result = judged(profile, budget=0.4, min_coverage=0.1)

        assert result.verdict == "INVALID"
        assert "differ by up to nan" in result.reason

    def test_one_failed_trace_of_a_pool(self, tmp_path: Path) -> None:
        good = profile_of(tmp_path, workload="good")
        bad = profile_of(tmp_path, workload="bad", verification=FAILED)

        result = judged(pool([good, bad]), budget=0.4, min_coverage=0.1)

        assert result.verdict == "INVALID"
        assert "tiny · bad" in result.reason

    def test_a_budget_below_one_page(self, tmp_path: Path) -> None:
        directory = make_trace(
            tmp_path / "trace", [layer_of_logits(np.zeros(1024))], verification=PASSED
        )
        profile = profile_trace(load_trace(directory), PageGrid(), Plan((0.005,)))

        result = judged(profile, budget=0.005, min_coverage=0.1)

        assert result.verdict == "INVALID"
        assert result.reason == (
            "0.5% of 1024 tokens is 5 tokens, less than one 32-token page (tiny · made). "
            "Raise the budget (from 3.2% on it buys one), lengthen the prompt, or use smaller "
            "pages."
        )
        assert [check.observed for check in result.checks] == [None, None]
        assert result.page_size == 32

    def test_the_shortest_trace_of_a_pool_decides_whether_a_page_is_bought(
        self, tmp_path: Path
    ) -> None:
        profiles = []
        for workload, n_token in (("long", 1600), ("short", 1024)):
            directory = make_trace(
                tmp_path / workload,
                [layer_of_logits(np.zeros(n_token))],
                workload=workload,
                verification=PASSED,
            )
            profiles.append(profile_trace(load_trace(directory), PageGrid(), Plan((0.02,))))

        assert judged(profiles[0], budget=0.02, min_coverage=0.01).verdict == "GO"
        result = judged(pool(profiles), budget=0.02, min_coverage=0.01)

        assert result.verdict == "INVALID"
        assert result.reason.startswith(
            "2% of 1024 tokens is 20 tokens, less than one 32-token page (tiny · short)."
        )

    def test_no_mass_on_any_eligible_page(self, tmp_path: Path) -> None:
        masses = [1.0] * 2 + [1e-20] * 6 + [1.0] * 2
        directory = make_trace(tmp_path / "trace", [layer_of_masses(masses)], verification=PASSED)
        profile = profile_trace(load_trace(directory), GRID, Plan((0.4,)))

        result = judged(profile, budget=0.4, min_coverage=0.1)

        assert result.verdict == "INVALID"
        assert result.reason.startswith("no sampled step has attention mass on an eligible page")


class TestNotes:
    def test_an_unverified_trace_is_noted_beside_any_verdict(self, tmp_path: Path) -> None:
        profile = profile_of(tmp_path, verification=None)
        note = "unverified trace: never compared with the model's own softmax"

        go = judged(profile, budget=0.4, min_coverage=0.8)
        no_go = judged(profile, budget=0.2, min_coverage=0.8)
        invalid = judged(profile, budget=0.1, min_coverage=0.8)

        assert [result.verdict for result in (go, no_go, invalid)] == ["GO", "NO-GO", "INVALID"]
        assert [result.notes for result in (go, no_go, invalid)] == [(note,)] * 3

    def test_one_unverified_trace_of_a_pool_is_noted_once(self, tmp_path: Path) -> None:
        good = profile_of(tmp_path, workload="good")
        unverified = [
            profile_of(tmp_path, workload=workload, verification=None) for workload in ("a", "b")
        ]

        result = judged(pool([good, *unverified]), budget=0.4, min_coverage=0.8)

        assert len(result.notes) == 1

    def test_an_ignored_end_of_text_is_noted_beside_any_verdict(self, tmp_path: Path) -> None:
        directory = make_trace(
            tmp_path / "trace",
            [layer_of_masses(MASSES, n_step=3)],
            n_visible=[8, 9, 10],
            workload="story",
            verification=PASSED,
            decode_indices=[0, 8, 16],
        )
        path = directory / "trace.json"
        document = json.loads(path.read_text("utf-8"))
        document["workload"]["eos_ignored_from"] = 5
        path.write_text(json.dumps(document), encoding="utf-8")
        ended = profile_trace(load_trace(directory), GRID, Plan(BUDGETS, LISTED))
        note = (
            "end of text ignored in tiny · story from decode step 5 on, so 2 of 3 sampled steps "
            "are of text that the model would not have written"
        )

        for threshold, verdict in ((0.1, "GO"), (1, "NO-GO")):
            result = judged(ended, budget=0.4, min_coverage=threshold)
            assert (result.verdict, result.notes) == (verdict, (note,))
        whole = profile_of(tmp_path, workload="whole")
        pooled = judged(pool([whole, ended]), budget=0.4, min_coverage=0.1)
        assert pooled.notes == (note,)


class TestUnanswered:
    def test_nothing_is_observed(self) -> None:
        gate = Gate(0.02, 0.95)
        demand = Demand("coverage", 0.95)

        result = unanswered_gate("id", "tiny", gate, "NOT EVALUATED", "no model was given")

        assert (result.verdict, result.reason) == ("NOT EVALUATED", "no model was given")
        assert result.checks == (Check(demand, "oracle", None), Check(demand, "landmark", None))
        assert result.deciding == Check(demand, "oracle", None)
        assert result.deciding.margin is None
        assert result.page_size is None
