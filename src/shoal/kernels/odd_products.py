"""Matrix products with rows that do not begin at multiples of 16 bytes, by the kernels for those that do.

A GPU's tensor cores are fed, and emptied, 16 bytes at a time; a product with rows of 50,257 columns in bfloat16 runs a
kernel that takes them one by one: on an H100 the logits of GPT-2 took 6.6 ms, and take 0.9 with rows of 50,304. Here
rows are copied, into longer ones or out of them, that many at a time.
"""

from __future__ import annotations

import torch

from shoal.kernels.row_copies import copy_rows

_PIECE_BYTES = 256 << 20  # of longer rows that are there at once
_ALIGNED_BYTES = 16


def odd_product(a: torch.Tensor, b: torch.Tensor, columns: int, bias: torch.Tensor | None = None) -> torch.Tensor:
    """The first columns of `a @ b + bias`, in rows of their own: computed with all, that many rows at a time, and
    copied.

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
    rows = min(a.shape[0], _length_of_a_piece(whole * a.element_size()))
    piece = a.new_empty((rows, whole))
    for start in range(0, a.shape[0], rows):
        some = a[start : start + rows]
        made = piece[: some.shape[0]]
        if bias is None:
            torch.mm(some, b, out=made)
        else:
            torch.addmm(bias, some, b, out=made)
        copy_rows(result[start : start + rows], made[:, :columns])
    return result


def odd_sum_product(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    """`a @ b`, of more rows of `b` than `a` has columns: that many rows of `a` at a time with zeros after them.

    Args:
        a: (M, K).
        b: (L, N) with K < L; zeros from its row K on.

    Returns:
        (M, N), contiguous.

    >>> odd_sum_product(torch.ones(1, 3), torch.tensor([[1.0], [1.0], [1.0], [0.0]]))
    tensor([[3.]])
    """
    columns, whole = a.shape[1], b.shape[0]
    result = a.new_empty((a.shape[0], b.shape[1]))
    rows = min(a.shape[0], _length_of_a_piece(whole * a.element_size()))
    piece = a.new_empty((rows, whole))
    piece[:, columns:].zero_()
    for start in range(0, a.shape[0], rows):
        some = a[start : start + rows]
        longer = piece[: some.shape[0]]
        copy_rows(longer[:, :columns], some)
        torch.mm(longer, b, out=result[start : start + rows])
    return result


def odd_rows_product(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    """`a @ b`, of a transposed `a`: a copy of that many of its rows at a time, which lie one after the other in none.

    Args:
        a: (M, K), the elements of each column one after the other.
        b: (K, N).

    Returns:
        (M, N), contiguous.

    >>> odd_rows_product(torch.ones(3, 2).t(), torch.ones(3, 1))
    tensor([[3.],
            [3.]])
    """
    n_rows, n_columns = a.shape
    result = a.new_empty((n_rows, b.shape[1]))
    rows = min(n_rows, max(_ALIGNED_BYTES, _length_of_a_piece(n_columns * a.element_size())))
    piece = a.new_empty((n_columns, _aligned(rows, a))).t()
    for start in range(0, n_rows, rows):
        some = a[start : start + rows]
        copy_rows(piece[: some.shape[0]], some)
        into = result[start : start + rows]
        if some.shape[0] == piece.shape[0]:
            torch.mm(piece, b, out=into)
        else:
            into.copy_(torch.mm(piece[: _aligned(some.shape[0], a)], b)[: some.shape[0]])
    return result


def _aligned(length: int, tensor: torch.Tensor) -> int:
    """That many elements, or a few more: a multiple of 16 bytes."""
    return length + -length % (_ALIGNED_BYTES // tensor.element_size())


def _length_of_a_piece(row_bytes: int) -> int:
    """How many rows a piece has: a power of two, as tiles of products have.

    >>> _length_of_a_piece(2 * 50304)
    2048
    """
    return 1 << max(0, (_PIECE_BYTES // row_bytes).bit_length() - 1)
