"""What PyTorch's caching allocator has reserved on CUDA once whole pages that are free were given back."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from shoal.lowlevel import cuda_allocator
from shoal.lowlevel.torch_versions import OLDEST_FIRST
from shoal.memory.layout.segment_ages import in_order_of_choice


def trimmed_segments(device: torch.device) -> list[Mapping[str, Any]]:
    """Give back what is cached, and return what is left; see `CachingAllocator.of_snapshot`.

    Where ages of segments matter all holes that are left are filled for a moment; nothing is written to them.
    """
    torch.accelerator.empty_cache()
    segments: list[Mapping[str, Any]] = [*cuda_allocator.segments(device)]
    if not OLDEST_FIRST:
        return segments
    held: dict[int, torch.Tensor] = {}

    def allocate(nbytes: int) -> int:
        block = torch.empty(nbytes, dtype=torch.uint8, device=device)
        held[block.data_ptr()] = block
        return block.data_ptr()

    def release(address: int) -> None:
        del held[address]

    try:
        return in_order_of_choice(segments, allocate, release)
    except torch.OutOfMemoryError:  # somebody else took what was free
        return segments
