"""`python -m shoal.memory.layout PROBLEM.csv`: lay out a problem in MiniMalloc's format and report the result.

Exit codes: 0 laid out, 1 no layout found within the capacity, 2 an argument or the file is wrong, 130 interrupted.
"""

from __future__ import annotations

import time
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.table import Table

from shoal.core.sizes import parse_bytes
from shoal.errors import InputError, ShoalError
from shoal.lowlevel import native
from shoal.memory.layout.csv_file import read_problem, write_layout
from shoal.memory.layout.fit import best_fit, first_fit
from shoal.memory.layout.problem import Layout, Problem, check_layout
from shoal.memory.layout.search import Answer, search, smallest

_NOT_FOUND = 1
_WRONG = 2
_INTERRUPTED = 130


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
        typer.echo(f"shoal.memory.layout: {error}", err=True)
        raise typer.Exit(_WRONG) from None
    except KeyboardInterrupt:
        typer.echo("shoal.memory.layout: interrupted; nothing was written", err=True)
        raise typer.Exit(_INTERRUPTED) from None
    if answer.layout is None:
        why = f"none found in {time_limit:g} s; give more time"
        if answer.proven:
            why = "no layout fits: that is proven"
        elif native.library() is None:
            why = "best fit needs more, and the native library, which searches further, is not built"
        typer.echo(f"shoal.memory.layout: {why}", err=True)
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


if __name__ == "__main__":
    typer.run(main)
