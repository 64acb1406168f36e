"""CSV in MiniMalloc's columns: what is written is read again, and what is wrong is named with its line."""

from __future__ import annotations

import random
from pathlib import Path

import pytest
from hypothesis import given

from shoal.errors import InputError
from shoal.memory.layout.csv_file import read_problem, write_layout
from shoal.memory.layout.fit import best_fit, first_fit
from shoal.memory.layout.problem import Block, Problem, check_layout
from shoal.memory.layout.search import search
from tests.engine.compile.wrong_values import is_readable
from tests.memory.layout.problems import problems
from tests.raising import raising


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
