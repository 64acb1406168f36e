"""Matrix products with rows that do not begin at multiples of 16 bytes, by the kernels for those that do.

A GPU's tensor cores are fed, and emptied, 16 bytes at a time; a product with rows of 50,257 columns in bfloat16 runs a
kernel that takes them one by one: on an H100 the logits of GPT-2 took 6.6 ms, and take 0.9 with rows of 50,304. Here
rows are copied, into longer ones or out of them, that many at a time.

PyTorch's kernel for copies of tensors that are not contiguous has each thread of a GPU wait for its element before it
asks for another. Triton's here asks for many; the reference is PyTorch's.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from shoal.errors import InputError
from shoal.lowlevel.dispatch import DispatchedOp, Implementation, choose, register
from shoal.lowlevel.torch_state import on_device
from shoal.lowlevel.triton_launch import Launch, Launches, TritonKernels

_MOST_BLOCK = 2048
_MOST_PROGRAMS = (1 << 31) - 1
_PIECE_BYTES = 256 << 20  # of longer rows that are there at once
_ALIGNED_BYTES = 16


def odd_product(a: Tensor, b: Tensor, columns: int, bias: Tensor | None = None) -> Tensor:
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
    for some, into in zip(a.split(rows), result.split(rows), strict=True):
        made = piece[: some.shape[0]]
        if bias is None:
            torch.mm(some, b, out=made)
        else:
            torch.addmm(bias, some, b, out=made)
        copy_rows(into, made[:, :columns])
    return result


def odd_sum_product(a: Tensor, b: Tensor) -> Tensor:
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
    for some, into in zip(a.split(rows), result.split(rows), strict=True):
        longer = piece[: some.shape[0]]
        copy_rows(longer[:, :columns], some)
        torch.mm(longer, b, out=into)
    return result


def odd_rows_product(a: Tensor, b: Tensor) -> Tensor:
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
    for some, into in zip(a.split(rows), result.split(rows), strict=True):
        copy_rows(piece[: some.shape[0]], some)
        if some.shape[0] == piece.shape[0]:
            torch.mm(piece, b, out=into)
        else:
            into.copy_(torch.mm(piece[: _aligned(some.shape[0], a)], b)[: some.shape[0]])
    return result


def _aligned(length: int, tensor: Tensor) -> int:
    """That many elements, or a few more: a multiple of 16 bytes."""
    return length + -length % (_ALIGNED_BYTES // tensor.element_size())


def _length_of_a_piece(row_bytes: int) -> int:
    """How many rows a piece has: a power of two, as tiles of products have.

    >>> _length_of_a_piece(2 * 50304)
    2048
    """
    return 1 << max(0, (_PIECE_BYTES // row_bytes).bit_length() - 1)


def copy_rows(into: Tensor, rows: Tensor) -> None:
    """`into.copy_(rows)`, of two matrices with the elements of each row side by side, or those of each column in both.

    Args:
        into: what is written.
        rows: of the same shape and dtype, on the same device, in other memory.

    >>> into = torch.zeros(2, 4)
    >>> copy_rows(into[:, :3], torch.ones(2, 3)), into
    (None, tensor([[1., 1., 1., 0.],
            [1., 1., 1., 0.]]))
    """
    if into.stride(1) != 1:
        into, rows = into.t(), rows.t()
    if into.numel():
        choose(_OP, into, rows)(into, rows)


class _RowCopiesTriton:
    """`row_copies_triton_kernels`."""

    def __init__(self) -> None:
        self._launches = Launches()

    @staticmethod
    def applies(into: Tensor, rows: Tensor) -> bool:
        """Whether it copies such rows here."""
        alike = into.shape == rows.shape and into.dtype == rows.dtype and into.device == rows.device
        lie_so = into.stride(1) == rows.stride(1) == 1 and into.shape[0] * _blocks(into)[0] <= _MOST_PROGRAMS
        return alike and lie_so and TRITON_KERNELS.run_on(into.device)

    def copy(self, into: Tensor, rows: Tensor) -> None:
        shape, steps = into.shape, (into.stride(0), rows.stride(0))

        def made() -> Launch:
            blocks, block = _blocks(into)
            rest = (*steps, shape[1], blocks, block)
            return Launch(TRITON_KERNELS.found().copy_blocks, (shape[0] * blocks,), lambda *both: (*both, *rest))

        with on_device(into.device):
            self._launches.run((shape, steps, into.dtype, into.device), (into, rows), made)


def _blocks(matrix: Tensor) -> tuple[int, int]:
    """How many blocks a row has, and how many elements a block."""
    columns = matrix.shape[1]
    block = min(_MOST_BLOCK, 1 << (columns - 1).bit_length())
    return -(-columns // block), block


def _try_on(device: torch.device) -> None:
    TRITON.copy(torch.empty((2, 3), device=device), torch.ones((2, 3), device=device))


TRITON_KERNELS = TritonKernels("shoal.kernels.row_copies_triton_kernels", "PyTorch's own kernel", InputError, _try_on)
TRITON = _RowCopiesTriton()
_OP: DispatchedOp[Any] = register("copy_rows", Tensor.copy_, Implementation("triton", TRITON.copy, TRITON.applies))
