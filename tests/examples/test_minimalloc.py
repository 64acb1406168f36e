"""CSV in MiniMalloc's columns: what is written is read again, and what is wrong is named with its line."""

from __future__ import annotations

import random
import runpy
import sys
from pathlib import Path

import pytest
import typer
from hypothesis import given
from typer.testing import CliRunner, Result

from examples.minimalloc import first_fit, main, read_problem, write_layout
from shoal.errors import InputError
from shoal.lowlevel import native
from shoal.memory.layout.problem import Block, Problem, check_layout
from shoal.memory.layout.search import best_fit, search
from tests.engine.compile.wrong_values import is_readable
from tests.memory.layout.problems import problems
from tests.raising import raising

PROBLEM = "id,lower,upper,size\nshort,0,2,4\nlong,1,6,2\nlarge,2,4,6\n"


APP = typer.Typer()
APP.command()(main)


@given(problem=problems())
def test_a_written_layout_is_its_problem_again(tmp_path_factory: pytest.TempPathFactory, problem: Problem) -> None:
    layout = best_fit(problem)
    path = write_layout(tmp_path_factory.mktemp("layout") / "out.csv", layout)
    assert read_problem(path) == problem
    assert [int(line.split(",")[4]) for line in path.read_text().splitlines()[1:]] == list(layout.offsets)


def test_columns_come_in_any_order_with_spaces_and_a_byte_order_mark(tmp_path: Path) -> None:
    path = tmp_path / "p.csv"
    path.write_text("\ufeffsize, id, upper, lower\r\n7, a, 3, 1\r\n\r\n")
    assert read_problem(path) == Problem((Block("a", 1, 3, 7),))


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("", "'id'"),
        ("id,lower,upper\na,0,1\n", "'size'"),
        ("id,lower,upper,size,alignment\na,0,1,4,8\n", "'alignment'"),
        ("id,lower,upper,size\na,0,1,4\nb,0,x,4\n", ""),
        ("id,lower,upper,size\na,0,1\n", ""),
        ("id,lower,upper,size\na,0,1,4,5\n", ""),
        ("id,lower,upper,size\na,2,1,4\n", "'a'"),
    ],
)
def test_a_file_that_makes_no_sense_is_refused_with_the_place(tmp_path: Path, text: str, said: str) -> None:
    path = tmp_path / "p.csv"
    path.write_text(text)
    with raising(InputError, said) as refused:
        read_problem(path)
    assert str(path) in str(refused.value)


def test_a_file_that_cannot_be_read_is_refused(tmp_path: Path) -> None:
    for path in (tmp_path / "absent.csv", tmp_path):
        with pytest.raises(InputError):
            read_problem(path)
    (tmp_path / "binary.csv").write_bytes(b"\xff\xfe\x00")
    with pytest.raises(InputError):
        read_problem(tmp_path / "binary.csv")


def test_a_file_with_anything_in_it_is_a_problem_or_refused_in_one_line(tmp_path: Path) -> None:
    whole = b"id,lower,upper,size\na,0,3,4\nb,1,2,5\nc,2,9,1\n"
    path = tmp_path / "problem.csv"
    draw = random.Random(0)
    contents = [whole[:at] for at in range(len(whole))]
    for _ in range(300):
        damaged = bytearray(whole)
        damaged[draw.randrange(len(whole))] ^= 1 << draw.randrange(8)
        contents.append(bytes(damaged))
    short = (b"", b"-1", b"1.5", b"nan", b"inf", b"x", b'"', b"\x00", b"\xff")
    for wrong in (*short, b"9" * 30, b"9" * 5000, b"x" * 200_000):
        contents += [whole.replace(b"3", wrong), whole.replace(b"a,", wrong + b","), whole.replace(b"size", wrong)]
        contents += [whole + wrong, wrong]
    refused = 0
    for content in contents:
        path.write_bytes(content)
        try:
            problem = read_problem(path)
        except InputError as error:
            assert str(path) in str(error) and is_readable(error)
            refused += 1
        else:
            layout = first_fit(problem)
            check_layout(layout)
            assert search(problem, layout.arena_bytes, time_limit_seconds=1).layout is not None
    assert refused > len(contents) // 4


def run(*arguments: object) -> Result:
    return CliRunner().invoke(APP, [str(argument) for argument in arguments])


def test_as_typed_it_lays_out_a_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "problem.csv").write_text(PROBLEM)
    monkeypatch.setattr(sys, "argv", ["examples.minimalloc", str(tmp_path / "problem.csv")])
    monkeypatch.delitem(sys.modules, "examples.minimalloc")
    with pytest.raises(SystemExit) as ended:
        runpy.run_module("examples.minimalloc", run_name="__main__")
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
    assert (done.exit_code, done.stderr) == (1, "examples.minimalloc: no layout fits: that is proven\n")
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
    assert done.stderr.startswith("examples.minimalloc: best fit needs more")


def test_bad_input_is_one_line_and_exit_2(tmp_path: Path) -> None:
    for arguments in ((tmp_path / "absent.csv",), (__file__,), (tmp_path / "absent.csv", "--capacity", "lots")):
        done = run(*arguments)
        assert done.exit_code == 2
        assert done.stderr.startswith("examples.minimalloc: ")
