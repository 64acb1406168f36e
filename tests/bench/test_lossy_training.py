"""The accuracy benchmark of encoded activations: same starts, exact bytes, nothing run twice, mistakes in one line."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from bench import lossy_training
from bench.lossy_training import EXACT, WAYS, bytes_of_a_step, error_of, first_batch
from bench.split_accuracy import Pace

PACE = Pace(images=32, epochs=1, batch=16, rate=0.05)


def small() -> nn.Module:
    def pair(inputs: int, outputs: int) -> list[nn.Module]:
        return [nn.Conv2d(inputs, outputs, 3, padding=1, bias=False), nn.BatchNorm2d(outputs), nn.ReLU()]

    return nn.Sequential(*pair(3, 8), *pair(8, 8), *pair(8, 8), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(8, 10))


@pytest.fixture
def data() -> dict[str, tuple[torch.Tensor, torch.Tensor]]:
    draw = torch.Generator().manual_seed(0)
    return {
        name: (torch.randn(n, 3, 32, 32, generator=draw), torch.randint(10, (n,), generator=draw))
        for name, n in (("train", 32), ("test", 30))
    }


def test_encoding_takes_a_quarter_of_what_it_encodes_and_is_the_same_every_time(data: Any) -> None:
    found = bytes_of_a_step(small, first_batch(data["train"], PACE), ["dynamic_tree"])
    plain, kept, encoded = (found[way] for way in ("plain PyTorch", EXACT, "dynamic_tree"))
    fewer = encoded["exact_bytes"] - encoded["encoded_bytes"]
    assert encoded["encoded_layers"] == 2 and 0 < encoded["largest_gradient_error"] < 0.1
    assert encoded["encoded_bytes"] == pytest.approx(encoded["exact_bytes"] / 4, rel=0.01)
    assert kept["saved_bytes"] - encoded["saved_bytes"] >= fewer
    assert all(row["peak_bytes"] > row["saved_bytes"] for row in (plain, kept, encoded))
    errors = [error_of(small, "dynamic_tree", PACE, data, seed=1) for _ in range(2)]
    assert errors[0] == errors[1] and 0 <= errors[0] <= 100


def test_what_is_finished_is_not_run_again(
    data: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    trained = []

    def error_of(build: Any, way: str, pace: Pace, data: Any, seed: int) -> float:
        trained.append((way, seed))
        return 10.0 + seed

    step = {"peak_bytes": 2000, "saved_bytes": 1000}
    of_a_step = {"plain PyTorch": step, EXACT: step, "linear": {**step, "largest_gradient_error": 0.02}}
    monkeypatch.setattr(lossy_training, "error_of", error_of)
    monkeypatch.setattr(lossy_training, "images_of", lambda device, tests=None: data)
    monkeypatch.setattr(lossy_training, "bytes_of_a_step", lambda build, batch, ways: of_a_step)
    arguments = ["--networks", "vgg", "--ways", "linear", "--images", "32"]
    assert lossy_training.main([*arguments, "--seeds", "2", "--out", str(tmp_path / "a")]) == 0
    assert "11.0" not in capsys.readouterr().err
    (first,) = (tmp_path / "a").glob("*.json")
    trained.clear()
    arguments += ["--seeds", "3", "--resume", str(first), "--out", str(tmp_path / "b")]
    assert lossy_training.main(arguments) == 0
    assert trained == [(EXACT, 2), ("linear", 2)]
    (second,) = (tmp_path / "b").glob("*.json")
    errors = json.loads(second.read_text())["errors_percent"]["vgg"]
    assert errors == {EXACT: [10.0, 11.0, 12.0], "linear": [10.0, 11.0, 12.0]}
    assert "none" in capsys.readouterr().out  # no difference
    assert lossy_training.main([*arguments, "--images", "64"]) == 2
    assert "ask for the same" in capsys.readouterr().err


@pytest.mark.parametrize("arguments", [["--networks", "lenet"], ["--ways", "morse"], ["--seeds", "0"]])
def test_a_mistake_is_one_line(arguments: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert lossy_training.main([*arguments, "--out", str(tmp_path)]) == 2
    assert capsys.readouterr().err.startswith("bench.lossy_training: ")


def test_part_of_a_batch_is_refused(
    data: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(lossy_training, "images_of", lambda device, tests=None: data)
    monkeypatch.setattr(lossy_training, "bytes_of_a_step", lambda build, batch, ways: {})
    assert lossy_training.main(["--networks", "vgg", "--images", "33", "--out", str(tmp_path)]) == 2
    assert "a multiple of 32" in capsys.readouterr().err


def test_every_way_is_named_for_its_codec() -> None:
    assert all(
        way.startswith(str(options.codec)) and ("stochastic" in way) == (options.codec_seed is not None)
        for way, options in WAYS.items()
    )
