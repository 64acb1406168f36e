"""`shoal doctor` takes one step of a user's model, plain and planned, and says in ten lines what it found."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner, Result

from shoal.app.cli import app
from shoal.app.cli.doctor import as_json, as_lines
from shoal.app.doctor.examine import examine, seconds
from shoal.app.doctor.subject import load_subject

MODELS = """
import torch
from torch import nn


def convolutions():
    layers = [layer for n in (3, 8, 8, 8) for layer in (nn.Conv2d(n, 8, 3, padding=1), nn.BatchNorm2d(8), nn.ReLU())]
    return nn.Sequential(*layers)


class Printing(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.last = convolutions(), nn.Conv2d(8, 8, 3)

    def forward(self, images):
        features = self.first(images)
        print("mean", float(features.mean()))
        return self.last(features)


def make_model():
    torch.manual_seed(0)
    return convolutions(), torch.randn(4, 3, 32, 32)


def alone():
    return convolutions()


def printing():
    return Printing(), torch.randn(4, 3, 32, 32)


class Named(nn.Module):
    def __init__(self):
        super().__init__()
        self.net = convolutions()

    def forward(self, mask=None, *, images):
        return {"features": self.net(images)}


def by_name():
    return Named(), {"images": torch.randn(4, 3, 32, 32)}


def raising():
    raise ValueError("no\\nsuch weights")


def nothing():
    return None


number = 3
"""


@pytest.fixture(autouse=True)
def here(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / "my_models.py").write_text(MODELS)
    (tmp_path / "broken_models.py").write_text("import nowhere_to_be_found")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("SHOAL_ALLOW", "recompute")  # one form of the step: seconds less


def doctor(*arguments: str) -> Result:
    return CliRunner().invoke(app, ["doctor", *arguments])


def test_a_step_that_fits_only_planned() -> None:
    found = examine(load_subject("my_models.py:make_model"), "900KiB", optimizer="sgd-momentum")
    lines = dict(line.split("  ", 1) for line in as_lines(found))
    assert len(lines) == 10
    assert "does not fit" in lines["plain step"] and lines["planned step"].strip().startswith("fits: ")
    assert "recomputed" in lines["by means of"] and "one graph" in lines["capture"]
    assert "bit for bit" in lines["gradients"]
    assert lines["type"].strip() == 'model = shoal.compile(model, budget="900KiB", optimizer="sgd-momentum")'
    for budget in ("80%", "2gb"):  # as it was given
        assert f'budget="{budget}", ' in as_json(replace(found, budget=budget))["type"]
    figures = as_json(found)
    assert figures["measured_peak_bytes"] <= 900 * 2**10 < figures["plain_peak_bytes"]
    assert figures["parameter_bytes"] == figures["optimizer_state_bytes"]  # momentum


def test_percents_are_of_steps_that_a_single_run_resolves() -> None:
    found = examine(load_subject("my_models.py:make_model"), "1GiB")
    assert found.plain is not None and found.planned is not None

    def lines(plain_seconds: float, planned_seconds: float) -> dict[str, str]:
        taken = replace(found.plain, seconds=plain_seconds), replace(found.planned, seconds=planned_seconds)
        printed = as_lines(replace(found, plain=taken[0], planned=taken[1], budget_bytes=10**9))
        return {name: words.strip() for name, words in (line.split("  ", 1) for line in printed)}

    assert "1.00 ms" in lines(0.001, 0.024)["plain step"]
    assert lines(0.001, 0.024)["planned step"].endswith("24.0 ms, +23 ms (one step each)")
    assert lines(0.1, 0.124)["planned step"].endswith("124.0 ms, +24.0 % (one step each)")


def test_a_model_that_is_called_with_keywords() -> None:
    done = doctor("my_models.py:by_name", "--budget", "1GiB", "--json")
    assert done.exit_code == 0, done.output
    figures = json.loads(done.stdout)
    assert figures["input"] == "4 x 3 x 32 x 32" and figures["fits_planned"] and figures["gradient_difference"] == 0
    shape = load_subject("my_models.py:by_name", ["images=2x3x8x8", "mask=2:int64"])
    assert list(shape.example) == ["images", "mask"] and shape.shapes == "2 x 3 x 8 x 8, 2"
    assert shape.of_samples(1)["images"].shape == (1, 3, 8, 8)  # type: ignore[call-overload]
    assert "name all inputs" in doctor("my_models.py:by_name", "--example", "images=2x3x8x8", "--example", "2").output


@pytest.mark.slow
def test_a_budget_that_cannot_be_met_names_the_least_and_a_batch_that_fits() -> None:
    done = doctor("my_models.py:make_model", "--budget", "680KiB", "--json")
    read = json.loads(done.stdout)
    assert done.exit_code == 2 and not read["fits_planned"]
    assert read["least_bytes"] > 680 * 2**10 and str(read["least_bytes"]) in read["refused"]
    assert read["remedies"] == ["a batch of 2 in place of 4"]
    less = json.loads(doctor("my_models.py:make_model", "--budget", "1KiB", "--json").stdout)
    assert "gradients and activations" in less["refused"] and less["least_bytes"] > 680 * 2**10
    assert f"budget={less['least_bytes']}, " in less["type"] and not less["remedies"]


def test_a_model_of_several_graphs_below_what_parameters_take_has_no_least() -> None:
    read = json.loads(doctor("my_models.py:printing", "--budget", "1KiB", "--json").stdout)
    assert "gradients and activations" in read["refused"] and read["least_bytes"] is None
    assert not read["uncaptured"] and "my_models.py" in read["breaks"][0]
    assert read["type"] == "nothing yet: no budget was found that works"


@pytest.mark.slow
def test_a_model_of_several_graphs_that_does_not_fit_is_captured_all_the_same() -> None:
    found = examine(load_subject("my_models.py:printing"), "600KiB")
    lines = {name: words.strip() for name, words in (line.split("  ", 1) for line in as_lines(found))}
    assert lines["planned step"].startswith("does not fit; ") and lines["planned step"].endswith(" are enough")
    assert lines["capture"].startswith("breaks at ") and "refused as several graphs" in lines["capture"]
    assert lines["helps most"].startswith("take the named line out")


def test_a_model_alone_takes_the_shape_that_is_given() -> None:
    read = json.loads(doctor("my_models.py:alone", "--example", "2x3x16x16", "--budget", "1GiB", "--json").stdout)
    assert read["input"] == "2 x 3 x 16 x 16" and read["fits_plain"] and read["fits_planned"]


def test_where_capture_breaks_is_named() -> None:
    done = doctor("my_models.py:printing", "--budget", "4MiB", "--json")
    read = json.loads(done.stdout)
    assert "mean" in done.stderr  # what the model prints is not among the figures
    assert read["fits_planned"] and read["breaks"] and all("my_models.py" in place for place in read["breaks"])


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["my_models.py"], "expected FILE.py:FUNCTION"),
        (["other.py:make_model"], "other.py: no such file"),
        (["no_module:make_model"], "no_module cannot be imported: ModuleNotFoundError"),
        (["broken_models.py:make_model"], "broken_models.py cannot be imported: ModuleNotFoundError"),
        (["my_models.py:other"], "my_models.py has no function other"),
        (["my_models.py:number"], "my_models.py has no function number"),
        (["my_models.py:raising"], "raising() raised ValueError: no such weights"),
        (["my_models.py:nothing"], "nothing() returned None; expected a torch.nn.Module"),
        (["my_models.py:alone"], "returned no input with the model"),
        (["my_models.py:alone", "--example", "4,3,8,8"], "--example 4,3,8,8: expected sizes with an x"),
        (["my_models.py:alone", "--example", "4x3x8x8:int65"], "--example 4x3x8x8:int65: expected sizes"),
        (["my_models.py:alone", "--example", f"{2**62}x3x8x8"], "no process can address that many bytes"),
        (["my_models.py:alone", "--example", f"{'9' * 5000}x3x8x8"], "expected sizes with an x"),
        (["my_models.py:alone", "--example", "nolabel=4x,3"], "--example nolabel=4x,3: expected sizes with an x"),
        (["my_models.py:alone", "--example", "nolabel=4x3x8x8"], "--example nolabel=4x3x8x8: Sequential.forward: "),
        (["my_models.py:by_name", "--example", "labels=2"], "type one --example for each input it takes"),
        (["my_models.py:alone", "--example", "4x5x8x8"], "the model cannot take this input: RuntimeError"),
        (["my_models.py:make_model", "--budget", "much"], "--budget much is not a size"),
        (["my_models.py:make_model", "--optimizer", "best"], "best"),
        (["my_models.py:make_model", "--device", "tpu"], "--device tpu"),
        (["my_models.py:make_model", "--allow", "magic"], "allow has an unknown name 'magic'"),
    ],
)
def test_a_mistake_is_one_line(arguments: list[str], said: str) -> None:
    done = doctor(*arguments)
    assert done.exit_code == 2 and done.stdout == "", done.output
    assert said in done.stderr.splitlines()[0]


def test_a_model_of_several_graphs_is_timed_in_a_step_in_which_nothing_is_prepared(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    prepared = []

    def timed(model: Any, *arguments: Any) -> float:
        if not hasattr(model, "shoal"):  # plain PyTorch's step
            return seconds(model, *arguments)
        before = len(model.shoal.preparations)
        taken = seconds(model, *arguments)
        prepared.append(len(model.shoal.preparations) - before)
        return taken

    monkeypatch.setattr("shoal.app.doctor.examine.seconds", timed)
    assert doctor("my_models.py:printing", "--budget", "4MiB").exit_code == 0
    assert prepared[0] and not prepared[-1]
    assert all(prepared[:-1])
