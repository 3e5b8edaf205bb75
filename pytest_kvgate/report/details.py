"""The tables of details: total mass, sharing and staleness, layers, page sizes, paging."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from pytest_kvgate.analysis.selectors import TOKEN_ORACLE
from pytest_kvgate.analysis.wording import UNDEFINED, cost, multiple, part, percent, share
from pytest_kvgate.report.tables import by_budget, table
from pytest_kvgate.report.wording import bytes_text

Row = Mapping[str, Any]

#: How numbers are written of which less is better.
WRITTEN = {"output_error": cost, "starved": cost}


def detail_blocks(document: Row) -> list[Iterator[str]]:
    """Return the tables of one model, each as its lines; those without numbers are empty."""
    budgets = document["settings"]["budgets"]
    coverage = document["coverage"]
    titles = {
        "total_mass": "total mass at",
        "global_coverage": "global top-B at",
        "starved": "starved units at",
        "jaccard": "overlap (Jaccard) at",
        "stale_coverage": "stale coverage at",
        "lag_one_coverage": "one step stale at",
        "output_error": "output error at",
    }
    if document["strides"] == [1]:
        del titles["lag_one_coverage"]  # it is stale coverage then
    return [
        by_budget("95% interval at", coverage, "selector", "ci", budgets, _interval),
        *(
            by_budget(title, coverage, "selector", key, budgets, WRITTEN.get(key, share))
            for key, title in titles.items()
        ),
        _gap(document["gap"]),
        _ablation(document["dim_ablation"]),
        _layers(document),
        _sweep(document),
        _paging(document),
        _metadata(document["metadata"]),
    ]


def _interval(value: Sequence[float] | None) -> str:
    return UNDEFINED if value is None else f"{value[0]:.4f}..{value[1]:.4f}"


def _gap(rows: Sequence[Row]) -> Iterator[str]:
    """Yield the gap of every selector but the first, which the summary shows."""
    if not rows:
        return
    first = rows[0]["selector"]
    keys = ("diffuse", "granularity", "selection", "staleness", "shortfall")
    texts = [
        [f"{percent(row['budget'])} {row['selector']}", *(part(row[key]) for key in keys)]
        for row in rows
        if row["selector"] != first
    ]
    if texts:
        headers = ["lost at", "diffuse", "page granularity", "selector", "stale", "sum"]
        yield from table(texts, headers, ("left", *("right" for _ in keys)))


def _ablation(rows: Sequence[Row]) -> Iterator[str]:
    """Yield landmark without the dims that RoPE turns, where there are both kinds."""
    texts = [
        [percent(row["budget"]), share(row["unrotated_coverage"]), share(row["all_dims_coverage"])]
        for row in rows
        if row["unrotated_coverage"] is not None
    ]
    if texts:
        headers = ["landmark at", "unrotated dims", "all dims"]
        yield from table(texts, headers, ("left", "right", "right"))


def _layers(document: Row) -> Iterator[str]:
    """Yield a row per layer: its attention, and the first two selectors at each budget."""
    budgets = [
        budget
        for budget in document["settings"]["budgets"]
        if any(
            row["budget"] == budget and row["coverage"] is not None for row in document["layers"]
        )
    ]
    selectors = document["settings"]["selectors"][:2]
    found = {(row["layer"], row["budget"], row["selector"]): row for row in document["layers"]}
    layers = sorted({row["layer"] for row in document["layers"]})
    any_budget = document["settings"]["budgets"][0] if document["settings"]["budgets"] else None
    texts = []
    for layer in layers:
        about = found[layer, any_budget, selectors[0]]
        support = about["support"]
        texts.append(
            [
                str(layer),
                share(about["eligible_mass"]),
                UNDEFINED if support is None else f"{support:.0f}",
                share(about["hottest"]),
                *(
                    share(found[layer, budget, name]["coverage"])
                    for budget in budgets
                    for name in selectors
                ),
            ]
        )
    headers = ["layer", "eligible", "support", "hottest"]
    headers += [f"{name} {percent(budget)}" for budget in budgets for name in selectors]
    if texts:
        yield from table(texts, headers, ("right",) * len(headers))


def _sweep(document: Row) -> Iterator[str]:
    """Yield coverage at several page sizes: of the first two selectors, and of single tokens."""
    selectors = document["settings"]["selectors"]
    shown = {*selectors[:2], *(name for name in selectors if name == TOKEN_ORACLE)}
    named = [
        {**row, "name": f"{row['page_size']} tokens: {row['selector']}"}
        for row in document["sweep"]
        if row["selector"] in shown
    ]
    budgets = document["settings"]["budgets"]
    yield from by_budget("pages of", named, "name", "coverage", budgets, share)


def _paging(document: Row) -> Iterator[str]:
    """Yield what an LRU pool fetches, and how large it would have to be."""
    rows, link = document["paging"], document["settings"]["link"]
    if not rows:
        return
    pool = multiple(document["settings"]["pool"])
    texts = []
    for row in rows:
        text = [
            f"{percent(row['budget'])} {row['selector']}",
            share(row["hit_rate"]),
            f"{row['missed_pages']:.2f}",
            bytes_text(row["missed_bytes"]),
            UNDEFINED if row["pool_for_99"] is None else multiple(row["pool_for_99"]),
            share(row["first_selections"]),
        ]
        if link is not None:
            text.insert(4, f"{row['ms_per_token']:.3g}")
        texts.append(text)
    headers = [
        f"pool of {pool} k",
        "hit rate",
        "missed pages",
        "missed bytes/step",
        "pool for 99%",
        "first use",
    ]
    if link is not None:
        headers.insert(4, f"ms/token at {link:g} GB/s")
    yield from table(texts, headers, ("left", *("right" for _ in headers[1:])))
    strides = document["strides"]
    if strides and strides[-1] > 1:
        yield (
            f"  Steps were sampled up to {strides[-1]} apart, which overstates misses; "
            "--kvgate-steps=0:33:1 does not."
        )


def _metadata(rows: Sequence[Row]) -> Iterator[str]:
    """Yield what each selector stores beside all pages."""
    texts = [
        [row["selector"], bytes_text(row["metadata_bytes"])]
        for row in rows
        if row["metadata_bytes"]
    ]
    if texts:
        yield from table(texts, ["selector", "metadata of all pages"], ("left", "right"))
