"""The codecs' benchmark runs, checks what it times, and tells the paper's figures from what can be had again."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from bench import codecs, codecs_speed
from bench.codecs_error import DISTRIBUTIONS, PAPER, errors_of, recorded
from bench.codecs_speed import Contender, Row, measure, ours, time_in_turns, verdicts, with_one_copy
from bench.frame import WrongResult
from bench.split_accuracy import Pace
from shoal.codecs import get
from shoal.errors import InputError

CPU = torch.device("cpu")
PACE = Pace(images=8, epochs=1, batch=4, rate=0.05)


def tiny() -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(3, 4, 3), nn.ReLU(), nn.Conv2d(4, 5, 1), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(5, 10)
    )


@pytest.fixture
def data() -> dict[str, tuple[torch.Tensor, torch.Tensor]]:
    draw = torch.Generator().manual_seed(0)
    return {"train": (torch.randn(64, 3, 32, 32, generator=draw), torch.randint(10, (64,), generator=draw))}


def test_a_quick_run_prints_every_part_and_leaves_its_figures(
    data: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(codecs, "images_of", lambda device, tests=None: data)
    monkeypatch.setattr(codecs, "NARROW", {"tiny": tiny})
    assert codecs.main(["--quick", "--out", str(tmp_path)]) == 0
    printed = capsys.readouterr().out
    assert "irreproducible" in printed and "tiny, narrow, after 2 steps" in printed and "break-even" in printed
    (path,) = tmp_path.glob("codecs_*.json")
    figures = json.loads(path.read_text())
    assert set(figures) == {"conditions", *codecs.PARTS}
    assert len(figures["table1"]) == len(DISTRIBUTIONS) * len(codecs.TABLE1)
    assert {row["contender"] for row in figures["speed"]} >= {"memcpy", "torch bf16 cast", *codecs.SPEED}
    assert all(row["decode_seconds"] > 0 for row in figures["speed"] if row["contender"] != "memcpy")


def test_without_the_data_set_the_rest_is_measured(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def missing(device: torch.device, tests: int | None = None) -> Any:
        raise InputError("no CIFAR-10 here")

    monkeypatch.setattr(codecs, "images_of", missing)
    assert codecs.main(["--quick", "--parts", "recorded", "--out", str(tmp_path)]) == 0
    assert "recorded: left out: no CIFAR-10 here" in capsys.readouterr().out


@pytest.mark.parametrize(
    "arguments",
    [["--parts", "weather"], ["--sizes", "0"], ["--rounds", "0"], ["--device", "abacus"], ["--codecs", "morse"]],
)
def test_a_mistake_is_one_line(arguments: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert codecs.main(["--quick", "--parts", "speed", *arguments, "--out", str(tmp_path)]) == 2
    assert capsys.readouterr().err.startswith("bench.codecs: ")


def test_errors_are_those_of_all_values_together() -> None:
    x, y = torch.tensor([1.0, -4.0, 0.0]), torch.tensor([[2.0]])
    found = errors_of([(x, torch.tensor([1.5, -3.0, 0.25])), (y, torch.tensor([[2.0]]))])
    assert found.elems == 4
    assert found.absolute == (0.5 + 1.0 + 0.25) / 4
    assert found.relative_percent == pytest.approx(100 * (0.5 + 0.25) / 3)  # of the three that are not zero
    assert found.bias_percent == pytest.approx(100 * (0.5 - 0.25) / 3)
    assert found.root_mean_square_percent == pytest.approx(100 * ((0.25 + 1 + 0.0625) / 21) ** 0.5)


@pytest.mark.parametrize("distribution", DISTRIBUTIONS, ids=lambda one: one.name)
def test_the_least_possible_error_is_below_that_of_the_best_evenly_filled_values(distribution: Any) -> None:
    """256 medians of equally many draws each: good, not best; and no better than the bound."""
    x = distribution.draw(256 * 400, torch.Generator().manual_seed(1)).double().sort().values.view(256, 400)
    evenly_filled = float((x - x.median(1, keepdim=True).values).abs().mean())
    assert 0.95 * distribution.least_absolute < evenly_filled < 3 * distribution.least_absolute


def test_the_papers_cells_are_all_there() -> None:
    assert len(PAPER) == 16 and {name for name, _ in PAPER} == {one.name for one in DISTRIBUTIONS}


def test_recorded_are_the_layers_that_training_updates(data: Any) -> None:
    found = recorded(tiny, PACE, data["train"], seed=0)
    assert [tuple(x.shape) for x in found["weights"]] == [(4, 3, 3, 3), (5, 4, 1, 1), (10, 5)]
    assert [x.shape for x in found["gradients"]] == [x.shape for x in found["weights"]]
    assert [tuple(x.shape) for x in found["activations"]] == [(4, 4, 30, 30), (4, 5)]  # the images are left out
    assert bool((found["activations"][0] >= 0).all())


def test_every_contender_is_timed_and_the_fastest_copy_stands_for_all() -> None:
    rows = with_one_copy(measure([get("truncate2"), get("sign_mask")], 5000, 1, 1, CPU))
    names = [row.contender for row in rows if row.contender != "bitsandbytes"]
    assert names == ["memcpy", "torch bf16 cast", "truncate2", "sign_mask"]
    assert [row.payload_bytes for row in rows if row.contender in names] == [20000, 10000, 10000, 625]
    assert rows[0].decode_gbps is None and rows[0].break_even_gbps is None


def test_a_decode_that_is_off_or_does_not_happen_is_told() -> None:
    x = torch.randn(100)
    right = ours(get("truncate2"), x)
    right.encode()
    right.check()
    right.result()[3] += 1
    with pytest.raises(WrongResult):
        right.check()
    out, calls = torch.zeros(4), iter(range(9))
    lazy = Contender(
        "lazy",
        lambda: None,
        lambda: out.fill_(2.0) if next(calls, 9) < 2 else None,
        (out,),
        lambda: out,
        4,
        lambda: None,
    )
    with pytest.raises(WrongResult):
        time_in_turns([lazy], 4, 1, 1, CPU)


def row(name: str, encode: float, decode: float | None) -> Row:
    return Row(name, 1 << 25, 1, 1 << 25, encode, decode)


def test_targets_are_met_or_not() -> None:
    rows = [row("memcpy", 1.0, None), row("linear", 1.0, 1.3), row("truncate1", 1.1, 1.0), row("bf16", 9.0, 9.0)]
    found = verdicts(rows, on_cuda=False)
    assert set(found) == {"linear", "truncate1"}
    assert [verdict.met for verdict in found["linear"]] == [True, False, None]  # bitsandbytes is not there
    assert [verdict.met for verdict in found["truncate1"]] == [False, True]
    with_peer = verdicts([*rows, row("bitsandbytes", 20.0, 1.0)], on_cuda=False)
    assert with_peer["linear"][2].met
    (encode, _) = verdicts(rows, on_cuda=True)["linear"]
    assert encode.measured == pytest.approx(5 / 8)  # of the bytes that a copy moves in the same time
    assert verdicts([Row("memcpy", 1 << 20, 1, 1, 1.0, None)], on_cuda=False) == {}


def test_a_peer_that_is_installed_takes_its_turns(monkeypatch: pytest.MonkeyPatch) -> None:
    def quantize_blockwise(x: torch.Tensor, blocksize: int) -> tuple[torch.Tensor, Any]:
        scale = x.abs().max()
        return (x / scale * 127).round().to(torch.int8), SimpleNamespace(absmax=scale.view(1))

    def dequantize_blockwise(codes: torch.Tensor, state: Any) -> torch.Tensor:
        return codes.float() / 127 * state.absmax

    peer = SimpleNamespace(quantize_blockwise=quantize_blockwise, dequantize_blockwise=dequantize_blockwise)
    monkeypatch.setattr(codecs_speed, "bitsandbytes", lambda: peer)
    rows = measure([], 4096, 1, 1, CPU)
    assert rows[-1].contender == "bitsandbytes" and rows[-1].payload_bytes == 4100
