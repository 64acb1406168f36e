"""Run real tensors from anywhere, also from within a capture, and leave PyTorch's state as it was."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager

import torch
from torch.utils._python_dispatch import _disable_current_modes


@contextmanager
def undisturbed(device: torch.device) -> Iterator[None]:
    """No fake tensors, gradients or autocast inside; outside, the random number generators are as they were."""
    with ExitStack() as stack:
        # A capture puts fake tensors and the Python dispatcher in force.
        stack.enter_context(_disable_current_modes())
        stack.enter_context(torch._C._DisablePythonDispatcher())
        stack.enter_context(torch._C._DisableAutocast())
        stack.enter_context(torch.no_grad())
        stack.enter_context(torch.random.fork_rng(devices=[device] if device.type == "cuda" else []))
        if device.type == "cuda":
            stack.enter_context(torch.cuda.device(device))
        yield
