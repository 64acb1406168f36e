"""`bench.ablation` plans each step with every inference off in turn, and rejects a plan that breaks a rule."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from bench import ablation
from bench.frame import WrongResult
from shoal.core.plan import Plan
from shoal.planners.joint import joint
from shoal.planners.limits import Limits
from tests.bench.small import put_in_place
from tests.random_steps import conv_bn_relu_chain


def test_a_quick_run_has_a_row_for_every_budget_and_says_what_each_inference_is_worth(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    put_in_place(monkeypatch)
    assert ablation.main(["--quick", "--without", "order,fill_slack,later_readers", "--out", str(tmp_path)]) == 0
    assert "Each inference off in turn" in capsys.readouterr().out
    (path,) = tmp_path.glob("*.json")
    rows = json.loads(path.read_text())["rows"]
    assert {(row["link"], row["budget"]) for row in rows} == {
        (link, budget) for link in (False, True) for budget in ("60 %", "minimum")
    }
    assert {off for row in rows for off in row["without"]} == {"order", "fill_slack", "later_readers"}
    # An order that needs fewer bytes is how the step fits in its minimum.
    assert any(row["without"].get("order", {"seconds": 1.0})["seconds"] is None for row in rows)


def row(budget: str, seconds: float | None, **more: float) -> dict[str, Any]:
    slower_percent = None if seconds is None else 100 * (seconds - 1)
    found = {"seconds": seconds, "slower_percent": slower_percent, "planning_seconds": 2.0, **more}
    return {
        "network": "net",
        "link": False,
        "budget": budget,
        "added_percent": 5.0,
        "planning_seconds": 3.0,
        "without": {"order": found},
    }


def test_the_table_counts_rows_that_an_inference_changes_by_more_than_a_tenth_of_a_percent() -> None:
    rows = [row("66 %", 1.0005), row("40 %", 1.25), row("25 %", 0.99), row("minimum", None, larger_percent=3.0)]
    worth, each = ablation.tables({"rows": rows})
    assert [[*column.cells] for column in worth.columns] == [
        *(["order"], ["4"], ["1"], ["25.0 %"], ["1"], ["1"], ["1.0 %"], ["3.0 %"], ["8"], ["12"])
    ]
    assert [*each.columns[3].cells] == ["", "+25.0 %", "-1.0 %", "none, +3.0 % bytes"]


def test_a_plan_over_its_budget_is_a_wrong_result(monkeypatch: pytest.MonkeyPatch) -> None:
    def over(graph: Any, hardware: Any, budget_bytes: int, **limits: Any) -> Plan:
        return replace(joint(graph, hardware, 2 * budget_bytes, **limits), budget_bytes=budget_bytes)

    graph = conv_bn_relu_chain(4)
    monkeypatch.setattr(ablation, "joint", over)
    budget_bytes = ablation.keep_all(graph, ablation.HARDWARE, 0).predicted_peak_bytes // 2
    with pytest.raises(WrongResult):
        ablation.planned(graph, budget_bytes, Limits())
