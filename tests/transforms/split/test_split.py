"""A split network against its definition: the unsplit one, in which every window is masked to its own patch."""

from __future__ import annotations

import copy
import math
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from hypothesis import assume, given
from hypothesis import strategies as st
from torch import nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from examples import networks as models
from shoal.errors import CaptureError, InputError
from shoal.transforms.split.patches import Region
from shoal.transforms.split.split import SplitModule, split
from tests.raising import raising
from tests.transforms.split.drawing import DRAWING


def convolution(inputs: int, outputs: int, kernel: int = 3, **changes: Any) -> nn.Conv2d:
    return nn.Conv2d(inputs, outputs, kernel, **{"padding": kernel // 2, **changes}).double()


def affine_norm() -> nn.BatchNorm2d:
    """Not the identity: a patch of nothing but padding would come out as zeros, like the next layer's padding, and
    rounding would decide which of the two a max-pool takes."""
    norm = nn.BatchNorm2d(4).double()
    nn.init.uniform_(norm.weight, 0.5, 1.5)
    nn.init.uniform_(norm.bias, 0.5, 1.5)
    return norm


@st.composite
def layers(draw: st.DrawFn, *, batch_norm: bool = True) -> list[nn.Module]:
    """A few layers of any shape, in float64, from 4 channels to 4."""
    found: list[nn.Module] = []
    for _ in range(draw(st.integers(1, 3))):
        kernel = draw(st.tuples(st.integers(1, 4), st.integers(1, 4)))
        stride = draw(st.tuples(st.integers(1, 3), st.integers(1, 3)))
        match draw(st.sampled_from(["conv", "conv", "max", "average"])):
            case "conv":
                dilation = draw(st.tuples(st.integers(1, 2), st.integers(1, 2)))
                padding = (draw(st.integers(0, kernel[0])), draw(st.integers(0, kernel[1])))
                groups, mode = draw(st.sampled_from([1, 2])), draw(st.sampled_from(["zeros", "zeros", "replicate"]))
                found.append(nn.Conv2d(4, 4, kernel, stride, padding, dilation, groups, padding_mode=mode).double())
            case "max":
                padding = (draw(st.integers(0, kernel[0] // 2)), draw(st.integers(0, kernel[1] // 2)))
                found.append(nn.MaxPool2d(kernel, stride, padding, ceil_mode=draw(st.booleans())))
            case _:
                padding = (draw(st.integers(0, kernel[0] // 2)), draw(st.integers(0, kernel[1] // 2)))
                ceil, include = draw(st.booleans()), draw(st.booleans())
                found.append(nn.AvgPool2d(kernel, stride, padding, ceil_mode=ceil, count_include_pad=include))
        if draw(st.booleans()):
            found.append(nn.Tanh())
        elif batch_norm and draw(st.booleans()):
            found.append(affine_norm())
    if not any(isinstance(layer, nn.Conv2d) for layer in found):
        found.append(convolution(4, 4))
    return found


grids = st.tuples(st.integers(1, 3), st.integers(1, 3)).filter(lambda grid: grid != (1, 1))


def masked(net: Sequence[nn.Module], x: torch.Tensor, divided: SplitModule) -> torch.Tensor:
    """The definition: for every patch, each layer runs on the whole, with what is outside the patch as if padded."""
    plan = divided.plan
    assert plan is not None
    sizes = tuple(x.shape[2:])
    cores = plan.cores(sizes, plan.even_cuts(sizes))
    rows = []
    for i in range(plan.grid[0]):
        row = []
        for j in range(plan.grid[1]):
            y = x
            for tensor, layer in enumerate(net):
                y = alone(layer, y, cores[tensor], cores[tensor + 1], (i, j))
            row.append(inside(y, cores[len(net)], (i, j)))
        rows.append(torch.cat(row, -1))
    return torch.cat(rows, -2)


def inside(x: torch.Tensor, region: Region, patch: tuple[int, int]) -> torch.Tensor:
    (top, bottom), (left, right) = region[0][patch[0]], region[1][patch[1]]
    return x[..., top:bottom, left:right]


def alone(layer: nn.Module, x: torch.Tensor, have: Region, made: Region, patch: tuple[int, int]) -> torch.Tensor:
    here = torch.zeros(x.shape[-2:], dtype=torch.bool)
    inside(here, have, patch).fill_(True)
    if isinstance(layer, nn.BatchNorm2d):
        normal = F.batch_norm(inside(x, have, patch), None, None, layer.weight, layer.bias, True, 0.0, layer.eps)
        whole = torch.zeros_like(x)
        inside(whole, have, patch).copy_(normal)
        return whole
    if isinstance(layer, nn.MaxPool2d):
        return layer(torch.where(here, x, -math.inf))
    if isinstance(layer, nn.AvgPool2d) and not layer.count_include_pad:
        sums = nn.AvgPool2d(layer.kernel_size, layer.stride, layer.padding, layer.ceil_mode, divisor_override=1)
        return sums(torch.where(here, x, 0.0)) / sums(here.to(x.dtype).expand_as(x)).clamp_min(1)
    if isinstance(layer, nn.Conv2d) and layer.padding_mode == "replicate":
        rows, columns = layer.padding  # the borders of the whole are padded by it, the cuts by zeros
        wide = F.pad(x, (columns, columns, rows, rows), "replicate")
        (top, bottom), (left, right) = have[0][patch[0]], have[1][patch[1]]
        height, width = x.shape[-2:]
        seen = torch.zeros(wide.shape[-2:], dtype=torch.bool)
        vertical = slice(top + rows if top else 0, bottom + rows if bottom < height else None)
        seen[vertical, slice(left + columns if left else 0, right + columns if right < width else None)] = True
        wide = torch.where(seen, wide, 0.0)
        return F.conv2d(wide, layer.weight, layer.bias, layer.stride, 0, layer.dilation, layer.groups)
    return layer(torch.where(here, x, 0.0)) if isinstance(layer, (nn.Conv2d, nn.AvgPool2d)) else layer(x)


def gradients(net: nn.Module, x: torch.Tensor, y: torch.Tensor) -> list[torch.Tensor]:
    weights = torch.linspace(-1, 1, y.numel(), dtype=y.dtype).reshape(y.shape)
    return list(torch.autograd.grad((y * weights).sum(), [x, *net.parameters()]))


def assert_equal(ours: Sequence[torch.Tensor], theirs: Sequence[torch.Tensor], tolerance: float = 1e-9) -> None:
    for one, other in zip(ours, theirs, strict=True):
        scale = float(other.detach().abs().max().clamp_min(1.0))
        torch.testing.assert_close(one, other, rtol=0.0, atol=tolerance * scale)


def forward_or_skip(net: nn.Module, x: torch.Tensor) -> torch.Tensor:
    try:
        return net(x)
    except (InputError, RuntimeError, ValueError):  # no window fits, or one value a channel
        assume(False)
        raise


@given(layers(), grids, st.tuples(st.integers(8, 20), st.integers(8, 20)), st.integers(1, 2))
def test_it_is_the_unsplit_network_with_every_window_masked_to_its_patch(
    net: list[nn.Module], grid: tuple[int, int], sizes: tuple[int, int], batch: int
) -> None:
    whole = nn.Sequential(*net)
    x = torch.randn(batch, 4, *sizes, dtype=torch.float64, requires_grad=True)
    forward_or_skip(copy.deepcopy(whole), x)
    divided = split(whole, depth=1.0, grid=grid)
    ours = forward_or_skip(divided, x)
    theirs = masked(net, x, divided)
    assert_equal([ours, *gradients(whole, x, ours)], [theirs, *gradients(whole, x, theirs)])


@given(layers(), grids, st.tuples(st.integers(8, 20), st.integers(8, 20)))
def test_overlapping_patches_are_the_unsplit_network(
    net: list[nn.Module], grid: tuple[int, int], sizes: tuple[int, int]
) -> None:
    whole, again = nn.Sequential(*net), nn.Sequential(*copy.deepcopy(net))
    x = torch.randn(3, 4, *sizes, dtype=torch.float64, requires_grad=True)
    theirs = forward_or_skip(again, x)
    divided = split(whole, depth=1.0, grid=grid, halo="exact")
    ours = forward_or_skip(divided, x)
    assert_equal([ours, *gradients(whole, x, ours)], [theirs, *gradients(again, x, theirs)], 1e-7)
    assert_equal(list(whole.buffers()), list(again.buffers()))


@pytest.mark.parametrize("name", DRAWING)
def test_overlapping_patches_end_at_what_draws_random_numbers(name: str) -> None:
    """Each patch would draw its own for the pixels that two of them compute."""

    class Drawing(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.second, self.drop = convolution(3, 4), convolution(4, 4), DRAWING[name]

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.second(self.drop(self.first(x)))

    net = Drawing()
    x = torch.randn(2, 3, 12, 12, dtype=torch.float64, requires_grad=True)
    divided = split(net, 1.0, halo="exact", join="auto")
    assert divided.plan is not None
    assert [divided.plan.name_of(tensor) for tensor in divided.plan.leaving] == ["first"]
    found = []
    for network in (divided, net):
        torch.manual_seed(1)
        y = network(x)
        found.append([y, *gradients(net, x, y), torch.get_rng_state().double()])
    assert_equal(*found, 1e-8)
    with raising(CaptureError, "depth asks for 2 convolutions and 1 can run in patches"):
        split(net, 1.0, halo="exact")


def test_overlapping_patches_run_a_dropout_that_drops_nothing() -> None:
    net = nn.Sequential(convolution(3, 4), EvalDropout(), convolution(4, 4))
    assert split(net, 1.0, halo="exact").plan is not None


class EvalDropout(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return F.dropout(x, 0.5, training=False)


class Residual(nn.Module):
    """A block that halves, with a 1x1 shortcut of stride 2 whose kernel is smaller than its stride."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = convolution(3, 4)
        self.a = convolution(4, 8, stride=2)
        self.norm = nn.BatchNorm2d(8).double()
        self.b = convolution(8, 8)
        self.shortcut = convolution(4, 8, kernel=1, stride=2)
        self.tail = convolution(16, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = F.relu(self.stem(x))
        y = self.b(F.relu(self.norm(self.a(x))))
        y = F.relu(y + self.shortcut(x))
        return self.tail(torch.cat([y, F.max_pool2d(y, 3, 1, 1)], 1))


@pytest.mark.parametrize("grid", [(2, 2), (3, 1), (1, 4)])
def test_branches_that_meet_are_cut_at_the_same_places(grid: tuple[int, int]) -> None:
    torch.manual_seed(0)
    net = Residual()
    again = copy.deepcopy(net)
    x = torch.randn(2, 3, 24, 22, dtype=torch.float64, requires_grad=True)
    exact = split(net, 1.0, grid, halo="exact")
    ours, theirs = exact(x), again(x)
    assert_equal([ours, *gradients(net, x, ours)], [theirs, *gradients(again, x, theirs)], 1e-8)
    assert split(net, 1.0, grid)(x).shape == theirs.shape


def test_joint_statistics_without_overlap_are_those_of_the_whole() -> None:
    net = nn.Sequential(convolution(4, 4, kernel=1), nn.BatchNorm2d(4).double(), nn.ReLU())
    again = copy.deepcopy(net)
    x = 1000 + torch.randn(2, 4, 10, 10, dtype=torch.float64, requires_grad=False)
    x.requires_grad_()
    ours, theirs = split(net, 1.0, (2, 3), batch_norm="joint")(x), again(x)
    assert_equal([ours, *gradients(net, x, ours)], [theirs, *gradients(again, x, theirs)], 1e-6)
    assert_equal(list(net.buffers()), list(again.buffers()))


def test_joint_running_statistics_move_once_where_checkpointing_runs_the_forward_pass_again() -> None:
    net = nn.Sequential(convolution(3, 4), nn.BatchNorm2d(4).double(), nn.ReLU())
    again = copy.deepcopy(net)
    x = torch.randn(2, 3, 8, 8, dtype=torch.float64, requires_grad=True)
    divided = split(net, 1.0, (2, 2), batch_norm="joint")
    checkpoint(divided, x, use_reentrant=False).sum().backward()
    split(again, 1.0, (2, 2), batch_norm="joint")(x).sum().backward()
    assert_equal(list(net.buffers()), list(again.buffers()))


@pytest.mark.parametrize("momentum", [0.1, None])
def test_running_statistics_move_once_for_all_patches_or_once_for_each(momentum: float | None) -> None:
    for mode, moves in (("joint", 1), ("patch", 4)):
        norm = nn.BatchNorm2d(4, momentum=momentum)
        net = nn.Sequential(nn.Conv2d(3, 4, 3, padding=1), norm)
        split(net, 1.0, (2, 2), batch_norm=mode)(torch.randn(2, 3, 8, 8))  # type: ignore[arg-type]
        assert int(norm.num_batches_tracked) == moves  # type: ignore[arg-type]


def test_where_kernel_and_stride_are_equal_nothing_changes() -> None:
    net = nn.Sequential(convolution(3, 4, kernel=2, stride=2, padding=0), nn.Tanh(), nn.AvgPool2d(2))
    x = torch.randn(2, 3, 16, 24, dtype=torch.float64)
    torch.testing.assert_close(split(net, 1.0, (2, 3))(x), net(x))


def test_a_grid_of_one_and_a_depth_of_none_are_the_network_itself() -> None:
    net = models.build("resnet18_cifar", seed=0)
    x = torch.randn(2, 3, 32, 32)
    for divided in (split(net, 0.5, (1, 1)), split(net, 0.0)):
        assert divided.plan is None
        assert divided.describe((32, 32)) == "nothing is split"
        again = copy.deepcopy(net)
        torch.testing.assert_close(divided(x), again(x), rtol=0, atol=0)


@pytest.mark.parametrize(
    ("name", "last"),
    [
        ("vgg19_cifar", "features.26"),
        ("resnet18", "layer2.1.relu"),
        ("resnet50", "layer3.0.relu"),
        ("alexnet", "features.5"),
        ("mobilenet_v2", "add_4"),
        ("googlenet", "cat_4"),
    ],
)
def test_half_of_a_network_is_joined_at_the_next_block(name: str, last: str) -> None:
    net = models.build(name, seed=0)
    divided = split(net, 0.5)
    assert divided.plan is not None
    assert [divided.plan.name_of(tensor) for tensor in divided.plan.leaving] == [last]
    assert list(divided.state_dict()) == list(net.state_dict())
    pixels = 32 if name.endswith("cifar") else 96
    with torch.device("meta"):
        made = copy.deepcopy(divided).to("meta")(torch.empty(2, 3, pixels, pixels))
    shape = made[0].shape if isinstance(made, tuple) else made.shape
    assert shape[0] == 2


@pytest.mark.parametrize("name", ["unet", "unet3d"])
def test_the_first_levels_of_a_unet_hand_their_skips_over_whole(name: str) -> None:
    net = models.build(name, seed=0).double()
    dims, side = (3, 16) if name == "unet3d" else (2, 32)
    again = copy.deepcopy(net)
    divided = split(net, 0.2, (2,) * dims, halo="exact")
    assert divided.plan is not None and len(divided.plan.leaving) >= 2
    x = torch.randn(1, net.encoders[0][0].in_channels, *(side,) * dims, dtype=torch.float64)  # type: ignore[index,union-attr]
    torch.testing.assert_close(divided(x), again(x), rtol=1e-8, atol=1e-8)


def test_one_dimension() -> None:
    net = nn.Sequential(nn.Conv1d(2, 4, 5, 2, 2), nn.BatchNorm1d(4), nn.ReLU(), nn.Conv1d(4, 4, 3, padding=1)).double()
    again = copy.deepcopy(net)
    x = torch.randn(3, 2, 50, dtype=torch.float64)
    torch.testing.assert_close(split(net, 1.0, (4,), halo="exact")(x), again(x))


def test_in_eval_mode_it_is_the_unsplit_network() -> None:
    net = models.build("resnet18_cifar", seed=0)
    divided = split(net, 0.5)
    x = torch.randn(2, 3, 32, 32)
    divided(x)
    divided.eval()
    assert not net.training
    torch.testing.assert_close(divided(x), net(x), rtol=0, atol=0)
    assert not torch.allclose(divided.train()(x), net(x))


def test_split_in_eval_mode_it_normalises_by_the_running_statistics() -> None:
    net = nn.Sequential(nn.Conv2d(3, 4, 1), nn.BatchNorm2d(4), nn.ReLU())
    divided = split(net, 1.0)
    divided(torch.randn(2, 3, 8, 8))
    assert "eval" not in repr(divided) + divided.describe((8, 8))
    divided.split_in_eval = True
    assert "split_in_eval=True" in repr(divided)
    assert divided.describe((8, 8)).splitlines()[0].endswith("; split in eval mode too")
    x = torch.randn(2, 3, 8, 8)
    torch.testing.assert_close(divided.eval()(x), net(x))  # 1x1 windows lose nothing at the cuts


def test_state_goes_both_ways_and_a_copy_is_its_own() -> None:
    net, other = models.build("resnet18_cifar", seed=0), models.build("resnet18_cifar", seed=1)
    divided = split(net, 0.5)
    divided.load_state_dict(other.state_dict())
    assert all(torch.equal(a, b) for a, b in zip(net.parameters(), other.parameters(), strict=True))
    twin = copy.deepcopy(divided).double()
    assert next(twin.parameters()).dtype == torch.float64
    assert next(net.parameters()).dtype == torch.float32
    assert twin(torch.randn(2, 3, 32, 32, dtype=torch.float64)).dtype == torch.float64


def test_channels_last_stays() -> None:
    net = nn.Sequential(*[nn.Conv2d(8, 8, 3, padding=1), nn.ReLU()] * 2).to(memory_format=torch.channels_last)
    x = torch.randn(2, 8, 16, 16).to(memory_format=torch.channels_last)
    assert split(net, 1.0)(x).is_contiguous(memory_format=torch.channels_last)


class Headed(nn.Module):
    """An auxiliary classifier, of the whole image, in the middle."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.third = (nn.Conv2d(3, 3, 3, padding=1) for _ in range(3))
        self.head = nn.Linear(3, 2)

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        x = self.first(x)
        head = self.head(F.adaptive_avg_pool2d(x, 1).flatten(1))
        return self.third(self.second(x)), head


def test_an_auxiliary_head_runs_on_the_whole() -> None:
    net = Headed()
    divided = split(net, join="second", halo="exact")
    assert divided.plan is not None
    assert [divided.plan.name_of(tensor) for tensor in divided.plan.leaving] == ["first", "second"]
    x = torch.randn(2, 3, 10, 10)
    for ours, theirs in zip(divided(x), net(x), strict=True):
        torch.testing.assert_close(ours, theirs)


def test_the_table_names_every_layer_and_its_padding() -> None:
    net = nn.Sequential(nn.Conv2d(3, 4, 3, 2, 1), nn.ReLU(), nn.MaxPool2d(3, 2, ceil_mode=True))
    told = split(net, 1.0, (2, 1)).describe((33, 16))
    assert told.splitlines()[0] == "2 patches (2 x 1) of 33 x 16, joined at 8 x 4; batch norm by patch"
    rows = [line.split() for line in told.splitlines()[2:]]
    assert rows[0] == ["0", "0", "0:16,", "16:33", "1+0,", "1+1", "1+1"]
    assert [row[0] for row in rows] == ["0", "0", "2", "2"]


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"depth": 1.5}, "depth=1.5: expected a share"),
        ({"depth": -0.1}, "depth=-0.1: expected a share"),
        ({"grid": (2, 0)}, "expected one to three numbers of patches"),
        ({"grid": 2}, "expected one to three numbers of patches"),
        ({"stochastic": 0.5}, "stochastic=0.5: expected omega"),
        ({"stochastic": -0.1}, "stochastic=-0.1: expected omega"),
        ({"batch_norm": "none"}, "batch_norm='none': expected 'patch' or 'joint'"),
        ({"halo": "some"}, "halo='some': expected 'exact' or None"),
        ({"halo": "exact", "stochastic": 0.2}, "give one of the two"),
        ({"join": "layer9"}, "join='layer9': no module of that name runs"),
        ({"join": ["layer2"]}, "join=['layer2']"),
        ({"grid": 2.0}, "grid=2.0"),
        ({"stochastic": "0.2"}, "stochastic='0.2'"),
        ({"model": "resnet18"}, "model is a str"),
    ],
)
def test_a_mistake_is_told(changes: dict[str, Any], said: str) -> None:
    with pytest.raises(InputError) as refused:
        split(**{"model": models.build("resnet18_cifar", seed=0), **changes})
    assert said in str(refused.value)


def test_a_grid_finer_than_the_join_and_an_input_too_small_are_told_with_their_sizes() -> None:
    net = models.build("vgg19_cifar", seed=0)
    with raising(InputError, "grid=(5, 5)", "4 x 4"):
        split(net, 0.5, (5, 5))(torch.randn(1, 3, 32, 32))


def test_a_grid_of_another_number_of_dimensions_is_told() -> None:
    with raising(CaptureError, "Conv2d"):
        split(models.build("resnet18_cifar", seed=0), grid=(2,))


class Control(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(3, 3, 3, padding=1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.conv(x) if x.sum() > 0 else x


class Whole(nn.Module):
    """An op in the middle that needs all of the image."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Conv2d(3, 3, 3, padding=1), nn.Conv2d(3, 3, 3, padding=1)
        self.norm = nn.InstanceNorm2d(3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.second(self.norm(self.first(x)))


def test_what_cannot_be_traced_or_split_is_named() -> None:
    with raising(CaptureError, "torch.fx"):
        split(Control())
    with raising(CaptureError, "op that cannot: norm"):
        split(Whole(), depth=1.0)
    with raising(CaptureError, "(InstanceNorm2d)"):
        split(Whole(), join="second")


def test_an_earlier_join_is_found_when_asked_for() -> None:
    divided = split(Whole(), depth=1.0, join="auto")
    assert divided.plan is not None
    assert [divided.plan.name_of(tensor) for tensor in divided.plan.leaving] == ["first"]
    assert divided(torch.randn(2, 3, 8, 8)).shape == (2, 3, 8, 8)


def test_images_come_first_and_have_a_batch() -> None:
    divided = split(nn.Sequential(nn.Conv2d(3, 4, 3, padding=1)), 1.0)
    with pytest.raises(InputError):
        divided(input=torch.randn(1, 3, 8, 8))
    with raising(InputError, "(8, 8)"):
        divided(torch.randn(8, 8))
