"""Layout problems and layouts as CSV, in MiniMalloc's columns: `id,lower,upper,size`, and `offset` for an answer."""

from __future__ import annotations

import csv
import io
from pathlib import Path

from shoal.core.files import write_text
from shoal.errors import InputError, brief
from shoal.memory.layout.problem import Block, Layout, Problem

_LARGEST = 2**62  # sums in the search stay within 63 bits
_COLUMNS = ("id", "lower", "upper", "size")


def read_problem(path: str | Path) -> Problem:
    """Read a problem; an `offset` column, if there is one, is ignored.

    Raises:
        InputError: the file cannot be read, a column is missing, or a line is invalid; the message names the line.
    """
    try:
        text = Path(path).read_text(encoding="utf-8-sig")
    except (OSError, UnicodeDecodeError) as error:
        reason = getattr(error, "strerror", None) or "it is not UTF-8 text"
        raise InputError(
            f"cannot read {path}: {reason}; give a CSV file with the columns {','.join(_COLUMNS)}"
        ) from None
    try:
        return _problem(path, csv.DictReader(io.StringIO(text), skipinitialspace=True))
    except csv.Error as error:
        raise InputError(
            f"{path} is not a CSV file ({error}); expected {','.join(_COLUMNS)} in the first line"
        ) from None


def _problem(path: str | Path, rows: csv.DictReader[str]) -> Problem:
    names = [name.strip() for name in rows.fieldnames or ()]
    missing = [column for column in _COLUMNS if column not in names]
    if missing:
        raise InputError(f"{path} has no column {missing[0]!r}; expected {','.join(_COLUMNS)} in the first line")
    if unknown := [name for name in names if name not in (*_COLUMNS, "offset")]:
        expected = ",".join(_COLUMNS)
        raise InputError(f"{path} has a column {brief(unknown[0])}, which is not supported; expected {expected}")
    rows.fieldnames = names
    blocks = []
    for row in rows:
        try:
            lower, upper, size_bytes = (int(row[column]) for column in _COLUMNS[1:])
        except (TypeError, ValueError):
            raise InputError(f"{path}, line {rows.line_num}: lower, upper and size must be whole numbers") from None
        if not all(-_LARGEST <= number <= _LARGEST for number in (lower, upper, size_bytes)):
            raise InputError(f"{path}, line {rows.line_num}: a number has more than 62 bits")
        if None in row:
            raise InputError(f"{path}, line {rows.line_num}: more values than columns")
        blocks.append(Block(row["id"] or "", lower, upper, size_bytes))
    if sum(block.size_bytes for block in blocks) > _LARGEST:
        raise InputError(f"{path}: the blocks together have more than 2**62 bytes")
    try:
        return Problem(tuple(blocks))
    except InputError as error:
        raise InputError(f"{path}: {error}") from None


def write_layout(path: str | Path, layout: Layout) -> Path:
    """Write the problem with an `offset` column, atomically.

    Raises:
        InputError: the file cannot be written.
    """
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow((*_COLUMNS, "offset"))
    for block, offset in zip(layout.problem.blocks, layout.offsets, strict=True):
        writer.writerow((block.name, block.lower, block.upper, block.size_bytes, offset))
    return write_text(path, text.getvalue())
