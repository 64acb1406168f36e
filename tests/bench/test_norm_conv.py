"""The fused op layer by layer: real shapes, counted, and results that are held against eager's."""

from __future__ import annotations

import io
import json
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from rich.console import Console
from torch import nn
from torch.utils.flop_counter import FlopCounterMode

from bench import norm_conv
from bench.frame import WrongResult
from bench.norm_conv import Layer, Row, Tensors, collect, layers_of
from examples import networks as models
from shoal.app.models import Bottleneck
from tests.raising import raising

ONE = (1, 1)
POINTWISE = Layer(8, 16, ONE, ONE, (0, 0), ONE, 1, 6, 6, True, True)
STRIDED = Layer(8, 6, (3, 3), (2, 2), ONE, ONE, 2, 7, 5, False, True)
STEM = Layer(3, 8, (3, 3), ONE, ONE, ONE, 1, 6, 6, False, False)


@pytest.mark.parametrize(("network", "convolutions", "shapes"), [("densenet121", 120, 66), ("resnet50", 53, 24)])
def test_layers_are_those_of_the_network_each_shape_once(network: str, convolutions: int, shapes: int) -> None:
    layers = layers_of(network, 224)
    assert len(layers) == shapes and sum(layers.values()) == convolutions
    with torch.device("meta"):
        model, images = models.build(network), torch.empty(models.example_shape(network, 2, 224))
    with FlopCounterMode(display=False) as counter:
        model(images)
    counted = counter.get_flop_counts()["Global"][torch.ops.aten.convolution]
    assert sum(count * layer.flops(2) for layer, count in layers.items()) == counted


def test_a_layer_normalises_only_where_nothing_comes_between_it_and_the_batch_norm() -> None:
    with torch.device("meta"):
        stem = nn.Sequential(nn.Conv2d(3, 8, 1), nn.BatchNorm2d(8))
        model = nn.Sequential(stem, nn.ReLU6(), Bottleneck(8, 2, 1, None), nn.Conv2d(8, 4, 1, bias=False))
        layers = collect(model, torch.empty(2, 3, 8, 8))
    read = [(layer.in_channels, layer.out_channels, layer.kernel[0], layer.normalises) for layer in layers]
    assert read == [
        (3, 8, 1, False),
        (8, 2, 1, False),  # reads a ReLU6
        (2, 2, 3, True),
        (2, 8, 1, True),
        (8, 4, 1, False),  # reads the ReLU of a residual sum, which was added in place to a batch norm's result
    ]
    assert [layer.needs_input_gradient for layer in layers] == [False, True, True, True, True]


@pytest.mark.parametrize("layer", [POINTWISE, STRIDED, STEM], ids=lambda layer: layer.name)
def test_ours_and_eager_agree_and_are_timed(layer: Layer) -> None:
    row = norm_conv.measure("a net", layer, 2, batch=3, rounds=2, clock=time.perf_counter)
    assert set(row.seconds) == {"ours", "eager"} and all(s > 0 for both in row.seconds.values() for s in both)
    assert all(off <= norm_conv.TOLERANCE for off in row.off.values())
    assert ("of x" in row.off) == layer.needs_input_gradient and ("of gamma" in row.off) == layer.normalises
    assert row.backward_flops == row.forward_flops * (2 if layer.needs_input_gradient else 1)


@pytest.mark.parametrize("wrong", ["y", "mean", "variance", "of weight"])
def test_a_wrong_result_or_gradient_is_noticed(wrong: str, monkeypatch: pytest.MonkeyPatch) -> None:
    right = norm_conv.norm_conv

    def off(xs: Any, mean: Any, scale: Any, shift: Any, rectify: Any, weight: Any, *rest: Any) -> Any:
        if wrong == "of weight":  # the same values, another gradient
            weight = 1.01 * weight - 0.01 * weight.detach()
        results = dict(
            zip(("y", "mean", "variance"), right(xs, mean, scale, shift, rectify, weight, *rest), strict=True)
        )
        if wrong in results:
            results[wrong] = 1.01 * results[wrong]
        return tuple(results.values())

    monkeypatch.setattr(norm_conv, "norm_conv", off)
    with raising(WrongResult, "8>16", "1x1", "@6", wrong):
        norm_conv.hold(Tensors(POINTWISE, 2))


def test_a_table_counts_every_layer_as_often_as_the_network_has_it() -> None:
    both = {"ours": (1.0, 2.0), "eager": (2.0, 1.0), "inductor": (3.0, 6.0)}
    slow = {"ours": (0.5, 0.5), "eager": (0.25, 0.5), "inductor": (1.0, 1.0)}
    rows = [Row("net", POINTWISE, 3, 10**9, 2 * 10**9, both, {"y": 1e-7}), Row("net", STEM, 1, 10**9, 10**9, slow, {})]
    out = io.StringIO()
    Console(file=out, width=200, no_color=True).print(norm_conv.table("net", rows))
    lines = {line.split("│")[1].strip(): line for line in out.getvalue().splitlines() if "│" in line}
    cells = {name: [cell.strip() for cell in line.split("│")[2:-1]] for name, line in lines.items()}
    forward = ["3", "1.0", "0.5", "2.00", "0.3", "3.00"]
    assert cells["norm 8>16 1x1 @6"] == [*forward, "1.0", "2.0", "0.50", "0.3", "3.00"]
    total = ["4", "3500 ms", "6250 ms", "1.79", "10000 ms", "2.86"]
    assert cells["all of them"] == [*total, "6500 ms", "3500 ms", "0.54", "19000 ms", "2.92"]
    reported = norm_conv.summary("net", rows)
    assert (
        "slower than eager forward in 1 of 2 shapes" in reported
        and "backward in 1 of 2" in reported
        and "1.0e-07" in reported
    )


def test_a_quick_run_measures_layers_of_both_networks(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    threads = torch.get_num_threads()
    assert norm_conv.main(["--quick", "--image", "32", "--threads", "1", "--cpu-time", "--out", str(tmp_path)]) == 0
    (path,) = tmp_path.glob("norm_conv_*.json")
    found = json.loads(path.read_text())
    assert found["conditions"]["threads"] == 1 and torch.get_num_threads() == threads
    assert [row["network"] for row in found["rows"]] == ["densenet121"] * 3 + ["resnet50"] * 3
    out = capsys.readouterr().out
    assert "malloc" in out and "norm 64>128 1x1 @8" in out and "norm 64>64 3x3 @8" in out


def test_inductor_is_a_contender_where_it_is_asked_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[dict[str, object]] = []

    def compile_nothing(function: Any, **options: object) -> Any:  # compiling takes half a minute
        asked.append(options)
        return function

    monkeypatch.setattr(torch, "compile", compile_nothing)
    arguments = ["--quick", "--networks", "resnet50", "--layers", "norm 64>64", "--image", "32", "--inductor"]
    assert norm_conv.main([*arguments, "--out", str(tmp_path)]) == 0
    (path,) = tmp_path.glob("norm_conv_*.json")
    (row,) = json.loads(path.read_text())["rows"]
    assert set(row["seconds"]) == {"ours", "eager", "inductor"}
    assert asked == [{"dynamic": False, "fullgraph": True}]


@pytest.mark.parametrize(
    ("arguments", "reported"),
    [
        (["--layers", "foo"], "--layers foo: none of the 66 layers of densenet121"),
        (["--networks", "densenet"], "--networks densenet: give some of"),
        (["--networks", ""], "--networks nothing: give some of"),
        (["--batch", "0"], "--batch 0: give 1 or more"),
        (["--threads", "0"], "--threads 0: give 1 or more"),
        (["--cpu-time", "--threads", "2"], "--cpu-time counts one CPU thread's time"),
    ],
)
def test_a_wrong_argument_is_one_line(
    arguments: list[str], reported: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert norm_conv.main([*arguments, "--out", str(tmp_path)]) == 2
    error = capsys.readouterr().err
    assert error.startswith("bench.norm_conv: ") and reported in error


def test_a_wrong_result_is_one_line_and_an_exit_code_of_its_own(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def differ(tensors: Tensors) -> None:
        raise WrongResult(f"{tensors.layer.name}: farther from eager")

    monkeypatch.setattr(norm_conv, "hold", differ)
    assert norm_conv.main(["--quick", "--image", "32", "--out", str(tmp_path)]) == 1
    assert capsys.readouterr().err == "bench.norm_conv: 3>64 7x7 /2 @32: farther from eager\n"
