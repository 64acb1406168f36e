"""Tables of results for a reader."""

from __future__ import annotations

from typing import Any

from rich.table import Table


def new_table(title: str, columns: str, **settings: Any) -> Table:
    """An empty table.

    Args:
        title: above it.
        columns: their names, with strokes between; numbers stand on the right, columns whose names begin with `<` on
            the left.
        settings: for `rich.table.Table`.

    >>> [(column.header, column.justify) for column in new_table("Times", "<contender | ms").columns]
    [('contender', 'left'), ('ms', 'right')]
    """
    made = Table(title=title, **settings)
    for column in map(str.strip, columns.split("|")):
        made.add_column(column.removeprefix("<"), justify="left" if column.startswith("<") else "right")
    return made
