"""One bit a value in plain torch: the definition that every kernel equals bit for bit."""

from __future__ import annotations

import torch

from shoal.codecs.bit_packing import bytes_of, pack_bits, unpack_bits
from shoal.codecs.pieces import pieces


def encode(x: torch.Tensor, out: torch.Tensor) -> None:
    """As `sign_mask.encode`, on any device, in any dtype."""
    for elements, _, _ in pieces(x.numel(), None):
        pack_bits(x[elements] > 0, out[bytes_of(elements)])


def decode(mask: torch.Tensor, out: torch.Tensor) -> None:
    """As `sign_mask.decode`, on any device."""
    for elements, _, _ in pieces(out.numel(), None):
        unpack_bits(mask[bytes_of(elements)], out[elements])
