"""What only CUDA has, or PyTorch tells only of CUDA: names, sizes and generators of devices, the allocator's limit,
kernels that keep the device busy, pinned pages, cuDNN's batch norm.

With `cuda_allocator` and `cuda_graphs` the only file that calls `torch.cuda`; all else goes through
`torch.accelerator`.
"""

from __future__ import annotations

from typing import Any

import torch

_PORTABLE = 1  # cudaHostRegisterPortable: pinned for every device
_OTHERWISE_BYTES = 64 << 20
_private: Any = torch._C  # its stubs lack these names


def is_available() -> bool:
    """Whether this PyTorch has CUDA, and there is a device."""
    return torch.cuda.is_available()


def device_name(device: torch.device) -> str:
    """The name of a device, such as "NVIDIA H200"."""
    return torch.cuda.get_device_name(device)


def capability(device: torch.device) -> tuple[int, int]:
    """The compute capability of a device; 9.0 is Hopper."""
    return torch.cuda.get_device_capability(device)


def total_bytes(device: torch.device) -> int:
    """All memory of a device."""
    return int(torch.cuda.get_device_properties(device).total_memory)


def multiprocessors(device: torch.device) -> int:
    """How many processors a device consists of."""
    return int(torch.cuda.get_device_properties(device).multi_processor_count)


def memory_fraction(device: torch.device) -> float:
    """The share of a device's memory that the caching allocator may reserve."""
    return torch.cuda.get_per_process_memory_fraction(device)


def set_memory_fraction(device: torch.device, fraction: float) -> None:
    """Set `memory_fraction`; what is reserved stays."""
    torch.cuda.set_per_process_memory_fraction(fraction, device)


def generator_states() -> list[torch.Tensor]:
    """The states of the default generators of all devices; none where there is no device."""
    return torch.cuda.get_rng_state_all() if torch.cuda.is_available() else []


def set_generator_states(states: list[torch.Tensor]) -> None:
    """Put the generators into these states, of as many devices; nothing where there are none."""
    if states and torch.cuda.is_available():
        torch.cuda.set_rng_state_all(states)


def spin(device: torch.device, cycles: int) -> None:
    """Keep the current stream busy for that many of the device's clock cycles; what is launched meanwhile queues up."""
    with torch.cuda.device(device):
        torch.cuda._sleep(cycles)


def l2_bytes(device: torch.device) -> int:
    """The size of the device's last cache."""
    properties: Any = torch.cuda.get_device_properties(device)
    return int(getattr(properties, "L2_cache_size", 0)) or _OTHERWISE_BYTES


def pin(address: int, nbytes: int) -> int:
    """Pin pages that PyTorch did not allocate, for every device; CUDA's error, 0 for none."""
    return int(torch.cuda.cudart().cudaHostRegister(address, nbytes, _PORTABLE))


def unpin(address: int) -> None:
    """Undo `pin`."""
    torch.cuda.cudart().cudaHostUnregister(address)


def is_left_to_cudnn(
    x: torch.Tensor,
    weight: torch.Tensor | None,
    bias: torch.Tensor | None,
    running_mean: torch.Tensor | None,
    running_var: torch.Tensor | None,
    training: bool,
    eps: float,
) -> bool:
    """Whether eager PyTorch runs cuDNN's batch norm on these; fake tensors will do."""
    if x.device.type != "cuda" or weight is None or bias is None or (running_mean is None) != (running_var is None):
        return False
    if running_mean is None and not training:
        return False
    # Of running statistics it only asks whether there are any, and cannot be given none.
    statistics = (running_mean, running_var) if running_mean is not None else (weight, weight)
    chosen = _private._select_batch_norm_backend(x, weight, bias, *statistics, training, eps)
    return bool(chosen == _private._BatchNormBackend.Cudnn)


def cudnn_reserve_bytes(x: torch.Tensor) -> int:
    """What cuDNN's batch norm in training mode saves of `x` in addition to its statistics."""
    return int(_private._get_cudnn_batch_norm_reserve_space_size(x, True))


def keeps_graph() -> bool:
    """Whether the backward pass that runs on this thread may be followed by another over the same graph."""
    if torch._C._current_graph_task_id() == -1:
        return True
    return bool(torch._C._autograd._get_current_graph_task_keep_graph())
