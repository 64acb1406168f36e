"""Eight flags a byte, the first in the lowest bit, in plain torch."""

from __future__ import annotations

import torch


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
