"""Float32 within a payload: the bytes themselves where they lie at a multiple of four, else a copy to and fro."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch

FLOAT_BYTES = 4


def read_floats(payload: torch.Tensor, elems: int) -> torch.Tensor:
    """The first `elems` float32 of a payload, (n,) uint8."""
    part = payload[: elems * FLOAT_BYTES]
    return part.view(torch.float32) if aligned(part, FLOAT_BYTES) else part.clone().view(torch.float32)


@contextmanager
def floats_to_write(payload: torch.Tensor, elems: int) -> Iterator[torch.Tensor]:
    """A tensor for the first `elems` float32 of a payload; they stand there after the block."""
    part = payload[: elems * FLOAT_BYTES]
    if aligned(part, FLOAT_BYTES):
        yield part.view(torch.float32)
        return
    values = torch.empty(elems, device=payload.device)
    yield values
    part.copy_(values.view(torch.uint8))


def aligned(part: torch.Tensor, item_bytes: int) -> bool:
    """Whether bytes can be viewed as items of so many."""
    return part.storage_offset() % item_bytes == 0 and part.data_ptr() % item_bytes == 0
