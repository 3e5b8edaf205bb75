"""Tables and text for the terminal, at most 100 columns wide."""

from __future__ import annotations

import textwrap
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

from tabulate import tabulate

from pytest_kvgate.analysis.wording import percent

WIDTH = 100
INDENT = "  "


def wrap(text: str, indent: str = "") -> list[str]:
    """Break text into lines of at most `WIDTH` columns, but no path or other long word."""
    return textwrap.wrap(
        text,
        WIDTH,
        initial_indent=indent,
        subsequent_indent=indent,
        break_on_hyphens=False,
        break_long_words=False,
    )


def table(
    rows: Sequence[Sequence[str]], headers: Sequence[str], align: Sequence[str]
) -> Iterator[str]:
    """Yield a table, split into several where its columns would not fit into `WIDTH`."""
    text = tabulate(
        rows, headers, tablefmt="simple", disable_numparse=True, colalign=align if rows else None
    )
    lines = text.splitlines()
    if max(map(len, lines)) <= WIDTH - len(INDENT) or len(headers) <= 2:
        yield from (INDENT + line.rstrip() for line in lines)
        return
    # Too wide: halve the columns, and repeat the first one, which names the row.
    middle = (len(headers) + 1) // 2
    for columns in (range(1, middle), range(middle, len(headers))):
        kept = [0, *columns]
        if columns.start > 1:
            yield ""
        yield from table(
            [[row[column] for column in kept] for row in rows if any(row[c] for c in columns)],
            [headers[column] for column in kept],
            [align[column] for column in kept],
        )


def by_budget(
    title: str,
    rows: Sequence[Mapping[str, Any]],
    name: str,
    key: str,
    budgets: Sequence[float],
    written: Callable[[Any], str],
) -> Iterator[str]:
    """Yield a table of ``rows[…][key]``, a row per ``rows[…][name]`` and a column per budget.

    Rows and columns without any number are left out.
    """
    found = {(row[name], row["budget"]): row[key] for row in rows if row[key] is not None}
    names = dict.fromkeys(row[name] for row in rows)
    known = [item for item in names if any((item, budget) in found for budget in budgets)]
    shown = [budget for budget in budgets if any((item, budget) in found for item in names)]
    texts = [[item, *(written(found.get((item, budget))) for budget in shown)] for item in known]
    if known:
        yield from table(texts, [title, *map(percent, shown)], ("left", *("right" for _ in shown)))


def blocks(parts: Iterable[Iterator[str]]) -> Iterator[str]:
    """Yield the lines of several blocks, empty lines between those that have any."""
    printed = False
    for part in parts:
        for position, line in enumerate(part):
            if printed and not position:
                yield ""
            yield line
            printed = True


def shorten(text: str, width: int) -> str:
    """Cut text to a width, marking the cut."""
    return text if len(text) <= width else text[: width - 1] + "…"
