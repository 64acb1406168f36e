"""The cost of splitting: every row is measured, and what is wrong is one line."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from bench import split_cost


def test_a_quick_run_measures_both_memory_formats(tmp_path: Path) -> None:
    assert split_cost.main(["--quick", "--networks", "resnet18", "--out", str(tmp_path)]) == 0
    (path,) = tmp_path.glob("split_cost*.json")
    rows = json.loads(path.read_text())["rows"]
    assert [row["layout"] for row in rows] == ["channels_last", "contiguous"]
    assert all(ratio > 0 for row in rows for ratio in row["ratios"].values())


@pytest.mark.parametrize("arguments", [["--networks", "resnet"], ["--turns", "0"]])
def test_a_wrong_argument_is_one_line(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert split_cost.main(arguments) == 2
    error = capsys.readouterr().err
    assert error.startswith("bench.split_cost: ") and arguments[0] in error and "Traceback" not in error
