"""What stays resident, against counting tokens one by one."""

from __future__ import annotations

import math
from fractions import Fraction

import pytest

from pytest_kvgate.analysis import PAGE_SELECTORS, PageGrid
from pytest_kvgate.analysis.resident import LayerCache, Resident, resident

GRIDS = [PageGrid(32, 32, 0.02), PageGrid(16, 40, 100), PageGrid(8, 0, 0), PageGrid(64, 4, 0.1)]
CACHE = LayerCache((0,), n_head_kv=2, head_dim=64, token_bytes=256)


def counted(grid: PageGrid, budget: str, n_token: int) -> int:
    """Return the tokens of a KV head that are free, or on the last k eligible pages."""
    recent = math.ceil(Fraction(str(grid.recent)) * n_token) if grid.recent < 1 else grid.recent
    pages: dict[int, list[int]] = {}
    for position in range(n_token):
        pages.setdefault(position // grid.page_size, []).append(position)
    eligible = [
        number
        for number, positions in pages.items()
        if positions[0] >= grid.sinks
        and (number + 1) * grid.page_size <= n_token - recent
        and len(positions) == grid.page_size
    ]
    k = math.floor(Fraction(budget) * n_token / grid.page_size)
    out = set(eligible[: max(0, len(eligible) - k)])
    return sum(len(positions) for number, positions in pages.items() if number not in out)


@pytest.mark.parametrize("grid", GRIDS, ids=str)
@pytest.mark.parametrize("n_token", [1, 33, 500, 2527])
@pytest.mark.parametrize("budget", ["0.001", "0.02", "0.3", "1.0"])
def test_a_paged_layer_keeps_what_is_free_and_k_pages_of_each_head(
    grid: PageGrid, budget: str, n_token: int
) -> None:
    found = resident([CACHE], grid, float(budget), n_token)
    assert found == Resident(512 * counted(grid, budget, n_token), 0.0, 512 * n_token)


def test_at_2048_tokens_and_4_percent_a_layer_keeps_176_tokens() -> None:
    # free: page 0, and from floor((2048 - 41) / 32) = 62 pages on; k = floor(81.92 / 32) = 2
    found = resident([CACHE], PageGrid(32, 32, 0.02), 0.04, 2048)
    assert found.kv == (32 + 64 + 2 * 32) * 512
    assert found.share == 160 / 2048


def test_dense_layers_stay_whole_and_windows_as_long_as_they_are_known_to_be() -> None:
    caches = [
        CACHE,
        LayerCache((1,), 4, 32, 100.0),
        LayerCache((2,), 1, 64, 10.0, paged=False, window=128),
        LayerCache((3,), 1, 64, 10.0, paged=False),
        LayerCache((4,), 1, 64, 10.0, paged=False, window=5000),
    ]
    found = resident(caches, PageGrid(), 0.04, 2048, dense_layers=(1,))
    rest = 400 * 2048 + 10 * 128 + 10 * 2048 + 10 * 2048
    assert found.kv == 160 * 512 + rest
    assert found.whole == 2048 * 512 + rest


def test_metadata_is_kept_beside_every_whole_page_of_layers_that_are_paged() -> None:
    caches = [CACHE, LayerCache((1,), 2, 64, 256), LayerCache((2,), 2, 64, 256, paged=False)]
    found = resident(
        caches, PageGrid(), 0.04, 2060, selector=PAGE_SELECTORS["quest"], dense_layers=(1,)
    )
    assert found.metadata == 64 * 2 * (2 * 2 * 64)  # pages, KV heads, two numbers of 2 bytes a dim
    assert found.total == found.kv + found.metadata
    assert found.share == found.total / (3 * 2060 * 512)


def test_layers_that_share_a_cache_keep_k_pages_each_and_one_that_is_dense_keeps_it_whole() -> None:
    shared = LayerCache((1, 3), 2, 64, 256)
    assert resident([shared], PageGrid(), 0.04, 2048).kv == (96 + 4 * 32) * 512
    assert resident([shared], PageGrid(), 0.04, 2048, dense_layers=(3,)).kv == 2048 * 512


@pytest.mark.parametrize(("pool", "pages"), [(1.0, 2), (1.4, 2), (1.5, 3), (2.0, 4), (1e6, 61)])
def test_a_pool_keeps_so_many_times_k_pages_but_no_more_than_there_are(
    pool: float, pages: int
) -> None:
    assert resident([CACHE], PageGrid(), 0.04, 2048, pool=pool).kv == (96 + pages * 32) * 512
