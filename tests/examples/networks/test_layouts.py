"""Names, shapes and counts are torchvision's.

`torchvision_layouts.json` was computed from the state dicts that torchvision 0.29.2 builds (`aux*` keys of googlenet
left out): how many tensors, how many parameters, and the SHA-256 of the lines `"{name} {shape} {dtype}\\n"` in order.
"""

from __future__ import annotations

import hashlib
import json
from pathlib import Path

import pytest
import torch

from examples import networks as models

LAYOUTS = json.loads((Path(__file__).parent / "torchvision_layouts.json").read_text())
AUXILIARY = {
    f"{head}.{name}": shape
    for head, channels in (("aux1", 512), ("aux2", 528))
    for name, shape in {
        "conv.conv.weight": (128, channels, 1, 1),
        "conv.bn.weight": (128,),
        "conv.bn.bias": (128,),
        "conv.bn.running_mean": (128,),
        "conv.bn.running_var": (128,),
        "conv.bn.num_batches_tracked": (),
        "fc1.weight": (1024, 2048),
        "fc1.bias": (1024,),
        "fc2.weight": (1000, 1024),
        "fc2.bias": (1000,),
    }.items()
}


def parameters(model: torch.nn.Module) -> int:
    return sum(parameter.numel() for parameter in model.parameters())


@pytest.mark.parametrize("name", LAYOUTS)
def test_state_dict_has_torchvisions_names_shapes_and_order(name: str) -> None:
    with torch.device("meta"):
        model = models.build(name)
    state = model.state_dict()
    lines = [f"{key} {tuple(tensor.shape)} {tensor.dtype}\n" for key, tensor in state.items()]
    assert len(state) == LAYOUTS[name]["tensors"]
    assert parameters(model) == LAYOUTS[name]["parameters"]
    assert hashlib.sha256("".join(lines).encode()).hexdigest() == LAYOUTS[name]["sha256"], "".join(lines)


@pytest.mark.parametrize(
    ("name", "key", "shape"),
    [
        ("alexnet", "classifier.4.weight", (4096, 4096)),
        ("vgg11", "features.18.weight", (512, 512, 3, 3)),
        ("vgg16", "features.28.bias", (512,)),
        ("vgg19_bn", "features.50.running_var", (512,)),
        ("resnet18", "layer2.0.downsample.0.weight", (128, 64, 1, 1)),
        ("resnet50", "layer4.2.conv3.weight", (2048, 512, 1, 1)),
        ("densenet121", "features.denseblock3.denselayer24.norm1.weight", (992,)),
        ("mobilenet_v2", "features.17.conv.1.0.weight", (960, 1, 3, 3)),
        ("googlenet", "inception5b.branch3.1.conv.weight", (128, 48, 3, 3)),
    ],
)
def test_a_tensor_that_torchvisions_checkpoint_holds(name: str, key: str, shape: tuple[int, ...]) -> None:
    with torch.device("meta"):
        assert models.build(name).state_dict()[key].shape == shape


def test_vgg11_has_the_parameters_that_its_paper_counts() -> None:
    with torch.device("meta"):
        assert parameters(models.build("vgg11")) == 132_863_336  # "133" million: configuration A in its table 2


def test_googlenet_loads_a_checkpoint_with_auxiliary_classifiers_and_leaves_the_checkpoint_whole() -> None:
    source = models.build("googlenet", seed=1)
    checkpoint = source.state_dict() | {key: torch.zeros(shape) for key, shape in AUXILIARY.items()}
    assert sum(tensor.numel() for key, tensor in checkpoint.items() if is_parameter(key)) == 13_004_888
    keys = list(checkpoint)
    model = models.build("googlenet", seed=2)
    model.load_state_dict(checkpoint, strict=True)
    assert list(checkpoint) == keys
    torch.testing.assert_close(model.state_dict(), source.state_dict(), rtol=0, atol=0)


def test_googlenet_still_refuses_other_unknown_keys() -> None:
    model = models.build("googlenet", seed=1)
    with pytest.raises(RuntimeError, match="aux3"):
        model.load_state_dict(model.state_dict() | {"aux3.weight": torch.zeros(1)}, strict=True)


def test_googlenet_inside_another_module_drops_its_own_auxiliary_keys_only() -> None:
    model = torch.nn.ModuleDict({"body": models.build("googlenet", seed=1), "aux1": torch.nn.Linear(1, 1)})
    checkpoint = model.state_dict() | {f"body.{key}": torch.zeros(shape) for key, shape in AUXILIARY.items()}
    checkpoint["aux1.weight"] = torch.full((1, 1), 7.0)
    model.load_state_dict(checkpoint, strict=True)
    assert model["aux1"].weight.item() == 7.0


# The 2-D count is that of the widely used PyTorch U-Net of the same widths (3 channels in, 2 classes out).
@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("unet", 31_037_698),
        ("vgg19_cifar", 143_678_248 - 123_642_856 + 512 * 10 + 10),
        ("resnet18_cifar", 11_689_512 - 1000 * 513 + 10 * 513 - 64 * 3 * 49 + 64 * 3 * 9),
    ],
)
def test_parameter_counts_of_networks_torchvision_lacks(name: str, expected: int) -> None:
    with torch.device("meta"):
        assert parameters(models.build(name)) == expected


def is_parameter(key: str) -> bool:
    return not key.endswith(("running_mean", "running_var", "num_batches_tracked"))
