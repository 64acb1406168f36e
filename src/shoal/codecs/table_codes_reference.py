"""Table codes in plain torch: the definition that every kernel equals bit for bit.

Works through pieces of a fixed number of elements, so that its scratch does not grow with the tensor.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch

from shoal.codecs.table import MAGNITUDES, SIGN, Table

_PIECE_ELEMS = 1 << 16


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
    block = block_elems or max(x.numel(), 1)
    scales.copy_(_scales(x, block, scale))
    thresholds = table.thresholds.to(x.device)
    magnitudes = table.magnitudes.to(x.device)
    for first, last in _pieces(x.numel()):
        part = x[first:last]
        element = torch.arange(first, last, device=x.device)
        of_block = scales[element // block]
        share = part.abs().div_(of_block)
        if seed is None:
            index = torch.bucketize(share, thresholds, right=True)
        else:
            index = torch.bucketize(share, magnitudes[1:], right=True)
            low, high = magnitudes[index], magnitudes[(index + 1).clamp_(max=MAGNITUDES - 1)]
            up = uniform(element + first_elem, seed) < (share - low) / (high - low)
            index += up & (index < MAGNITUDES - 1)
        index.masked_fill_(~(of_block > 0), 0)  # nothing but zeros, or no number
        codes[first:last] = index.add_(part.signbit(), alpha=SIGN).to(torch.uint8)


def decode_blocks(
    codes: torch.Tensor, scales: torch.Tensor, table: Table, block_elems: int | None, out: torch.Tensor
) -> None:
    """As `table_codes.decode_blocks`, on any device."""
    block = block_elems or max(out.numel(), 1)
    magnitudes = table.magnitudes.to(out.device)
    for first, last in _pieces(out.numel()):
        part = codes[first:last]
        of_block = scales[torch.arange(first, last, device=out.device) // block]
        value = magnitudes[(part & (SIGN - 1)).int()].mul_(of_block)
        torch.where(part >= SIGN, -value, value, out=out[first:last])
        # Processors differ in the NaN that a product gives.
        out[first:last].masked_fill_(of_block.isnan(), torch.nan)


def uniform(element: torch.Tensor, seed: int) -> torch.Tensor:
    """lowbias32 of each element's number and the seed, as float32 in [0, 1): the same for an element on every device.

    >>> uniform(torch.arange(3), seed=1)
    tensor([0.1005, 0.0000, 0.8192])
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


def _pieces(elems: int) -> Iterator[tuple[int, int]]:
    return ((first, min(first + _PIECE_ELEMS, elems)) for first in range(0, elems, _PIECE_ELEMS))
