"""From traces to profiles."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from pytest_kvgate.analysis.measure import compatible, measure_layer
from pytest_kvgate.analysis.pages import PageGrid
from pytest_kvgate.analysis.plan import Plan
from pytest_kvgate.analysis.profile import Profile
from pytest_kvgate.analysis.threads import workers
from pytest_kvgate.analysis.units import LayerNumbers
from pytest_kvgate.trace import Trace, TraceError


def profile_trace(trace: Trace, grid: PageGrid, plan: Plan) -> Profile:
    """Measure one trace on one page grid; raises as `profile_on_grids` does."""
    return profile_on_grids(trace, (grid,), plan)[0]


def profile_on_grids(trace: Trace, grids: Sequence[PageGrid], plan: Plan) -> tuple[Profile, ...]:
    """Measure one trace on several page grids, in one pass over each layer.

    Layers with a sliding window are left out.

    Raises:
        TraceError: as `require_pages` does, or an array holds a value that is not finite.
        SelectorError: a registered selector returned something else than scores.
    """
    for grid in grids:
        require_pages(trace, grid)
    numbers: dict[int, list[LayerNumbers]] = {position: [] for position in range(len(grids))}
    with workers(max(layer.n_head_kv for layer in trace.paged_layers)) as threads:
        for layer in trace.paged_layers:
            for group in compatible(grids):
                chosen = [grids[position] for position in group]
                measured = measure_layer(layer, trace.steps, chosen, plan, threads)
                for position, found in zip(group, measured, strict=True):
                    numbers[position].append(found)
    return tuple(
        Profile((trace,), grid, plan, LayerNumbers.joined(numbers[position]))
        for position, grid in enumerate(grids)
    )


def pool(profiles: Sequence[Profile]) -> Profile:
    """Pool profiles measured with the same settings; every unit weighs the same."""
    first = profiles[0]
    if len(profiles) == 1:
        return first
    parts, n_before = [], 0
    for profile in profiles:
        units = profile.numbers.units
        moved = replace(units, trace=units.trace + n_before)  # a pool holds several already
        parts.append(replace(profile.numbers, units=moved))
        n_before += len(profile.traces)
    traces = tuple(trace for profile in profiles for trace in profile.traces)
    return Profile(traces, first.grid, first.plan, LayerNumbers.joined(parts))


def require_pages(trace: Trace, grid: PageGrid) -> None:
    """Raise TraceError unless there is a layer to page and an eligible page in it."""
    if not trace.paged_layers:
        raise TraceError(
            f"{trace.label}: every layer with a KV cache has a sliding window, so there is nothing "
            "to page. kvgate measures layers that attend to the whole context."
        )
    n_visible = trace.n_context
    first, end = grid.eligible(n_visible)
    if first == end:
        recent = grid.recent_tokens(n_visible)
        raise TraceError(
            f"{trace.label}: no page is eligible: of {n_visible} tokens the first {grid.sinks} "
            f"(sinks) and the last {recent} (recent window) are resident anyway, which leaves no "
            f"whole {grid.page_size}-token page between them. Use a longer prompt, smaller pages "
            "(--kvgate-page-size), or smaller --kvgate-sinks and --kvgate-recent."
        )
