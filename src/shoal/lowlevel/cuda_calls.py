"""What only CUDA has: kernels that keep the device busy, pinned pages, the cache between a device and its memory."""

from __future__ import annotations

from typing import Any

import torch

_PORTABLE = 1  # cudaHostRegisterPortable: pinned for every device
_OTHERWISE_BYTES = 64 << 20
_private: Any = torch._C  # its stubs lack these names


def spin(device: torch.device, cycles: int) -> None:
    """Keep the current stream busy for so many of the device's clock cycles; what is launched meanwhile queues up."""
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
    """What cuDNN's batch norm in training mode saves of `x` beside its statistics."""
    return int(_private._get_cudnn_batch_norm_reserve_space_size(x, True))


def keeps_graph() -> bool:
    """Whether the backward pass that runs on this thread may be followed by another over the same graph."""
    if torch._C._current_graph_task_id() == -1:
        return True
    return bool(torch._C._autograd._get_current_graph_task_keep_graph())
