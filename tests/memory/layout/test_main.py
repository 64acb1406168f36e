"""`python -m shoal.memory.layout`: what it prints, what it writes, and how it ends."""

from __future__ import annotations

import runpy
import sys
from pathlib import Path

import pytest
import typer
from typer.testing import CliRunner, Result

from shoal.lowlevel import native
from shoal.memory.layout.__main__ import main

PROBLEM = "id,lower,upper,size\nshort,0,2,4\nlong,1,6,2\nlarge,2,4,6\n"


APP = typer.Typer()
APP.command()(main)


def run(*arguments: object) -> Result:
    return CliRunner().invoke(APP, [str(argument) for argument in arguments])


def test_as_typed_it_lays_out_a_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "problem.csv").write_text(PROBLEM)
    monkeypatch.setattr(sys, "argv", ["shoal.memory.layout", str(tmp_path / "problem.csv")])
    monkeypatch.delitem(sys.modules, "shoal.memory.layout.__main__")
    with pytest.raises(SystemExit) as ended:
        runpy.run_module("shoal.memory.layout", run_name="__main__")
    said = capsys.readouterr()
    assert (ended.value.code, said.err) == (0, "")
    assert "150.0 %" in said.out


def test_it_lays_out_a_file_within_a_capacity_and_writes_the_offsets(tmp_path: Path) -> None:
    problem, output = tmp_path / "problem.csv", tmp_path / "out.csv"
    problem.write_text(PROBLEM)
    done = run(problem, "--capacity", 8, "--time-limit", 60, "--output", output)
    assert done.exit_code == 0, done.stderr
    assert all(word in done.stdout for word in ("first fit", "best fit", "search", "150.0 %", "100.0 %"))
    assert output.read_text().splitlines()[0] == "id,lower,upper,size,offset"
    assert len(output.read_text().splitlines()) == 4


def test_a_capacity_that_cannot_be_met_writes_nothing(tmp_path: Path) -> None:
    problem, output = tmp_path / "problem.csv", tmp_path / "out.csv"
    problem.write_text(PROBLEM)
    done = run(problem, "--capacity", 7, "--output", output)
    assert (done.exit_code, done.stderr) == (1, "shoal.memory.layout: no layout fits: that is proven\n")
    assert not output.exists()


def test_without_the_native_library_it_says_that_best_fit_serves(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(native, "library", lambda: None)
    problem = tmp_path / "problem.csv"
    problem.write_text("id,lower,upper,size\na,4,6,2\nb,4,7,3\nc,3,4,4\nd,2,5,2\n")  # the search finds 7 bytes
    done = run(problem)
    assert done.exit_code == 0
    assert "no native library" in " ".join(done.stdout.split())
    done = run(problem, "--capacity", 7)
    assert done.exit_code == 1
    assert done.stderr.startswith("shoal.memory.layout: best fit needs more")


def test_bad_input_is_one_line_and_exit_2(tmp_path: Path) -> None:
    for arguments in ((tmp_path / "absent.csv",), (__file__,), (tmp_path / "absent.csv", "--capacity", "lots")):
        done = run(*arguments)
        assert done.exit_code == 2
        assert done.stderr.startswith("shoal.memory.layout: ")
