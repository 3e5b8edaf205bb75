"""What a builder asks next, by hand: the gap, layers that stay dense, strides and metadata."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from pytest_kvgate.analysis import (
    NotMeasuredError,
    PageGrid,
    Plan,
    Profile,
    UndefinedError,
    pool,
    profile_trace,
)
from pytest_kvgate.analysis.findings import (
    dense_layers,
    dim_ablation,
    gap,
    metadata_bytes,
    strides,
)
from pytest_kvgate.trace import load_trace
from tests.traces import LayerArrays, layer_of_masses, make_trace, random_layer

EXACT = 1e-6
# Pages of two tokens. Free: page 0 (sinks) and the last two tokens. Eligible: pages 1, 2 and 3,
# with masses 0.2, 0.3 and 0.1 of a total of 1.
SIX_TENTHS = [0.15, 0.05, 0.1, 0.1, 0.01, 0.29, 0.05, 0.05, 0.15, 0.05]
GRID = PageGrid(page_size=2, sinks=2, recent=2)


def profile_of(
    path: Path,
    *layers: LayerArrays,
    grid: PageGrid = GRID,
    budgets: tuple[float, ...] = (0.2,),
    n_visible: Sequence[int] | None = None,
    decode_indices: Sequence[int] | None = None,
    selectors: tuple[str, ...] | None = None,
) -> Profile:
    directory = make_trace(path / "trace", layers, n_visible, decode_indices=decode_indices)
    plan = Plan(budgets) if selectors is None else Plan(budgets, selectors)
    return profile_trace(load_trace(directory), grid, plan)


def test_the_gap_of_one_step_by_hand(tmp_path: Path) -> None:
    profile = profile_of(tmp_path, layer_of_masses(SIX_TENTHS))

    found = gap(profile, "landmark", 0.2)

    # the two best tokens hold 0.39, the best page 0.3, the page of the best mean logit 0.2
    assert found.diffuse == pytest.approx(1 - 0.39 / 0.6, abs=EXACT)
    assert found.granularity == pytest.approx(0.09 / 0.6, abs=EXACT)
    assert found.selector == pytest.approx(0.1 / 0.6, abs=EXACT)
    assert found.staleness is None
    assert found.shortfall == pytest.approx(1 - 0.2 / 0.6, abs=EXACT)


def two_steps() -> LayerArrays:
    """The query turns from the first token to the second and the fifth."""
    masses = np.array([[0.7, 0.1, 0.1, 0.1], [0.2, 0.6, 0.1, 0.1]])
    return LayerArrays(
        k=np.concatenate([np.eye(4), np.zeros((2, 4))])[None].astype(np.float32),
        q=np.log(masses)[:, None].astype(np.float32),
        scale=1.0,
    )


def test_the_gap_of_two_steps_is_over_the_one_with_a_step_before(tmp_path: Path) -> None:
    profile = profile_of(
        tmp_path, two_steps(), grid=PageGrid(1, 0, 1), budgets=(0.2,), n_visible=[5, 6]
    )

    found = gap(profile, "oracle", 0.2)

    # The last query sees five eligible tokens, the fifth with a logit of 0: of 2 in all, one page
    # holds 0.6 or the fifth token, which is the best, 1.
    held = 1 / 2
    assert found.diffuse == pytest.approx(1 - held, abs=EXACT)
    assert (found.granularity, found.selector) == pytest.approx((0, 0), abs=EXACT)
    # the first step took token 0, which holds 0.2 of 2 now
    assert found.staleness == pytest.approx(held - 0.1, abs=EXACT)
    assert found.shortfall == pytest.approx(0.9, abs=EXACT)
    assert profile.measure("stale_coverage", "oracle", 0.2) == pytest.approx(0.1, abs=EXACT)


def test_layers_stay_dense_that_not_even_the_oracle_pages(tmp_path: Path) -> None:
    # half of the eligible mass on one page, and a third
    steep = layer_of_masses(SIX_TENTHS, index=3)
    even = layer_of_masses([1.0] * 10, index=8)
    profile = profile_of(tmp_path, steep, even)

    assert dense_layers(profile, 0.2, 0.3) == ()
    assert dense_layers(profile, 0.2, 0.4) == (8,)
    assert dense_layers(profile, 0.2, 0.6) == (3, 8)
    # what is reached exactly is enough
    assert dense_layers(profile, 0.2, profile.layer_coverage("oracle", 0.2)[8]) == ()
    with pytest.raises(NotMeasuredError):
        dense_layers(profile, 0.3, 0.5)


def test_strides_are_those_of_all_traces_each_once(tmp_path: Path) -> None:
    layer = random_layer(n_token=40, n_step=4)
    one = profile_of(tmp_path / "one", layer, decode_indices=[0, 1, 4, 5])
    other = profile_of(tmp_path / "other", layer, decode_indices=[7, 17, 18, 19])

    assert strides(one) == (1, 3)
    assert strides(pool([one, other])) == (1, 3, 10)
    alone = profile_of(tmp_path / "alone", random_layer(n_token=40))
    assert strides(alone) == ()


def test_only_steps_that_follow_each_other_count_at_lag_one(tmp_path: Path) -> None:
    layer = random_layer(n_token=60, n_step=4, n_head_kv=1)
    profile = profile_of(tmp_path, layer, decode_indices=[0, 2, 3, 7])

    stale = profile.samples("stale_coverage", "oracle", 0.2)
    lag_one = profile.samples("lag_one_coverage", "oracle", 0.2)

    assert stale.decode_index.tolist() == [2, 3, 7]
    assert lag_one.decode_index.tolist() == [3]
    assert lag_one.value == stale.value[1:2]
    apart = profile_of(tmp_path / "apart", layer, decode_indices=[0, 2, 4, 6])
    with pytest.raises(UndefinedError, match="stride of 1"):
        apart.measure("lag_one_coverage", "oracle", 0.2)


def test_metadata_is_two_bytes_a_number_beside_every_page_of_the_longest_trace(
    tmp_path: Path,
) -> None:
    layers = [
        random_layer(n_token=67, n_head_kv=2, head_dim=8, index=0),
        random_layer(n_token=67, n_head_kv=4, head_dim=16, index=1),
        random_layer(n_token=67, n_head_kv=4, head_dim=16, index=2, window=9),
    ]
    short = [replace(layer, k=layer.k[:, :40]) for layer in layers]
    grid = PageGrid(8, 8, 8)
    profile = pool(
        [
            profile_of(tmp_path / str(number), *chosen, grid=grid)
            for number, chosen in enumerate((short, layers, short))
        ]
    )

    # eight whole pages of 67 tokens; the layer with a window is not paged
    numbers = 8 * (2 * 8 + 4 * 16)
    assert metadata_bytes(profile, "landmark") == 2 * numbers
    for box in ("quest", "mean-std", "cuboid-mean"):
        assert metadata_bytes(profile, box) == 4 * numbers
    for nothing in ("recency", "random"):
        assert metadata_bytes(profile, nothing) == 0
    for ceiling in ("oracle", "token-oracle"):  # nobody can build them
        assert metadata_bytes(profile, ceiling) is None


def ablation_layer(rotated_last: bool) -> LayerArrays:
    """Page 1 has the mass of the first dim, page 2 that of the second; the first is stronger."""
    keys = np.zeros((1, 10, 2))
    keys[0, 2:4, 0], keys[0, 4:6, 1] = 3.0, 2.0
    return LayerArrays(
        k=keys.astype(np.float32),
        q=np.ones((1, 1, 2), dtype=np.float32),
        scale=1.0,
        n_rot=1,
        rotated_last=rotated_last,
    )


@pytest.mark.parametrize(("rotated_last", "taken"), [(False, 2), (True, 1)])
def test_the_ablation_ranks_by_the_dims_that_are_never_turned(
    tmp_path: Path, rotated_last: bool, taken: int
) -> None:
    profile = profile_of(tmp_path, ablation_layer(rotated_last))

    found = dim_ablation(profile, 0.2)

    masses = {1: 2 * np.exp(3), 2: 2 * np.exp(2), 3: 2.0}
    assert found is not None
    assert found.all_dims == pytest.approx(masses[1] / sum(masses.values()), abs=EXACT)
    assert found.unrotated == pytest.approx(masses[taken] / sum(masses.values()), abs=EXACT)
    assert found.layers == (0,)


def test_the_ablation_counts_the_layers_that_have_both_kinds_of_dims(tmp_path: Path) -> None:
    some = replace(ablation_layer(False), index=4)
    whole = [replace(some, index=index, n_rot=n_rot) for index, n_rot in ((1, 0), (2, 2))]

    found = dim_ablation(profile_of(tmp_path / "some", *whole, some), 0.2)
    assert found is not None
    assert found.layers == (4,)
    assert found == dim_ablation(profile_of(tmp_path / "alone", some), 0.2)
    assert dim_ablation(profile_of(tmp_path / "none", *whole), 0.2) is None
    without = profile_of(tmp_path / "without", some, selectors=("oracle", "quest"))
    assert dim_ablation(without, 0.2) is None


def test_a_skipped_unit_is_no_step_before_and_touches_no_pool(tmp_path: Path) -> None:
    # at the second of five steps all mass is on the first token, which is free
    keys = np.zeros((1, 60, 2))
    keys[0, 0, 0] = 1.0
    keys[0, :, 1] = np.random.default_rng(2).standard_normal(60)
    queries = np.array([[0, 1], [60, 1], [0, 1], [0, 1], [0, -1]])[:, None]
    layer = LayerArrays(k=keys.astype(np.float32), q=queries.astype(np.float32), scale=1.0)

    profile = profile_of(tmp_path, layer, grid=PageGrid(2, 2, 2), budgets=(0.1,))

    assert profile.skipped_units == 1
    assert profile.samples("coverage", "oracle", 0.1).decode_index.tolist() == [0, 2, 3, 4]
    for name in ("jaccard", "stale_coverage", "lag_one_coverage"):
        assert profile.samples(name, "oracle", 0.1).decode_index.tolist() == [3, 4]
    # the third step finds in the pool what the first selected
    hits = profile.samples("hit_rate", "oracle", 0.1)
    assert hits.decode_index.tolist() == [2, 3, 4]
    assert hits.value[:2].tolist() == [1, 1]
