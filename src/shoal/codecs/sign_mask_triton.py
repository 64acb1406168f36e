"""One bit a value in Triton; as `shoal.codecs.sign_mask`, bit for bit."""

from __future__ import annotations

import torch

from shoal.codecs.launch_triton import TILE_ELEMS, found, on, tiles


def encode(x: torch.Tensor, out: torch.Tensor) -> None:
    """As `sign_mask`'s; tensors for which `launch_triton.applies` is true."""
    with on(x.device):
        found().sign_mask[tiles(x.numel())](x, out, x.numel(), TILE_ELEMS)
