"""The table of trainers: rows come from their own tests, and what is wrong in one is no row that passes."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path
from typing import Any

import pytest

from bench import hosts
from tests.hosts.laws import ROWS

ROW = {
    "test": "tests/hosts/test_peft.py::test_it_trains_inside_the_budget_to_the_same_bits",
    "graphs": 2,
    "budget_bytes": 700,
    "plain_peak_bytes": 1000,
    "peak_bytes": 690,
    "steps": 6,
    "unequal": [],
    "first_seconds": 1.5,
    "step_seconds": [0.5, 0.25, 0.25],
    "plain_seconds": [0.2],
}


def run_with(row: dict[str, Any], monkeypatch: pytest.MonkeyPatch, out: Path) -> tuple[int, dict[str, Any]]:
    """Run the bench where the trainer's test leaves this row; its exit code and what it saves."""

    def tested(command: list[str], *, env: dict[str, str], **_: Any) -> subprocess.CompletedProcess[str]:
        Path(env[ROWS]).write_text(json.dumps(row) + "\n")
        return subprocess.CompletedProcess(command, 0, "1 passed", "")

    monkeypatch.setattr(subprocess, "run", tested)
    code = hosts.main(["--hosts", "peft", "--out", str(out)])
    (saved,) = out.glob("hosts_*.json")
    (found,) = json.loads(saved.read_text())["rows"]
    return code, found


def test_a_row_is_what_the_trainers_test_measured(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    code, found = run_with(ROW, monkeypatch, tmp_path)
    assert code == 0
    assert (found["name"], found["result"], found["share"]) == ("peft", "equal", 70.0)
    assert found["of_budget_percent"] == pytest.approx(98.571, abs=0.001)
    assert (found["steps_a_second"], found["plain_steps_a_second"]) == (4.0, 5.0)


@pytest.mark.parametrize("wrong", [{"unequal": ["weight"]}, {"peak_bytes": 701}])
def test_other_bits_or_a_peak_over_the_budget_fail(
    wrong: dict[str, Any], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    assert run_with({**ROW, **wrong}, monkeypatch, tmp_path)[0] == 1


def test_an_unknown_trainer_is_a_mistake(capsys: pytest.CaptureFixture[str]) -> None:
    assert hosts.main(["--hosts", "keras"]) == 2
    assert "keras" in capsys.readouterr().err
