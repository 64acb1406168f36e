"""Tables of results for a reader."""

from __future__ import annotations

import statistics
import string
from collections.abc import Mapping
from typing import Any

from rich.table import Table

from shoal.core.sizes import format_bytes


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


def cells(formats: str, row: Mapping[str, Any] | None = None, /, **more: Any) -> list[str]:
    """The cells of a row.

    Args:
        formats: with strokes between, as of `str.format`; `bytes` and `ms` are formats too (of bytes, of seconds), and
            of a list the median is taken. A cell whose value is None or missing is empty.
        row, more: the values.

    >>> cells("{name} | {peak:bytes} | {seconds:ms} | {off:+.1f} % | {of[a]:.0f}", {"name": "ours", "of": {"a": 2}},
    ...     peak=2048, seconds=[0.001, 0.002, 0.003])
    ['ours', '2.000 KiB', '2.0', '', '2']
    """
    values = {**(row or {}), **more}
    return [_cell(one.strip(), values) for one in formats.split("|")]


def _cell(form: str, values: Mapping[str, Any]) -> str:
    try:
        return _FORMATTER.vformat(form, (), values)
    except (KeyError, AttributeError, TypeError):
        return ""


class _Formatter(string.Formatter):
    def format_field(self, value: Any, form: str) -> str:
        if value is None:
            raise KeyError
        if isinstance(value, list):
            value = statistics.median(value)
        if form == "bytes":
            return format_bytes(int(value))
        return f"{1e3 * value:.1f}" if form == "ms" else format(value, form)


_FORMATTER = _Formatter()
