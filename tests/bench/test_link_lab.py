"""The link lab builds, shapes, reports and cleans up; without the means it says what is missing."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import pytest

from bench import link_lab
from bench.link_lab import LabError, open_lab, why_not
from shoal.errors import InputError
from tests.raising import raising

_REASON = why_not()
needs_lab = pytest.mark.skipif(_REASON is not None, reason=str(_REASON))


def _ours(pid: int) -> list[str]:
    return [name for name in link_lab._namespaces() if name.startswith(f"shoal-{pid}-")]


@needs_lab
@pytest.mark.parametrize(("ranks", "rate_gbps"), [(2, 0.1), (3, 0.1), (2, None)])
def test_every_rank_hears_from_the_one_before(ranks: int, rate_gbps: float | None) -> None:
    with open_lab(ranks, rate_gbps) as lab:
        found = lab.run("bench.lab_rank", {"payload_bytes": 1 << 18}, timeout_seconds=60)
    assert len(found) == ranks
    assert all(one["goodput_gbps"] > 0 for one in found)
    assert _ours(os.getpid()) == []


@needs_lab
def test_no_more_passes_than_the_rate_lets_through() -> None:
    with open_lab(2, 0.02) as lab:
        found = link_lab.verify(lab, seconds=0.5)
    assert found["goodput_gbps"] < 1.5 * found["expected_gbps"]  # unshaped it is a hundred times that


@needs_lab
def test_a_rank_that_fails_is_told_with_its_last_words_and_nothing_is_left() -> None:
    with raising(LabError, "bench.lab_rank", "payload_bytes"), open_lab(2, None) as lab:
        lab.run("bench.lab_rank", {})
    assert _ours(os.getpid()) == []


@needs_lab
def test_ranks_that_take_too_long_are_ended() -> None:
    with raising(LabError, "bench.lab_rank"), open_lab(2, 0.01) as lab:
        lab.run("bench.lab_rank", {"payload_bytes": 1 << 30}, timeout_seconds=2)
    assert _ours(os.getpid()) == []


@needs_lab
def test_what_a_killed_lab_left_is_removed_by_the_next() -> None:
    killed = os.fork()
    if killed == 0:
        with open_lab(3, 1.0):
            os.kill(os.getpid(), signal.SIGKILL)
    os.waitpid(killed, 0)
    assert len(_ours(killed)) == 4  # three ranks and the bridge's
    link_lab.remove_stale()
    assert _ours(killed) == []


@pytest.mark.parametrize(("ranks", "rate_gbps"), [(1, 1.0), (2, 0.0), (2, -1.0), (101, None)])
def test_an_impossible_lab_is_refused_in_a_line(ranks: int, rate_gbps: float | None) -> None:
    with raising(InputError, "100"), open_lab(ranks, rate_gbps):
        pass


def test_without_root_or_tools_it_says_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(link_lab.os, "geteuid", lambda: 1000)
    assert why_not() == "only root may make network namespaces: run it as root" or not link_lab.shutil.which("tc")
    monkeypatch.setattr(link_lab.shutil, "which", lambda tool: None)
    assert why_not() == "ip and tc not found: install iproute2"
    assert link_lab.main(["--out", str(tmp_path)]) == 3
    assert capsys.readouterr().err == "bench.link_lab: no link lab here: ip and tc not found: install iproute2\n"


def test_a_link_that_is_no_number_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    assert link_lab.main(["--links", "fast"]) == 2
    assert "'fast': expected Gbit/s or loopback" in capsys.readouterr().err
