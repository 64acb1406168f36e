"""The accuracy benchmark trains what it says, evaluates unsplit and as trained, and tells no difference from noise."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from bench import split_accuracy
from bench.split_accuracy import CONDITIONS, Condition, Pace, errors_of, finding

PACE = Pace(images=40, epochs=1, batch=20, rate=0.05)


@pytest.fixture
def data() -> dict[str, tuple[torch.Tensor, torch.Tensor]]:
    draw = torch.Generator().manual_seed(0)
    return {
        name: (torch.randn(n, 3, 32, 32, generator=draw), torch.randint(10, (n,), generator=draw))
        for name, n in (("train", 40), ("test", 30))
    }


@pytest.mark.parametrize("network", list(split_accuracy.NARROW))
@pytest.mark.parametrize("condition", [CONDITIONS[0], CONDITIONS[4], CONDITIONS[5], CONDITIONS[-1]], ids=str)
def test_every_kind_trains_and_the_same_seed_gives_the_same_errors(
    data: dict[str, tuple[torch.Tensor, torch.Tensor]], network: str, condition: Condition
) -> None:
    build = split_accuracy.NARROW[network]
    first, again = (errors_of(build, condition, PACE, data, seed=1) for _ in range(2))
    assert first == again
    assert all(0 <= error <= 100 for error in first.values())
    if condition.depth == 0:
        assert first["unsplit"] == first["split"]


def test_depths_split_as_many_convolutions_as_they_say() -> None:
    for build in split_accuracy.NARROW.values():
        total = sum(isinstance(layer, nn.Conv2d) and layer.kernel_size == (3, 3) for layer in build().modules())
        for condition in CONDITIONS[1:5]:
            plan = split_accuracy.shoal.split(build(), condition.depth, condition.grid).plan
            assert plan is not None
            convolutions = sum(step.windows is not None and step.windows[0].kernel == 3 for step in plan.steps)
            assert condition.depth * total <= convolutions <= condition.depth * total + 2  # to the end of a block


def test_what_is_finished_is_not_run_again(
    data: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    trained = []

    def errors_of(build: Any, condition: Condition, pace: Pace, data: Any, seed: int) -> dict[str, float]:
        trained.append((condition.name, seed))
        return {"unsplit": 10.0 + seed, "split": 11.0 + seed}

    monkeypatch.setattr(split_accuracy, "errors_of", errors_of)
    monkeypatch.setattr(split_accuracy, "images_of", lambda device, tests=None: data)
    arguments = ["--networks", "vgg", "--images", "40", "--epochs", "1"]
    assert split_accuracy.main([*arguments, "--seeds", "2", "--out", str(tmp_path / "a")]) == 0
    (first,) = (tmp_path / "a").glob("*.json")
    trained.clear()
    arguments += ["--seeds", "3", "--resume", str(first), "--out", str(tmp_path / "b")]
    assert split_accuracy.main(arguments) == 0
    assert trained == [(condition.name, 2) for condition in CONDITIONS]
    (second,) = (tmp_path / "b").glob("*.json")
    rows = json.loads(second.read_text())["errors_percent"]["vgg"]
    assert all(errors["unsplit"] == [10.0, 11.0, 12.0] for errors in rows.values())
    assert split_accuracy.main([*arguments, "--images", "41"]) == 2
    assert "ask for the same" in capsys.readouterr().err


def test_what_is_within_two_standard_errors_is_no_finding() -> None:
    assert finding([10.0, 12.0], [10.5, 11.4]) == "none"
    assert finding([15.0, 15.2], [10.0, 10.2]) == "+5.0"


@pytest.mark.parametrize("arguments", [["--networks", "lenet"], ["--seeds", "0"], ["--device", "abacus"]])
def test_a_mistake_is_one_line(arguments: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert split_accuracy.main([*arguments, "--out", str(tmp_path)]) == 2
    assert capsys.readouterr().err.startswith("bench.split_accuracy: ")
