"""The step with cuDNN's ops in it computes what plain PyTorch does, whatever is kept."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator

import pytest
import torch
from torch import nn

import shoal
from tests import cudnn_on_the_cpu
from tests.joint_graphs import captured_step


@pytest.fixture(autouse=True)
def on_the_cpu() -> Iterator[None]:
    with cudnn_on_the_cpu.cudnn_on_the_cpu():
        yield


class Twice(nn.Module):
    """One layer on two inputs: its statistics leave as new tensors."""

    def __init__(self) -> None:
        super().__init__()
        self.conv, self.norm = nn.Conv2d(4, 4, 1), nn.BatchNorm2d(4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.norm(self.conv(self.norm(x)).tanh())


class Frozen(nn.BatchNorm2d):
    def train(self, mode: bool = True) -> nn.Module:
        return super().train(False)


class Transposed(nn.Module):
    """The norm reads a tensor that is dense in no memory format."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm2d(4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.norm(x.transpose(2, 3)) * 2


NORMS: dict[str, Callable[[], nn.Module]] = {
    "plain": lambda: nn.BatchNorm2d(4),
    "no affine": lambda: nn.BatchNorm2d(4, affine=False),
    "no statistics": lambda: nn.BatchNorm2d(4, track_running_stats=False),
    "channels last": lambda: nn.Sequential(nn.BatchNorm2d(4)).to(memory_format=torch.channels_last),
    "instance norm": lambda: nn.InstanceNorm2d(4, affine=True),
    "frozen statistics": lambda: Frozen(4).eval(),
    "frozen weight": lambda: nn.BatchNorm2d(4).requires_grad_(False),
    "called twice": Twice,
    "transposed": Transposed,
}


def network(norm: str) -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Conv2d(3, 4, 3), NORMS[norm](), nn.Tanh(), nn.Conv2d(4, 4, 3), nn.BatchNorm2d(4), nn.ReLU())


@pytest.mark.parametrize("norm", NORMS)
def test_results_gradients_and_statistics_are_those_of_plain_pytorch(norm: str) -> None:
    # cuDNN gets a dense copy of what is transposed, whose elements are added up in another order.
    dtype, same = (torch.float64, torch.allclose) if norm == "transposed" else (torch.float32, torch.equal)
    plain = network(norm).to(dtype)
    planned = copy.deepcopy(plain)
    step = shoal.compile(planned, budget="1GiB", options=shoal.Options(planner="chain"))  # recomputes
    for _ in range(2):
        plain.zero_grad(), planned.zero_grad()
        x = torch.randn(4, 3, 9, 7, dtype=dtype)
        results = [one(x) for one in (plain, step)]
        for result in results:
            result.square().sum().backward()
        assert same(*results)
        for one, other in zip(plain.parameters(), planned.parameters(), strict=True):
            assert one.grad is None is other.grad or same(one.grad, other.grad)  # type: ignore[arg-type]
    assert all(map(same, plain.buffers(), planned.buffers()))


@pytest.mark.parametrize("norm", NORMS)
def test_what_cudnn_can_do_is_left_to_it(norm: str) -> None:
    captured = captured_step(network(norm))
    native = [op.target for op in captured.graph.ops if "norm" in op.target and "cudnn" not in op.target]
    assert len(native) == {"no affine": 2, "frozen statistics": 1}.get(norm, 0)  # of the latter the backward pass
    reserved = [s for s in captured.graph.storages if s.dtype == "uint8"]
    assert {s.nbytes for s in reserved} == {cudnn_on_the_cpu.RESERVE_BYTES}
    assert all(s.id in captured.graph.saved for s in reserved)


def test_a_second_backward_pass_finds_the_reserve_as_the_first_did(monkeypatch: pytest.MonkeyPatch) -> None:
    model = network("plain")
    loss = shoal.compile(model, budget="1GiB", options=shoal.Options(planner="keep_all"))(torch.randn(4, 3, 9, 7)).sum()
    monkeypatch.setattr(cudnn_on_the_cpu, "WRITES_INTO_RESERVE", True)
    loss.backward(retain_graph=True)
    loss.backward()
    assert all(parameter.grad.isfinite().all() for parameter in model.parameters())  # type: ignore[union-attr]
