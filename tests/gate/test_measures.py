"""Every measure and scope that a gate may demand: what is compared, and what the reason says."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from numpy.typing import NDArray

from pytest_kvgate.analysis import PageGrid, Plan, Profile, profile_trace
from pytest_kvgate.trace import load_trace
from tests.gate.profiles import judged, profile_of
from tests.traces import PASSED, LayerArrays, layer_of_masses, make_trace, random_layer

SELECTORS = ("oracle", "landmark", "quest", "token-oracle")
COVERAGES = (0.27, 0.29, 0.5, 0.9)


@pytest.fixture(scope="module")
def profile(tmp_path_factory: pytest.TempPathFactory) -> Profile:
    layers = [
        random_layer(index, n_token=640, n_step=12, index=index, values=True) for index in range(6)
    ]
    directory = make_trace(tmp_path_factory.mktemp("trace") / "t", layers, verification=PASSED)
    plan = Plan((0.25, 0.5), SELECTORS, coverages=COVERAGES)
    return profile_trace(load_trace(directory), PageGrid(), plan)


def units(profile: Profile, measure: str, selector: str) -> NDArray[np.float64]:
    """Return a measure at 25% of each unit."""
    values: NDArray[np.float64] = profile.numbers.units.numbers[measure][
        profile.selectors.index(selector), 0
    ]
    return values


class TestScopes:
    def test_the_worst_layer(self, profile: Profile) -> None:
        held = units(profile, "coverage", "landmark")
        worst = min(held[profile.layer == layer].mean() for layer in range(6))

        go = judged(profile, budget=0.25, min_coverage=0.2, scope="worst-layer")
        no_go = judged(profile, budget=0.25, min_coverage=0.27, scope="worst-layer")

        assert (go.verdict, no_go.verdict) == ("GO", "NO-GO")
        assert go.deciding.observed == pytest.approx(worst)
        assert go.reason.startswith("landmark holds 0.2551 of the eligible mass in the worst layer")
        assert no_go.reason.startswith(
            "the selector is the problem: landmark holds 0.2551 of the eligible mass in the worst "
            "layer at a budget of 25%; the others: oracle 0.2758, quest 0.2424, token-oracle 0."
        )
        layer, value = no_go.worst_layers[0]
        assert (layer, value) == (5, no_go.deciding.observed)

    def test_the_worst_twentieth(self, profile: Profile) -> None:
        held = np.sort(units(profile, "coverage", "oracle"))
        at = int(0.05 * (len(held) - 1))

        result = judged(profile, budget=0.25, min_coverage=0.29, scope="p05", selector="oracle")

        assert result.verdict == "NO-GO"
        assert result.deciding.observed == held[at]
        assert "holds 0.2444 of the eligible mass in the worst twentieth of the units at a" in (
            result.reason
        )
        assert judged(profile, budget=0.25, min_coverage=0.2, scope="p05").verdict == "GO"

    def test_chosen_layers(self, profile: Profile) -> None:
        held = units(profile, "coverage", "landmark")[np.isin(profile.layer, [2, 5])].mean()

        result = judged(profile, budget=0.25, min_coverage=0.2, layers=[5, 2], selector="landmark")

        assert result.deciding.observed == pytest.approx(held)
        assert "of the eligible mass in the chosen layers at a budget" in result.reason
        assert {layer for layer, _ in result.worst_layers} == {2, 5}
        assert result.n_layer == 2

    def test_the_worst_of_chosen_layers(self, profile: Profile) -> None:
        layers = [1, 2, 4]
        result = judged(profile, budget=0.25, min_coverage=0.9, layers=layers, scope="worst-layer")

        assert "in the worst layer of 3 chosen layers at a budget of 25%" in result.reason
        assert result.dense_layers == (1, 2, 4)

    def test_a_layer_that_there_is_not(self, profile: Profile) -> None:
        result = judged(profile, budget=0.25, min_coverage=0.2, layers=[2, 7, 9])

        assert result.verdict == "INVALID"
        assert result.reason == (
            "layer 7 of layers=[2, 7, 9] holds no unit that counts: it is not a layer of this "
            "model with a KV cache and without a sliding window. Accepted: 0-5."
        )

    def test_no_unit_at_all_is_said_before_the_layers(self, tmp_path: Path) -> None:
        masses = [1.0] * 2 + [1e-20] * 6 + [1.0] * 2
        directory = make_trace(tmp_path / "trace", [layer_of_masses(masses)], verification=PASSED)
        grid = PageGrid(page_size=2, sinks=2, recent=2)
        profile = profile_trace(load_trace(directory), grid, Plan((0.4,)))

        result = judged(profile, budget=0.4, min_coverage=0.1, layers=[0])

        assert result.verdict == "INVALID"
        assert result.reason.startswith("no sampled step has attention mass on an eligible page")


class TestTotalMass:
    def test_it_counts_what_is_free(self, profile: Profile) -> None:
        result = judged(profile, budget=0.25, min_total_mass=0.3)

        assert result.verdict == "GO"
        assert result.deciding.observed == pytest.approx(
            units(profile, "total_mass", "landmark").mean()
        )
        assert result.reason == (
            "landmark holds 0.3267 of all mass at a budget of 25%, 0.0267 above the threshold."
        )

    def test_a_ceiling_that_is_too_low(self, profile: Profile) -> None:
        result = judged(profile, budget=0.25, min_total_mass=0.5)

        assert result.verdict == "NO-GO"
        assert result.reason == (
            "the ceiling is below the threshold: even a perfect selector of 32-token pages holds "
            "0.3467 of all mass at a budget of 25%, so no selector can pass. Required: 0.5."
        )

    def test_a_selector_that_is_the_problem(self, profile: Profile) -> None:
        result = judged(profile, budget=0.25, min_total_mass=0.34)

        assert result.reason.startswith("the selector is the problem: landmark holds 0.3267 of all")
        assert result.reason.endswith(" Required: 0.34.")


class TestOutputError:
    def test_it_must_stay_below(self, profile: Profile) -> None:
        result = judged(profile, budget=0.25, max_output_error=1.7)

        assert result.verdict == "GO"
        assert [check.selector for check in result.checks] == ["landmark"]
        assert result.deciding.observed == pytest.approx(
            units(profile, "output_error", "landmark").mean()
        )
        assert result.reason == (
            "landmark has an attention-output error of 1.6640 at a budget of 25%, 0.0360 below the "
            "threshold."
        )

    def test_one_too_large_is_the_fault_of_no_ceiling(self, profile: Profile) -> None:
        result = judged(profile, budget=0.25, max_output_error=0.5, selector="quest")

        assert result.verdict == "NO-GO"
        assert result.reason == (
            "attention to a selection is too far from attention to everything: quest has an "
            "attention-output error of 1.7054 at a budget of 25%, where 0.5 is allowed; the "
            "others: oracle 1.6637, landmark 1.6640."
        )

    def test_the_worst_layer_has_the_largest(self, profile: Profile) -> None:
        errors = units(profile, "output_error", "landmark")
        worst = max(errors[profile.layer == layer].mean() for layer in range(6))

        result = judged(profile, budget=0.25, max_output_error=0.5, scope="worst-layer")

        assert result.deciding.observed == pytest.approx(worst)
        assert "of 1.9010 in the worst layer at a budget" in result.reason
        layer, value = result.worst_layers[0]
        assert (layer, value) == (1, result.deciding.observed)
        errors_down = [error for _, error in result.worst_layers]
        assert errors_down == sorted(errors_down, reverse=True)

    def test_without_v_it_is_undefined(self, tmp_path: Path) -> None:
        result = judged(profile_of(tmp_path), budget=0.4, min_coverage=0.1, max_output_error=0.5)

        assert result.verdict == "INVALID"
        assert result.reason == (
            "output_error of landmark is undefined: the trace holds no values (V); capture it with "
            "--kvgate-values."
        )


class TestHitRate:
    def test_go(self, profile: Profile) -> None:
        result = judged(profile, budget=0.25, min_hit_rate=0.3)

        assert result.verdict == "GO"
        hits, accesses = (units(profile, name, "landmark") for name in ("hits", "accesses"))
        later = ~np.isnan(accesses)
        assert result.deciding.observed == pytest.approx(hits[later].sum() / accesses[later].sum())
        assert result.reason == (
            "landmark finds 0.5055 of its pages in a pool of 2 × a step's pages at a budget of "
            "25%, 0.2055 above the threshold."
        )

    def test_no_go_says_what_pool_would_serve(self, profile: Profile) -> None:
        result = judged(profile, budget=0.25, min_hit_rate=0.9)

        assert result.verdict == "NO-GO"
        assert result.reason.startswith(
            "the pool misses too often: landmark finds 0.5055 of its pages in a pool of 2 × a "
            "step's pages at a budget of 25%, where 0.9 is required. No pool serves 99%: "
        )
        assert result.reason.endswith("% of the accesses are to pages never selected before.")

    def test_a_larger_pool_that_serves_is_named(self, tmp_path: Path) -> None:
        # three pages take turns: a pool of two never holds the right one, a pool of three always
        n_step, pages = 300, 3
        keys = np.zeros((1, 610, pages), dtype=np.float32)
        for page in range(pages):
            keys[0, 2 + 2 * page : 4 + 2 * page, page] = 10
        queries = np.eye(pages, dtype=np.float32)[np.arange(n_step) % pages][:, None]
        layer = LayerArrays(keys, queries)
        directory = make_trace(tmp_path / "t", [layer], verification=PASSED)
        profile = profile_trace(load_trace(directory), PageGrid(2, 2, 300), Plan((0.0065,)))

        result = judged(profile, budget=0.0065, min_hit_rate=0.5)

        assert result.verdict == "NO-GO"
        assert result.deciding.observed == 0
        assert result.reason.endswith("A pool of 3 × would serve 99%.")
        larger = profile_trace(load_trace(directory), profile.grid, Plan((0.0065,), pool=3.0))
        assert judged(larger, budget=0.0065, min_hit_rate=0.99).verdict == "GO"

    def test_a_stride_is_said_to_overstate_misses(self, tmp_path: Path) -> None:
        directory = make_trace(
            tmp_path / "t", [random_layer(n_token=640, n_step=6)], verification=PASSED
        )
        document = directory / "trace.json"
        text = document.read_text("utf-8")
        for index in range(5, 0, -1):
            text = text.replace(f'"decode_index": {index},', f'"decode_index": {index * 8},')
        document.write_text(text, encoding="utf-8")
        profile = profile_trace(load_trace(directory), PageGrid(), Plan((0.25,)))

        result = judged(profile, budget=0.25, min_hit_rate=0.99)

        assert result.reason.endswith(
            "Steps were sampled 8 apart, which overstates misses; a capture with a stride of 1, "
            "such as --kvgate-steps=0:33:1, does not."
        )


class TestRequiredBudget:
    def test_go(self, profile: Profile) -> None:
        result = judged(profile, max_budget=0.5, coverage=0.4)

        assert result.verdict == "GO"
        needed = profile.required_budget("landmark", 0.4)
        assert result.deciding.observed == needed == 0.353
        assert result.reason == (
            "landmark needs a budget of 35.3% for a coverage of 0.4, 14.7% below what is allowed."
        )
        assert result.worst_layers == ()

    def test_exactly_the_budget_allowed_is_enough(self, profile: Profile) -> None:
        assert judged(profile, max_budget=0.353, coverage=0.4).verdict == "GO"
        assert judged(profile, max_budget=0.352, coverage=0.4).verdict == "NO-GO"

    def test_a_ceiling_that_costs_too_much(self, profile: Profile) -> None:
        result = judged(profile, max_budget=0.25, coverage=0.4)

        assert result.verdict == "NO-GO"
        assert result.reason == (
            "the ceiling is too costly: even a perfect selector of 32-token pages needs a budget "
            "of 35% for a coverage of 0.4, so no selector can pass. 25% is allowed."
        )

    def test_a_selector_that_costs_too_much(self, profile: Profile) -> None:
        result = judged(profile, max_budget=0.351, coverage=0.4)

        assert result.reason.startswith(
            "the selector is the problem: landmark needs a budget of 35.3% for a coverage of 0.4; "
            "the others: oracle 35%, quest "
        )
        assert result.reason.endswith("%. 35.1% is allowed.")

    def test_a_coverage_that_no_budget_reaches(self, tmp_path: Path) -> None:
        profile = profile_of(tmp_path)
        numbers = replace(profile.numbers, covered=np.minimum(profile.numbers.covered, 0.75))
        profile = replace(profile, numbers=numbers)

        result = judged(profile, max_budget=0.6, coverage=0.8, selector="landmark")

        assert result.verdict == "NO-GO"
        assert result.deciding.observed is None
        assert result.reason == (
            "the ceiling is too costly: even a perfect selector of 2-token pages reaches a "
            "coverage of 0.8 at no budget, so no selector can pass. 60% is allowed."
        )

    @pytest.mark.parametrize(
        ("scope", "words"),
        [("worst-layer", " in the worst layer"), ("p05", " in the worst twentieth of the units")],
    )
    def test_in_a_scope(self, profile: Profile, scope: str, words: str) -> None:
        result = judged(profile, max_budget=0.25, coverage=0.27, scope=scope)

        assert result.deciding.observed is not None
        assert f"for a coverage of 0.27{words}" in result.reason


class TestSeveralDemands:
    def test_each_is_checked_and_the_first_missed_decides(self, profile: Profile) -> None:
        result = judged(
            profile,
            budget=0.25,
            min_coverage=0.25,
            min_total_mass=0.3,
            max_output_error=0.1,
            min_hit_rate=0.9,
            max_budget=0.5,
            coverage=0.4,
        )

        assert [(check.demand.measure, check.selector, check.state) for check in result.checks] == [
            ("coverage", "oracle", "ok"),
            ("coverage", "landmark", "ok"),
            ("total_mass", "oracle", "ok"),
            ("total_mass", "landmark", "ok"),
            ("output_error", "landmark", "missed"),
            ("hit_rate", "landmark", "missed"),
            ("required_budget", "oracle", "ok"),
            ("required_budget", "landmark", "ok"),
        ]
        assert result.verdict == "NO-GO"
        assert result.deciding.demand.measure == "output_error"
        assert result.reason.startswith("attention to a selection is too far")

    def test_tokens_under_the_threshold_are_too_diffuse(self, profile: Profile) -> None:
        result = judged(profile, budget=0.25, min_coverage=0.9, selector="token-oracle")

        assert result.reason.startswith(
            "attention is too diffuse: even a perfect selector of single tokens holds 0.5107 of "
            "the eligible mass at a budget of 25%, so no selector of pages or tokens can pass. The "
            "smallest budget at which token-oracle reaches 0.9 is "
        )


class TestDenseLayers:
    def test_layers_whose_ceiling_is_below_the_threshold(self, profile: Profile) -> None:
        held = {
            layer: units(profile, "coverage", "oracle")[profile.layer == layer].mean()
            for layer in range(6)
        }
        middle = float(np.median(list(held.values())))

        result = judged(profile, budget=0.25, min_coverage=middle)

        assert result.dense_layers == tuple(
            layer for layer, value in held.items() if value < middle
        )
        assert len(result.dense_layers) == 3
        assert result.n_layer == 6

    def test_only_the_chosen_ones(self, profile: Profile) -> None:
        assert judged(profile, budget=0.25, min_coverage=0.9, layers=[4]).dense_layers == (4,)

    def test_none_where_no_coverage_is_demanded(self, profile: Profile) -> None:
        assert judged(profile, budget=0.25, min_hit_rate=0.9).dense_layers == ()
        assert judged(profile, max_budget=0.1, coverage=0.9).dense_layers == ()
