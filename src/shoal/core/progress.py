"""One line on stderr that says what a long preparation is doing, for who waits for a first step.

`preparing` encloses the preparation, `doing` says what it does now. Nothing is written where stderr is not a terminal,
nor by a preparation that ends within two seconds.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from threading import Lock, Timer

from rich.console import Console
from rich.live import Live
from rich.spinner import Spinner
from rich.text import Text

_AFTER_SECONDS = 2.0
_line: ContextVar[_Line | None] = ContextVar("line", default=None)


@contextmanager
def preparing(model: str) -> Iterator[None]:
    """Show what `doing` says within the block; a block inside of another one uses its line."""
    console = Console(stderr=True)
    if _line.get() is not None or not console.is_terminal:
        yield
        return
    line = _Line(console, model)
    token = _line.set(line)
    try:
        yield
    finally:
        _line.reset(token)
        line.stop()


def doing(what: str) -> bool:
    """Say what is done now; False where no line is shown."""
    line = _line.get()
    if line is not None:
        line.write(what)
    return line is not None


class _Line:
    def __init__(self, console: Console, model: str) -> None:
        self._before = f"preparing {model or 'the model'}"
        self._spinner = Spinner("dots", Text(self._before))
        self._live = Live(self._spinner, console=console, transient=True, redirect_stdout=False)
        self._lock = Lock()
        self._ended = False
        self._timer = Timer(_AFTER_SECONDS, self._show)
        self._timer.daemon = True
        self._timer.start()

    def _show(self) -> None:
        with self._lock:
            if not self._ended:
                self._live.start()

    def write(self, what: str) -> None:
        self._spinner.update(text=Text(f"{self._before}: {what}"))

    def stop(self) -> None:
        self._timer.cancel()
        with self._lock:
            self._ended = True
            self._live.stop()
