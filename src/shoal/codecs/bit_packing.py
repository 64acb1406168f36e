"""Eight flags a byte, the first in the lowest bit, in plain torch."""

from __future__ import annotations

import torch

_PIECE_BYTES = 1 << 13


def pack_bits(flags: torch.Tensor, out: torch.Tensor) -> None:
    """Write (n,) bool into (ceil(n / 8),) uint8; bits past the last flag are 0.

    >>> out = torch.empty(2, dtype=torch.uint8)
    >>> pack_bits(torch.tensor([True, False, True] * 3), out)
    >>> out.tolist()
    [109, 1]
    """
    weights = 1 << torch.arange(8, dtype=torch.uint8, device=flags.device)
    for first in range(0, out.numel(), _PIECE_BYTES):
        part = flags[8 * first : 8 * (first + _PIECE_BYTES)]
        missing = -part.numel() % 8
        rows = torch.nn.functional.pad(part, (0, missing)).view(-1, 8)
        out[first : first + rows.shape[0]] = (rows * weights).sum(1, dtype=torch.uint8)


def unpack_bits(packed: torch.Tensor, out: torch.Tensor) -> None:
    """The inverse of `pack_bits`: write (n,) bool."""
    places = torch.arange(8, dtype=torch.uint8, device=packed.device)
    for first in range(0, packed.numel(), _PIECE_BYTES):
        part = packed[first : first + _PIECE_BYTES, None]
        flags = (part >> places).bitwise_and_(1).view(-1)
        to = out[8 * first : 8 * (first + _PIECE_BYTES)]
        to.copy_(flags[: to.numel()])
