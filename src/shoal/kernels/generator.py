"""Replay of random numbers: a recomputed dropout draws the mask it drew the first time."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any

import torch


def generator_state(device: torch.device) -> torch.Tensor:
    """The state of the device's default generator, a uint8 tensor in host memory."""
    return torch.cuda.get_rng_state(device) if device.type == "cuda" else torch.get_rng_state()


def state_bytes(device: torch.device) -> int:
    """Device bytes of such a state: none but on the CPU."""
    return generator_state(device).nbytes if device.type == "cpu" else 0


@cache
def replaying(target: Callable[..., Any]) -> Callable[..., Any]:
    """`target` with two arguments more in front, a generator's state and the device it is for: it runs with the
    device's generator set to that state, and then the generator is put back where it was."""

    def replay(state: torch.Tensor, device: torch.device, /, *args: Any, **kwargs: Any) -> Any:
        present = generator_state(device)
        _set(device, state)
        try:
            return target(*args, **kwargs)
        finally:
            _set(device, present)

    return replay


def _set(device: torch.device, state: torch.Tensor) -> None:
    if device.type == "cuda":
        torch.cuda.set_rng_state(state, device)
    else:
        torch.set_rng_state(state)
