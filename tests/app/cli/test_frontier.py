"""`shoal frontier` prints its table or its JSON, and writes three files."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from torch import nn
from typer.testing import CliRunner, Result

import shoal.app.models
from shoal.app.cli import app
from tests.engine.training_laws import blocks

SMALL = ["--model", "resnet18", "--batch", "2", "--image", "32", "--hardware", "p100-nvlink", "--allow", "recompute"]


@pytest.fixture(autouse=True)
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shoal.app.models, "build", lambda model, seed: nn.Sequential(*blocks(3, 8, 8, 8), nn.Flatten()))


def frontier(*more: str) -> Result:
    return CliRunner().invoke(app, ["frontier", *SMALL, "--points", "3", *more])


def test_the_table_and_the_files(tmp_path: Path) -> None:
    out = tmp_path / "new" / "folder"
    done = frontier("--out", str(out), "--budget", "1GiB")
    assert done.exit_code == 0, done.output
    assert done.stderr == ""  # where nobody watches
    assert "resnet18, times for p100-nvlink; plain PyTorch: " in done.stdout
    assert sum(" KiB " in line for line in done.stdout.splitlines()) >= 3
    assert {path.name for path in out.iterdir()} == {"frontier.html", "frontier.svg", "frontier.json"}
    assert json.loads((out / "frontier.json").read_text())["budget_bytes"] == 2**30


def test_as_json() -> None:
    read = json.loads(frontier("--json").stdout)
    assert read["model"] == "resnet18" and len(read["points"]) == 3 and read["means"] == ["recompute"]


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--points", "1"], "points=1: expected an int from 2 to 100"),
        (["--allow", "magic"], "allow has an unknown name 'magic'"),
        (["--hardware", "p1000"], "hardware='p1000' is not a preset"),
    ],
)
def test_a_mistake_is_one_line(arguments: list[str], said: str) -> None:
    done = frontier(*arguments)
    assert done.exit_code == 2 and said in done.stderr and done.stderr.count("\n") == 1
