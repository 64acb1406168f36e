"""Who waits at a terminal for a first step reads its stages and what is left; a log file gets nothing."""

from __future__ import annotations

import io
import logging
import re
import time

import pytest
from rich.console import Console

from shoal.core import progress
from shoal.core.progress import Preparation, doing, preparing


@pytest.fixture
def terminal(monkeypatch: pytest.MonkeyPatch) -> io.StringIO:
    stream = io.StringIO()
    console = Console(file=stream, force_terminal=True, force_interactive=True, color_system=None, width=120)
    monkeypatch.setattr(progress, "Console", lambda stderr, emoji: console)
    return stream


@pytest.fixture
def at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(progress, "_AFTER_SECONDS", 0.0)


def wait_for(text: str, stream: io.StringIO) -> None:
    until = time.monotonic() + 10
    while text not in stream.getvalue() and time.monotonic() < until:
        time.sleep(0.01)
    assert text in stream.getvalue()


def test_a_long_preparation_says_what_it_does(terminal: io.StringIO, at_once: None) -> None:
    with preparing("ResNet"):
        assert doing("capture", "unmodified")
        wait_for("preparing ResNet: capture", terminal)
        with preparing("another"):
            doing("profile", "op 1 of 2: [bold]aten.add", done=0, total=8)
        wait_for("preparing ResNet: profile", terminal)
        wait_for("op 1 of 2: [bold]aten.add", terminal)
    assert "another" not in terminal.getvalue()
    assert not doing("plan")


def test_the_seconds_left_follow_from_what_is_done(
    terminal: io.StringIO, at_once: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    now = [0.0]
    monkeypatch.setattr(progress, "perf_counter", lambda: now[0])
    with preparing("ResNet"):
        doing("profile", done=0, total=100)
        now[0] = 20.0
        doing("profile", done=20, total=100)
        wait_for(" 80 s left", terminal)


def test_what_was_done_stays_as_one_line(terminal: io.StringIO, at_once: None) -> None:
    with preparing("ResNet"):
        doing("plan")
        wait_for("preparing ResNet: plan", terminal)
    said = terminal.getvalue().rsplit("ResNet: ", 1)[1]
    assert re.match(r"first step prepared in \d+\.\d s \(capture \d+\.\d s, plan \d+\.\d s", said)


def test_a_short_one_writes_nothing(terminal: io.StringIO, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO, "shoal"), preparing("ResNet"):
        doing("capture")
    assert terminal.getvalue() == ""
    assert re.match(r"ResNet: first step prepared in \d+\.\d s \(capture \d+\.\d s", caplog.messages[0])


def test_a_file_gets_nothing(at_once: None, capfd: pytest.CaptureFixture[str]) -> None:
    with preparing("ResNet"):
        assert not doing("capture")
        time.sleep(0.05)
    assert capfd.readouterr() == ("", "")


def test_a_block_in_which_nothing_is_done_is_no_preparation(
    terminal: io.StringIO, at_once: None, caplog: pytest.LogCaptureFixture
) -> None:
    noted: list[Preparation] = []
    with caplog.at_level(logging.INFO, "shoal"), preparing("ResNet", record=noted.append):
        time.sleep(0.05)
    assert (terminal.getvalue(), caplog.messages, noted) == ("", [], [])


def test_an_error_ends_the_line(terminal: io.StringIO, at_once: None) -> None:
    noted: list[Preparation] = []
    with pytest.raises(ValueError, match="wrong"), preparing("ResNet", record=noted.append):
        doing("capture")
        wait_for("capture", terminal)
        raise ValueError("wrong")
    assert not doing("plan") and not noted and "prepared in" not in terminal.getvalue()


def test_the_seconds_of_a_stage_add_up_and_those_inside_count_once(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = iter((10.0, 11.0, 13.0, 16.0, 20.0))
    monkeypatch.setattr(progress, "perf_counter", lambda: next(clock))
    noted: list[Preparation] = []
    with preparing("ResNet", why="size 0 is 6, was 8", begun_seconds=5.0, record=noted.append):
        doing("profile")
        with preparing("ResNet", record=noted.append):
            doing("capture")
            doing("plan")
    assert [one.stages for one in noted] == [{"capture": 5.0 + 1 + 3, "profile": 2.0, "plan": 4.0}]
    assert noted[0].seconds == 15.0
    assert str(noted[0]) == (
        "ResNet: prepared again, as size 0 is 6, was 8, in 15.0 s (capture 9.0 s, profile 2.0 s, plan 4.0 s)"
    )
