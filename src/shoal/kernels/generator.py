"""Replay of random numbers: a recomputed dropout draws the mask it drew the first time."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any

import torch
from torch import Tensor


def generator_state(device: torch.device) -> Tensor:
    """The state of the device's default generator, a uint8 tensor in host memory."""
    if device.type == "cpu":
        return torch.get_rng_state()
    state: Tensor = torch.get_device_module(device).get_rng_state(device)
    return state


def state_bytes(device: torch.device) -> int:
    """Device bytes of such a state: none but on the CPU."""
    return generator_state(device).nbytes if device.type == "cpu" else 0


@cache
def replaying(target: Callable[..., Any]) -> Callable[..., Any]:
    """`target` with two arguments more in front, a generator's state and the device it is for: it runs with the
    device's generator set to that state, and then the generator is put back where it was."""

    def replay(state: Tensor, device: torch.device, /, *args: Any, **kwargs: Any) -> Any:
        present = generator_state(device)
        set_generator_state(device, state)
        try:
            return target(*args, **kwargs)
        finally:
            set_generator_state(device, present)

    return replay


def set_generator_state(device: torch.device, state: Tensor) -> None:
    """Put the device's default generator into a state that it had."""
    if device.type == "cpu":
        torch.set_rng_state(state)
    else:
        torch.get_device_module(device).set_rng_state(state, device)
