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
    monkeypatch.setattr(shoal.app.models, "find", lambda name: lambda: nn.Sequential(*blocks(3, 8, 8, 8), nn.Flatten()))


def frontier(*more: str) -> Result:
    return CliRunner().invoke(app, ["frontier", *SMALL, "--points", "3", *more])


def test_the_table_and_the_files(tmp_path: Path) -> None:
    out = tmp_path / "new" / "folder"
    done = frontier("--out", str(out), "--budget", "1GiB")
    assert done.exit_code == 0, done.output
    assert done.stderr == ""  # where nothing watches
    assert "resnet18, times for p100-nvlink; plain PyTorch: " in done.stdout
    assert sum(" KiB " in line for line in done.stdout.splitlines()) >= 3
    assert {path.name for path in out.iterdir()} == {"frontier.html", "frontier.svg", "frontier.json"}
    assert json.loads((out / "frontier.json").read_text())["budget_bytes"] == 2**30


def test_as_json() -> None:
    read = json.loads(frontier("--json").stdout)
    assert read["model"] == "resnet18" and len(read["points"]) == 3 and read["means"] == ["recompute"]


@pytest.mark.slow
def test_images_per_second_by_batch(tmp_path: Path) -> None:
    by_batch = ["--batch", "auto", "--budget", "600KiB", "--planner", "keep_all"]
    read = json.loads(frontier(*by_batch, "--json", "--out", str(tmp_path)).stdout)
    assert {path.name for path in tmp_path.iterdir()} == {"frontier.html", "frontier.svg", "frontier.json"}
    assert read == json.loads((tmp_path / "frontier.json").read_text())
    assert read["points"][0]["batch"] == 1 and read["points"][-1]["batch"] == read["largest_batch"]
    assert read["too_many"] == read["largest_batch"] + 1 and read["budget_bytes"] == 600 * 2**10
    done = frontier(*by_batch)
    assert done.exit_code == 0 and done.stderr == "", done.output
    assert f"inside 600.0 KiB; best: {read['best_batch']} images, " in done.stdout
    rows = [line.split("│")[1].strip() for line in done.stdout.splitlines() if line.startswith("│")]
    assert set(rows) >= {str(point["batch"]) for point in read["points"]} | {str(read["too_many"])}


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--batch", "auto"], "--batch auto needs a budget that all batches have to fit in, such as --budget 1GiB"),
        (["--batch", "auto", "--budget", "1KiB"], "resnet18 needs"),
        (["--batch", "auto", "--budget", "few"], "--budget few is not a size"),
        (["--batch", "few"], "--batch few: expected a number of images, or auto"),
        (["--batch", "0"], "--batch 0"),
        (["--points", "1"], "--points 1: expected an int from 2 to 100"),
        (["--allow", "magic"], "allow has an unknown name 'magic'"),
        (["--hardware", "p1000"], "--hardware p1000 is not a preset"),
    ],
)
def test_a_mistake_is_one_line(arguments: list[str], said: str) -> None:
    done = frontier(*arguments)
    assert done.exit_code == 2 and said in done.stderr.splitlines()[0]
