"""`python -m examples.try_codecs`: a table of what each codec makes of some numbers."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import torch
from typer.testing import CliRunner, Result

import examples.try_codecs as module
from examples.try_codecs import app, tryable_names
from shoal.codecs import get


@pytest.fixture(autouse=True)
def _quick(monkeypatch: pytest.MonkeyPatch) -> None:
    def once(run: object, device: object) -> float:
        return 1e-3

    monkeypatch.setattr(module, "fastest_seconds", once)


def invoke(*arguments: str | Path) -> Result:
    return CliRunner().invoke(app, [*map(str, arguments), "--device", "cpu"])


def error_line(result: Result) -> str:
    """A user's mistake, as reported on stderr with exit code 2."""
    assert result.exit_code == 2, result.output
    assert result.stdout == ""
    assert result.stderr.startswith("shoal: ") and not any(line.endswith(" ") for line in result.stderr.splitlines())
    return " ".join(result.stderr.split())


def test_without_arguments_every_codec_meets_normal_numbers() -> None:
    result = invoke("--elements", "5000")
    assert result.exit_code == 0, result.output
    assert "normal: 5,000 float32 on cpu" in result.stdout
    assert "break-even GB/s" in result.stdout
    rows = [line.split("│")[1].strip() for line in result.stdout.splitlines() if line.startswith("│")]
    assert rows == tryable_names()


@pytest.mark.parametrize("distribution", ["normal", "uniform", "laplace", "lognormal", "relu"])
def test_one_codec_and_one_distribution_as_json(distribution: str) -> None:
    result = invoke("--distribution", distribution, "--elements", "4096", "--codec", "linear", "--json")
    assert result.exit_code == 0, result.output
    figures = json.loads(result.stdout)
    assert (figures["source"], figures["elements"], figures["device"]) == (distribution, 4096, "cpu")
    (row,) = figures["codecs"]
    assert (row["codec"], row["raw_bytes"], row["payload_bytes"]) == ("linear", 16384, 4100)
    assert row["ratio"] == pytest.approx(16384 / 4100)
    assert row["encode_gbps"] == pytest.approx(16384 / 1e-3 / 1e9)


def test_a_file_and_several_codecs(tmp_path: Path) -> None:
    values = torch.randn(1000)
    np.save(tmp_path / "x.npy", values.numpy())
    result = invoke(tmp_path / "x.npy", "--codec", "bf16", "--codec", "dynamic_tree", "--json")
    assert result.exit_code == 0, result.output
    figures = json.loads(result.stdout)
    assert figures["source"] == str(tmp_path / "x.npy")
    assert [row["codec"] for row in figures["codecs"]] == ["bf16", "dynamic_tree"]
    error = (get("bf16").encode(values).decode() - values).abs().max().item()
    assert figures["codecs"][0]["largest_error"] == error


def test_the_first_numbers_of_a_file(tmp_path: Path) -> None:
    torch.save({"weight": torch.randn(10, 10)}, tmp_path / "state.pt")
    result = invoke(tmp_path / "state.pt", "--elements", "30", "--json", "--codec", "linear")
    assert json.loads(result.stdout)["elements"] == 30


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["nowhere.npy"], "cannot read nowhere.npy: No such file"),
        (["--distribution", "cauchy"], "unknown distribution 'cauchy'"),
        (["--elements", "0"], "--elements 0: it must be at least 1"),
        (["--elements", str(2**64)], f"--elements {2**64}: it must be at least 1 and at most 2**45"),
        (["--codec", "dynamic_three"], "unknown codec 'dynamic_three': did you mean 'dynamic_tree'?"),
        (["--codec", "sign_mask"], "sign_mask keeps no values"),
        (["--codec", "pool_index"], "pool_index: got no input_shape"),
        (["x.npy", "--distribution", "normal"], "got both x.npy and --distribution normal"),
    ],
)
def test_a_mistake_is_one_line_and_exit_code_2(arguments: list[str], said: str) -> None:
    assert said in error_line(invoke(*arguments))


def test_a_device_that_is_none_is_reported() -> None:
    result = CliRunner().invoke(app, ["--device", "tpu"])
    assert "--device tpu" in error_line(result)
