"""Matrix products whose rows do not begin at multiples of 16 bytes, by the kernels for those that do.

A GPU's tensor cores are fed, and emptied, 16 bytes at a time; a product with rows of 50,257 columns in bfloat16 runs a
kernel that takes them one by one: on an H100 the logits of GPT-2 took 6.6 ms, and take 0.9 with rows of 50,304.
"""

from __future__ import annotations

import torch

_PIECE_BYTES = 256 << 20  # of longer rows that are there at once


def odd_product(a: torch.Tensor, b: torch.Tensor, columns: int, bias: torch.Tensor | None = None) -> torch.Tensor:
    """The first columns of `a @ b + bias`, in rows of their own: computed with all, so many rows at a time, and copied.

    Args:
        a: (M, K).
        b: (K, N) with `columns` ≤ N.
        columns: how many columns of the product are wanted.
        bias: None, or of N elements.

    Returns:
        (M, columns), contiguous.

    >>> odd_product(torch.ones(2, 4), torch.ones(4, 8), 7).shape
    torch.Size([2, 7])
    """
    whole = b.shape[1]
    result = a.new_empty((a.shape[0], columns))
    rows = min(a.shape[0], _rows_of_a_piece(whole * a.element_size()))
    piece = a.new_empty((rows, whole))
    for start in range(0, a.shape[0], rows):
        some = a[start : start + rows]
        made = piece[: some.shape[0]]
        if bias is None:
            torch.mm(some, b, out=made)
        else:
            torch.addmm(bias, some, b, out=made)
        result[start : start + rows].copy_(made[:, :columns])
    return result


def _rows_of_a_piece(row_bytes: int) -> int:
    """A power of two, as tiles of products have.

    >>> _rows_of_a_piece(2 * 50304)
    2048
    """
    return 1 << max(0, (_PIECE_BYTES // row_bytes).bit_length() - 1)
