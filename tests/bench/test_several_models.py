"""The benchmark of several models under one budget."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from bench import several_models
from tests.engine.training_laws import needs_compiler

pytestmark = [pytest.mark.usefixtures("real_machine"), needs_compiler]


def test_a_step_of_several_models_is_held_against_plain_pytorch_and_its_budget(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert several_models.main(["--networks", "moving average", "--shares", "80", "--out", str(tmp_path)]) == 0
    (path,) = tmp_path.glob("several_models_*.json")
    (row,) = json.loads(path.read_text())["rows"]
    assert row["result"] == "equal" and not row["refused"]
    assert 80 <= row["of_budget_percent"] <= 100
    assert "Several models under one budget" in capsys.readouterr().out
