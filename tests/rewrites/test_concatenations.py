"""Concatenations that are not computed, and gradients of concatenations that are added as a whole.

The function and its gradients are the same."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import shoal
from shoal.capture.capture_step import capture_step
from shoal.capture.captured import Captured
from shoal.capture.pieces import choose_concatenations, in_pieces
from shoal.core.variant import Pieces
from shoal.errors import PlanError
from shoal.rewrites import concatenations
from tests.joint_graphs import operands, run_joint
from tests.raising import raising

CONVOLUTIONS: dict[int, Any] = {2: nn.Conv2d, 3: nn.Conv3d}
TRANSPOSED: dict[int, Any] = {2: nn.ConvTranspose2d, 3: nn.ConvTranspose3d}


class Level(nn.Module):
    """A U-Net's last level; what is concatenated is read by one convolution, or two."""

    def __init__(self, dims: int = 2, readers: int = 1, **options: Any) -> None:
        super().__init__()
        conv = CONVOLUTIONS[dims]
        self.enter, self.down = conv(2, 4, 3, padding=1), conv(4, 6, 3, stride=2, padding=1)
        self.up = TRANSPOSED[dims](6, 3, 2, stride=2)
        self.read = nn.ModuleList(conv(7, 5, 3, padding=1, **options) for _ in range(readers))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        skip = self.enter(x).tanh()
        both = torch.cat([skip, self.up(self.down(skip).tanh())], 1)
        return torch.stack([read(both).tanh() for read in self.read]).sum(0)


def captured_of(net: nn.Module, x: torch.Tensor) -> Captured:
    return capture_step(net, x, name="net")[0]


def cats(captured: Captured) -> list[str]:
    return [op.name for op in captured.graph.ops if op.target == "aten.cat.default"]


@pytest.mark.parametrize("dims", [2, 3])
@pytest.mark.parametrize("options", [{}, {"bias": False}, {"stride": 2}, {"dilation": 2}], ids=str)
@pytest.mark.parametrize(("readers", "last"), [(1, False), (2, True)])
def test_results_and_gradients_are_those_of_the_step(
    dims: int, options: dict[str, Any], readers: int, last: bool
) -> None:
    torch.manual_seed(0)
    layout = {2: torch.channels_last, 3: torch.channels_last_3d}[dims] if last else torch.contiguous_format
    net = Level(dims, readers, **options).double().to(memory_format=layout)
    x = torch.randn(2, 2, *[8] * dims, dtype=torch.float64).contiguous(memory_format=layout)
    captured = captured_of(net, x)
    (name,) = cats(captured)
    changed = in_pieces(captured, [Pieces(name, parts=True)])
    assert name not in {op.name for op in changed.graph.ops}
    largest = max(s.nbytes for s in captured.graph.storages)
    if readers == 1:  # its gradient is no tensor either, unless it is a sum
        assert all(s.nbytes < largest for s in changed.graph.storages)
    tensors = operands(captured.joint)
    for ours, theirs in zip(run_joint(changed.joint, tensors), run_joint(captured.joint, tensors), strict=True):
        assert (ours is None) == (theirs is None)
        if ours is not None:
            torch.testing.assert_close(ours, theirs, rtol=1e-10, atol=1e-10)


class Otherwise(Level):
    """The concatenation has a reader that is no convolution."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        skip = self.enter(x)
        both = torch.cat([skip, self.up(self.down(skip))], 1)
        return self.read[0](both).sum() + both.tanh().sum()


def test_large_concatenations_that_convolutions_alone_read_are_chosen() -> None:
    large, small = torch.randn(1, 2, 512, 512), torch.randn(1, 2, 8, 8)
    captured = captured_of(Level(), large)
    assert choose_concatenations(captured, captured.graph) == (Pieces(cats(captured)[0], parts=True),)
    for net, x in ((Level(), small), (Otherwise(), large), (Level(groups=1).requires_grad_(False), large)):
        if not any(parameter.requires_grad for parameter in net.parameters()):
            x = x.clone().requires_grad_()
        other = captured_of(net, x)
        found = choose_concatenations(other, other.graph)
        assert found == () or not any(parameter.requires_grad for parameter in net.parameters())


def test_a_plan_of_another_step_is_refused() -> None:
    captured = captured_of(Level(), torch.randn(1, 2, 8, 8))
    with raising(PlanError, "'cat_7'"):
        in_pieces(captured, [Pieces("cat_7", parts=True)])


def test_a_step_is_planned_without_them_saved_loaded_and_measured(tmp_path: Path) -> None:
    torch.manual_seed(0)
    net, x = nn.Sequential(Level(), nn.AdaptiveAvgPool2d(1)).double(), torch.randn(1, 2, 384, 384, dtype=torch.float64)
    keep = shoal.plan(net, x, "10GiB", allow="keep").predicted_peak_bytes
    for share in (0.62, 0.58, 0.54, 0.5, 0.46):
        plan = shoal.plan(net, x, int(share * keep), allow="recompute, direct")
        if plan.variant.pieces:
            break
    assert "1 concatenations left out" in str(plan.variant), plan.explain()
    assert plan.variant.means == {"direct"}
    plan.save(tmp_path / "plan.json")
    net(x).square().mean().backward()
    expected = [parameter.grad.clone() for parameter in net.parameters()]
    net.zero_grad()
    model = shoal.compile(net, options=shoal.Options(plan=shoal.Plan.load(tmp_path / "plan.json")))
    model(x).square().mean().backward()
    for ours, theirs in zip(net.parameters(), expected, strict=True):
        torch.testing.assert_close(ours.grad, theirs, rtol=1e-8, atol=1e-12)
    assert model.shoal.plan.variant == plan.variant
    assert model.shoal.measured_peak_bytes <= model.shoal.predicted_peak_bytes


def test_it_needs_no_kernel_of_this_machine() -> None:
    with torch.device("meta"):
        net, x = nn.Sequential(Level(3), nn.AdaptiveAvgPool3d(1)), torch.randn(1, 2, 64, 64, 64)
    whole = shoal.plan(net, x, "40GiB", allow="keep", hardware="rtx-4090-24gb").predicted_peak_bytes

    def least(allow: str) -> int:
        with pytest.raises(shoal.BudgetError) as refused:
            shoal.plan(net, x, whole // 100, allow=allow, hardware="rtx-4090-24gb", offload_to=None)
        assert refused.value.least_feasible_bytes
        return refused.value.least_feasible_bytes

    assert least("recompute, order, direct") < 0.9 * least("recompute, order")


_LAYERS = 5


class Dense(nn.Module):
    """A dense block: each layer reads all earlier ones side by side, along `dim`."""

    def __init__(self, dim: int = 1, first: int = 16, growth: int = 4) -> None:
        super().__init__()
        self.dim = dim
        self.stem = nn.Conv2d(3, first, 3, padding=1)
        sizes = [first + growth * place for place in range(_LAYERS)]
        self.layers = nn.ModuleList(
            nn.Sequential(nn.BatchNorm2d(size), nn.ReLU(), nn.Conv2d(size, growth, 3, padding=1)) for size in sizes
        )
        self.head = nn.Sequential(nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(sizes[-1] + growth, 5))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        parts = [self.stem(x)]
        for layer in self.layers:
            parts.append(layer(torch.cat(parts, self.dim)))
        return self.head(torch.cat(parts, self.dim))  # type: ignore[no-any-return]


class Nested(nn.Module):
    """Skips of skips, as in a U-Net++: `high` waits for the last convolution, and is as large as what does not."""

    def __init__(self) -> None:
        super().__init__()
        self.high, self.first, self.second = nn.Conv2d(3, 8, 1), nn.Conv2d(8, 8, 3, padding=1), nn.Conv2d(16, 8, 1)
        self.last = nn.Conv2d(24, 4, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        high = self.high(x)
        first = self.first(high).relu()
        second = self.second(torch.cat([high, first], 1)).relu()
        return self.last(torch.cat([high, first, second], 1)).mean((2, 3))  # type: ignore[no-any-return]


def train(model: nn.Module, x: torch.Tensor, precision: torch.dtype) -> list[torch.Tensor | None]:
    for _ in range(3):
        for parameter in model.parameters():
            parameter.grad = None
        with torch.autocast("cpu", dtype=precision, enabled=precision != torch.float32):
            loss = model(x).float().square().mean()
        loss.backward()
    return [parameter.grad for parameter in model.parameters()]


def sums(model: nn.Module) -> int:
    """Of gradients, in the backward pass."""
    graph = model.shoal.plan.graph  # type: ignore[union-attr]
    return sum(op.target == "aten.add.Tensor" and op.phase == "backward" for op in graph.ops)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("layout", "precision"),
    [(torch.channels_last, torch.float32), (torch.contiguous_format, torch.bfloat16)],
    ids=["channels_last", "contiguous, bfloat16"],
)
def test_a_dense_block_has_eager_bits_and_a_sum_a_layer_in_the_same_bytes(
    layout: torch.memory_format, precision: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    torch.manual_seed(0)
    model = Dense().to(memory_format=layout)  # type: ignore[call-overload]
    x = torch.randn(2, 3, 12, 12).to(memory_format=layout)
    expected = train(copy.deepcopy(model), x, precision)
    models = [shoal.compile(copy.deepcopy(model), "1GiB", allow="bitwise") for _ in range(2)]
    whole, one_by_one = models
    for got, wanted in zip(train(whole, x, precision), expected, strict=True):
        assert got is not None and wanted is not None and torch.equal(got, wanted)
    monkeypatch.setattr(concatenations, "_neighbours", lambda part: [])
    train(one_by_one, x, precision)
    assert (sums(whole), sums(one_by_one)) == (_LAYERS, sum(range(_LAYERS + 1)))
    measured, predicted = ([getattr(one.shoal, f"{a}_peak_bytes") for one in models] for a in ("measured", "predicted"))
    assert measured[0] == measured[1] and predicted[0] == predicted[1] and whole.shoal.repairs == 0


def test_within_less_the_bits_stay() -> None:
    torch.manual_seed(0)
    model, x = Dense(), torch.randn(8, 3, 24, 24)
    whole = shoal.plan(model, x, "1GiB", allow="bitwise").predicted_peak_bytes
    expected = train(copy.deepcopy(model), x, torch.float32)
    ours = shoal.compile(model, int(0.6 * whole), allow="bitwise")
    for got, wanted in zip(train(ours, x, torch.float32), expected, strict=True):
        assert got is not None and wanted is not None and torch.equal(got, wanted)
    assert ours.shoal.measured_peak_bytes <= 0.6 * whole


def test_so_it_is_along_other_dimensions() -> None:
    class Along(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = nn.ModuleList(nn.Linear(6, 6) for _ in range(3))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            parts = [x * 2]
            for layer in self.layers:
                parts.append(layer(torch.cat(parts, 1)).tanh()[:, :1])
            return torch.cat(parts, 1)

    torch.manual_seed(0)
    model, x = Along(), torch.randn(3, 8, 6)
    expected = train(copy.deepcopy(model), x, torch.float32)
    ours = shoal.compile(model, "1GiB", allow="bitwise")
    for got, wanted in zip(train(ours, x, torch.float32), expected, strict=True):
        assert got is not None and wanted is not None and torch.equal(got, wanted)


def test_what_would_be_copied_for_the_most_part_is_added_part_by_part() -> None:
    torch.manual_seed(0)
    model, x = Nested(), torch.randn(2, 3, 16, 16)
    expected = train(copy.deepcopy(model), x, torch.float32)
    ours = shoal.compile(model, "1GiB", allow="bitwise")
    for got, wanted in zip(train(ours, x, torch.float32), expected, strict=True):
        assert got is not None and wanted is not None and torch.equal(got, wanted)
    assert not any(op.target == "aten.clone.default" for op in ours.shoal.plan.graph.ops)
    assert sums(ours) == 3  # of `high` twice, and of `first`
