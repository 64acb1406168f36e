"""A graph run without the ways in of its modules: the same results, and whoever hangs on to a module is still asked."""

from __future__ import annotations

import copy
import pickle

import torch
from torch import nn
from torch.fx import symbolic_trace
from torch.nn.modules.module import register_module_forward_hook

from shoal import fuse_batchnorm
from shoal.transforms.fuse.eager_graph import EagerGraph


def _net() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Conv2d(3, 4, 1), nn.BatchNorm2d(4), nn.ReLU(), nn.Sequential(nn.Conv2d(4, 2, 1), nn.Tanh()))


def test_computes_what_the_graph_does() -> None:
    net, x = _net(), torch.randn(2, 3, 4, 4)
    run = EagerGraph()(symbolic_trace(net))
    assert torch.equal(run(x), net(x))


def test_modules_with_hooks_are_called() -> None:
    net, seen = _net(), []
    net[2].register_forward_hook(lambda *_: seen.append("relu"))
    EagerGraph()(symbolic_trace(net))(torch.randn(2, 3, 4, 4))
    assert seen == ["relu"]


def test_hooks_on_all_modules_see_those_of_a_fused_network() -> None:
    fused, seen = fuse_batchnorm(_net()), []
    handle = register_module_forward_hook(lambda module, *_: seen.append(type(module).__name__))
    try:
        fused(torch.randn(2, 3, 4, 4))
    finally:
        handle.remove()
    assert "Tanh" in seen


def test_a_copy_runs_its_own_modules() -> None:
    fused, x = fuse_batchnorm(_net()), torch.randn(2, 3, 4, 4)
    fused(x)
    copied = copy.deepcopy(fused)
    with torch.no_grad():
        for parameter in copied.parameters():
            parameter.zero_()
    assert fused(x).abs().sum() > 0 == copied(x).abs().sum()
    assert type(pickle.loads(pickle.dumps(EagerGraph()))) is EagerGraph
