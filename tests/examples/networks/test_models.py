"""What every network of the papers does: shapes, gradients, determinism, errors.

That its step is captured whole is told by `tests/engine/compile/test_networks.py`, where it trains planned.
"""

from __future__ import annotations

import pytest
import torch

from examples import networks as models
from shoal.errors import InputError
from tests.raising import raising

SMALL = tuple(name for name in models.names() if not name.startswith("vgg") or name == "vgg19_cifar")
SIDES = {"alexnet": 67, "unet3d": 16, "densenet121": 32, "resnet18_cifar": 16}


def batch(name: str, samples: int = 2) -> torch.Tensor:
    generator = torch.Generator().manual_seed(0)
    shape = models.example_shape(name, samples, SIDES.get(name, 32))
    return torch.randn(shape, generator=generator, device="cpu")


@pytest.mark.parametrize("name", models.names())
def test_output_has_one_row_per_sample_or_one_value_per_pixel(name: str) -> None:
    with torch.device("meta"):
        model = models.build(name, num_classes=5, in_channels=4)
        x = torch.empty(models.example_shape(name, 2, 224, in_channels=4))
    y = model(x)
    assert y.shape == ((2, 5, *x.shape[2:]) if name.startswith("unet") else (2, 5))


@pytest.mark.parametrize("name", ["resnet18", "resnet50", "googlenet", "mobilenet_v2", "densenet121", "vgg16"])
def test_images_need_not_be_square_or_even(name: str) -> None:
    with torch.device("meta"):
        assert models.build(name, num_classes=5)(torch.empty(2, 3, 75, 101)).shape == (2, 5)


@pytest.mark.parametrize("name", SMALL)
def test_gradients_are_finite_and_not_zero(name: str) -> None:
    torch.manual_seed(0)
    model = models.build(name, num_classes=5, seed=0)
    model(batch(name, 4)).square().sum().backward()
    for key, parameter in model.named_parameters():
        assert parameter.grad is not None, key
        assert parameter.grad.isfinite().all() and parameter.grad.any(), key


@pytest.mark.parametrize("name", SMALL)
def test_eval_mode_repeats_itself_and_moves_no_state(name: str) -> None:
    model = models.build(name, num_classes=5, seed=0).eval()
    before = {key: tensor.clone() for key, tensor in model.state_dict().items()}
    x = batch(name)
    with torch.no_grad():
        y = model(x)
        assert torch.equal(y, model(x))
        torch.testing.assert_close(y[:1], model(x[:1]))
    torch.testing.assert_close(model.state_dict(), before, rtol=0, atol=0)


@pytest.mark.parametrize("name", ["resnet18", "mobilenet_v2", "googlenet", "unet3d"])
def test_a_seed_fixes_the_weights_and_leaves_the_generator_alone(name: str) -> None:
    torch.manual_seed(1)
    state = torch.get_rng_state()
    first = models.build(name, seed=5).state_dict()
    assert torch.equal(torch.get_rng_state(), state)
    torch.manual_seed(2)
    torch.testing.assert_close(models.build(name, seed=5).state_dict(), first, rtol=0, atol=0)
    key = next(iter(first))
    assert not torch.equal(models.build(name, seed=6).state_dict()[key], first[key])


def test_without_a_seed_the_weights_come_from_the_generator() -> None:
    torch.manual_seed(5)
    first = models.build("resnet18").state_dict()
    assert torch.equal(first["fc.weight"], models.build("resnet18", seed=5).state_dict()["fc.weight"])
    assert not torch.equal(first["fc.weight"], models.build("resnet18").state_dict()["fc.weight"])


@pytest.mark.parametrize("name", ["resnet18_cifar", "googlenet", "unet"])
def test_a_checkpoint_round_trip_gives_the_same_network(name: str, tmp_path) -> None:
    model = models.build(name, num_classes=5, seed=0)
    model(batch(name))
    torch.save(model.state_dict(), tmp_path / "weights.pt")
    other = models.build(name, num_classes=5, seed=1)
    other.load_state_dict(torch.load(tmp_path / "weights.pt", weights_only=True), strict=True)
    with torch.no_grad():
        assert torch.equal(model.eval()(batch(name)), other.eval()(batch(name)))


@pytest.mark.parametrize(
    ("name", "kind", "rates"),
    [
        ("alexnet", torch.nn.Dropout, [0.5, 0.5]),
        ("vgg16", torch.nn.Dropout, [0.5, 0.5]),
        ("mobilenet_v2", torch.nn.Dropout, [0.2]),
        ("googlenet", torch.nn.Dropout, [0.2]),
        ("vgg19_cifar", torch.nn.Dropout, []),
    ],
)
def test_dropout_where_torchvision_has_it(name: str, kind: type[torch.nn.Dropout], rates: list[float]) -> None:
    with torch.device("meta"):
        model = models.build(name)
    assert [module.p for module in model.modules() if isinstance(module, kind)] == rates


@pytest.mark.parametrize("name", models.names())
def test_every_relu_module_works_in_place(name: str) -> None:
    with torch.device("meta"):
        model = models.build(name)
    relus = [module for module in model.modules() if isinstance(module, (torch.nn.ReLU, torch.nn.ReLU6))]
    assert all(relu.inplace for relu in relus)
    assert relus or name == "googlenet"


# Standard deviations that torchvision's rules prescribe: Kaiming over fan-out or fan-in, or a constant.
@pytest.mark.parametrize(
    ("name", "key", "deviation"),
    [
        ("resnet18", "layer3.0.conv1.weight", (2 / (256 * 9)) ** 0.5),
        ("vgg19_cifar", "features.3.weight", (2 / (64 * 9)) ** 0.5),
        ("vgg19_cifar", "classifier.weight", 0.01),
        ("densenet121", "features.denseblock1.denselayer1.conv1.weight", (2 / 64) ** 0.5),
        ("mobilenet_v2", "features.18.0.weight", (2 / 1280) ** 0.5),
        ("mobilenet_v2", "classifier.1.weight", 0.01),
        ("googlenet", "inception4a.branch2.1.conv.weight", 0.01),
        ("googlenet", "fc.weight", 0.01),
    ],
)
def test_initial_weights_have_torchvisions_spread(name: str, key: str, deviation: float) -> None:
    weight = models.build(name, seed=0).state_dict()[key]
    assert weight.std().item() == pytest.approx(deviation, rel=0.05)


@pytest.mark.parametrize(
    ("wrong", "meant"), [("resnet-18", "resnet18"), ("ResNet50", "resnet50"), ("mobilenetv2", "mobilenet_v2")]
)
def test_an_unknown_name_lists_the_names_and_the_closest(wrong: str, meant: str) -> None:
    with raising(InputError, f"'{meant}'") as caught:
        models.build(wrong)
    assert all(name in str(caught.value) for name in models.names())


def test_a_name_like_no_other_gets_the_list_only() -> None:
    with raising(InputError, "'zzz'"):
        models.example_shape("zzz", 1, 32)


@pytest.mark.parametrize(("name", "side", "multiple"), [("unet", 40, 16), ("unet3d", 20, 8), ("unet3d", 4, 8)])
def test_a_unet_names_the_multiple_that_its_sides_must_have(name: str, side: int, multiple: int) -> None:
    with torch.device("meta"):
        model = models.build(name)
    dims = 3 if name == "unet3d" else 2
    with raising(InputError, multiple, "x".join([str(side)] * dims)):
        model(torch.empty(1, 3, *(side,) * dims, device="meta"))
    with raising(InputError, multiple):
        models.example_shape(name, 1, side)


def test_a_unet_takes_sides_of_different_length() -> None:
    with torch.device("meta"):
        assert models.build("unet3d")(torch.empty(1, 3, 8, 16, 24)).shape == (1, 2, 8, 16, 24)


def test_an_image_of_one_pixel_per_step_still_trains_resnet18() -> None:
    model = models.build("resnet18", num_classes=10, seed=0)
    assert model(batch("resnet18", 3)).shape == (3, 10)
