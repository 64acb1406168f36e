"""The benchmark of forty models: each row says what became of a budget, and a least that is named is tried."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from bench import models
from bench.frame import Unavailable
from bench.models_catalogue import CATALOGUE, Built, Entry
from shoal.errors import InputError
from tests.raising import raising

pytestmark = pytest.mark.usefixtures("real_machine")


def _chain() -> Built:
    layers = [nn.Sequential(nn.Conv2d(8 if n else 3, 8, 3, padding=1), nn.Dropout(0.1), nn.GELU()) for n in range(4)]
    model = nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten())
    return model, lambda model: F.cross_entropy(model(torch.randn(2, 3, 32, 32)), torch.arange(2))


def _missing() -> Built:
    raise Unavailable("no_such_library is not installed")


def _stage(what: str) -> None:
    pass


def test_a_budget_is_met_with_plain_pytorchs_gradients_or_refused_with_a_least_that_works(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setitem(CATALOGUE, "chain", Entry("torch", _chain))
    met, refused = models.measure({"model": "chain", "shares": [75, 20], "seed": 0, "allow": "bitwise"}, _stage)
    assert (met["result"], met["gradients"], met["wrong"], met["said"]) == ("met", "equal", False, [])
    assert met["given_up"] and met["peak_bytes"] <= met["budget_bytes"] == int(0.75 * met["plain_peak_bytes"])
    assert (refused["result"], refused["at_least"], refused["wrong"]) == ("refused: BudgetError", "met", False)
    assert refused["budget_bytes"] < refused["least_bytes"] < met["plain_peak_bytes"]


def test_other_gradients_and_a_crash_are_rows_that_say_so(monkeypatch: pytest.MonkeyPatch) -> None:
    torch.manual_seed(0)
    plain = models._Plain(*_chain())
    plain.gradients[1][0] = 2 * plain.gradients[1][0]  # type: ignore[index, operator]
    row = models._trained(plain, plain.peak_bytes, "bitwise")
    assert row["wrong"] and row["gradients"] == "within 5e-01"
    monkeypatch.setattr(models.shoal, "compile", lambda *_, **__: 1 / 0)
    row = models._trained(plain, plain.peak_bytes, "bitwise")
    assert (row["result"], row["reason"], row["wrong"]) == ("crashed", "ZeroDivisionError: division by zero", True)


def test_a_run_in_which_all_is_skipped_names_the_libraries_and_fails(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(models, "_asked_of_a_process", lambda question: ([], f"{question['model']}'s is not installed"))
    assert models.main(["--quick", "--out", str(tmp_path)]) == 3
    expected = "; ".join(f"{name}'s is not installed" for name in models.QUICK)
    assert capsys.readouterr().err == f"bench.models: nothing was measured: {expected}\n"


def test_a_model_whose_library_is_missing_is_skipped_with_the_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(CATALOGUE, "missing", Entry("no_such_library", _missing))
    with raising(InputError, "no_such_library"):
        models.measure({"model": "missing", "shares": [60], "seed": 0, "allow": "bitwise"}, _stage)


def test_rows_of_an_earlier_run_are_not_measured_again(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    row = models._new_row("bert", 60.0, 1000) | {"result": "met"}
    earlier = tmp_path / "earlier.json"
    earlier.write_text(json.dumps({"rows": [row], "skipped": {}}))
    arguments = ["--networks", "bert", "--shares", "60", "--resume", str(earlier), "--out", str(tmp_path)]
    assert models.main(arguments) == 0
    assert "bert" in capsys.readouterr().out
    (saved,) = tmp_path.glob("models_*.json")
    assert json.loads(saved.read_text())["rows"] == [row]


def test_there_are_forty_models_of_four_libraries() -> None:
    counts = {name: sum(one.library == name for one in CATALOGUE.values()) for name in models.PACKAGES[1:]}
    assert counts == {"timm": 25, "transformers": 11, "diffusers": 5, "torchvision": 2}
