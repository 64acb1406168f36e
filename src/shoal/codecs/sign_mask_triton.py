"""One bit a value in Triton; as `shoal.codecs.sign_mask`, bit for bit."""

from __future__ import annotations

import torch

from shoal.codecs.launch_triton import TILE_ELEMS, applies, found, on, tiles

__all__ = ["applies", "decode", "encode"]


def encode(x: torch.Tensor, out: torch.Tensor) -> None:
    """As `sign_mask.encode`; tensors for which `applies` is true."""
    if x.numel():
        with on(x.device):
            x = x.view(torch.uint8) if x.dtype == torch.bool else x
            found().sign_mask[tiles(x.numel())](x, out, x.numel(), TILE_ELEMS)


def decode(mask: torch.Tensor, out: torch.Tensor) -> None:
    """As `sign_mask.decode`; tensors for which `applies` is true."""
    if out.numel():
        with on(out.device):
            found().unpack_flags[tiles(out.numel())](mask, out.view(torch.uint8), out.numel(), TILE_ELEMS)
