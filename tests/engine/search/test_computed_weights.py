"""Layers whose weights are computed in every forward pass are rewritten like others, and so is what trains them.

Each way to compute weights is captured once, and every variant of that graph runs with the model's own tensors, in
float64; under a budget it trains in float32, no further from float64 than plain PyTorch.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.nn.utils import parametrizations, parametrize, prune, spectral_norm, weight_norm

import shoal
from shoal.capture.layered import Refused
from shoal.core.means import LOSSY
from shoal.core.variant import Variant
from shoal.engine.search import split_variants
from shoal.engine.search.variants import Variants
from shoal.errors import BudgetError
from tests.engine.search.variant_steps import captured, step
from tests.float32_rule import too_far

pytestmark = pytest.mark.filterwarnings("ignore:.*weight_norm.*:FutureWarning")
Layer = Any
_SIZES = {1: (8,), 2: (8, 6), 3: (8, 4, 4)}


class Standardised(nn.Module):
    """Weight standardisation as timm has it: a batch norm of the weight."""

    def forward(self, weight: torch.Tensor) -> torch.Tensor:
        rows = weight.reshape(1, weight.shape[0], -1)
        return F.batch_norm(rows, None, None, training=True, momentum=0.0, eps=1e-6).reshape_as(weight)


class LowRank(nn.Module):
    """The weight and a product of two parameters, of which the former is not trained: LoRA."""

    def __init__(self, weight: torch.Tensor) -> None:
        super().__init__()
        self.down = nn.Parameter(torch.randn(2, weight[0].numel()) / 4)
        self.up = nn.Parameter(torch.randn(len(weight), 2) / 4)

    def forward(self, weight: torch.Tensor) -> torch.Tensor:
        return weight.detach() + (self.up @ self.down).reshape_as(weight)


class DropConnect(nn.Module):
    """Some numbers of the weight are zero in a step, others in the next."""

    def forward(self, weight: torch.Tensor) -> torch.Tensor:
        return F.dropout(weight, 0.3, training=True)


class Scaled(nn.Module):
    """A factor that is moved in place in every forward pass, without gradients."""

    def __init__(self) -> None:
        super().__init__()
        self.factor = nn.Buffer(torch.ones(()))

    def forward(self, weight: torch.Tensor) -> torch.Tensor:
        with torch.no_grad():
            self.factor.mul_(0.9).add_(weight.abs().mean())
        return weight * self.factor.clone()


def parametrized(make: Callable[[torch.Tensor], nn.Module]) -> Callable[[Layer], Layer]:
    return lambda layer: parametrize.register_parametrization(layer, "weight", make(layer.weight))


PLAIN = "plain"
KINDS: dict[str, Callable[[Layer], Layer]] = {
    "weight_norm": parametrizations.weight_norm,
    "weight_norm by hooks": weight_norm,
    "spectral_norm": lambda layer: parametrizations.spectral_norm(layer, n_power_iterations=2),
    "spectral_norm by hooks": spectral_norm,
    "pruned": lambda layer: prune.l1_unstructured(layer, "weight", 0.5),
    "standardised": parametrized(lambda _: Standardised()),
    "low rank": parametrized(LowRank),
    "dropped": parametrized(lambda _: DropConnect()),
    "scaled": parametrized(lambda _: Scaled()),
    "two of them": lambda layer: KINDS["scaled"](parametrizations.weight_norm(layer)),
}


class Network(nn.Module):
    """A residual block, a transposed convolution, two convolutions with one weight, and a linear layer."""

    def __init__(self, dims: int, kind: str) -> None:
        super().__init__()
        weights, name = KINDS.get(kind, lambda layer: layer), f"{dims}d"
        convolution, norm = getattr(nn, f"Conv{name}"), getattr(nn, f"BatchNorm{name}")
        self.first, self.second = weights(convolution(3, 4, 3, padding=1)), weights(convolution(4, 4, 3, padding=1))
        self.convolve, self.short = getattr(F, f"conv{name}"), weights(convolution(4, 4, 1, bias=False))
        self.up = weights(getattr(nn, f"ConvTranspose{name}")(4, 4, 2, 2))
        self.norms = nn.ModuleList([norm(4), norm(4).eval().requires_grad_(False)])
        self.head = weights(nn.Linear(4, 2))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = F.relu(self.norms[0](self.first(x)))
        x = F.relu(self.norms[1](self.second(x)) + self.short(x))
        convolve, weight = self.convolve, self.short.weight
        return self.head(convolve(convolve(self.up(x), weight).relu(), weight).flatten(2).mean(2))


VARIANTS = (
    *(Variant(fuse=level) for level in ("rcf", "bnff", "icf")),
    *(Variant(depth=depth, slices=slices) for depth, slices in ((0.5, 2), (1.0, 5))),
    *(Variant(slabs=slabs, twice=twice) for slabs, twice in ((2, False), (4, True))),
)


def made(dims: int, kind: str, dtype: torch.dtype) -> tuple[nn.Module, torch.Tensor]:
    torch.manual_seed(0)
    return Network(dims, kind).to(dtype), torch.randn(5, 3, *_SIZES[dims]).to(dtype)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("dims", [2, 3])
def test_every_variant_computes_the_model(dims: int, kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(split_variants, "_WORTH_SLABS_BYTES", 0)
    model, x = made(dims, kind, torch.float64)
    plain, before = made(dims, kind, torch.float64)[0], copy.deepcopy(model.state_dict())
    graph, inputs = captured(model, x)
    expected = step(lambda: plain(x), plain)
    candidates, ran = Variants(graph, LOSSY), list[Variant]()
    patches = [Variant(depth=depth, grid=(2,) * dims) for depth in (0.5, 1.0)]
    for variant in (*VARIANTS, *patches):
        model.load_state_dict(before)
        try:
            rewritten = candidates.graph(variant)
        except Refused:
            continue
        ran.append(variant)
        found = step(lambda rewritten=rewritten: rewritten(*inputs)[0], model)  # type: ignore[misc]
        assert found.keys() == expected.keys()
        for name, theirs in expected.items():
            torch.testing.assert_close(found[name], theirs, rtol=1e-10, atol=1e-10, msg=f"{variant}: {name}")
    assert {"slices": True, "grid": True, "slabs": dims == 3, "fuse": True} == {
        name: any(getattr(one, name) for one in ran) for name in ("slices", "grid", "slabs", "fuse")
    }


def test_patches_that_are_not_exact_compute_what_they_compute_of_layers_with_the_same_weights() -> None:
    results = []
    for kind in ("weight_norm", PLAIN):
        torch._dynamo.reset()
        model, x = made(2, kind, torch.float64)
        graph, inputs = captured(model, x)
        rewritten = Variants(graph, LOSSY).graph(Variant(depth=0.5, grid=(2, 2), exact=False))
        results.append(step(lambda: rewritten(*inputs)[0], model))  # noqa: B023
    ours, theirs = results
    for name in ours.keys() & theirs.keys():  # the output, statistics, and gradients of what is not computed
        torch.testing.assert_close(ours[name], theirs[name], rtol=0, atol=1e-6, msg=name)  # `weight_g` is of float32
    assert {"y", "first.bias", "norms.0.running_mean"} <= ours.keys() & theirs.keys()


def trained(model: nn.Module, x: torch.Tensor) -> tuple[dict[str, torch.Tensor], dict[str, torch.Tensor]]:
    """What one step gives, and all tensors of the model after nine more."""
    first = step(lambda: model(x), model)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    for _ in range(9):
        optimizer.step()
        optimizer.zero_grad()
        model(x).square().sum().backward()
    return first, {name: tensor.detach().clone() for name, tensor in model.state_dict().items()}


def small(kind: str, dtype: torch.dtype) -> tuple[nn.Module, torch.Tensor]:
    """A network whose maps are larger than all its parameters, and whose result is small."""
    torch.manual_seed(0)
    weights = KINDS[kind]
    layers = [weights(nn.Conv2d(3, 8, 3, padding=1)), nn.BatchNorm2d(8), nn.ReLU(), weights(nn.Conv2d(8, 8, 3))]
    network = nn.Sequential(*layers, nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten(), weights(nn.Linear(8, 2)))
    return network.to(dtype), torch.randn(4, 3, 24, 24).to(dtype)


@pytest.mark.slow
def test_the_minimum_that_is_named_is_that_of_slices_and_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(split_variants, "_PARTS", ())  # patches take long to plan, and so do many slices
    monkeypatch.setattr(split_variants, "_SLICES", (4,))
    model, x = small("spectral_norm", torch.float32)
    with pytest.raises(BudgetError) as refused:
        shoal.compile(model, 80_000, allow="recompute, exact_split", optimizer="sgd")(x)
    named = refused.value.least_feasible_bytes
    model, x = small("spectral_norm", torch.float32)
    ours: Any = shoal.compile(model, named, allow="recompute, exact_split", optimizer="sgd")
    mine = trained(ours, x)
    assert ours.shoal.plan.variant.slices and ours.shoal.measured_peak_bytes <= named
    theirs, exact = (trained(*small("spectral_norm", dtype)) for dtype in (torch.float32, torch.float64))
    for result, plain, right in zip(mine, theirs, exact, strict=True):
        assert not too_far(result, plain, right)
