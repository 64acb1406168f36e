"""The budgets' benchmark runs from end to end on a tiny step, and its file holds every column."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from bench import budgets
from bench.peers import PEERS
from tests.bench.small import put_in_place

SHOAL_COLUMNS = {
    "met",
    "exceeded",
    "predicted_peak_bytes",
    "measured_peak_bytes",
    "difference_percent",
    "added_percent",
    "predicted_added_percent",
    "lower_bound_percent",
    "planning_seconds",
    "repairs",
    "exactness",
    "seconds",
}


def test_quick_run_writes_every_column_and_resumes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    put_in_place(monkeypatch)
    asked = ["--quick", "--networks", "googlenet", "--budgets", "90", "--out", str(tmp_path)]
    assert budgets.main(asked) == 0
    assert "1 of 1 budgets met, 0 exceeded" in capsys.readouterr().out.replace("\n", " ")
    (path,) = tmp_path.iterdir()
    assert path.name.startswith("budgets-googlenet_")
    result = json.loads(path.read_text())
    assert result["conditions"]["torch"] and result["conditions"]["threads"] == 1
    assert result["plain"]["repeatable"]
    (row,) = result["rows"]
    assert row["shoal"].keys() >= SHOAL_COLUMNS
    assert row["shoal"]["exactness"] == "equal bits"
    assert row["shoal"]["measured_peak_bytes"] <= row["budget_bytes"] == int(0.9 * result["plain"]["peak_bytes"])
    assert row["monet_percent"] is None
    for peer in PEERS:
        assert any(one["peer"] == peer for one in result["peers"])
        if row[peer]["met"]:
            assert row[peer]["measured_peak_bytes"] <= row["budget_bytes"]
            assert row[peer]["setting"] and row[peer]["seconds"]

    written = path.stat().st_mtime_ns
    assert budgets.main([*asked, "--resume"]) == 0
    assert path.stat().st_mtime_ns == written, "a finished network was measured again"


def test_a_file_measured_otherwise_is_not_resumed(tmp_path: Path) -> None:
    path = tmp_path / "result.json"
    path.write_text(json.dumps({"setting": {"batch": 2}, "options": {"shares": [66.0]}}))
    assert budgets._finished(path, {"setting": {"batch": 2}, "options": {"shares": (66.0,)}}) is not None
    assert budgets._finished(path, {"setting": {"batch": 3}, "options": {"shares": (66.0,)}}) is None
    path.write_text("{")
    assert budgets._finished(path, {"setting": {"batch": 2}}) is None


@pytest.mark.parametrize(
    ("arguments", "reason"),
    [
        (["--networks", "resnet5"], "resnet5: give some of mobilenet_v2, "),
        (["--networks", "alexnet"], "alexnet: give some of"),
        (["--device", "tpu"], "is not a device"),
        (["--repeats", "-1"], "--repeats -1: give 1 or more"),
        (["--budgets", "0"], "'0': a budget is above 0"),
        (["--budgets", "many"], "'many': expected percentages"),
        (["--quick", "--networks", "unet3d", "--out", "/proc/nowhere"], "give another with --out"),
    ],
)
def test_a_mistake_is_one_line(arguments: list[str], reason: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert budgets.main(arguments) == 2
    reported = capsys.readouterr().err
    assert reason in reported and "Traceback" not in reported


def test_the_sweep_has_21_values() -> None:
    values = budgets.sweep(budgets.SWEEP)
    assert len(set(values)) == 21 and values[0] == 0.0 and values[1] == 0.05 and values[-1] == 1.0
