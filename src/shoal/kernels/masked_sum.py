"""The sum over what a boolean mask or an index selects, in as many bytes whatever it selects."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor


def masked_sum(x: Tensor, mask: Tensor, dims: Sequence[int] | None, keepdim: bool = False) -> Tensor:
    """`x[mask].sum(dims, keepdim)`, with its bits; over all axes where `dims` is None.

    What is not selected is allocated too, and not touched: a step is planned once, for every mask.

    >>> masked_sum(torch.arange(6.0).view(3, 2), torch.tensor([True, False, True]), [0])
    tensor([4., 6.])
    """
    places = mask.nonzero()
    left_out = mask.numel() - len(places)
    places_left_out = places.new_empty(left_out * mask.dim())
    selected = x[places.unbind(1)]
    values_left_out = x.new_empty(left_out * math.prod(x.shape[mask.dim() :]))
    total = selected.sum() if dims is None else selected.sum(list(dims), keepdim)
    del places_left_out, values_left_out
    return total


def indexed_sum(x: Tensor, dim: int, index: Tensor) -> Tensor:
    """The sum of what `index` selects along `dim`, each place once, with the bits of autograd's for `index_fill`.

    What repeated places leave out is allocated too, as in `masked_sum`.

    >>> indexed_sum(torch.arange(6.0).view(3, 2), 0, torch.tensor([2, 2, 0]))
    tensor(10.)
    """
    places = torch.ops.aten._unique.default(index, False)[0]
    left_out = index.numel() - len(places)
    places_left_out = places.new_empty(left_out)
    selected = x.index_select(dim, places)
    values_left_out = x.new_empty(left_out * (selected.numel() // max(1, len(places))))
    total = selected.sum()
    del places_left_out, values_left_out
    return total
