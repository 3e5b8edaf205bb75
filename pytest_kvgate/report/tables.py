"""Tables and text for the terminal, at most 100 columns wide."""

from __future__ import annotations

import textwrap
from collections.abc import Iterator, Sequence

from tabulate import tabulate

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
        yield from table(
            [[row[column] for column in kept] for row in rows],
            [headers[column] for column in kept],
            [align[column] for column in kept],
        )


def shorten(text: str, width: int) -> str:
    """Cut text to a width, marking the cut."""
    return text if len(text) <= width else text[: width - 1] + "…"
