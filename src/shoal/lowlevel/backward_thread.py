"""Calls on the thread on which autograd runs a device's backward passes: libraries keep things for each thread."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch


def on_backward_thread(device: torch.device, call: Callable[[], None]) -> None:
    """Call something, without recording it, where a backward pass on `device` that starts here would run.

    On the CPU that is this thread.

    >>> import threading
    >>> seen = []
    >>> on_backward_thread(torch.device("cpu"), lambda: seen.append(threading.get_ident()))
    >>> seen == [threading.get_ident()]
    True
    """
    # AOTAutograd keeps backward passes on its own thread while it traces.
    with torch.enable_grad(), torch.autograd.set_multithreading_enabled(True):
        _BackwardThreadCall.apply(torch.zeros(1, device=device, requires_grad=True), call).backward()


class _BackwardThreadCall(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, call: Callable[[], None]) -> torch.Tensor:
        ctx.call = call
        return x.clone()

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor, None]:
        with torch.no_grad():
            ctx.call()
        return gradients[0], None
