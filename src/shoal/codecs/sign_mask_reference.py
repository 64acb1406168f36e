"""One bit a value in plain torch: the definition that every kernel equals bit for bit."""

from __future__ import annotations

import torch

from shoal.codecs.bit_packing import pack_bits, unpack_bits


def encode(x: torch.Tensor, out: torch.Tensor) -> None:
    """As `sign_mask.pack`, on any device, in any dtype."""
    pack_bits(x if x.dtype == torch.bool else x > 0, out)


def decode(mask: torch.Tensor, out: torch.Tensor) -> None:
    """As `sign_mask.unpack`, on any device."""
    unpack_bits(mask, out)
