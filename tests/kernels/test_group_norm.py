"""Group norm again, and its gradient in place: the bits of PyTorch's kernels, and no more memory than is said."""

from __future__ import annotations

import copy

import pytest
import torch
from hypothesis import assume, given
from hypothesis import strategies as st
from torch import nn

import shoal
from shoal.kernels import group_norm
from shoal.kernels.group_norm import backward, backward_, backward_repeats_bits
from shoal.kernels.norm_again import normalise, normalise_, repeats_bits
from shoal.lowlevel import allocations
from tests.engine.training_laws import same_bits
from tests.joint_graphs import captured_step

aten = torch.ops.aten
CPU = torch.device("cpu")


@st.composite
def inputs(draw: st.DrawFn) -> tuple[torch.Tensor, int]:
    """A batch (N, C, ...) of one to three spatial dimensions, in either layout, and into how many groups it is cut."""
    spatial = draw(st.lists(st.integers(1, 9), min_size=1, max_size=3))
    groups = draw(st.integers(1, 8))
    shape = (draw(st.integers(1, 4)), groups * draw(st.integers(1, 5)), *spatial)
    dtype = draw(st.sampled_from([torch.float32, torch.float64]))
    generator = torch.Generator().manual_seed(draw(st.integers(0, 9999)))
    x = (torch.randn(shape, generator=generator) * draw(st.sampled_from([1e-3, 1.0, 50.0])) + 0.5).to(dtype)
    if draw(st.booleans()) and x.dim() > 3:
        x = x.contiguous(memory_format=torch.channels_last if x.dim() == 4 else torch.channels_last_3d)
    return x, groups


def per_channel(x: torch.Tensor, seed: int) -> torch.Tensor:
    return torch.randn(x.shape[1], generator=torch.Generator().manual_seed(seed)).to(x.dtype)


def forward(x: torch.Tensor, groups: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """PyTorch's kernel: result, mean, inverse deviation."""
    pixels = x.shape[2:].numel()
    return aten.native_group_norm(x, per_channel(x, 1), per_channel(x, 2), *x.shape[:2], pixels, groups, 1e-5)


@given(inputs())
def test_where_it_repeats_the_bits_it_repeats_them_for_any_batch(drawn: tuple[torch.Tensor, int]) -> None:
    x, groups = drawn
    assume(repeats_bits(x.dtype, CPU, x.dim(), x.shape[1], not x.is_contiguous(), x.dtype, groups))
    y, mean, invstd = forward(x, groups)
    again = normalise(x, per_channel(x, 1), per_channel(x, 2), mean, invstd)
    assert same_bits(again, y) and again.stride() == y.stride()
    assert same_bits(normalise_(x, per_channel(x, 1), per_channel(x, 2), mean, invstd), y)


@given(inputs())
def test_the_gradient_in_place_has_the_bits_of_pytorchs(drawn: tuple[torch.Tensor, int]) -> None:
    x, groups = drawn
    x = x.contiguous()
    assume(backward_repeats_bits(x.dtype, CPU, x.dim(), x.shape[1], groups))
    _, mean, invstd = forward(x, groups)
    grad = torch.randn(x.shape, generator=torch.Generator().manual_seed(3)).to(x.dtype)
    theirs = backward(grad, x, per_channel(x, 1), mean, invstd)
    ours = backward_(grad, x, per_channel(x, 1), mean, invstd)
    assert all(map(same_bits, ours, theirs))
    assert ours[0] is grad


def test_here_it_repeats_the_bits_of_float32() -> None:
    """A CPU on which it does not would lose nothing but memory; the kernels of x86-64 are known to agree."""
    if torch.backends.cpu.get_cpu_capability() not in ("AVX2", "AVX512"):
        pytest.skip("not tried on this processor")
    assert repeats_bits(torch.float32, CPU, 5, 8, False, torch.float32, 2)
    assert backward_repeats_bits(torch.float32, CPU, 5, 8, 2)


def test_the_gradient_in_place_allocates_a_piece(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(group_norm, "_PIECE_ELEMS", 2048)
    x, grad = torch.randn(2, 8, 32, 32), torch.randn(2, 8, 32, 32)
    _, mean, invstd = forward(x, 4)
    theirs = backward(grad, x, per_channel(x, 1), mean, invstd)
    ours, changes = allocations.record(lambda: backward_(grad, x, per_channel(x, 1), mean, invstd))
    assert all(map(same_bits, ours, theirs))
    assert allocations.peak_bytes(changes) < 1.2 * 2048 * 4


class Net(nn.Sequential):
    """Convolutions with group norms between, as in SegResNet."""

    def __init__(self) -> None:
        super().__init__(
            *(nn.Conv3d(1, 8, 3, padding=1), nn.GroupNorm(4, 8), nn.ReLU(), nn.Conv3d(8, 8, 3, padding=1)),
            *(nn.GroupNorm(2, 8), nn.SiLU(), nn.Conv3d(8, 2, 1)),
        )


def test_a_step_with_group_norms_inside_a_budget_is_plain_pytorchs(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its normalised tensors are computed again in place, its gradients written over those that come in."""
    monkeypatch.setattr("shoal.rewrites.norms.WORTH_PIECES_BYTES", 0)
    torch.manual_seed(0)
    plain, x = Net(), torch.randn(2, 1, 12, 12, 12)
    planned = copy.deepcopy(plain)
    with pytest.raises(shoal.BudgetError) as refused:
        shoal.compile(copy.deepcopy(plain), budget=300_000, allow="bitwise")(x)
    assert refused.value.least_feasible_bytes is not None
    compiled = shoal.compile(planned, budget=refused.value.least_feasible_bytes, allow="bitwise")
    for model in (plain, compiled, plain, compiled):  # a step is measured in the second one
        model(x).square().mean().backward()
    for ours, theirs in zip(planned.parameters(), plain.parameters(), strict=True):
        assert ours.grad is not None and theirs.grad is not None and same_bits(ours.grad, theirs.grad)
    assert compiled.shoal.measured_peak_bytes == pytest.approx(compiled.shoal.predicted_peak_bytes, rel=0.02)
    targets = {node.target for node in captured_step(copy.deepcopy(plain), x).joint.graph.nodes}
    assert backward in targets
