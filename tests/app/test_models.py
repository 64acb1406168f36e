"""Networks are found by Shoal's names, by those of torchvision and timm, and by files and modules of the user."""

from __future__ import annotations

import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace

import pytest
import torch
from torch import nn

from shoal.app import models
from shoal.errors import InputError
from tests.raising import raising


@pytest.mark.parametrize("name", models.RESNETS)
def test_a_resnet_has_the_classes_asked_for(name: str) -> None:
    with torch.device("meta"):
        model = models.build(name, num_classes=5)
        assert model(torch.empty(models.example_shape(model, 2, 64))).shape == (2, 5)


def test_a_seed_fixes_the_weights_and_leaves_the_generator_alone() -> None:
    state = torch.get_rng_state()
    first, same, other = (models.build("resnet18_cifar", seed=seed).fc.weight for seed in (5, 5, 6))
    assert torch.equal(torch.get_rng_state(), state)
    assert torch.equal(first, same) and not torch.equal(first, other)


def test_a_function_of_a_file_or_a_module_is_called_with_what_it_takes(tmp_path: Path) -> None:
    file = tmp_path / "nets.py"
    file.write_text(
        "import torch\nfrom torch import nn\n\n\ndef plain():\n    return nn.Linear(2, 7), torch.zeros(1, 2)\n\n\n"
        "def classes(num_classes=3):\n    return nn.Conv3d(1, num_classes, 3)\n"
    )
    assert models.build(f"{file}:plain", num_classes=5).out_features == 7
    model = models.build(f"{file}:classes", num_classes=5)
    assert model.out_channels == 5 and models.build(f"{file}:classes").out_channels == 3
    assert models.example_shape(model, 2, 8) == (2, 1, 8, 8, 8)
    with torch.device("meta"):
        assert models.build("examples.networks.vgg:vgg19_cifar", num_classes=5).classifier.out_features == 5
        assert models.build("examples/networks/vgg.py:vgg11").classifier[6].out_features == 1000


def test_torchvision_comes_before_timm_and_neither_has_to_be_there(monkeypatch: pytest.MonkeyPatch) -> None:
    def zoo(making: str, *names: str) -> SimpleNamespace:
        made = {making: lambda name, num_classes=1000: nn.Linear(len(names), num_classes)}
        return SimpleNamespace(list_models=lambda: names, **made)

    torchvision = ModuleType("torchvision")
    monkeypatch.setitem(sys.modules, "torchvision", torchvision)
    monkeypatch.setitem(sys.modules, "torchvision.models", zoo("get_model", "vgg19"))
    monkeypatch.setitem(sys.modules, "timm", zoo("create_model", "vgg19", "efficientnet_b0"))
    assert models.build("vgg19", num_classes=5).weight.shape == (5, 1)
    assert models.build("efficientnet_b0", num_classes=5).weight.shape == (5, 2)
    monkeypatch.setitem(sys.modules, "torchvision.models", None)  # importing it raises ImportError
    assert models.build("vgg19").weight.shape == (1000, 2)
    monkeypatch.setitem(sys.modules, "timm", None)
    with raising(InputError, "'vgg19'"):
        models.build("vgg19")


@pytest.mark.parametrize(
    ("name", "complaint"),
    [
        ("resnet-18", "'resnet-18'"),
        ("nowhere.py:net", ""),
        ("math:nothing", ""),
        ("os:getcwd", "torch.nn.Module"),
        ("math:sqrt", "TypeError"),
    ],
)
def test_what_is_no_network_is_one_line(name: str, complaint: str) -> None:
    with raising(InputError, complaint):
        models.build(name)


@pytest.mark.parametrize(("batch", "image"), [(0, 8), (1, 0), (2**40, 2**10)])
def test_sizes_that_cannot_be_are_refused(batch: int, image: int) -> None:
    with pytest.raises(InputError):
        models.example_shape(nn.Conv2d(3, 4, 3), batch, image)
