"""Float32 and flags within a payload of bytes, in plain torch.

Floats are a view of the bytes where these are aligned, else a copy. Flags are packed eight to a byte, the first in the
lowest bit.
"""

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
    """Whether bytes can be viewed as items of that many."""
    return part.storage_offset() % item_bytes == 0 and part.data_ptr() % item_bytes == 0


def bytes_of(elements: slice) -> slice:
    """Where the bits of these flags lie; they begin at a multiple of 8.

    >>> bytes_of(slice(16, 41))
    slice(2, 6, None)
    """
    return slice(elements.start // 8, -(-elements.stop // 8))


def pack_bits(flags: torch.Tensor, out: torch.Tensor) -> None:
    """Write (n,) bool into (ceil(n / 8),) uint8; bits past the last flag are 0.

    >>> out = torch.empty(2, dtype=torch.uint8)
    >>> pack_bits(torch.tensor([True, False, True] * 3), out)
    >>> out.tolist()
    [109, 1]
    """
    weights = 1 << torch.arange(8, dtype=torch.uint8, device=flags.device)
    rows = torch.nn.functional.pad(flags, (0, -flags.numel() % 8)).view(-1, 8)
    torch.sum(rows * weights, 1, dtype=torch.uint8, out=out)


def unpack_bits(packed: torch.Tensor, out: torch.Tensor) -> None:
    """The inverse of `pack_bits`: write (n,) bool."""
    places = torch.arange(8, dtype=torch.uint8, device=packed.device)
    flags = (packed[:, None] >> places).bitwise_and_(1).view(-1)
    out.copy_(flags[: out.numel()])
