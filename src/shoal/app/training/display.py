"""A run on the terminal: the plan as a table, a live bar, the outcome. Without a terminal, one line an epoch."""

from __future__ import annotations

from types import TracebackType
from typing import TYPE_CHECKING, Any

from rich.console import Console
from rich.markup import escape
from rich.progress import BarColumn, MofNCompleteColumn, TaskID, TextColumn, TimeElapsedColumn
from rich.progress import Progress as Bar
from rich.table import Table

from shoal.app.training.options import Outcome, Progress, TrainOptions
from shoal.app.training.results import bytes_by_kind
from shoal.core.sizes import format_bytes

if TYPE_CHECKING:
    from shoal import Plan


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

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._bar.stop()

    def planned(self, state: Any) -> None:
        """Print the plan."""
        if getattr(state, "plan", None) is not None:
            self._console.print(plan_table(state.plan))

    def stepped(self, now: Progress) -> None:
        """Move the bar."""
        fields: dict[str, Any] = {"epoch": f"{now.epoch}/{now.epochs}", "news": self._news(now)}
        if self._task is None:
            self._task = self._bar.add_task("", total=now.steps, **fields)
        self._bar.update(self._task, total=now.steps, completed=now.step, **fields)

    def epoch_ended(self, last: Progress, test_accuracy: float) -> None:
        """Print the epoch's line."""
        self._console.print(
            f"epoch {last.epoch}/{last.epochs}  {self._news(last)}  test {test_accuracy:.1%}",
            highlight=False,
            soft_wrap=True,
        )

    def _news(self, now: Progress) -> str:
        news = f"loss {now.loss:.4f}  accuracy {now.accuracy:.1%}"
        if now.images_per_second:
            news += f"  {now.images_per_second:.0f} images/s"
        if now.peak_bytes is not None:
            news += f"  peak {format_bytes(now.peak_bytes)}"
            if self._options.budget_bytes:
                news += f" of {format_bytes(self._options.budget_bytes)}"
        return news


def plan_table(plan: Plan) -> Table:
    """What the plan does and what it is predicted to cost."""
    table = Table(title=f"Plan for {escape(plan.graph.model or 'the model')} ({plan.planner})", show_header=False)
    kept, again = plan.kept, plan.recomputed
    plain = plan.plain_peak_bytes
    _row(table, "kept", f"{len(kept)} saved storages, {format_bytes(sum(s.nbytes for s in kept))}")
    _row(table, "recomputed", f"{len(again)} storages, {format_bytes(sum(s.nbytes for s in again))}")
    if plan.offloaded:
        wait = _seconds(plan.timeline.stall_seconds)
        away = f"{len(plan.offloaded)} storages, {format_bytes(plan.host_bytes)}"
        _row(table, "offloaded", f"{away}; the device waits {wait} for copies")
    if wait_seconds := plan.timeline.launch_wait_seconds:
        _row(table, "launches", f"the device waits {_seconds(wait_seconds)} for the host to launch ops")
    if plan.budget_bytes:
        _row(table, "budget", format_bytes(plan.budget_bytes))
    _row(
        table,
        "predicted peak",
        f"{format_bytes(plan.predicted_peak_bytes)}, {plan.predicted_peak_bytes / plain:.1%} of plain PyTorch's "
        f"({format_bytes(plain)})",
    )
    _row(table, "predicted step", f"{_seconds(plan.predicted_seconds)}; plain PyTorch {_seconds(plan.plain_seconds)}")
    least_seconds = plan.plain_seconds + plan.least_added_seconds
    _row(table, "lower bound", f"no plan in this form and order of ops takes less than {_seconds(least_seconds)}")
    _row(table, "planned in", _seconds(plan.planning_seconds))
    return table


def outcome_table(options: TrainOptions, outcome: Outcome) -> Table:
    """The results of the run."""
    table = Table(title=f"{escape(options.model)} on {escape(options.data)}", show_header=False)
    accuracy = outcome.test_accuracy
    _row(table, "test accuracy", "not tested" if accuracy is None else f"{accuracy:.1%}")
    if outcome.losses:
        _row(table, "loss", f"{outcome.losses[0]:.4f} at first, {outcome.losses[-1]:.4f} at last")
    _row(table, "images per second", f"{outcome.images_per_second:.0f}" if outcome.images_per_second else "no step ran")
    if outcome.predicted_peak_bytes:
        _row(table, "predicted peak", format_bytes(outcome.predicted_peak_bytes))
    if outcome.measured_peak_bytes is not None:
        measured = format_bytes(outcome.measured_peak_bytes)
        if options.budget_bytes:
            share = outcome.measured_peak_bytes / options.budget_bytes
            measured += f", {share:.1%} of the budget of {format_bytes(options.budget_bytes)}"
        _row(table, "measured peak", measured)
    for name, value in bytes_by_kind(outcome.traffic).items():
        _row(table, name, value)
    return table


def _row(table: Table, name: str, value: str) -> None:
    table.add_row(name, escape(value))


def _seconds(seconds: float) -> str:
    return f"{seconds:.1f} s" if seconds >= 10 else f"{1e3 * seconds:.1f} ms" if seconds < 1 else f"{seconds:.2f} s"
