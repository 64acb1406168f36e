"""The benchmark of scale: every phase has its time, and a filled cache leaves no op to time."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from bench import scale

pytestmark = pytest.mark.usefixtures("real_machine")


def test_a_filled_cache_leaves_no_op_to_time(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ["--quick", "--networks", "chain", "--shares", "80", "--out", str(tmp_path)]
    assert scale.main(arguments) == 0
    (path,) = tmp_path.glob("scale_*.json")
    rows = json.loads(path.read_text())["rows"]
    (planned,) = rows["plan"]
    empty, filled = rows["step"]
    assert planned["added_percent"] >= planned["bound_percent"] >= 0
    assert planned["seconds"] >= planned["capture_seconds"] + planned["planner_seconds"] > 0
    assert filled["timing_seconds"] == 0 < empty["timing_seconds"]
    assert [empty["cache"], filled["cache"]] == ["empty", "filled"]
    assert "first step" in capsys.readouterr().out
