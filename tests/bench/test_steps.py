"""The benchmark of kinds of steps: several graphs in one budget, equal to plain PyTorch."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from bench import steps

pytestmark = pytest.mark.usefixtures("real_machine")


def test_a_step_of_several_graphs_is_held_against_plain_pytorch_and_its_budget(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert steps.main(["--quick", "--networks", "print in a loop", "--out", str(tmp_path)]) == 0
    (path,) = tmp_path.glob("steps_*.json")
    (row,) = json.loads(path.read_text())["rows"]
    assert (row["graphs"], row["result"]) == (4, "equal")
    assert 90 <= row["of_budget_percent"] <= 100
    assert "Kinds of steps" in capsys.readouterr().out
