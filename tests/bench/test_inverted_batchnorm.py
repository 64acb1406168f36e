"""The benchmark of the inverted form: every contender is checked, and what is wrong is one line."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from bench import inverted_batchnorm, inverted_steps
from bench.frame import WrongResult
from bench.inverted_batchnorm import measure
from bench.inverted_steps import Checkpointed, rewritten, saved_bytes
from bench.split_accuracy import NARROW, Pace
from bench.workload import Workload
from shoal.transforms.invert.inverted_model import InvertedModel
from tests.raising import raising


@pytest.fixture
def data() -> dict[str, tuple[torch.Tensor, torch.Tensor]]:
    draw = torch.Generator().manual_seed(0)
    return {
        name: (torch.randn(n, 3, 32, 32, generator=draw), torch.randint(10, (n,), generator=draw))
        for name, n in (("train", 40), ("test", 30))
    }


def pair_and_convolution() -> nn.Sequential:
    return nn.Sequential(
        nn.Conv2d(3, 8, 3, padding=1),
        nn.BatchNorm2d(8),
        nn.ReLU(inplace=True),
        nn.Conv2d(8, 4, 1),
        nn.AdaptiveAvgPool2d(1),
        nn.Flatten(),
    )


@pytest.mark.parametrize("with_reader", [False, True])
def test_checkpointing_saves_where_the_convolution_is_in_the_segment_and_moves_statistics_once(
    with_reader: bool,
) -> None:
    net = pair_and_convolution()
    images, target = torch.randn(2, 3, 16, 16), torch.tensor([1, 2])
    workload = Workload("pair", net, images, target)
    model = rewritten(
        net, frozenset({"1"}), lambda pair: (Checkpointed(pair[0], pair[1] if with_reader else None), with_reader)
    )
    one = 2 * 8 * 16 * 16 * 4
    fewer = saved_bytes(workload, net) - saved_bytes(workload, model)
    assert (fewer > 0.9 * one) == with_reader
    assert (abs(fewer) < 0.1 * one) != with_reader
    gradients = []
    for forward in (net, model):
        nn.BatchNorm2d.reset_running_stats(net[1])  # type: ignore[arg-type]
        gradients.append(torch.autograd.grad(F.cross_entropy(forward(images), target), list(net.parameters())))
        assert net[1].num_batches_tracked == 1
    assert all(torch.equal(ours, theirs) for ours, theirs in zip(*gradients, strict=True))


def test_a_contender_that_computes_something_else_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(InvertedModel, "restore", lambda model: model.source)  # ReLU, not LeakyReLU
    monkeypatch.setattr(inverted_steps, "SLOPE", 0.5)
    with pytest.raises(WrongResult):
        inverted_steps.measure("resnet18", 2, 32, 1)


@pytest.mark.parametrize("shift", [0.0, 1.0])
def test_inputs_made_again_are_measured_and_within_the_bound(shift: float) -> None:
    small, large = measure(0.01, 1e-3, shift, 64), measure(0.01, 10.0, shift, 64)
    assert 0 < small.median < small.largest <= small.predicted
    if shift:
        assert small.largest > 10 * large.largest


def test_an_error_beyond_the_bound_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(inverted_batchnorm, "reconstruction_error", lambda *_: torch.tensor([1e-9]))
    with raising(WrongResult, "1.0e-09"):
        measure(0.01, 1.0, 0.0, 64)


@pytest.mark.parametrize("network", list(NARROW))
def test_every_way_trains_from_the_same_start_and_comes_back(network: str, data: Any) -> None:
    rows = list(inverted_batchnorm.trained(network, Pace(40, 1, 20, 0.05), data, seed=1))
    assert [name for name, _, _ in rows] == list(inverted_batchnorm.WAYS)
    assert all(0 <= error <= 100 and off <= 1e-5 for _, error, off in rows)


def test_the_two_leaky_ways_compute_the_same() -> None:
    x = torch.randn(4, 3, 32, 32)
    outputs = []
    for way in (inverted_batchnorm.leaky, inverted_batchnorm.inverted):
        torch.manual_seed(0)
        outputs.append(way(NARROW["resnet"]())(x))
    torch.testing.assert_close(*outputs, rtol=1e-4, atol=1e-5)


def test_a_conversion_that_changes_outputs_is_told(monkeypatch: pytest.MonkeyPatch, data: Any) -> None:
    monkeypatch.setattr(InvertedModel, "restore", lambda model, **_: nn.Sequential(model, nn.ReLU()))
    with pytest.raises(WrongResult):
        inverted_batchnorm.there_and_back(inverted_batchnorm.inverted(NARROW["vgg"]()), data["test"][0])


def test_a_quick_run_measures_every_contender(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert inverted_batchnorm.main(["--quick", "--parts", "steps,reconstruction", "--out", str(tmp_path)]) == 0
    (path,) = tmp_path.glob("inverted_batchnorm_*.json")
    found = json.loads(path.read_text())
    rows = found["steps"]["rows"]
    plain, ours = rows["plain"], rows["inverted"]
    assert 2 * (plain["saved_bytes"] - ours["saved_bytes"]) >= found["steps"]["pair_bytes"]
    assert ours["peak_bytes"] < plain["peak_bytes"]
    assert rows["checkpointed pairs"]["saved_bytes"] > rows["checkpointed pairs and convolutions"]["saved_bytes"]
    assert ("inplace_abn" in rows) != ("inplace_abn" in found["steps"]["not_installed"])
    assert len(found["reconstruction"]) == 50
    assert "inplace_abn" in capsys.readouterr().out


@pytest.mark.parametrize(
    "arguments", [["--parts", "memory"], ["--networks", "lenet"], ["--turns", "0"], ["--epochs", "-1"]]
)
def test_a_mistake_is_one_line(arguments: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert inverted_batchnorm.main([*arguments, "--out", str(tmp_path)]) == 2
    assert capsys.readouterr().err.startswith("bench.inverted_batchnorm: ")
