"""A planned step in small, and transfers one at a time."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from typing import Any

import pytest
import torch

from shoal.offload.links.open_link import OpenLink
from shoal.offload.transfers import Transfers

CPU = torch.device("cpu")
PAGE = 4096
needs_compiler = pytest.mark.skipif(
    not any(map(shutil.which, ("c++", "g++", "clang++"))), reason="a memory limit on the CPU needs a C++ compiler"
)


def offload(transfers: Transfers, receipt: torch.Tensor, slot: int, tensor: torch.Tensor) -> None:
    transfers.start_offload(receipt, slot, tensor)
    transfers.finish_offload(receipt, slot)


def fetch(transfers: Transfers, receipt: torch.Tensor, slot: int) -> torch.Tensor:
    fetched = transfers.start_fetch(receipt, slot)
    transfers.finish_fetch(receipt, slot)
    return fetched


class Step:
    """A planned step in small: y = Σ (x · i)² over a number of storages, each of which waits on the host.

    The gradient is 2 x Σ i². `in_forward` and `in_backward` are called in the middle of each.
    """

    def __init__(self, transfers: Transfers, slots: int) -> None:
        self.transfers, self.slots = transfers, slots
        self.in_forward: Callable[[], None] = lambda: None
        self.in_backward: Callable[[], None] = lambda: None
        step = self

        class Function(torch.autograd.Function):
            @staticmethod
            def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
                receipt = transfers.begin()
                total = x.new_zeros(())
                ctx.shape = x.shape
                for slot in range(slots):
                    value = x * (slot + 1)
                    transfers.start_offload(receipt, slot, value)
                    total = total + value.square().sum()
                    if slot == slots // 2:
                        step.in_forward()
                    transfers.finish_offload(receipt, slot)
                ctx.save_for_backward(receipt)
                return total

            @staticmethod
            def backward(ctx: Any, grad: torch.Tensor) -> torch.Tensor:
                (receipt,) = ctx.saved_tensors
                result = torch.zeros(ctx.shape)
                coming = transfers.start_fetch(receipt, slots - 1)
                for slot in reversed(range(slots)):
                    transfers.finish_fetch(receipt, slot)
                    value = coming
                    if slot:
                        coming = transfers.start_fetch(receipt, slot - 1)
                    if slot == slots // 2:
                        step.in_backward()
                    result += grad * 2 * value * (slot + 1)
                return result

        self.function = Function

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.function.apply(x)

    def expected(self, x: torch.Tensor) -> torch.Tensor:
        return sum((2 * (x.detach() * (i + 1)) * (i + 1) for i in reversed(range(self.slots))), torch.zeros_like(x))

    def is_right(self) -> bool:
        """Whether a whole step gives the gradient it must."""
        self.in_forward = self.in_backward = lambda: None
        x = torch.randn(300, requires_grad=True)
        self.forward(x).backward()
        return torch.equal(x.grad, self.expected(x))  # type: ignore[arg-type]


def step_on(link: OpenLink, slots: int = 4) -> Step:
    return Step(Transfers(link, [1200] * slots), slots)
