"""The benchmark of first steps: processes of their own, held against plain PyTorch and the budget."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from bench import first_step
from bench.frame import WrongResult

pytestmark = pytest.mark.usefixtures("real_machine")


def test_it_times_a_cold_and_a_warm_first_step(tmp_path: Path) -> None:
    assert first_step.main(["--quick", "--shares", "80", "--out", str(tmp_path)]) == 0
    (path,) = tmp_path.glob("first_step_*.json")
    (row,) = json.loads(path.read_text())["rows"]
    assert row["network"] == "resnet18"
    assert row["peak_bytes"] <= row["budget_bytes"]
    assert row["cold_ratio"] == row["cold_seconds"] / row["aot_seconds"]
    assert row["warm_seconds"] > 0


@pytest.mark.parametrize("wrong", [{"peak_bytes": 101}, {"repairs": 1}, {"loss": 2.1}])
def test_a_step_over_the_budget_or_of_another_loss_is_no_result(wrong: dict[str, float]) -> None:
    right = {"peak_bytes": 100, "repairs": 0, "loss": 2.0}
    first_step._check("net", 50, 100, right, {"loss": 2.0})
    with pytest.raises(WrongResult):
        first_step._check("net", 50, 100, right | wrong, {"loss": 2.0})
