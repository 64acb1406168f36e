"""`bench.order` runs, and says how far its orders are from the best."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from bench import order
from tests.bench.small import put_in_place


def test_a_quick_run_compares_with_the_best_of_all_orders(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    put_in_place(monkeypatch)
    assert order.main(["--quick", "--networks", "resnet18", "--out", str(tmp_path)]) == 0
    assert "Everything kept" in capsys.readouterr().out
    (path,) = tmp_path.glob("*.json")
    found = json.loads(path.read_text())
    assert 1 <= found["small"]["mean"] < found["small"]["given"]
    (row,) = found["kept"]
    assert row["after_bytes"] < row["before_bytes"]
    assert all(
        plan["ordered"].get("added_percent", 0) <= plan["as_captured"].get("added_percent", 1e9) + 0.1
        for plan in found["plans"]
    )
