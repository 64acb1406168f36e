"""What runs a raw function: the first kernel that applies, or the one that a variable names."""

from __future__ import annotations

from importlib import import_module
from inspect import signature
from types import ModuleType

import pytest
import torch

from shoal.codecs import kernels
from shoal.codecs.kernels import kernel
from shoal.errors import InputError

FUNCTIONS = {
    "table_codes": ("encode_blocks", "decode_blocks"),
    "truncation": ("pack", "unpack"),
    "one_bit": ("encode_blocks", "decode_blocks"),
    "sign_mask": ("encode", "decode"),
}
REFERENCE = "shoal.codecs.truncation_reference"


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
    modules = {name: Fake(name, False) for name in map("shoal.codecs.truncation_{}".format, kernels.KERNELS)}
    modules[REFERENCE] = Fake(REFERENCE, True)
    monkeypatch.setattr(kernels, "_module", modules.__getitem__)
    return modules


def put(found: dict[str, Fake], kind: str, applies: bool) -> Fake:
    name = f"shoal.codecs.truncation_{kind}"
    found[name] = Fake(name, applies)
    return found[name]


def test_where_none_applies_the_reference_runs(found: dict[str, Fake]) -> None:
    assert kernel("truncation", torch.ones(1)).__name__ == REFERENCE


def test_each_is_asked_about_the_tensors_in_order(found: dict[str, Fake]) -> None:
    triton, native = put(found, "triton", False), put(found, "native", True)
    x, out = torch.ones(1), torch.ones(2)
    assert kernel("truncation", x, out) is native
    assert triton.asked == native.asked == [(x, out)]
    triton._applies = True
    assert kernel("truncation", x) is triton


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


@pytest.mark.parametrize("name", ["table_codes", "truncation", "one_bit", "sign_mask"])
@pytest.mark.parametrize("kind", [*kernels.KERNELS, "reference"])
def test_every_kernel_has_the_functions_of_the_reference(name: str, kind: str) -> None:
    reference = import_module(f"shoal.codecs.{name}_reference")
    module = import_module(f"shoal.codecs.{name}_{kind}")
    assert kind == "reference" or callable(module.applies)
    for function in FUNCTIONS[name]:
        theirs, ours = (list(signature(getattr(m, function)).parameters) for m in (module, reference))
        assert theirs[: len(ours)] == ours
