"""Steps whose concatenations are not computed: the same function and gradients, from the parts."""

from __future__ import annotations

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
