"""What a long preparation is doing, for who waits for a first step: stages, and one line on stderr that shows them.

`preparing` encloses the preparation, `doing` says what it does now. Nothing is written where stderr is not a terminal,
nor by a preparation that ends within two seconds. A block in which nothing is done is none.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from threading import Lock, Timer
from time import perf_counter
from typing import Literal, get_args

from rich.console import Console
from rich.markup import escape
from rich.progress import BarColumn, Progress, SpinnerColumn, TextColumn, TimeElapsedColumn
from rich.table import Column

log = logging.getLogger("shoal")
Stage = Literal["capture", "profile", "plan", "first run"]
STAGES: tuple[Stage, ...] = get_args(Stage)
_AFTER_SECONDS = 2.0
_current: ContextVar[Preparation | None] = ContextVar("current", default=None)


@dataclass(eq=False)
class Preparation:
    """What comes before a step can run: it is captured, its ops are profiled, a plan is made, and it runs once.

    Attributes:
        model: whose step it is.
        why: why a step is prepared again; "" for the first one.
        stages: the seconds of each stage so far.
    """

    model: str
    why: str = ""
    stages: dict[str, float] = field(default_factory=dict)
    _stage: Stage | None = None
    _since: float = field(default_factory=perf_counter)
    _line: _ProgressLine | None = None

    @property
    def seconds(self) -> float:
        """All of it."""
        return sum(self.stages.values())

    def at(self, stage: Stage) -> None:
        """This stage begins, or goes on."""
        now = perf_counter()
        before = self._stage or "capture"
        self.stages[before] = self.stages.get(before, 0.0) + now - self._since
        self._stage, self._since = stage, now

    def end(self) -> bool:
        """Take the line away; whether it was ever there."""
        line, self._line = self._line, None  # a record may outlive it
        return line is not None and line.stop()

    def show(self, stage: Stage, what: str, done: float, total: float | None) -> bool:
        """What is done now; whether there is a line to show it."""
        if self._stage is None and (console := Console(stderr=True, emoji=False)).is_terminal:
            self._line = _ProgressLine(console, self.model)
        self.at(stage)
        if self._line is not None:
            self._line.write(stage, what, done, total)
        return self._line is not None

    def __str__(self) -> str:
        parts = ", ".join(f"{stage} {self.stages[stage]:.1f} s" for stage in STAGES if stage in self.stages)
        what = f"prepared again, as {self.why}," if self.why else "first step prepared"
        return f"{self.model or 'the model'}: {what} in {self.seconds:.1f} s ({parts})"


@contextmanager
def preparing(
    model: str,
    *,
    why: str = "",
    begun_seconds: float = 0.0,
    record: Callable[[Preparation], object] = lambda preparation: None,
) -> Iterator[None]:
    """Show what `doing` says within the block; a block inside of another one is part of it.

    Args:
        model, why: as of `Preparation`.
        begun_seconds: how long the capture has been going on already.
        record: called with the preparation where the block ends well.
    """
    if _current.get() is not None:
        yield
        return
    preparation = Preparation(model, why, _since=perf_counter() - begun_seconds)
    token = _current.set(preparation)
    try:
        yield
    finally:
        _current.reset(token)
        was_shown = preparation.end()
    if preparation.stages:
        preparation.at("first run")
        record(preparation)
        if was_shown:
            Console(stderr=True, emoji=False).print(escape(str(preparation)), highlight=False, soft_wrap=True)
        else:
            log.info("%s", preparation)


def doing(stage: Stage, what: str = "", *, done: float = 0.0, total: float | None = None) -> bool:
    """Say what is done now; False where no line is shown.

    Args:
        stage: it is part of.
        what: it is, in words.
        done, total: how much of the stage, in any unit that goes with the time; None where that is not known.
    """
    preparation = _current.get()
    return preparation is not None and preparation.show(stage, what, done, total)


class _ProgressLine:
    """A stage, what it does, a bar where it is known how far it is, and the seconds that are left of it."""

    def __init__(self, console: Console, model: str) -> None:
        self._before = f"preparing {model or 'the model'}"
        self._bar = Progress(
            SpinnerColumn(),
            TextColumn("{task.description}"),
            BarColumn(bar_width=24, table_column=Column(min_width=24)),
            TimeElapsedColumn(),
            TextColumn("{task.fields[left]}"),
            TextColumn("{task.fields[what]}", table_column=Column(no_wrap=True, ratio=1)),
            console=console,
            transient=True,
            redirect_stdout=False,
        )
        self._task = self._bar.add_task(escape(self._before), total=None, left="", what="")
        self._measured: tuple[str, float] | None = None  # the stage whose bar is shown, and since when
        self._lock = Lock()
        self._ended = self._shown = False
        self._timer = Timer(_AFTER_SECONDS, self._show)
        self._timer.daemon = True
        self._timer.start()

    def _show(self) -> None:
        with self._lock:
            if not self._ended:
                self._shown = True
                self._bar.start()

    def write(self, stage: str, what: str, done: float, total: float | None) -> None:
        if total is None:
            self._measured, left = None, ""
        else:
            if self._measured is None or self._measured[0] != stage:
                self._measured = stage, perf_counter()
            spent = perf_counter() - self._measured[1]
            left = f"{spent * (total - done) / done:.0f} s left" if done else ""
        text = escape(f"{self._before}: {stage}")
        self._bar.update(self._task, description=text, completed=done, total=total, left=left, what=escape(what))

    def stop(self) -> bool:
        """Take the line away; whether it was ever there."""
        self._timer.cancel()
        with self._lock:
            self._ended = True
            self._bar.stop()
        return self._shown
