"""The points of a frontier as rows of text, and as a table for a terminal."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from rich.markup import escape
from rich.table import Table

from shoal.core.added_time import added_text
from shoal.core.frontier import FrontierData, FrontierPoint, Storages
from shoal.core.sizes import format_bytes

COLUMNS = (
    "budget", "of plain %", "predicted peak", "step ms", "added", "bound ms", "kept", "recomputed", "offloaded",
    "encoded", "computed",
)  # fmt: skip


def rows(frontier: FrontierData) -> list[tuple[str, ...]]:
    """A row for each point, by increasing budget; `COLUMNS` heads them."""
    return [row(frontier, point) for point in frontier.points]


def table(frontier: FrontierData) -> Table:
    """The points, for `rich.print`; the fastest inside the user's budget is bold."""
    inside = frontier.inside_budget
    return grid(title(frontier), COLUMNS, rows(frontier), None if inside is None else row(frontier, inside))


def grid(title: str, columns: Sequence[str], rows: Iterable[tuple[str, ...]], marked: tuple[str, ...] | None) -> Table:
    """Rows under their headings, figures to the right and the last column to the left; the marked one is bold."""
    table = Table(title=escape(title), title_justify="left")
    for heading in columns:
        table.add_column(heading, justify="left" if heading == columns[-1] else "right")
    for cells in rows:
        table.add_row(*map(escape, cells), style="bold" if cells == marked else None)
    return table


def title(frontier: FrontierData) -> str:
    """What is shown, in one line."""
    plain = f"{milliseconds(frontier.plain_seconds)} ms in {format_bytes(frontier.plain_peak_bytes)}"
    return f"{frontier.model}, times for {frontier.hardware}; plain PyTorch: {plain}"


def row(frontier: FrontierData, point: FrontierPoint) -> tuple[str, ...]:
    """A point under `COLUMNS`."""
    return (
        format_bytes(point.budget_bytes),
        f"{100 * point.budget_bytes / frontier.plain_peak_bytes:.1f}",
        format_bytes(point.predicted_peak_bytes),
        milliseconds(point.seconds),
        added_text(point.seconds, frontier.plain_seconds),
        milliseconds(point.bound_seconds),
        *(_described(s) for s in (point.kept, point.recomputed, point.offloaded, point.encoded)),
        str(point.variant),
    )


def _described(storages: Storages) -> str:
    return f"{storages.count}: {format_bytes(storages.nbytes)}" if storages.count else "-"


def milliseconds(seconds: float) -> str:
    """Seconds in ms, with one to three digits after the point.

    >>> milliseconds(0.0123), milliseconds(0.00012345)
    ('12.3', '0.123')
    """
    count = 1e3 * seconds
    return f"{count:.{3 if count < 1 else 2 if count < 10 else 1}f}"
