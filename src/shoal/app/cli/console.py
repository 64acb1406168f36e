"""What all commands share: the program they belong to, how they print, and how they report a user's mistake."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch
import typer
from rich.console import Console
from rich.markup import escape
from rich.progress import Progress, SpinnerColumn, TextColumn, TimeElapsedColumn
from rich.table import Table
from rich.text import Text

from shoal.app.cli.typed import in_flags, reject_without_effect
from shoal.core.columns import aligned
from shoal.errors import InputError, ShoalError

WRONG = 2
OUT_OF_MEMORY = 3
DIVERGED = 4
INTERRUPTED = 130

app = typer.Typer(
    help="Train convolutional networks inside a byte budget.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)
errors = Console(stderr=True, emoji=False)  # what a user typed, such as train.py:x, may look like the name of one


def output() -> Console:
    """Where results go: stdout, as wide as a row needs where it is not a terminal."""
    console = Console(emoji=False)
    if not console.is_terminal:
        console.width = 240
    return console


@contextmanager
def search_shown(name: str) -> Iterator[Callable[[str], object]]:
    """A line that shows what a search tries; nothing where stderr is not a terminal."""
    columns = (SpinnerColumn(), TextColumn("{task.description}"), TimeElapsedColumn())
    with Progress(*columns, console=errors, transient=True, disable=not errors.is_terminal) as progress:
        task = progress.add_task(name)
        yield lambda what: progress.update(task, description=f"{name}: {escape(what)}")


@contextmanager
def errors_reported(ctx: typer.Context, *, quiet: bool = False) -> Iterator[None]:
    """A user's mistake is reported on stderr, with exit code 2; so is memory that ran out, with code 3.

    Flags that have no effect are such a mistake.

    Args:
        ctx: of the command, whose flags the messages name.
        quiet: whether another process reports the same.
    """
    try:
        reject_without_effect(ctx)
        yield
    except ShoalError as error:
        if not quiet:
            report_error(error, ctx)
        raise typer.Exit(WRONG) from None
    except KeyboardInterrupt:
        if not quiet:
            report_error("interrupted at once; what was done since the last checkpoint is lost")
        raise typer.Exit(INTERRUPTED) from None
    except (MemoryError, RuntimeError) as error:
        if not is_out_of_memory(error):
            raise
        if not quiet:
            reason = " ".join(str(error).split())[:100] or type(error).__name__
            report_error(f"out of memory ({reason}); give a smaller batch or image")
        raise typer.Exit(OUT_OF_MEMORY) from None


def is_out_of_memory(error: BaseException) -> bool:
    """Whether memory ran out; torch's allocator of the CPU has no class of its own for that."""
    return isinstance(error, (MemoryError, torch.OutOfMemoryError)) or "DefaultCPUAllocator" in str(error)


def report_error(error: ShoalError | str, ctx: typer.Context | None = None) -> None:
    """Print what happened on stderr and the details of an error below it, their values aligned.

    Args:
        error: or what to say.
        ctx: of the command, if the error names keywords of Python.
    """
    details = error.details if isinstance(error, ShoalError) else {}
    text = str(ShoalError(*error.args)) if isinstance(error, ShoalError) else " ".join(error.split())
    if ctx is not None:
        text = in_flags(text, ctx)
        details = {label: in_flags(str(value), ctx) for label, value in details.items()}
    errors.print(f"[bold red]shoal:[/] {escape(text)}", highlight=False, soft_wrap=True)
    rows = [(f"  {label}:", str(value)) for label, value in details.items()]
    if not errors.is_terminal:
        for line in aligned(rows):  # one fact a line, whatever the width
            errors.print(Text(line), soft_wrap=True)
    elif rows:
        facts = Table.grid(padding=(0, 2))
        for label, value in rows:
            facts.add_row(Text(label, style="dim"), Text(value))
        errors.print(facts)


def patch_grid(text: str) -> tuple[int, ...]:
    """Read --grid, such as 2x2.

    Raises:
        InputError: it is not numbers with an x in between.
    """
    parts = text.lower().split("x")
    if not all(part.strip().isdecimal() for part in parts):
        raise InputError(f"--grid {text}: expected numbers of patches with an x in between, such as 2x2")
    return tuple(int(part) for part in parts)
