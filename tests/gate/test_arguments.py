"""Gates: how they are written, and what they then ask for."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import replace
from decimal import Decimal
from fractions import Fraction

import numpy as np
import pytest

from pytest_kvgate.analysis import SELECTORS
from pytest_kvgate.analysis.effects import Variant
from pytest_kvgate.gate import Demand, Gate, GateError, gate_from_arguments
from pytest_kvgate.gate.model import DemandedMeasure


def refused(*arguments: object, **keywords: object) -> str:
    with pytest.raises(GateError) as caught:
        gate_from_arguments(arguments, keywords)
    return str(caught.value)


class TestGateFromArguments:
    def test_budget_and_threshold_are_enough(self) -> None:
        gate = gate_from_arguments((), {"budget": 0.02, "min_coverage": 0.95})

        assert gate == Gate(budget=0.02, min_coverage=0.95, selector=None, page_size=None)

    def test_everything_can_be_said(self) -> None:
        keywords = {"budget": 1, "min_coverage": 1, "selector": "landmark", "page_size": 16}

        gate = gate_from_arguments((), keywords)

        assert gate == Gate(1.0, 1.0, selector="landmark", page_size=16)
        assert isinstance(gate.budget, float)

    @pytest.mark.parametrize("value", [Fraction(1, 50), np.float64(0.02)])
    def test_any_real_number_is_a_fraction(self, value: object) -> None:
        gate = gate_from_arguments((), {"budget": value, "min_coverage": 0.9})

        assert type(gate.budget) is float
        assert gate.budget == 0.02

    def test_a_float32_is_the_decimal_that_it_prints_as(self) -> None:
        gate = gate_from_arguments(
            (), {"budget": np.float32(0.02), "min_coverage": np.float32(0.95)}
        )

        assert (gate.budget, gate.min_coverage) == (0.02, 0.95)

    def test_a_number_that_becomes_zero_as_a_float(self) -> None:
        found = refused(budget=0.02, min_coverage=Fraction(1, 10**400))

        assert found.endswith("min_coverage is too small to be told from 0.")

    def test_a_selector_that_is_no_text(self) -> None:
        found = refused(budget=0.02, min_coverage=0.9, selector=np.array(["oracle", "landmark"]))

        assert "there is no such selector" in found

    def test_a_positional_argument(self) -> None:
        assert refused(0.02, 0.95) == (
            "kvgate() got the positional argument 0.02; name every argument, as in "
            "kvgate(budget=0.02, min_coverage=0.95). Accepted: budget, min_coverage, "
            "min_total_mass, max_output_error, min_hit_rate, max_kl, min_top1, max_nll_increase, "
            "max_budget, coverage, selector, page_size, scope, layers, dense_layers, confidence."
        )

    def test_an_unknown_argument(self) -> None:
        assert refused(budget=0.02, threshold=0.95).startswith(
            "kvgate() got an unknown argument 'threshold'. Accepted: budget, min_coverage, "
        )

    @pytest.mark.parametrize(
        ("keywords", "needs"),
        [
            ({}, "budget and min_coverage"),
            ({"budget": 0.02}, "min_coverage"),
            ({"min_coverage": 0.9, "selector": "oracle"}, "budget"),
        ],
    )
    def test_a_missing_argument(self, keywords: Mapping[str, object], needs: str) -> None:
        assert refused(**keywords).startswith(f"kvgate() needs {needs}")
        assert "as in kvgate(budget=0.02, min_coverage=0.95)" in refused(**keywords)

    @pytest.mark.parametrize(
        "value",
        [
            0,
            -0.1,
            1.001,
            2,
            50,
            math.nan,
            math.inf,
            "0.02",
            "2%",
            None,
            True,
            [0.02],
            0.02j,
            Decimal("0.02"),
        ],
        ids=repr,
    )
    @pytest.mark.parametrize(
        ("name", "meaning"),
        [("budget", "a fraction of the context"), ("min_coverage", "a share of the mass")],
    )
    def test_a_number_outside_its_range(self, name: str, meaning: str, value: object) -> None:
        keywords: dict[str, object] = {"budget": 0.02, "min_coverage": 0.95, name: value}

        assert refused(**keywords) == (
            f"kvgate({name}={value!r}): {name} is {meaning}, a number above 0 and up to 1."
        )

    def test_a_number_too_large_for_a_float(self) -> None:
        found = refused(budget=10**400, min_coverage=0.95)

        assert found.endswith("budget is a fraction of the context, a number above 0 and up to 1.")

    @pytest.mark.parametrize("selector", ["best", "", "Oracle", 3, ["oracle"]], ids=repr)
    def test_an_unknown_selector(self, selector: object) -> None:
        assert refused(budget=0.02, min_coverage=0.95, selector=selector) == (
            f"kvgate(selector={selector!r}): there is no such selector. Accepted: "
            f"{', '.join(SELECTORS)}."
        )

    @pytest.mark.parametrize("selector", SELECTORS)
    def test_every_selector_of_the_package(self, selector: str) -> None:
        keywords = {"budget": 0.02, "min_coverage": 0.95, "selector": selector}

        assert gate_from_arguments((), keywords).selector == selector

    @pytest.mark.parametrize("page_size", [0, -32, 32.0, "32", True, math.nan], ids=repr)
    def test_a_page_size_that_is_not_whole_tokens(self, page_size: object) -> None:
        assert refused(budget=0.02, min_coverage=0.95, page_size=page_size) == (
            f"kvgate(page_size={page_size!r}): a page is a whole number of tokens, 1 or more."
        )


class TestGate:
    def test_without_a_selector_the_ceiling_and_landmark_are_checked(self) -> None:
        gate = Gate(0.02, 0.95)

        assert gate.checked_selectors(gate.demands[0]) == ("oracle", "landmark")
        assert gate.needed_selectors == ("oracle", "landmark")

    def test_with_a_selector_it_alone_is_checked_and_the_ceiling_explains(self) -> None:
        gate = Gate(0.02, 0.95, selector="landmark")

        assert gate.checked_selectors(gate.demands[0]) == ("landmark",)
        assert gate.needed_selectors == ("oracle", "landmark")
        assert replace(gate, selector="oracle").needed_selectors == ("oracle",)
        assert replace(gate, selector="token-oracle").needed_selectors == ("oracle", "token-oracle")

    def test_demands_come_in_the_order_of_the_arguments(self) -> None:
        gate = Gate(
            budget=0.02,
            max_budget=0.1,
            coverage=0.9,
            min_hit_rate=0.8,
            max_output_error=0.2,
            min_total_mass=0.97,
            min_coverage=0.95,
        )

        assert gate.demands == (
            Demand("coverage", 0.95),
            Demand("total_mass", 0.97),
            Demand("output_error", 0.2),
            Demand("hit_rate", 0.8),
            Demand("required_budget", 0.1),
        )
        assert gate.main_budget == 0.02
        assert gate.measured_budgets == (0.02, 0.1)
        assert gate.wanted_coverages == (0.95, 0.9)
        assert gate.needs_values

    @pytest.mark.parametrize(
        ("measure", "is_floor", "has_ceiling", "checked"),
        [
            ("coverage", True, True, ("oracle", "landmark")),
            ("total_mass", True, True, ("oracle", "landmark")),
            ("required_budget", False, True, ("oracle", "landmark")),
            # the oracle ranks by mass: it bounds neither the error nor the hits of another
            ("output_error", False, False, ("landmark",)),
            ("hit_rate", True, False, ("landmark",)),
        ],
    )
    def test_a_demand_knows_its_side_and_its_ceiling(
        self, measure: DemandedMeasure, is_floor: bool, has_ceiling: bool, checked: tuple[str, ...]
    ) -> None:
        demand = Demand(measure, 0.5)

        assert (demand.is_floor, demand.has_ceiling) == (is_floor, has_ceiling)
        assert Gate(0.02).checked_selectors(demand) == checked
        assert Gate(0.02, selector="quest").checked_selectors(demand) == ("quest",)

    def test_a_gate_of_a_required_budget_alone_is_about_that_budget(self) -> None:
        gate = Gate(max_budget=0.0505, coverage=0.9)

        assert gate.main_budget == 0.0505
        assert gate.measured_budgets == (0.05,)  # the grid has steps of 0.1%
        assert not gate.needs_values

    def test_the_ceiling_is_needed_to_explain_even_where_it_is_not_checked(self) -> None:
        assert Gate(0.02, min_hit_rate=0.5).needed_selectors == ("oracle", "landmark")
        assert Gate(0.02, max_output_error=0.5, selector="quest").needed_selectors == (
            "oracle",
            "quest",
        )


class TestNewArguments:
    def test_layers_are_sorted_and_counted_once(self) -> None:
        keywords = {"budget": 0.02, "min_coverage": 0.9}

        assert gate_from_arguments((), {**keywords, "layers": [7, 3, 3]}).layers == (3, 7)
        assert gate_from_arguments((), {**keywords, "layers": range(2, 5)}).layers == (2, 3, 4)
        assert gate_from_arguments((), {**keywords, "layers": {1, 0}}).layers == (0, 1)

    def test_none_stands_for_the_default_of_what_has_one(self) -> None:
        keywords = dict.fromkeys(("selector", "page_size", "layers", "confidence"))

        assert gate_from_arguments((), {"budget": 0.02, "min_coverage": 0.9, **keywords}) == Gate(
            0.02, 0.9
        )

    @pytest.mark.parametrize(
        "name", ["budget", "min_coverage", "min_total_mass", "max_output_error", "min_hit_rate"]
    )
    def test_none_is_no_threshold(self, name: str) -> None:
        keywords: dict[str, object] = {"budget": 0.02, "min_coverage": 0.9, name: None}

        assert refused(**keywords).startswith(f"kvgate({name}=None): ")

    def test_an_output_error_may_pass_1(self) -> None:
        keywords = {"budget": 0.02, "max_output_error": 1.5}

        assert gate_from_arguments((), keywords).max_output_error == 1.5

    @pytest.mark.parametrize("value", [0, -1, math.inf, math.nan, "0.1", True], ids=repr)
    def test_an_output_error_that_is_no_bound(self, value: object) -> None:
        assert refused(budget=0.02, max_output_error=value) == (
            f"kvgate(max_output_error={value!r}): max_output_error is ‖o'−o‖/‖o‖, a number above "
            "0, such as 0.1."
        )

    @pytest.mark.parametrize("value", [0, 0.49, 1, 1.5, 95, "95%", math.nan, True], ids=repr)
    def test_a_confidence_that_is_none(self, value: object) -> None:
        assert refused(budget=0.02, min_coverage=0.9, confidence=value) == (
            f"kvgate(confidence={value!r}): the share of intervals that hold the truth is needed, "
            "from 0.5 and below 1, such as 0.95."
        )

    @pytest.mark.parametrize(
        "value", [[], (), 3, "3", [True], [1.0], [-1], [0, None], {}, range(0)], ids=repr
    )
    def test_layers_that_are_no_indices(self, value: object) -> None:
        assert refused(budget=0.02, min_coverage=0.9, layers=value) == (
            f"kvgate(layers={value!r}): layer indices are needed, whole numbers from 0, such as "
            "layers=[3, 7] or layers=range(8, 16)."
        )

    @pytest.mark.parametrize("value", ["worst", "Mean", 5, None, ["mean"]], ids=repr)
    def test_a_scope_that_there_is_not(self, value: object) -> None:
        assert refused(budget=0.02, min_coverage=0.9, scope=value) == (
            f"kvgate(scope={value!r}): accepted: mean, worst-layer, p05."
        )

    @pytest.mark.parametrize(
        ("keywords", "found"),
        [
            ({"max_budget": 0.1}, "kvgate() needs max_budget and coverage together"),
            (
                {"budget": 0.1, "min_coverage": 0.5, "coverage": 0.9},
                "kvgate() needs max_budget and coverage together",
            ),
            ({"coverage": 0.9}, "kvgate() needs budget and min_coverage, as in "),
            (
                {"budget": 0.1, "max_budget": 0.1, "coverage": 0.9},
                "kvgate(budget=…) has no effect on max_budget; give one of min_coverage, "
                "min_total_mass, max_output_error, min_hit_rate, max_kl, min_top1, "
                "max_nll_increase, or leave budget out.",
            ),
            ({"max_output_error": 0.1}, "kvgate() needs budget for its max_output_error"),
            (
                {"max_budget": 0.0009, "coverage": 0.9},
                "kvgate(max_budget=0.0009): required budgets are looked for in steps of 0.1%; "
                "0.001 or more is accepted.",
            ),
        ],
    )
    def test_arguments_that_do_not_go_together(
        self, keywords: Mapping[str, object], found: str
    ) -> None:
        assert refused(**keywords).startswith(found)

    @pytest.mark.parametrize("name", ["max_output_error", "min_hit_rate"])
    def test_tokens_have_no_pages(self, name: str) -> None:
        assert refused(budget=0.1, selector="token-oracle", **{name: 0.5}) == (
            f"kvgate({name}=0.5) is about pages, and 'token-oracle' selects tokens; name another "
            "selector."
        )

    def test_a_selector_of_the_users_is_accepted_by_name(self) -> None:
        keywords = {"budget": 0.02, "min_coverage": 0.9, "selector": "mine"}

        assert gate_from_arguments((), keywords, ("oracle", "mine")).selector == "mine"


class TestEffectsOnTheNextToken:
    def test_a_gate_says_which_sparse_runs_it_needs(self) -> None:
        gate = gate_from_arguments(
            (), {"budget": 0.04, "max_kl": 0.05, "selector": "quest", "dense_layers": [3, 1]}
        )
        assert gate.needs_closed_loop
        assert gate.variants(32) == (
            Variant(32, 0.04, "oracle", (1, 3)),
            Variant(32, 0.04, "quest", (1, 3)),
        )
        sized = gate_from_arguments((), {"budget": 0.04, "min_top1": 0.9, "page_size": 16})
        assert sized.variants(32) == (
            Variant(16, 0.04, "oracle"),
            Variant(16, 0.04, "landmark"),
        )

    def test_a_gate_on_attention_alone_needs_none(self) -> None:
        gate = gate_from_arguments((), {"budget": 0.04, "min_coverage": 0.9, "dense_layers": [0]})
        assert not gate.needs_closed_loop
        assert gate.variants(32) == ()
        assert gate.counted_layers((0, 1, 2)) == (1, 2)

    @pytest.mark.parametrize(
        ("keywords", "found"),
        [
            ({"max_kl": 0.05}, "kvgate() needs budget for its max_kl"),
            ({"budget": 0.1, "max_kl": 0}, "kvgate(max_kl=0): max_kl is the KL divergence"),
            ({"budget": 0.1, "min_top1": 1.5}, "kvgate(min_top1=1.5): min_top1 is a share"),
            (
                {"budget": 0.1, "max_nll_increase": "a"},
                "kvgate(max_nll_increase='a'): max_nll_increase is a rise",
            ),
            (
                {"budget": 0.1, "max_kl": 0.1, "layers": [1]},
                "kvgate(layers=[1]) has no effect on max_kl",
            ),
            (
                {"budget": 0.1, "min_top1": 0.1, "scope": "p05"},
                "kvgate(scope='p05') has no effect on min_top1",
            ),
            (
                {"budget": 0.1, "min_coverage": 0.1, "layers": [1, 2], "dense_layers": [2]},
                "kvgate(): layer 2 is in layers and in dense_layers",
            ),
            (
                {"budget": 0.1, "max_kl": 0.1, "dense_layers": "1"},
                "kvgate(dense_layers='1'): layer indices are needed",
            ),
            (
                {"budget": 0.1, "max_kl": 0.1, "dense_layers": []},
                "kvgate(dense_layers=[]): layer indices are needed",
            ),
        ],
    )
    def test_what_does_not_fit_is_refused(self, keywords: Mapping[str, object], found: str) -> None:
        assert refused(**keywords).startswith(found)
