"""`python -m examples.minimalloc PROBLEM.csv`: lay out a problem in MiniMalloc's format and report the result.

Its columns are `id,lower,upper,size`, and `offset` for an answer.

Exit codes: 0 laid out, 1 no layout found within the capacity, 2 an argument or the file is wrong, 130 interrupted.
"""

from __future__ import annotations

import csv
import io
import time
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.table import Table

from shoal.core.files import write_text
from shoal.core.sizes import parse_bytes
from shoal.errors import InputError, ShoalError, brief
from shoal.lowlevel import native
from shoal.memory.layout.problem import Block, Layout, Problem, check_layout
from shoal.memory.layout.search import Answer, best_fit, placed_in_order, search

_NOT_FOUND = 1
_WRONG = 2
_INTERRUPTED = 130

_LARGEST = 2**62  # sums in the search stay within 63 bits
_SHARE_OF_TIME = 1 / 3  # of the time left, for one capacity
_COLUMNS = ("id", "lower", "upper", "size")


def main(
    problem: Annotated[Path, typer.Argument(help="CSV with the columns id, lower, upper, size.")],
    capacity: Annotated[
        str | None, typer.Option(help="Bytes of the arena; without it, the smallest is searched for.")
    ] = None,
    time_limit: Annotated[float, typer.Option(help="Seconds to search for.")] = 60.0,
    output: Annotated[Path | None, typer.Option(help="CSV to write, with an offset column.")] = None,
) -> None:
    """Give every block of a problem an address, by first fit, by best fit and by an exact search."""
    try:
        if not 0 <= time_limit < float("inf"):
            raise InputError(f"time-limit={time_limit}: expected a finite number of seconds of at least 0")
        blocks = read_problem(problem)
        capacity_bytes = None if capacity is None else parse_bytes(capacity)
        answer = _lay_out(blocks, capacity_bytes, time_limit)
        if answer.layout is not None and output is not None:
            write_layout(output, answer.layout)
            typer.echo(str(output))
    except ShoalError as error:
        typer.echo(f"examples.minimalloc: {error}", err=True)
        raise typer.Exit(_WRONG) from None
    except KeyboardInterrupt:
        typer.echo("examples.minimalloc: interrupted; nothing was written", err=True)
        raise typer.Exit(_INTERRUPTED) from None
    if answer.layout is None:
        why = f"none found in {time_limit:g} s; give more time"
        if answer.proven:
            why = "no layout fits: that is proven"
        elif native.library() is None:
            why = "best fit needs more, and the native library, which searches further, is not built"
        typer.echo(f"examples.minimalloc: {why}", err=True)
        raise typer.Exit(_NOT_FOUND)


def _lay_out(problem: Problem, capacity_bytes: int | None, time_limit_seconds: float) -> Answer:
    table = Table("layout", "arena bytes", "of the most in use", "seconds", title=f"{len(problem.blocks)} blocks")
    for column in table.columns[1:]:
        column.justify = "right"
    table.add_row("the most bytes in use at once", f"{problem.highest_live_bytes}", "100.0 %", "")

    def add(name: str, layout: Layout | None, seconds: float) -> None:
        figures = ("none", "") if layout is None else (f"{layout.arena_bytes}", f"{100 * layout.fragmentation:.1f} %")
        table.add_row(name, *figures, f"{seconds:.2f}")

    for name, method in (("first fit", first_fit), ("best fit", best_fit)):
        started = time.perf_counter()
        layout = method(problem)
        add(name, layout, time.perf_counter() - started)
        check_layout(layout)
    started = time.perf_counter()
    if capacity_bytes is None:
        answer = smallest(problem, time_limit_seconds=time_limit_seconds)
    else:
        answer = search(problem, capacity_bytes, time_limit_seconds=time_limit_seconds)
    name = "search" if native.library() is not None else "best fit (no native library, so no search)"
    add(name, answer.layout, time.perf_counter() - started)
    if answer.layout is not None:
        check_layout(answer.layout, capacity_bytes)
    Console().print(table)
    return answer


def first_fit(problem: Problem) -> Layout:
    """Give each block, in the order of allocation, the lowest address where it fits.

    This is the paper's static memory planning (Split-CNN and HMMS, section 4.4), and what an allocator without
    knowledge of the future does. Blocks that are allocated at the same time keep their order.
    """
    blocks = problem.blocks
    return placed_in_order(problem, sorted(range(len(blocks)), key=lambda place: blocks[place].lower), tightest=False)


def smallest(problem: Problem, *, time_limit_seconds: float = 60.0) -> Answer:
    """The smallest layout found in time; `proven` where there is none smaller.

    Starts from `best_fit`, tries the lower bound (the most bytes in use at once), and bisects the capacities between.
    """
    deadline = time.perf_counter() + time_limit_seconds
    best = best_fit(problem)
    if native.library() is None:
        return Answer(best, best.arena_bytes == problem.highest_live_bytes)
    impossible_bytes = problem.highest_live_bytes - 1
    tried_bytes = problem.highest_live_bytes
    not_found_bytes = impossible_bytes
    while best.arena_bytes - 1 > not_found_bytes:
        left_seconds = deadline - time.perf_counter()
        if left_seconds <= 0:
            break
        answer = search(problem, tried_bytes, time_limit_seconds=_SHARE_OF_TIME * left_seconds)
        if answer.layout is not None:
            best = answer.layout
        else:
            not_found_bytes = tried_bytes
            if answer.proven:
                impossible_bytes = tried_bytes
        tried_bytes = (not_found_bytes + best.arena_bytes) // 2
    return Answer(best, best.arena_bytes - 1 == impossible_bytes)


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


if __name__ == "__main__":
    typer.run(main)
