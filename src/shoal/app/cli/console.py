"""How commands speak: results to stdout, a user's mistake as one line on stderr, and an exit code."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import typer
from rich.console import Console
from rich.markup import escape

from shoal.errors import ShoalError

WRONG = 2
OUT_OF_MEMORY = 3
INTERRUPTED = 130

errors = Console(stderr=True)


def printing() -> Console:
    console = Console()
    if not console.is_terminal:
        console.width = 240  # a file has room for a whole row
    return console


@contextmanager
def told_plainly(*, quiet: bool = False) -> Iterator[None]:
    """A user's mistake is one line on stderr and exit code 2. `quiet` where another process tells the same."""
    try:
        yield
    except ShoalError as error:
        if not quiet:
            tell(str(error))
        raise typer.Exit(WRONG) from None
    except KeyboardInterrupt:
        if not quiet:
            tell("interrupted at once; what was done since the last checkpoint is lost")
        raise typer.Exit(INTERRUPTED) from None


def tell(message: str) -> None:
    errors.print(f"[bold red]shoal:[/] {escape(' '.join(message.split()))}", highlight=False, soft_wrap=True)
