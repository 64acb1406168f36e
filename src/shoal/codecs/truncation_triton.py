"""Truncation's packing in Triton; as `shoal.codecs.truncation`, bit for bit."""

from __future__ import annotations

import torch

from shoal.codecs.launch_triton import TILE_ELEMS, applies, found, tiles
from shoal.lowlevel.triton_launch import on_device

__all__ = ["applies", "pack", "unpack"]

_WHOLE = {1: torch.uint8, 2: torch.int16}


def pack(x: torch.Tensor, width_bytes: int, nearest: bool, out: torch.Tensor) -> None:
    """As `truncation.pack`; tensors for which `applies` is true."""
    with on_device(x.device):
        if width_bytes in _WHOLE and _aligned(out, width_bytes):
            whole = out.view(_WHOLE[width_bytes])
            found().pack_whole[tiles(x.numel())](x, whole, x.numel(), 32 - 8 * width_bytes, nearest, TILE_ELEMS)
            return
        begun = 0
        if width_bytes == 3 and _aligned(out, 4):
            begun = x.numel() // 4 * 4
            words = out[: 3 * begun].view(torch.int32)
            if begun:
                found().pack_words[tiles(words.numel())](x, words, words.numel(), nearest, TILE_ELEMS)
        if rest := x.numel() - begun:
            found().pack_bytes[tiles(rest)](
                x[begun:], out[width_bytes * begun :], rest, width_bytes, nearest, TILE_ELEMS
            )


def unpack(packed: torch.Tensor, width_bytes: int, out: torch.Tensor) -> None:
    """As `truncation.unpack`; tensors for which `applies` is true."""
    with on_device(out.device):
        if width_bytes in _WHOLE and _aligned(packed, width_bytes):
            whole = packed.view(_WHOLE[width_bytes])
            found().unpack_whole[tiles(out.numel())](whole, out, out.numel(), width_bytes, TILE_ELEMS)
            return
        begun = 0
        if width_bytes == 3 and _aligned(packed, 4):
            begun = out.numel() // 4 * 4
            if begun:
                found().unpack_words[tiles(begun)](packed[: 3 * begun].view(torch.int32), out, begun, TILE_ELEMS)
        if rest := out.numel() - begun:
            found().unpack_bytes[tiles(rest)](packed[width_bytes * begun :], out[begun:], rest, width_bytes, TILE_ELEMS)


def _aligned(buffer: torch.Tensor, item_bytes: int) -> bool:
    # A view in wider items wants both.
    return buffer.data_ptr() % item_bytes == 0 and buffer.storage_offset() % item_bytes == 0
