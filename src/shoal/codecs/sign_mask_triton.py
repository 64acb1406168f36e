"""One bit a value in Triton; as `shoal.codecs.sign_mask`, bit for bit."""

from __future__ import annotations

import torch

from shoal.codecs.launch_triton import TILE_ELEMS, applies, found, tiles
from shoal.lowlevel.triton_launch import on_device

__all__ = ["applies", "decode", "encode"]

# The integers of a number's bits, and the greatest that is one.
_AS = {
    torch.float32: (torch.int32, 0x7F800000),
    torch.float16: (torch.int16, 0x7C00),
    torch.bfloat16: (torch.int16, 0x7F80),
    torch.uint8: (torch.uint8, 0xFF),
    torch.bool: (torch.uint8, 0xFF),
}


def encode(x: torch.Tensor, out: torch.Tensor) -> None:
    """As `sign_mask.encode`; tensors for which `applies` is true."""
    if x.numel():
        with on_device(x.device):
            bits, largest = _AS[x.dtype]
            found().sign_mask[tiles(x.numel())](x.view(bits), out, x.numel(), largest, TILE_ELEMS)


def decode(mask: torch.Tensor, out: torch.Tensor) -> None:
    """As `sign_mask.decode`; tensors for which `applies` is true."""
    if out.numel():
        with on_device(out.device):
            found().unpack_flags[tiles(out.numel())](mask, out.view(torch.uint8), out.numel(), TILE_ELEMS)
