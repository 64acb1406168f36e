"""The benchmark of a planned step that gives nothing up: held against plain PyTorch, timed in turns."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from bench import overhead

pytestmark = pytest.mark.usefixtures("real_machine")


def test_it_times_a_planned_step_beside_plain_pytorch_and_the_noise(tmp_path: Path) -> None:
    assert overhead.main(["--quick", "--networks", "tiny ops", "--out", str(tmp_path)]) == 0
    (path,) = tmp_path.glob("overhead_*.json")
    (row,) = json.loads(path.read_text())["rows"]
    assert row["ops"] == 500
    assert row["plain_seconds"] > 0
    assert {"added_percent", "added_us", "noise_percent"} <= row.keys()
