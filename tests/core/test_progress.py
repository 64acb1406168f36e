"""Who waits at a terminal for a first step reads what it is doing; a log file gets nothing."""

from __future__ import annotations

import io
import time

import pytest
from rich.console import Console

from shoal.core import progress
from shoal.core.progress import doing, preparing


@pytest.fixture
def terminal(monkeypatch: pytest.MonkeyPatch) -> io.StringIO:
    stream = io.StringIO()
    console = Console(file=stream, force_terminal=True, force_interactive=True, color_system=None, width=100)
    monkeypatch.setattr(progress, "Console", lambda stderr: console)
    return stream


def wait_for(text: str, stream: io.StringIO) -> None:
    until = time.monotonic() + 10
    while text not in stream.getvalue() and time.monotonic() < until:
        time.sleep(0.01)


def test_a_long_preparation_says_what_it_does(terminal, monkeypatch):
    monkeypatch.setattr(progress, "_AFTER_SECONDS", 0.0)
    with preparing("ResNet"):
        assert doing("capturing")
        wait_for("preparing ResNet: capturing", terminal)
        with preparing("another"):
            doing("timing op 1 of 2")
        wait_for("preparing ResNet: timing op 1 of 2", terminal)
    shown = terminal.getvalue()
    assert "preparing ResNet: capturing" in shown and "preparing ResNet: timing op 1 of 2" in shown
    assert "another" not in shown
    assert not doing("nothing any more")


def test_a_short_one_writes_nothing(terminal):
    with preparing("ResNet"):
        doing("capturing")
    assert terminal.getvalue() == ""


def test_a_file_gets_nothing(monkeypatch, capfd):
    monkeypatch.setattr(progress, "_AFTER_SECONDS", 0.0)
    with preparing("ResNet"):
        assert not doing("capturing")
        time.sleep(0.05)
    assert capfd.readouterr() == ("", "")


def test_an_error_ends_the_line(terminal, monkeypatch):
    monkeypatch.setattr(progress, "_AFTER_SECONDS", 0.0)
    with pytest.raises(ValueError, match="wrong"), preparing("ResNet"):
        doing("capturing")
        wait_for("capturing", terminal)
        raise ValueError("wrong")
    assert not doing("nothing any more")
