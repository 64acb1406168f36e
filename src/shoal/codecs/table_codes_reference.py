"""Table codes in plain torch: the definition that every kernel equals bit for bit."""

from __future__ import annotations

import torch

from shoal.codecs.pieces import pieces
from shoal.codecs.table import MAGNITUDES, SIGN, Table


def encode_blocks(
    x: torch.Tensor,
    table: Table,
    block_elems: int | None,
    scales: torch.Tensor,
    codes: torch.Tensor,
    *,
    scale: float | None = None,
    seed: int | None = None,
    first_elem: int = 0,
) -> None:
    """As `table_codes.encode_blocks`, on any device."""
    scales.copy_(_scales(x, block_elems or max(x.numel(), 1), scale))
    thresholds = table.thresholds.to(x.device)
    magnitudes = table.magnitudes.to(x.device)
    for elements, blocks, columns in pieces(x.numel(), block_elems):
        part = x[elements].view(-1, columns)
        of_block = scales[blocks, None]
        share = part.abs().div_(of_block)
        if seed is None:
            index = torch.bucketize(share, thresholds, right=True, out_int32=True)
        else:
            index = torch.bucketize(share, magnitudes[1:], right=True, out_int32=True)
            low, high = magnitudes[index], magnitudes[(index + 1).clamp_(max=MAGNITUDES - 1)]
            number = torch.arange(elements.start, elements.stop, device=x.device).view_as(part) + first_elem
            up = uniform(number, seed) < (share - low) / (high - low)
            index += up & (index < MAGNITUDES - 1)
        index.masked_fill_(~(of_block > 0), 0)  # nothing but zeros, or no number
        codes[elements] = index.add_(part.signbit(), alpha=SIGN).to(torch.uint8).view(-1)


def decode_blocks(
    codes: torch.Tensor, scales: torch.Tensor, table: Table, block_elems: int | None, out: torch.Tensor
) -> None:
    """As `table_codes.decode_blocks`, on any device."""
    magnitudes = table.magnitudes.to(out.device)
    for elements, blocks, columns in pieces(out.numel(), block_elems):
        code = codes[elements].view(-1, columns)
        of_block = scales[blocks, None]
        value = magnitudes[(code & (SIGN - 1)).int()].mul_(of_block)
        value = torch.where(code < SIGN, value, -value)
        # Processors differ in the NaN that a product gives.
        out[elements] = value.masked_fill_(of_block.isnan(), torch.nan).view(-1)


def uniform(element: torch.Tensor, seed: int) -> torch.Tensor:
    """lowbias32 of each element's number and the seed, as float32 in [0, 1): the same for an element on every device.

    >>> uniform(torch.arange(3), seed=1)
    tensor([0.4083, 0.0000, 0.3279])
    """
    mask = 0xFFFFFFFF
    h = (element & mask) ^ (seed & mask)
    h = h ^ (h >> 16)
    h = (h * 0x7FEB352D) & mask
    h = h ^ (h >> 15)
    h = (h * 0x846CA68B) & mask
    h = h ^ (h >> 16)
    return (h >> 8).float() * 2**-24


def _scales(x: torch.Tensor, block: int, scale: float | None) -> torch.Tensor:
    whole = x.numel() // block * block
    parts = [_largest(x[:whole].view(-1, block))] if whole else []
    if whole < x.numel():
        parts.append(_largest(x[whole:].view(1, -1)))
    largest = torch.cat(parts) if parts else x.new_empty(0)
    chosen = largest if scale is None else torch.full_like(largest, scale)
    return chosen.masked_fill_(~largest.isfinite(), torch.nan)


def _largest(rows: torch.Tensor) -> torch.Tensor:
    """The greatest magnitude of each row, without the scratch of `rows.abs()`; NaN where there is one."""
    low, high = rows.aminmax(dim=1)
    return torch.maximum(low.abs_(), high.abs_())
