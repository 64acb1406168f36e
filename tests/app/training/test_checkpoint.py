"""A checkpoint puts everything back, or says in one line why it cannot."""

from __future__ import annotations

import errno
import os
import random
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import shoal
from shoal.app.training import checkpoint
from shoal.app.training.checkpoint import Position
from shoal.app.training.ranks import Ranks
from shoal.app.training.strategy import Strategy
from shoal.core import files
from shoal.errors import InputError
from tests.engine.compile.wrong_values import is_readable
from tests.raising import raising

ARGUMENTS = {"model": "tiny", "batch": 4, "image": None, "lr": 0.1}


class Parts:
    """A model, an optimizer and a scaler, with a step or two after them."""

    def __init__(self, seed: int, features: int = 3) -> None:
        torch.manual_seed(seed)
        self.model = nn.Sequential(nn.Linear(4, features), nn.BatchNorm1d(features), nn.Dropout(0.5))
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=0.1)
        self.strategy = Strategy(self.model, self.optimizer, Ranks())
        self.scaler = torch.amp.GradScaler("cpu", enabled=True)

    def step(self) -> torch.Tensor:
        outputs = self.model(torch.randn(8, 4))
        outputs.square().sum().backward()
        self.optimizer.step()
        self.optimizer.zero_grad()
        return outputs.detach()

    def save(self, path: Path, position: Position | None = None, **changed: Any) -> Path:
        arguments = {**ARGUMENTS, **changed}
        return checkpoint.save(path, arguments, position or Position.start(), self.strategy, self.scaler)

    def load(self, path: Path, **changed: Any) -> Position:
        return checkpoint.load(path, {**ARGUMENTS, **changed}, self.strategy, self.scaler)


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "checkpoint.pt"


def test_what_follows_a_checkpoint_is_the_same_bit_for_bit(path: Path) -> None:
    trained = Parts(seed=1)
    trained.step()
    position = Position(2, 5, 1.5, 7, 9, [0.1, 1 / 3], [0.25])
    trained.save(path, position)
    expected = [trained.step() for _ in range(3)]

    other = Parts(seed=2)
    assert other.load(path) == position
    assert all(map(torch.equal, expected, [other.step() for _ in range(3)]))


def test_there_is_nothing_to_resume_from(path: Path) -> None:
    with pytest.raises(InputError):
        Parts(seed=0).load(path)


def test_a_run_with_other_arguments_is_reported_which(path: Path) -> None:
    Parts(seed=0).save(path)
    with raising(InputError, "batch=4 there and 8 here", "image=None there and 32 here"):
        Parts(seed=0).load(path, batch=8, image=32)


def test_a_checkpoint_of_another_network_does_not_fit(path: Path) -> None:
    Parts(seed=0).save(path)
    with pytest.raises(InputError):
        Parts(seed=0, features=5).load(path)


def damaged(whole: bytes) -> dict[str, bytes]:
    middle = len(whole) // 2
    return {
        "empty": b"",
        "text": b"this is not a checkpoint\n" * 10,
        "cut short": whole[:middle],
        "one bit flipped": whole[:middle] + bytes([whole[middle] ^ 1]) + whole[middle + 1 :],
    }


@pytest.mark.parametrize("damage", ["empty", "text", "cut short", "one bit flipped"])
def test_a_damaged_file_is_reported_in_one_line(path: Path, damage: str) -> None:
    parts = Parts(seed=0, features=500)  # its weights fill the middle of the file
    parts.save(path)
    path.write_bytes(damaged(path.read_bytes())[damage])
    with pytest.raises(InputError):
        parts.load(path)


class Bomb:
    def __reduce__(self) -> tuple[Any, ...]:
        return (os.mkdir, ("exploded",))


@pytest.mark.parametrize("content", [{"epoch": 3}, [1, 2], Bomb(), {"format": "shoal-checkpoint", "version": 99}])
def test_a_foreign_file_is_refused_and_none_of_its_code_runs(
    path: Path, content: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.chdir(tmp_path)
    torch.save(content, path)
    with pytest.raises(InputError):
        Parts(seed=0).load(path)
    assert not (tmp_path / "exploded").exists()


def test_a_full_disk_leaves_the_earlier_checkpoint(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    parts = Parts(seed=0)
    parts.save(path, Position(1, 0, 0.0, 0, 0, [], []))

    def full(handle: int) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(files.os, "fsync", full)
    with pytest.raises(InputError):
        parts.save(path, Position(2, 0, 0.0, 0, 0, [], []))
    assert parts.load(path).epoch == 1
    assert list(path.parent.iterdir()) == [path]


def test_what_the_plans_of_a_run_encode_comes_back_with_it(path: Path) -> None:
    """Its numbers hang on that, and it hangs on times that were measured."""
    parts, fresh = Parts(0), Parts(1)
    for each in (parts, fresh):
        shoal.compile(each.model, budget="1GiB", allow="bitwise, encode")
    parts.model.shoal.encoded["some step"] = ("relu", "relu_1")
    fresh.load(parts.save(path))
    assert fresh.model.shoal.encoded == {"some step": ("relu", "relu_1")}


def _with_pickle(path: Path, change: Callable[[bytes], bytes]) -> None:
    """Write the checkpoint again as a sound archive, its pickled part changed."""
    with zipfile.ZipFile(path) as parts:
        members = {name: parts.read(name) for name in parts.namelist()}
    with zipfile.ZipFile(path, "w") as parts:
        for name, content in members.items():
            parts.writestr(name, change(content) if name.endswith("data.pkl") else content)


def test_a_sound_archive_of_a_damaged_pickle_is_reported_in_one_line_whatever_the_damage(path: Path) -> None:
    Parts(seed=0).save(path)
    whole = path.read_bytes()
    with zipfile.ZipFile(path) as parts:
        size = next(info.file_size for info in parts.infolist() if info.filename.endswith("data.pkl"))
    draw = random.Random(0)

    def cut(at: int) -> Callable[[bytes], bytes]:
        return lambda content: content[:at]

    def flipped(at: int, bit: int) -> Callable[[bytes], bytes]:
        return lambda content: content[:at] + bytes([content[at] ^ bit]) + content[at + 1 :]

    cuts = [cut(size * share // 75) for share in range(75)]
    flips = [flipped(draw.randrange(size), 1 << draw.randrange(8)) for _ in range(150)]
    refused = 0
    for change in cuts + flips:
        path.write_bytes(whole)
        _with_pickle(path, change)
        try:
            Parts(seed=0).load(path)
        except InputError as error:
            assert str(path) in str(error)
            assert is_readable(error)
            assert "--resume" in str(error) or "resume with the same arguments" in str(error)
            refused += 1
    assert refused >= len(cuts)


@pytest.mark.parametrize("key", ["model", "optimizer", "scaler", "position", "ranks", "arguments"])
def test_a_part_of_the_wrong_kind_is_reported_in_one_line(path: Path, key: str) -> None:
    parts = Parts(seed=0)
    parts.save(path)
    whole = torch.load(path, weights_only=True)
    assert key in whole
    no_position = {**vars(Position.start()), "step": -1}
    for wrong in (None, 7, "x", [], [1], {}, {"x": 1}, torch.zeros(2), [{"travel": 3}], no_position):
        if key == "scaler" and wrong == {}:
            continue  # what a scaler that is switched off has
        torch.save({**whole, key: wrong}, path)
        with pytest.raises(InputError) as caught:
            parts.load(path)
        assert str(path) in str(caught.value) and is_readable(caught.value)


def _group(**changed: Any) -> Callable[[dict[str, Any]], object]:
    return lambda state: state["optimizer"]["param_groups"][0].update(changed)


def _slot(name: str, change: Callable[[torch.Tensor], object], key: int = 0) -> Callable[[dict[str, Any]], object]:
    def damage(state: dict[str, Any]) -> None:
        slots = state["optimizer"]["state"][key]
        slots[name] = change(slots[name])

    return damage


# What to do to the state of AdamW and of the model, and what the error names.
FAULTS: dict[str, tuple[Callable[[dict[str, Any]], object], str]] = {
    "weight decay": (_group(weight_decay=-50.0), "weight_decay=-50.0 there and 0.01 here"),
    "betas": (_group(betas=(0.1, 0.2)), "betas"),
    "maximize": (_group(maximize=True), "maximize=True there and False here"),
    "not a number": (_group(eps=float("nan")), "eps=nan"),
    "unknown setting": (_group(nesterov=True), "nesterov=True"),
    "two groups": (lambda state: state["optimizer"]["param_groups"].append({"params": []}), "2 groups"),
    "no group": (lambda state: state["optimizer"]["param_groups"].clear(), "0 groups"),
    "fewer parameters": (lambda state: state["optimizer"]["param_groups"][0]["params"].pop(), "other parameters"),
    "unknown parameter": (lambda state: state["optimizer"]["state"].update({9: {}}), "unknown parameter '9'"),
    "no state": (lambda state: state["optimizer"]["state"].pop(1), "parameter 1 with no"),
    "missing slot": (lambda state: state["optimizer"]["state"][0].pop("exp_avg"), "parameter 0 with no 'exp_avg'"),
    "unknown slot": (lambda state: state["optimizer"]["state"][0].update(z=1), "an unknown 'z'"),
    "shape": (
        _slot("exp_avg", lambda value: value[:2]),
        "exp_avg of parameter 0 of shape (2, 4), expected (3, 4)",
    ),
    "one row": (_slot("exp_avg_sq", lambda value: value[:1]), "exp_avg_sq of parameter 0 of shape"),
    "complex": (_slot("exp_avg", lambda value: value + 0j), "exp_avg of parameter 0 of complex64, expected float32"),
    "dtype": (_slot("exp_avg", torch.Tensor.double), "of float64, expected float32"),
    "integers": (_slot("exp_avg", torch.Tensor.int), "of int32, expected float32"),
    "no tensor": (_slot("exp_avg", lambda value: 0.5), "expected a tensor"),
    "not finite": (_slot("exp_avg", lambda value: value / 0), "not finite"),
    "step": (_slot("step", lambda value: value * float("nan")), "step of parameter 0"),
    "steps": (_slot("step", lambda value: torch.ones(3)), "step of parameter 0"),
    "weight": (
        lambda state: state["model"]["0.weight"].fill_(float("inf")),
        "0.weight with numbers that are not finite",
    ),
    "complex weight": (
        lambda state: state["model"].update({"0.weight": torch.zeros(3, 4, dtype=torch.complex64)}),
        "0.weight of complex64",
    ),
    "scale": (lambda state: state["scaler"].update(scale=float("nan")), "scale=nan"),
    "growth": (lambda state: state["scaler"].update(growth_factor=50.0), "growth_factor=50.0"),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_a_state_that_is_not_this_runs_is_refused_in_one_line_and_nothing_is_loaded(path: Path, fault: str) -> None:
    trained, damage = Parts(seed=0), FAULTS[fault]
    trained.step()
    trained.save(path, Position(0, 1, 1.0, 1, 1, [1.0], []))
    whole = torch.load(path, weights_only=True)
    damage[0](whole)
    torch.save(whole, path)
    other = Parts(seed=1)
    before = [parameter.clone() for parameter in other.model.parameters()]
    with raising(InputError, damage[1], path) as caught:
        other.load(path)
    assert is_readable(caught.value)
    assert all(map(torch.equal, before, other.model.parameters())) and not other.optimizer.state


def test_a_setting_that_an_older_file_lacks_is_that_of_this_run(path: Path) -> None:
    trained = Parts(seed=0)
    trained.step()
    trained.save(path, Position(0, 1, 1.0, 1, 1, [1.0], []))
    whole = torch.load(path, weights_only=True)
    for name in ("weight_decay", "decoupled_weight_decay", "eps"):
        whole["optimizer"]["param_groups"][0].pop(name)
    torch.save(whole, path)
    expected, other = trained.step(), Parts(seed=1)
    other.load(path)
    assert torch.equal(expected, other.step())
    assert all(map(torch.equal, trained.model.parameters(), other.model.parameters()))


def test_a_scaler_that_has_left_out_every_step_so_far_leaves_no_state_and_resumes(path: Path) -> None:
    Parts(seed=0).save(path, Position(0, 1, 1.0, 1, 1, [1.0], []))
    assert Parts(seed=1).load(path).step == 1
