"""A run on the terminal: the plan, a live bar, the outcome. Without a terminal, one line an epoch."""

from __future__ import annotations

from typing import Any

from rich.console import Console
from rich.markup import escape
from rich.progress import BarColumn, MofNCompleteColumn, TaskID, TextColumn, TimeElapsedColumn
from rich.progress import Progress as Bar
from rich.table import Table

from shoal.app.training.options import Outcome, Progress, TrainOptions
from shoal.app.training.results import in_words
from shoal.core.sizes import format_bytes


class Display:
    """Shows a run as it goes; a `Watcher` and a context manager.

    Args:
        console: where to.
        options: of the run.
    """

    def __init__(self, console: Console, options: TrainOptions) -> None:
        self._console = console
        self._options = options
        self._task: TaskID | None = None
        self._bar = Bar(
            TextColumn("epoch {task.fields[epoch]}"),
            BarColumn(),
            MofNCompleteColumn(),
            TextColumn("{task.fields[news]}"),
            TimeElapsedColumn(),
            console=console,
            disable=not console.is_terminal,
        )

    def __enter__(self) -> Display:
        self._bar.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._bar.stop()

    def planned(self, state: Any) -> None:
        """Print the plan, as `shoal plan` does."""
        self.say(state.plan.explain())

    def stepped(self, now: Progress) -> None:
        """Move the bar."""
        fields: dict[str, Any] = {"epoch": f"{now.epoch}/{now.epochs}", "news": self._news(now)}
        if self._task is None:
            self._task = self._bar.add_task("", total=now.steps, **fields)
        self._bar.update(self._task, total=now.steps, completed=now.step, **fields)

    def epoch_ended(self, last: Progress, test_accuracy: float) -> None:
        """Print the epoch's line."""
        self.say(f"epoch {last.epoch}/{last.epochs}  {self._news(last)}  test {test_accuracy:.1%}")

    def ended(self, outcome: Outcome) -> None:
        """Print the results."""
        table = Table(title=f"{escape(self._options.model)} on {escape(self._options.data)}", show_header=False)
        for name, value in in_words(self._options, outcome).items():
            table.add_row(name, escape(value))
        self._console.print(table)

    def say(self, text: str) -> None:
        """Print lines as they are."""
        self._console.print(text, highlight=False, markup=False, soft_wrap=True)

    def _news(self, now: Progress) -> str:
        news = f"loss {now.loss:.4f}  accuracy {now.accuracy:.1%}"
        if now.images_per_second:
            news += f"  {now.images_per_second:.0f} images/s"
        if now.peak_bytes is not None:
            news += f"  peak {format_bytes(now.peak_bytes)}"
            if self._options.budget_bytes:
                news += f" of {format_bytes(self._options.budget_bytes)}"
        return news
