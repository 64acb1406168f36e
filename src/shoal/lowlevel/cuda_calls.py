"""What only CUDA has: kernels that keep the device busy, pinned pages, the cache between a device and its memory."""

from __future__ import annotations

from typing import Any

import torch

_PORTABLE = 1  # cudaHostRegisterPortable: pinned for every device
_OTHERWISE_BYTES = 64 << 20


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
