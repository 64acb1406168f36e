"""`bench.least` finds budgets that `shoal.plan` plans in, and says how much less they are than keeping everything."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

import shoal
from bench import least
from examples import networks as models
from tests.bench.small import put_in_place


def test_the_least_that_is_found_can_be_planned(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    put_in_place(monkeypatch)
    assert least.main(["--quick", "--out", str(tmp_path)]) == 0
    assert "resnet18" in capsys.readouterr().out
    (path,) = tmp_path.glob("*.json")
    (row,) = json.loads(path.read_text())["rows"]
    assert row["sliced"]["bytes"] <= row["whole"]["bytes"] < row["plain_bytes"]
    with torch.device("meta"):
        model, images = models.build("resnet18"), torch.empty(4, 3, 64, 64)
    whole_bytes = row["whole"]["bytes"]
    plan = shoal.plan(model, images, whole_bytes, hardware=least.HARDWARE, offload_to=None, allow="bitwise")
    assert plan.predicted_peak_bytes <= whole_bytes
    assert "resnet18: on slices" in least.chart({"rows": [row]})
