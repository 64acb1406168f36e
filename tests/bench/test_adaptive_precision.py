"""The A2DTWP benchmark: same layers at both sizes, phases weighed right, bytes checked, nothing trained twice."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from bench import adaptive_precision, adaptive_steps
from bench.adaptive_precision import given_error, main, of_contenders, phases, weights_of
from bench.adaptive_steps import Size, paper_link, weight_bytes
from bench.adaptive_training import NETWORKS
from bench.frame import WrongResult
from shoal.distributed.weights.precision import AdaptivePrecision, packable
from tests.bench.noise import noise_images


@pytest.mark.parametrize("name", NETWORKS)
def test_narrow_and_full_networks_have_the_same_weights_by_name(name: str) -> None:
    network = NETWORKS[name]
    with torch.device("meta"):
        full = network.full() if name == "resnet34" else None
    narrow = network.narrow()
    assert narrow(torch.zeros(2, 3, 32, 32)).shape == (2, 10)
    count = {"alexnet": 5 + 4, "vgg_a": 8 + 3, "resnet34": 33 + 1 + 3}[name]  # table I; three shortcuts
    assert len(packable(narrow)) == count
    if full is not None:
        assert packable(full) == packable(narrow)


def test_the_link_makes_vggs_raw_weights_take_the_papers_share_of_its_computation() -> None:
    model = torch.nn.Linear(1000, 250)
    link = paper_link(model, 2.0, Size(4, 224))
    raw = weight_bytes(model)
    whole_seconds = 2.0 * 64 / 4
    assert raw / link.to_device_bytes_per_second / whole_seconds == pytest.approx(153.93 / (128.72 + 33.51))
    assert raw / link.to_host_bytes_per_second / whole_seconds == pytest.approx(68.51 / (128.72 + 33.51))


def test_phases_are_weighed_by_how_long_they_lasted_up_to_the_given_error() -> None:
    run = {"widths": [(0, {"a": 1}), (30, {"a": 2}), (90, {"a": 3})]}
    assert phases(run, 60, {"a": ["a.x", "a.y"]}) == [(0.5, {"a.x": 1, "a.y": 1}), (0.5, {"a.x": 2, "a.y": 2})]
    assert [share for share, _ in phases(run, 120, {})] == [0.25, 0.5, 0.25]
    part = {"parts": {"pack": 1.0}, "raw_bytes": 8, "all_step_seconds": []}
    measured: dict[str, Any] = {
        name: {"step_seconds": 4.0, "sent_bytes": 8, **part} for name in adaptive_steps.WIDTHS_BYTES
    }
    measured["AWP 0"] = {"step_seconds": 1.0, "sent_bytes": 2, **part}
    measured["AWP 1"] = {"step_seconds": 2.0, "sent_bytes": 4, **part}
    found = of_contenders(measured, {"AWP": [0.25, 0.75]})["AWP"]
    assert found["step_seconds"] == 1.75 and found["sent_bytes"] == 3.5


def test_the_given_error_is_the_baselines_best_within_most_of_its_run() -> None:
    assert given_error({"errors_percent": [90.0, 70.0, 80.0, 60.0, 50.0]}) == 60.0


def test_blocks_widths_are_given_to_their_weights() -> None:
    model = NETWORKS["resnet34"].narrow()
    groups = AdaptivePrecision(model, -1.0, 1, by="block").groups
    by_block = weights_of(model, dict.fromkeys(groups, 1))
    assert sorted(name for names in by_block.values() for name in names) == sorted(packable(model))
    assert len(by_block["layer2.0"]) == 3


def test_it_runs_and_keeps_what_was_trained(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(adaptive_precision, "images_of", lambda device, tests=None: noise_images())
    asked = ["--quick", "--networks", "vgg_a", "--rounds", "1", "--out", str(tmp_path)]
    assert main(asked) == 0
    (path,) = tmp_path.glob("adaptive_precision_*.json")
    result = json.loads(path.read_text())
    measured = result["steps"]["vgg_a"]["measured"]
    assert measured["32 bits"]["sent_bytes"] == measured["32 bits"]["raw_bytes"]
    assert measured["8 bits"]["sent_bytes"] < 0.3 * measured["8 bits"]["raw_bytes"]
    trained = result["training"]
    monkeypatch.setattr(adaptive_precision.training, "run_of", None)  # nothing may be trained again
    assert main([*asked, "--part", "training", "--resume", str(path)]) == 0
    assert json.loads(path.read_text())["training"] == trained
    shown = capsys.readouterr().out
    assert "to a validation error" in shown and "truncate1" in shown


def test_mistakes_are_told_in_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--networks", "lenet"]) == 2
    assert "lenet" in capsys.readouterr().err


def test_other_bytes_than_the_widths_say_are_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    model = NETWORKS["vgg_a"].narrow()
    narrow = {"8 bits": dict.fromkeys(packable(model), 1)}
    monkeypatch.setattr(AdaptivePrecision, "bytes_of", lambda self, name: 2)
    with pytest.raises(WrongResult):
        adaptive_steps.profile(model, Size(2, 32), adaptive_steps.Link("fast", 1e9, 1e9, 0.0), narrow, 1)
