"""What runs a raw function: the first kernel that applies, or the one that a variable names."""

from __future__ import annotations

from types import ModuleType

import pytest
import torch

from shoal.codecs import kernels
from shoal.codecs.kernels import kernel
from shoal.errors import InputError


class Fake(ModuleType):
    def __init__(self, name: str, applies: bool) -> None:
        super().__init__(name)
        self.asked: list[tuple[torch.Tensor, ...]] = []
        self._applies = applies

    def applies(self, *tensors: torch.Tensor) -> bool:
        self.asked.append(tensors)
        return self._applies


@pytest.fixture
def found(monkeypatch: pytest.MonkeyPatch) -> dict[str, Fake]:
    monkeypatch.delenv(kernels.VARIABLE, raising=False)
    modules: dict[str, Fake] = {}
    monkeypatch.setattr(kernels, "_module", modules.get)
    return modules


def put(found: dict[str, Fake], kind: str, applies: bool) -> Fake:
    name = f"shoal.codecs.truncation_{kind}"
    found[name] = Fake(name, applies)
    return found[name]


def test_without_kernels_the_reference_runs(found: dict[str, Fake]) -> None:
    assert kernel("truncation", torch.ones(1)).__name__ == "shoal.codecs.truncation_reference"


def test_each_is_asked_about_the_tensors_in_order(found: dict[str, Fake]) -> None:
    triton, native = put(found, "triton", False), put(found, "native", True)
    x, out = torch.ones(1), torch.ones(2)
    assert kernel("truncation", x, out) is native
    assert triton.asked == native.asked == [(x, out)]
    triton._applies = True
    assert kernel("truncation", x) is triton


def test_one_that_does_not_apply_leaves_it_to_the_reference(found: dict[str, Fake]) -> None:
    put(found, "native", False)
    assert kernel("truncation", torch.ones(1)).__name__ == "shoal.codecs.truncation_reference"


@pytest.mark.parametrize(
    ("variable", "runs"), [("torch", "reference"), ("native", "native"), ("triton", "triton"), ("", "triton")]
)
def test_a_variable_names_the_only_one_to_ask(
    found: dict[str, Fake], monkeypatch: pytest.MonkeyPatch, variable: str, runs: str
) -> None:
    put(found, "triton", True)
    put(found, "native", True)
    monkeypatch.setenv(kernels.VARIABLE, variable)
    assert kernel("truncation", torch.ones(1)).__name__ == f"shoal.codecs.truncation_{runs}"


def test_a_variable_that_names_none_is_told(found: dict[str, Fake], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(kernels.VARIABLE, "cuda")
    with pytest.raises(InputError, match="SHOAL_CODEC_KERNELS=cuda: choose one of triton, native, torch"):
        kernel("truncation", torch.ones(1))
