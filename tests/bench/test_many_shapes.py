"""The benchmark of many shapes: few captures, inside the budget, equal to plain PyTorch."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from bench import many_shapes

pytestmark = pytest.mark.usefixtures("real_machine")


def test_it_counts_captures_and_holds_every_step_against_plain_pytorch(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert many_shapes.main(["--quick", "--networks", "convolved text", "--out", str(tmp_path)]) == 0
    (path,) = tmp_path.glob("many_shapes_*.json")
    (row,) = json.loads(path.read_text())["rows"]
    assert (row["shapes"], row["equal"]) == (10, True)
    assert 2 <= row["captures"] <= 4
    assert 0 < row["of_budget_percent"] <= 100
    assert "Many shapes" in capsys.readouterr().out
