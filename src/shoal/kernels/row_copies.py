"""Copies between rows of one length that begin at different distances, of which few begin at multiples of 16 bytes.

PyTorch's kernel for tensors that are not contiguous has each thread of a GPU wait for its element before it asks for
another. Triton's here asks for many; the reference is PyTorch's.
"""

from __future__ import annotations

from typing import Any

import torch

from shoal.errors import InputError
from shoal.lowlevel.dispatch import DispatchedOp, Implementation, choose, register
from shoal.lowlevel.torch_state import on_device
from shoal.lowlevel.triton_launch import Launch, Launches, TritonKernels

_MOST_BLOCK = 2048
_MOST_PROGRAMS = (1 << 31) - 1


def copy_rows(into: torch.Tensor, rows: torch.Tensor) -> None:
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
    def applies(into: torch.Tensor, rows: torch.Tensor) -> bool:
        """Whether it copies such rows here."""
        alike = into.shape == rows.shape and into.dtype == rows.dtype and into.device == rows.device
        lie_so = into.stride(1) == rows.stride(1) == 1 and into.shape[0] * _blocks(into)[0] <= _MOST_PROGRAMS
        return alike and lie_so and TRITON_KERNELS.run_on(into.device)

    def copy(self, into: torch.Tensor, rows: torch.Tensor) -> None:
        shape, steps = into.shape, (into.stride(0), rows.stride(0))

        def made() -> Launch:
            blocks, block = _blocks(into)
            rest = (*steps, shape[1], blocks, block)
            return Launch(TRITON_KERNELS.found().copy_blocks, (shape[0] * blocks,), lambda *both: (*both, *rest))

        with on_device(into.device):
            self._launches.run((shape, steps, into.dtype, into.device), (into, rows), made)


def _blocks(matrix: torch.Tensor) -> tuple[int, int]:
    """How many blocks a row has, and how many elements a block."""
    columns = matrix.shape[1]
    block = min(_MOST_BLOCK, 1 << (columns - 1).bit_length())
    return -(-columns // block), block


def _try_on(device: torch.device) -> None:
    TRITON.copy(torch.empty((2, 3), device=device), torch.ones((2, 3), device=device))


TRITON_KERNELS = TritonKernels("shoal.kernels.row_copies_triton_kernels", "PyTorch's own kernel", InputError, _try_on)
TRITON = _RowCopiesTriton()
_OP: DispatchedOp[Any] = register(
    "copy_rows", torch.Tensor.copy_, Implementation("triton", TRITON.copy, TRITON.applies)
)
