"""Whatever is given for an argument, a value of another type is refused by name."""

from __future__ import annotations

import dataclasses
import inspect
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy
import pytest
import torch
from torch import nn
from torch.optim import SGD

import shoal
from shoal.core import arguments
from shoal.core.files import write_text
from shoal.errors import InputError, PlanError, ShoalError
from tests.raising import raising


class Incomparable:
    """Has no truth value, no equality and no hash, as arrays of several elements."""

    __hash__ = None  # type: ignore[assignment]

    def __eq__(self, other: object) -> bool:
        raise ValueError("ambiguous")

    def __bool__(self) -> bool:
        raise ValueError("ambiguous")


ODD: dict[str, Any] = {
    "tensor": torch.zeros(2),
    "meta": torch.empty(2, device="meta"),
    "array": numpy.zeros(2),
    "incomparable": Incomparable(),
    "nan": float("nan"),
    "huge": 10**400,
    "nul": "a\0b",
    "surrogate": "\ud800",
    "bytes": b"x",
    "list": [[1]],
    "dict": {},
    "type": int,
    "negative": -1,
    "complex": 1j,
    "function": print,
}


def net() -> nn.Module:
    return nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.Conv2d(4, 4, 3))


def bound(make: Callable[[nn.Module], Any], method: str) -> Callable[..., Any]:
    return lambda **given: getattr(make(net()), method)(**given)


CALLS: dict[str, tuple[Callable[..., Any], Mapping[str, Callable[[], Any]], tuple[str, ...]]] = {
    "Options": (shoal.Options, {}, tuple(field.name for field in dataclasses.fields(shoal.Options))),
    "compile": (shoal.compile, {"model": net}, tuple(inspect.signature(shoal.compile).parameters)),
    "Budget": (shoal.Budget, {}, ("budget",)),
    "split": (shoal.split, {"model": net}, tuple(inspect.signature(shoal.split).parameters)),
    "invert_norm": (shoal.invert_norm, {"model": net}, ("model", "slope", "limit")),
    "fuse_batchnorm": (shoal.fuse_batchnorm, {"model": net}, ("model", "level", "when")),
    "offload_activations": (shoal.offload_activations, {}, ("min_bytes", "host_budget", "link")),
    "Plan.load": (shoal.Plan.load, {}, ("path",)),
    "check": (bound(shoal.split, "check"), {"sizes": lambda: (8, 8)}, ("sizes", "images")),
    "describe": (bound(shoal.split, "describe"), {}, ("sizes",)),
    "reconstruction_errors": (bound(shoal.invert_norm, "reconstruction_errors"), {}, ("dtype",)),
    "restore": (bound(shoal.invert_norm, "restore"), {}, ("activation", "limit")),
    "HostWeights": (
        lambda **given: shoal.distributed.HostWeights(**{"optimizer": SGD(given["model"].parameters(), 0.1)} | given),
        {"model": net},
        ("optimizer", "precision", "rounding", "one_byte", "gradients", "rehearse"),
    ),
    "register": (shoal.codecs.register, {}, ("kind",)),
    "write": (write_text, {"text": lambda: ""}, ("path",)),
}


@pytest.mark.parametrize("odd", ODD)
@pytest.mark.parametrize(("call", "name"), [(call, name) for call, (_, _, names) in CALLS.items() for name in names])
def test_no_value_of_any_type_gives_an_error_of_pythons(
    call: str, name: str, odd: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    function, others, _ = CALLS[call]
    given = {other: make() for other, make in others.items()} | {name: ODD[odd]}
    try:
        function(**given)
    except ShoalError as error:
        assert str(error)


@pytest.mark.parametrize("name", ["strict", "cuda_graphs"])
def test_a_tensor_is_no_switch(name: str) -> None:
    for value in (torch.zeros(2), torch.ones(1), numpy.ones(1), 2, "yes"):
        with raising(InputError, f"{name}="):
            shoal.Options(**{name: value})
    assert getattr(shoal.Options(**{name: numpy.bool_(True)}), name) is True


def test_of_the_arguments_that_are_refused_the_name_is_said() -> None:
    with raising(InputError, "kernels="):
        shoal.Options(kernels=numpy.zeros(2))  # type: ignore[arg-type]
    with raising(InputError, "limit="):
        shoal.invert_norm(net(), limit=10**400)
    assert shoal.invert_norm(net(), limit=10**30).inverted
    with raising(PlanError, "path="):
        shoal.Plan.load("a\0b")
    with raising(InputError, "sizes="):
        shoal.split(net()).check(8)  # type: ignore[arg-type]


def test_numbers_of_numpy_are_numbers() -> None:
    assert arguments.positive("first", numpy.int64(3)) == 3
    assert arguments.is_number(numpy.float32(0.5)) and not arguments.is_number(float("inf"))
    assert arguments.sizes("patch", (numpy.int32(4), 8), 2) == (4, 8)
