"""A fused network against the network itself: the same numbers at every level, and fewer saved bytes."""

from __future__ import annotations

import copy
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from rich.console import Console
from torch import nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

import shoal
from examples.networks.densenet import DenseNet
from shoal.app.models import BasicBlock, Bottleneck, ResNet
from shoal.core.residence import Recompute
from shoal.errors import InputError
from shoal.transforms.fuse.fuse_graph import LEVELS, Level
from tests.raising import raising
from tests.scratch import needs_little_scratch

fuse_batchnorm = partial(shoal.fuse_batchnorm, when="always")  # tests have small maps


def _convolution(inputs: int, outputs: int, kernel: int = 3, **changes: Any) -> nn.Conv2d:
    return nn.Conv2d(inputs, outputs, kernel, **{"padding": kernel // 2, "bias": False, **changes})


class Dense(nn.Module):
    """Two pre-activated layers that read the concatenation of all before them; functional ReLUs, one in place."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = _convolution(3, 4)
        self.norms = nn.ModuleList(nn.BatchNorm2d(channels) for channels in (4, 7, 10))
        self.convolutions = nn.ModuleList(_convolution(channels, 3) for channels in (4, 7))
        self.head = _convolution(10, 2, 1, bias=True)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        features = [self.stem(x)]
        for norm, convolution in zip(self.norms, self.convolutions, strict=False):
            features.append(convolution(F.relu(norm(torch.cat(features, dim=1)), inplace=True)))
        return self.head(torch.relu(self.norms[2](torch.cat(features, 1))))


class Preactivated(nn.Module):
    """A residual block whose ReLU two convolutions read, and a residual sum that a batch norm reads."""

    def __init__(self) -> None:
        super().__init__()
        self.stem, self.shortcut = _convolution(3, 4), _convolution(4, 6, 1, stride=2)
        self.norm1, self.norm2, self.norm3 = nn.BatchNorm2d(4), nn.BatchNorm2d(6), nn.BatchNorm2d(6)
        self.convolution1, self.convolution2 = _convolution(4, 6, stride=2), _convolution(6, 6, groups=2)
        self.head = _convolution(6, 2, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.norm1(self.stem(x)).relu()
        out = self.convolution2(F.relu(self.norm2(self.convolution1(x))))
        out += self.shortcut(x)
        return self.head(torch.relu(self.norm3(out)))


class Shared(nn.Module):
    """One batch norm and one convolution, each called twice."""

    def __init__(self) -> None:
        super().__init__()
        self.stem, self.convolution, self.norm = _convolution(3, 4), _convolution(4, 4), nn.BatchNorm2d(4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.convolution(F.relu(self.norm(self.stem(x))))
        return self.convolution(F.relu(self.norm(x)))


def _vgg() -> nn.Module:
    return nn.Sequential(
        _convolution(3, 4, bias=True),
        nn.BatchNorm2d(4, affine=False),
        nn.ReLU(inplace=True),
        _convolution(4, 5, padding="same"),
        nn.BatchNorm2d(5, track_running_stats=False),
        nn.ReLU(inplace=True),
        nn.Dropout(0.3),
        nn.MaxPool2d(2),
        _convolution(5, 5),
        nn.ReLU(inplace=True),
        _convolution(5, 4),
        nn.BatchNorm2d(4, momentum=None),
        nn.ReLU6(),
        _convolution(4, 4, padding_mode="reflect"),
        nn.BatchNorm2d(4),
        nn.Identity(),
        nn.Flatten(),
        nn.Linear(64, 3),
    )


NETS: dict[str, Callable[[], nn.Module]] = {
    "dense": Dense,
    "preactivated": Preactivated,
    "shared": Shared,
    "vgg": _vgg,
    "resnet": lambda: _small_resnet(),
}


def _small_resnet() -> nn.Module:
    downsample = nn.Sequential(_convolution(4, 8, 1, stride=2), nn.BatchNorm2d(8))
    return nn.Sequential(
        _convolution(3, 4),
        nn.BatchNorm2d(4),
        nn.ReLU(),
        BasicBlock(4, 8, 2, downsample),
        Bottleneck(8, 2, 1, None),
        nn.AdaptiveAvgPool2d(1),
    )


def _built(name: str, dtype: torch.dtype = torch.float64) -> nn.Module:
    torch.manual_seed(0)
    net = NETS[name]().to(dtype)
    for module in net.modules():
        if isinstance(module, nn.BatchNorm2d) and module.affine:
            nn.init.normal_(module.weight)
            nn.init.normal_(module.bias)
    return net


def _images(seed: int = 0, dtype: torch.dtype = torch.float64, count: int = 2) -> torch.Tensor:
    return torch.randn((count, 3, 8, 8), generator=torch.Generator().manual_seed(seed), dtype=dtype)


def _trained(net: nn.Module, steps: int = 3, dtype: torch.dtype = torch.float64) -> list[torch.Tensor]:
    """Results, gradients, parameters and buffers of a few steps, in one list."""
    torch.manual_seed(1)
    optimizer = torch.optim.SGD([p for p in net.parameters() if p.requires_grad], 0.01)
    found = []
    for step in range(steps):
        optimizer.zero_grad()
        y = net(_images(step, dtype))
        y.square().mean().backward()
        optimizer.step()
        found += [y, *(p.grad for p in net.parameters() if p.grad is not None)]
    return [t.detach().clone() for t in [*found, *net.parameters(), *net.buffers()]]


def _same(ours: list[torch.Tensor], theirs: list[torch.Tensor], tolerance: float = 1e-9) -> None:
    for own, other in zip(ours, theirs, strict=True):
        torch.testing.assert_close(own, other, rtol=tolerance, atol=tolerance)


def _saved_bytes(net: nn.Module, images: torch.Tensor) -> int:
    """Bytes of distinct storages saved for backward; parameters and buffers not counted."""
    own = {t.untyped_storage().data_ptr() for t in [*net.parameters(), *net.buffers()]}
    saved: dict[int, int] = {}
    held = []

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        held.append(tensor)
        if tensor.untyped_storage().data_ptr() not in own:
            saved[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        net(images)
    return sum(saved.values())


@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("name", NETS)
def test_trains_as_the_network_itself(name: str, level: Level) -> None:
    net = _built(name)
    fused = fuse_batchnorm(copy.deepcopy(net), level)
    assert fused.summary.level == level and fused.summary.fused
    _same(_trained(fused), _trained(net))
    _same([fused.eval()(_images())], [net.eval()(_images())], 1e-9)


@pytest.mark.parametrize("name", NETS)
def test_channels_last(name: str) -> None:
    net = _built(name).to(memory_format=torch.channels_last)
    fused = fuse_batchnorm(copy.deepcopy(net))
    images = _images().contiguous(memory_format=torch.channels_last)
    torch.manual_seed(1)
    theirs = net(images)
    torch.manual_seed(1)
    ours = fused(images)
    torch.testing.assert_close(ours, theirs)
    assert ours.stride() == theirs.stride()


def test_levels_fuse_what_the_paper_says() -> None:
    applied = {level: fuse_batchnorm(_built("dense"), level) for level in LEVELS}
    assert [one.layer for one in applied["rcf"].summary.fused] == ["relu", "relu_1", "relu_2"]
    assert "norms.1" in [one.layer for one in applied["mvf"].summary.fused]
    by_layer = {one.layer: one for one in applied["bnff"].summary.fused}
    assert by_layer["norms.1"].statistics == "1 sweep"
    by_layer = {one.layer: one for one in applied["icf"].summary.fused}
    assert by_layer["norms.1"].statistics == "stem, convolutions.0"
    assert not any(node.target is torch.cat for node in applied["icf"]._fused[0].graph.nodes)
    by_layer = {one.layer: one for one in fuse_batchnorm(_built("resnet")).summary.fused}
    assert (by_layer["3.bn1"].statistics, by_layer["3.bn1"].applied) == ("3.conv1", "3.conv2")
    assert (by_layer["3.bn2"].statistics, by_layer["3.bn2"].applied) == ("3.conv2", "one pass with residual and ReLU")
    assert fuse_batchnorm(_built("dense")).summary.level == "icf"
    assert fuse_batchnorm(_built("resnet")).summary.level == "bnff"


@pytest.mark.parametrize("make", [lambda: DenseNet((3, 4), 3), lambda: ResNet(Bottleneck, (2, 1, 1, 1), 3)])
def test_saved_bytes_fall_with_the_level(make: Callable[[], nn.Module]) -> None:
    torch.manual_seed(0)
    net, images = make(), torch.randn(2, 3, 32, 32)
    plain = _saved_bytes(net, images)
    rcf, mvf, bnff, icf = (_saved_bytes(fuse_batchnorm(net, level), images) for level in LEVELS)
    assert plain >= rcf and 1.03 * rcf >= mvf > bnff >= icf  # vectors are saved too
    if isinstance(net, DenseNet):
        assert icf < 0.8 * bnff and bnff < 0.7 * plain


def test_parameters_names_and_checkpoints_are_the_networks() -> None:
    net = _built("vgg")
    fused = fuse_batchnorm(net)
    assert list(fused.state_dict()) == list(net.state_dict())
    assert dict(fused.named_parameters()) == dict(net.named_parameters())
    other = _built("vgg")
    _trained(other)
    fused.load_state_dict(other.state_dict())
    _same(list(net.state_dict().values()), list(other.state_dict().values()))
    _same([copy.deepcopy(fused).eval()(_images())], [other.eval()(_images())])


def test_frozen_batch_norms_stay_frozen() -> None:
    def freeze(net: nn.Module) -> nn.Module:
        for module in net.modules():
            if isinstance(module, nn.BatchNorm2d):
                module.eval().requires_grad_(False)
        return net

    for name in ("dense", "resnet"):
        net = _built(name)
        _trained(net)  # so that there are statistics
        net.zero_grad()
        fused = fuse_batchnorm(copy.deepcopy(net))
        _same(_trained(freeze(fused)), _trained(freeze(net)))


def test_statistics_move_once_under_checkpointing() -> None:
    net = _built("resnet")
    fused = fuse_batchnorm(copy.deepcopy(net))
    for reentrant in (False, True):
        net(_images())
        checkpoint(fused, _images().requires_grad_(), use_reentrant=reentrant).sum().backward()
    _same(list(fused.buffers()), list(net.buffers()))


def test_gradients_accumulate() -> None:
    net = _built("dense")
    fused = fuse_batchnorm(copy.deepcopy(net))
    for model in (net, fused):
        for seed in range(3):
            model(_images(seed)).square().sum().backward()
    _same([p.grad for p in fused.parameters()], [p.grad for p in net.parameters()])  # type: ignore[misc]


@pytest.mark.parametrize("name", ["dense", "resnet"])
def test_autocast(name: str) -> None:
    net = _built(name, torch.float32)
    truth = copy.deepcopy(net).double()
    fused = fuse_batchnorm(copy.deepcopy(net))
    truth(_images()).square().sum().backward()
    for model in (net, fused):
        with torch.autocast("cpu", torch.bfloat16):
            y = model(_images(dtype=torch.float32))
        y.float().square().sum().backward()
        assert y.dtype == torch.bfloat16
    for true, theirs, ours in zip(truth.parameters(), net.parameters(), fused.parameters(), strict=True):
        assert true.grad is not None and theirs.grad is not None and ours.grad is not None
        assert ours.grad.dtype == torch.float32
        allowed = 2 * (theirs.grad - true.grad).norm() + 0.02 * true.grad.norm() + 0.02
        assert (ours.grad - true.grad).norm() <= allowed
    for own, other in zip(fused.buffers(), net.buffers(), strict=True):
        torch.testing.assert_close(own, other, rtol=2e-2, atol=2e-2)


def test_far_from_zero_no_worse_than_plain_float32() -> None:
    nets = {}
    for dtype in (torch.float64, torch.float32):
        net = _built("dense", dtype)
        net.stem.bias = nn.Parameter(torch.full((4,), 1000.0, dtype=dtype))  # type: ignore[union-attr]
        nets[dtype] = net
    fused = fuse_batchnorm(copy.deepcopy(nets[torch.float32]))
    truth = _trained(nets[torch.float64], 1)
    plain, ours = _trained(nets[torch.float32], 1, torch.float32), _trained(fused, 1, torch.float32)
    for true, theirs, own in zip(*([t.double() for t in found] for found in (truth, plain, ours)), strict=True):
        allowed = 2 * float((theirs - true).norm()) + 1e-3 * float(true.norm()) + 1e-3
        assert float((own - true).norm()) <= allowed


def test_layers_with_hooks_are_left_and_their_hooks_run() -> None:
    net = _built("resnet")
    seen = []
    net[1].register_forward_hook(lambda *_: seen.append("norm"))
    net[4].register_forward_hook(lambda *_: seen.append("block"))
    fused = fuse_batchnorm(net)
    left = {one.layer: one.reason for one in fused.summary.left}
    assert "hooks" in left["1"] and left["4.bn1"] == "it is inside 4, which is called whole"
    fused(_images())
    assert seen == ["norm", "block"]


def test_hooks_that_come_later_run_too() -> None:
    net = _built("resnet")
    fused = fuse_batchnorm(net)
    seen = []
    net[0].register_forward_hook(lambda *_: seen.append("convolution"))
    net.register_forward_hook(lambda *_: seen.append("network"))
    fused(_images())
    fused.eval()(_images())
    assert seen == ["convolution", "network"] * 2


def test_what_is_left_has_a_reason() -> None:
    class Own(nn.BatchNorm2d):
        pass

    net = nn.Sequential(
        _convolution(3, 4), nn.SyncBatchNorm(4), nn.ReLU(), _convolution(4, 4), Own(4), nn.ReLU(), nn.BatchNorm2d(4)
    )
    fused = fuse_batchnorm(net)
    reasons = {one.layer: one.reason for one in fused.summary.left}
    assert "all processes" in reasons["1"] and "Own" in reasons["4"] and "output" in reasons["6"]
    console = Console(record=True, width=200, file=open("/dev/null", "w"))  # noqa: SIM115
    console.print(fused.summary)
    assert "all processes" in console.export_text()


def test_a_network_that_cannot_be_traced_stays_as_it_was() -> None:
    class Branches(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.body = _built("dense")

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            y: torch.Tensor = self.body(x)
            return y if y.sum() > 0 else -y

    net = Branches()
    fused = fuse_batchnorm(copy.deepcopy(net))
    assert "cannot trace" in fused.summary.left[0].reason
    _same(_trained(fused), _trained(net))


def test_a_tensor_that_is_written_over_is_not_read_later() -> None:
    class Overwritten(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.stem, self.norm, self.head = _convolution(3, 4), nn.BatchNorm2d(8), _convolution(8, 2)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            y = self.stem(x)
            both = torch.cat([y, y * 2], 1)
            y.mul_(3.0)
            return self.head(torch.relu(self.norm(both))) + y.sum()

    torch.manual_seed(0)
    net = Overwritten().double()
    fused = fuse_batchnorm(copy.deepcopy(net), "icf")
    assert fused.summary.fused[0].statistics == "1 sweep"
    _same(_trained(fused), _trained(net))


def test_a_channel_of_one_element_is_refused_as_ever() -> None:
    fused = fuse_batchnorm(nn.Sequential(_convolution(3, 4), nn.BatchNorm2d(4), nn.ReLU()))
    with pytest.raises(ValueError, match="more than 1 value per channel"):
        fused(torch.zeros(1, 3, 1, 1))


def test_wrong_arguments_are_told() -> None:
    with raising(InputError, "'bnff'"):
        fuse_batchnorm(nn.ReLU(), "all")  # type: ignore[arg-type]
    with raising(InputError, "torch.nn.Module"):
        fuse_batchnorm(print)  # type: ignore[arg-type]


@pytest.mark.parametrize("name", ["dense", "resnet"])
def test_under_torch_compile(name: str) -> None:
    net = _built(name)
    fused = fuse_batchnorm(copy.deepcopy(net))
    compiled: Any = torch.compile(fused, backend="aot_eager", fullgraph=True)
    ours = _trained(compiled, 2)
    _same(ours, _trained(net, 2))


def _deep() -> nn.Module:
    layers = [(_convolution(8, 8), nn.BatchNorm2d(8), nn.ReLU()) for _ in range(4)]
    head = (nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(8, 3))
    return nn.Sequential(_convolution(3, 8), *(layer for three in layers for layer in three), *head)


def _budgeted(net: nn.Module, budget: int | None) -> tuple[Any, list[Any]]:
    """Status, gradients and buffers after two steps."""
    model = shoal.compile(copy.deepcopy(net), budget)
    images = torch.randn((4, 3, 32, 32), generator=torch.Generator().manual_seed(0))
    for _ in range(2):
        model.zero_grad()
        model(images).square().sum().backward()
    return model.shoal, [*(p.grad for p in model.parameters()), *model.buffers()]


def test_within_a_budget_bit_for_bit() -> None:
    torch.manual_seed(0)
    fused = fuse_batchnorm(_deep())
    whole, expected = _budgeted(fused, None)
    budget = int(whole.measured_peak_bytes * 0.85)
    status, found = _budgeted(fused, budget)
    assert status.measured_peak_bytes <= budget
    assert any(isinstance(residence, Recompute) for residence in status.plan.residences.values())
    for own, other in zip(found, expected, strict=True):
        assert torch.equal(own, other)


@needs_little_scratch
@pytest.mark.parametrize("make", [_deep, lambda: DenseNet((2,), 3)])
def test_one_op_of_a_captured_step_whose_peak_is_known(make: Callable[[], nn.Module]) -> None:
    torch.manual_seed(0)
    net = make()
    (fused, _), (plain, _) = _budgeted(fuse_batchnorm(net), None), _budgeted(net, None)
    assert {"shoal.norm_conv.default", "shoal.dense_block.default"} & {op.target for op in fused.plan.graph.ops}
    if make is not _deep:  # whose peak is scratch, which plain convolutions may need less of
        assert fused.measured_peak_bytes < plain.measured_peak_bytes
    assert abs(fused.measured_peak_bytes - fused.predicted_peak_bytes) <= 0.02 * fused.measured_peak_bytes
