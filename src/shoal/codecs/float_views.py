"""Float32 within a payload: the bytes themselves where they lie at a multiple of four, else a copy to and fro."""

from __future__ import annotations

import torch

FLOAT_BYTES = 4


def read_floats(payload: torch.Tensor, elems: int) -> torch.Tensor:
    """The first `elems` float32 of a payload, (n,) uint8."""
    part = part_of(payload, 0, elems * FLOAT_BYTES)
    return part.view(torch.float32) if aligned(part, FLOAT_BYTES) else part.clone().view(torch.float32)


def floats_to_write(payload: torch.Tensor, elems: int) -> torch.Tensor:
    """A tensor for the first `elems` float32 of a payload: `write_floats` puts there what it was filled with."""
    part = part_of(payload, 0, elems * FLOAT_BYTES)
    return part.view(torch.float32) if aligned(part, FLOAT_BYTES) else torch.empty(elems, device=payload.device)


def write_floats(payload: torch.Tensor, values: torch.Tensor) -> None:
    """Make `values`, which `floats_to_write` gave, the first of the payload."""
    if values.data_ptr() != payload.data_ptr():
        payload[: values.nbytes].copy_(values.view(torch.uint8))


def part_of(payload: torch.Tensor, first: int, elems: int) -> torch.Tensor:
    """`payload[first : first + elems]` of a dense payload, in half the time."""
    return payload.as_strided((elems,), (1,), payload.storage_offset() + first)


def aligned(part: torch.Tensor, item_bytes: int) -> bool:
    """Whether bytes can be viewed as items of so many."""
    return part.storage_offset() % item_bytes == 0 and part.data_ptr() % item_bytes == 0
