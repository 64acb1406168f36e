"""What runs now, for whoever watches a terminal."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Protocol

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn


class Show(Protocol):
    """Say what runs; `steps` of the whole are done since the last call."""

    def __call__(self, subject: str, what: str, steps: int = 0) -> None: ...


@contextmanager
def bar(total: int) -> Iterator[Show]:
    """A bar over `total` things on stderr, with what runs now; nothing where nobody watches."""
    console = Console(stderr=True)
    columns = (BarColumn(), MofNCompleteColumn(), TimeElapsedColumn(), TextColumn("{task.description}"))
    with Progress(*columns, console=console, transient=True, disable=not console.is_terminal) as progress:
        task = progress.add_task("", total=total)

        def show(subject: str, what: str, steps: int = 0) -> None:
            progress.update(task, description=f"{subject}: {what}", advance=steps)

        yield show
