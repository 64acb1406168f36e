"""Every rewrite of a captured graph computes what the model computes, however its batch norms are set.

A rewrite is built while its layers are bound to no tensors, and runs when they are: both must get the same answers from
them. Each setting is captured once, and every variant of that graph runs with the model's own tensors, in float64.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import fx, nn
from torch.nn import functional as F
from torch.nn.modules.batchnorm import _BatchNorm

import shoal
from shoal.capture.layered import Refused
from shoal.capture.traced_functions import admit_cumulative_norms, cumulative_norms
from shoal.core.means import LOSSY
from shoal.core.variant import Variant
from shoal.engine.search import split_variants
from shoal.engine.search.variants import Variants
from shoal.errors import BudgetError
from tests.engine.search.variant_steps import captured

_CONVOLUTIONS: dict[int, Any] = {1: nn.Conv1d, 2: nn.Conv2d, 3: nn.Conv3d}
_BATCH_NORMS: dict[int, type[_BatchNorm]] = {1: nn.BatchNorm1d, 2: nn.BatchNorm2d, 3: nn.BatchNorm3d}
_SIZES = {1: (9,), 2: (6, 6), 3: (6, 4, 4)}


def _without(name: str) -> Callable[[_BatchNorm], None]:
    return lambda layer: setattr(layer, name, None)


def _freeze(layer: _BatchNorm) -> None:
    layer.eval().requires_grad_(False)


def _stop_tracking(layer: _BatchNorm) -> None:
    layer.track_running_stats = False


def _lose_statistics(layer: _BatchNorm) -> None:
    layer.eval().running_mean = layer.running_var = None


SETTINGS: dict[str, tuple[dict[str, Any], Callable[[_BatchNorm], Any]]] = {
    "train": ({}, lambda layer: layer.train()),
    "eval": ({}, lambda layer: layer.eval()),
    "eval without gradients": ({}, _freeze),
    "train without gradients": ({}, lambda layer: layer.requires_grad_(False)),
    "untracked": ({"track_running_stats": False}, lambda layer: layer.train()),
    "untracked in eval": ({"track_running_stats": False}, lambda layer: layer.eval()),
    "tracking stopped": ({}, _stop_tracking),
    "statistics lost": ({}, _lose_statistics),
    "cumulative": ({"momentum": None}, lambda layer: layer.train()),
    "cumulative in eval": ({"momentum": None}, lambda layer: layer.eval()),
    "without affine": ({"affine": False}, lambda layer: layer.train()),
    "without affine in eval": ({"affine": False}, lambda layer: layer.eval()),
    "weight only": ({}, _without("bias")),
    "bias only": ({}, _without("weight")),
    "uncounted": ({}, _without("num_batches_tracked")),
}


class Network(nn.Module):
    """A residual block, then a dense block; its convolutions have biases."""

    def __init__(self, dims: int, settings: list[str]) -> None:
        super().__init__()
        convolution = _CONVOLUTIONS[dims]
        self.first, self.second, self.third = (convolution(c, 2, 3, padding=1) for c in (3, 2, 2))
        self.grow, self.more, self.head = convolution(2, 2, 3, padding=1), convolution(4, 2, 1), convolution(6, 2, 1)
        self.norms = nn.ModuleList(
            _batch_norm(dims, channels, settings[place % len(settings)])
            for place, channels in enumerate((2, 2, 2, 2, 4, 6))
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = F.relu(self.norms[0](self.first(x)))
        x = F.relu(self.norms[2](self.third(F.relu(self.norms[1](self.second(x))))) + x)
        x = torch.cat([x, self.grow(F.relu(self.norms[3](x)))], 1)
        x = torch.cat([x, self.more(F.relu(self.norms[4](x)))], 1)
        return self.head(F.relu(self.norms[5](x)))


def _batch_norm(dims: int, channels: int, setting: str) -> _BatchNorm:
    """One whose vectors are all unlike those that a new one has."""
    options, change = SETTINGS[setting]
    layer = _BATCH_NORMS[dims](channels, **options)
    for _, vector in (*layer.named_parameters(), *layer.named_buffers()):
        if vector.is_floating_point():
            nn.init.uniform_(vector, 0.5, 2.0)
    change(layer)
    return layer


def variants(dims: int) -> Iterator[Variant]:
    for level in ("rcf", "mvf", "bnff", "icf"):
        yield Variant(fuse=level)
    for slices in (2, 5):
        yield Variant(depth=1.0, slices=slices)
    yield Variant(depth=1.0, grid=(2,) * dims)
    yield Variant(depth=0.5, grid=(2,) * dims)
    if dims == 3:
        yield Variant(slabs=2)
        yield Variant(slabs=3, twice=True)


def captured_with_cumulative_norms(model: nn.Module, x: torch.Tensor) -> tuple[fx.GraphModule, list[Any]]:
    admit_cumulative_norms(model)
    with cumulative_norms():
        return captured(model, x)


def step(run: Callable[[], torch.Tensor], model: nn.Module) -> dict[str, torch.Tensor | None]:
    """The output of one step, all gradients and all buffers afterwards."""
    model.zero_grad()
    y = run()
    (y * torch.linspace(-1, 2, y.numel(), dtype=y.dtype).reshape(y.shape)).sum().backward()
    gradients = {name: parameter.grad for name, parameter in model.named_parameters()}
    return {"y": y.detach(), **gradients, **{name: buffer.clone() for name, buffer in model.named_buffers()}}


def assert_right(dims: int, settings: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """Every variant gives what plain PyTorch gives."""
    monkeypatch.setattr(split_variants, "_WORTH_SLABS_BYTES", 0)
    torch.manual_seed(0)
    model, x = Network(dims, settings).double(), torch.randn(5, 3, *_SIZES[dims], dtype=torch.float64)
    plain = copy.deepcopy(model)
    before = copy.deepcopy(model.state_dict())
    expected = step(lambda: plain(x), plain)
    graph, inputs = captured_with_cumulative_norms(model, x)
    candidates, ran = Variants(graph, LOSSY), 0
    for variant in variants(dims):
        model.load_state_dict(before)
        try:
            rewritten = candidates.graph(variant)
        except Refused:
            continue
        ran += 1
        found = step(lambda rewritten=rewritten: rewritten(*inputs)[0], model)  # type: ignore[misc]
        for name, theirs in expected.items():
            ours = found[name]
            assert (ours is None) == (theirs is None), f"{variant}: {name}"
            if ours is not None and theirs is not None:
                torch.testing.assert_close(ours, theirs, rtol=1e-10, atol=1e-10, msg=f"{variant}: {name}")
    assert ran >= 4


@pytest.mark.parametrize(
    "settings",
    [
        ["train"],
        ["eval"],
        ["weight only"],
        ["bias only", "uncounted", "tracking stopped"],
        ["cumulative", "without affine"],
        ["untracked in eval", "statistics lost", "cumulative in eval", "without affine in eval"],
        ["eval without gradients", "train without gradients", "untracked"],
    ],
    ids=", ".join,
)
def test_every_variant_computes_the_model_whose_batch_norms_are(
    settings: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    assert_right(3, settings, monkeypatch)


@pytest.mark.parametrize("dims", [1, 2])
@pytest.mark.parametrize("settings", [["eval"], ["train", "eval"]], ids=", ".join)
def test_so_it_does_in_other_dimensions(dims: int, settings: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    assert_right(dims, settings, monkeypatch)


def two_convolutions() -> nn.Module:
    """Frozen batch norms after convolutions whose maps are larger than all parameters."""
    torch.manual_seed(0)
    norms = [_batch_norm(2, 16, setting) for setting in ("eval", "eval without gradients")]
    layers = [nn.Conv2d(3, 16, 3, padding=1), norms[0], nn.ReLU(), nn.Conv2d(16, 16, 3, padding=1), norms[1], nn.ReLU()]
    return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten())  # a loss of few numbers takes no room


@pytest.mark.slow
def test_a_model_with_frozen_batch_norms_trains_at_the_minimum_that_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(split_variants, "_PARTS", ())  # patches take long to plan, and so do many slices
    monkeypatch.setattr(split_variants, "_SLICES", (2,))
    x, allow = torch.randn(4, 3, 24, 24), "recompute, exact_split"
    with pytest.raises(BudgetError) as refused:
        shoal.compile(two_convolutions(), budget="150kB", allow=allow)(x)
    model: Any = shoal.compile(two_convolutions(), budget=refused.value.least_feasible_bytes, allow=allow)
    mine = step(lambda: model(x), model)
    assert model.shoal.plan.variant.slices
    plain, exact = two_convolutions(), two_convolutions().double()
    theirs, right = step(lambda: plain(x), plain), step(lambda: exact(x.double()), exact)
    for name, ours in mine.items():
        reference, other = right[name], theirs[name]
        if reference is None or other is None or ours is None:
            assert reference is other is ours, name
            continue
        rounding = (other - reference).abs().max() + 1e-5 * reference.abs().max()
        assert (ours - reference).abs().max() <= 2 * rounding, name
