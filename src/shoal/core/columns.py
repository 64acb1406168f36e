"""Text in columns, to be printed or pasted anywhere."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence

from rich.console import Console, RenderableType
from rich.markup import escape
from rich.table import Table
from rich.text import Text


def aligned(rows: Iterable[Sequence[str]]) -> list[str]:
    """A line for each row, with two spaces between columns as wide as their widest cells.

    >>> aligned([("layer", "was"), ("features.0", "7 x 7")])
    ['layer       was', 'features.0  7 x 7']
    """
    grid = Table.grid(padding=(0, 2, 0, 0))
    for row in rows:
        grid.add_row(*map(Text, row))
    return as_text(grid).splitlines() if grid.row_count else []


def grid(
    title: str,
    columns: Sequence[str],
    rows: Iterable[Sequence[str]],
    *,
    left: Collection[str],
    marked: Sequence[str] | None = None,
) -> Table:
    """A table for `rich.print`, its figures to the right.

    Args:
        title: above it.
        columns: their headings.
        rows: a cell for each column.
        left: headings of the columns that hold words.
        marked: the row that is bold.
    """
    table = Table(title=escape(title), title_justify="left")
    for heading in columns:
        table.add_column(heading, justify="left" if heading in left else "right")
    for cells in rows:
        table.add_row(*map(escape, cells), style="bold" if cells == marked else None)
    return table


def as_text(shown: RenderableType) -> str:
    """What rich prints of it, without colours and with nothing wrapped."""
    console = Console(width=100_000, color_system=None)
    with console.capture() as printed:
        console.print(shown)
    return "\n".join(line.rstrip() for line in printed.get().splitlines())
