"""A fused network of which some maps are too small: they run PyTorch's own layers, and train as ever."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable
from threading import Thread
from typing import Any

import pytest
import torch
from torch import nn
from torch._dynamo.testing import CompileCounter
from torch.utils.checkpoint import checkpoint
from torch.utils.flop_counter import FlopCounterMode

import shoal
from examples.networks.densenet import DenseNet
from shoal import fuse_batchnorm
from shoal.errors import InputError
from shoal.kernels.norm.norm_conv_native import ConvWindow
from shoal.lowlevel.native import levels
from shoal.transforms.fuse import fusion_size
from shoal.transforms.fuse.fuse_graph import LEVELS, Level
from tests.raising import raising
from tests.transforms.fuse.test_fuse_batchnorm import NETS, _built, _images, _same, _saved_bytes, _trained


def _dense_net() -> nn.Module:
    torch.manual_seed(0)
    return DenseNet((3, 4), 3).to(memory_format=torch.channels_last)


def _large_images() -> torch.Tensor:
    images = torch.randn((2, 3, 32, 32), generator=torch.Generator().manual_seed(0))
    return images.contiguous(memory_format=torch.channels_last)


@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("name", NETS)
def test_trains_as_the_network_itself_where_some_maps_are_fused(
    name: str, level: Level, monkeypatch: pytest.MonkeyPatch
) -> None:
    for least in (1 << 20, 600, 513, 400):  # of maps of 128 to 1280 elements
        monkeypatch.setattr(fusion_size, "MIN_ELEMS", least)
        net = _built(name)
        _same(_trained(fuse_batchnorm(copy.deepcopy(net), level), 2), _trained(net, 2))


@pytest.mark.parametrize("least", [1 << 30, 15000, 4000])
def test_dense_blocks_of_which_some_are_small(least: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fusion_size, "MIN_ELEMS", 4000)
    monkeypatch.setattr(fusion_size, "MIN_BLOCK_ELEMS", least)
    net = _dense_net().double()
    fused = fuse_batchnorm(copy.deepcopy(net))
    for model in (net, fused):
        model(_large_images().double()).square().sum().backward()
    _same([p.grad for p in fused.parameters()], [p.grad for p in net.parameters()], 1e-8)  # type: ignore[misc]
    _same(list(fused.buffers()), list(net.buffers()))


def test_a_network_of_small_maps_is_bit_for_bit_the_network_itself() -> None:
    for name in NETS:
        net = _built(name, torch.float32)
        ours, theirs = (_trained(model, 2, torch.float32) for model in (fuse_batchnorm(copy.deepcopy(net)), net))
        assert all(torch.equal(own, other) for own, other in zip(ours, theirs, strict=True))


def _wide_net() -> nn.Sequential:
    torch.manual_seed(1)
    layers: list[nn.Module] = [nn.Conv2d(3, 32, 3, padding=1)]
    for _ in range(3):
        layers += [nn.BatchNorm2d(32), nn.ReLU(), nn.Conv2d(32, 32, 3, padding=1, bias=False)]
    return nn.Sequential(*layers, nn.BatchNorm2d(32)).to(memory_format=torch.channels_last)


@pytest.mark.skipif(not levels(), reason="the native library was not built")
def test_small_maps_are_fused_where_the_convolution_alone_is_worth_it() -> None:
    net, images = _wide_net(), _large_images()
    assert images.numel() // 3 * 32 < fusion_size.MIN_ELEMS
    weights = torch.randn((2, 32, 32, 32), generator=torch.Generator().manual_seed(2))
    found = []
    for model, dtype in (
        (copy.deepcopy(net).double(), torch.float64),
        (net, torch.float32),
        (fuse_batchnorm(copy.deepcopy(net)), torch.float32),
    ):
        y = model(images.to(dtype))
        gradients = torch.autograd.grad((y * weights.to(dtype)).sum(), list(model.parameters()))
        found.append([y.detach(), *gradients])
    assert not torch.equal(found[1][0], found[2][0])  # other kernels
    for truth, naive, ours in zip(*found, strict=True):
        error, allowed = (float((mine.double() - truth).norm()) for mine in (ours, naive))
        # A ReLU may fall on the other side.
        assert error <= allowed + 1e-4 * float(truth.norm()) + 1e-3
    same, size = [1, 1], fusion_size.FusionSize("pays")
    assert not size.is_quick([images], torch.ones(32, 3, 3, 3), None, ConvWindow(same, same, same, 1))
    assert size.is_quick([torch.cat([images] * 8, 1)], torch.ones(64, 24, 3, 3), None, ConvWindow(same, same, same, 1))


def test_inputs_of_which_nothing_is_fused_run_the_network_itself(monkeypatch: pytest.MonkeyPatch) -> None:
    net = _dense_net()
    fused = fuse_batchnorm(net)
    calls = []
    monkeypatch.setattr(net, "forward", lambda x: calls.append(x.shape) or type(net).forward(net, x))
    small = _images(dtype=torch.float32)
    for _ in range(3):
        fused(small).sum().backward()
    assert calls == [small.shape] * 2  # once it was found out
    monkeypatch.setattr(fusion_size, "MIN_BLOCK_ELEMS", 1)
    fused(_large_images()).sum().backward()
    fused(_large_images()).sum().backward()
    assert calls == [small.shape] * 2
    with FlopCounterMode(display=False) as counter:
        fused(small)
    assert torch.ops.shoal.dense_block in counter.get_flop_counts()["Global"]


@pytest.mark.parametrize("copied", [copy.deepcopy, lambda fused: pickle.loads(pickle.dumps(fused))])
def test_a_copy_decides_by_its_own_layers(copied: Callable[[Any], Any], monkeypatch: pytest.MonkeyPatch) -> None:
    fused, images = fuse_batchnorm(_dense_net()), _images(dtype=torch.float32)
    fused(images)
    twin = copied(fused)
    for parameter in fused.parameters():
        nn.init.zeros_(parameter)
    plain = copy.deepcopy(twin.unfused)
    assert torch.equal(twin(images), plain(images))
    monkeypatch.setattr(fusion_size, "MIN_BLOCK_ELEMS", 1)
    for _ in range(2):
        torch.testing.assert_close(twin(_large_images()), plain(_large_images()), rtol=1e-4, atol=1e-4)
    calls: list[object] = []
    monkeypatch.setattr(twin.unfused, "forward", calls.append)
    twin(_large_images())
    assert not calls
    twin(images)
    assert len(calls) == 1


def test_what_other_threads_run_meanwhile_does_not_count(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fusion_size, "MIN_ELEMS", 4096)
    net = nn.Sequential(_wide_net(), nn.ReLU(), nn.Conv2d(32, 4, 1), nn.Identity())
    waiting: list[torch.Tensor] = []

    def meanwhile(*unused: object) -> None:
        if waiting:
            thread = Thread(target=fused, args=(waiting.pop(),))
            thread.start()
            thread.join()

    net[3].register_forward_hook(meanwhile)
    fused = fuse_batchnorm(net)
    waiting.append(torch.ones(2, 3, 4, 4))
    fused(_large_images())
    assert not waiting
    monkeypatch.setattr(net, "forward", lambda x: pytest.fail("it is fused"))
    fused(_large_images())


@pytest.mark.skipif(not levels(), reason="the native library was not built")
def test_a_network_that_is_moved_is_asked_again(monkeypatch: pytest.MonkeyPatch) -> None:
    net, images = _wide_net().to(memory_format=torch.contiguous_format), _large_images().contiguous()
    fused = fuse_batchnorm(net)
    fused(images)
    fused.to(memory_format=torch.channels_last)
    monkeypatch.setattr(net, "forward", lambda x: pytest.fail("a 3 x 3 by squares is worth its call"))
    fused(images)


def test_a_compiler_captures_it_once() -> None:
    fused, counter = fuse_batchnorm(_wide_net()), CompileCounter()
    compiled = torch.compile(fused, backend=counter)
    for _ in range(2):
        compiled(_large_images()).sum().backward()
        fused(_large_images())
    assert counter.frame_count == 1


def test_who_wants_the_bytes_says_always(monkeypatch: pytest.MonkeyPatch) -> None:
    net, images = _dense_net(), _large_images()
    plain, always, pays = (
        _saved_bytes(model, images)
        for model in (net, fuse_batchnorm(net, when="always"), fuse_batchnorm(net, when="pays"))
    )
    assert always < 0.5 * plain and pays <= plain
    monkeypatch.setattr(fusion_size, "MIN_BLOCK_ELEMS", 15000)  # the second block is smaller
    assert always < _saved_bytes(fuse_batchnorm(net), images) < pays


def test_small_frozen_batch_norms_stay_frozen() -> None:
    net = _built("dense")
    _trained(net)
    for module in net.modules():
        if isinstance(module, nn.BatchNorm2d):
            module.eval()
    _same(_trained(fuse_batchnorm(copy.deepcopy(net))), _trained(net))


def test_statistics_of_small_maps_move_once_under_checkpointing() -> None:
    net = _built("resnet")
    fused = fuse_batchnorm(copy.deepcopy(net))
    for reentrant in (False, True):
        net(_images())
        checkpoint(fused, _images().requires_grad_(), use_reentrant=reentrant).sum().backward()
    _same(list(fused.buffers()), list(net.buffers()))


def test_whoever_watches_sees_the_fused_ops() -> None:
    fused = fuse_batchnorm(_built("resnet", torch.float32))
    with FlopCounterMode(display=False) as counter:
        fused(_images(dtype=torch.float32))
    assert torch.ops.shoal.norm_conv in counter.get_flop_counts()["Global"]
    model = shoal.compile(fuse_batchnorm(_built("resnet", torch.float32)), None)
    model(_images(dtype=torch.float32)).sum().backward()
    assert "shoal.norm_conv.default" in {op.target for op in model.shoal.plan.graph.ops}


def test_other_words_are_refused() -> None:
    with raising(InputError, "when='never'", "'pays'", "'always'"):
        fuse_batchnorm(nn.ReLU(), when="never")  # type: ignore[arg-type]


def test_a_compiler_is_not_asked_which_kernels_there_are(monkeypatch: pytest.MonkeyPatch) -> None:
    def asked(*unused: object) -> bool:
        raise AssertionError("it would have to look into the native library")

    monkeypatch.setattr(fusion_size, "runs_winograd", asked)
    window, weight = ConvWindow([1, 1], [1, 1], [1, 1], 1), torch.ones(64, 64, 3, 3)
    size = fusion_size.FusionSize("pays")

    def quick(x: torch.Tensor) -> torch.Tensor:
        return x + 1 if size.is_quick([x], weight, None, window) else x

    compiled = torch.compile(quick, backend="eager", fullgraph=True)
    assert torch.equal(compiled(images := torch.ones(2, 64, 64, 64)), images)


def test_it_tells_whether_every_map_that_it_was_asked_about_is_large() -> None:
    size = fusion_size.FusionSize("always")
    assert size.fuses(torch.ones(1, 8, 4, 4), elems=fusion_size.MIN_ELEMS) and size.all_large
    assert size.fuses(torch.ones(1, 8, 4, 4)) and not size.all_large
