"""What every raw function asks of the tensors it is given: one dimension, dense, of a known dtype and length."""

from __future__ import annotations

import torch

from shoal.errors import CodecError


def check_flat(what: str, tensor: torch.Tensor, *dtypes: torch.dtype) -> None:
    """
    Raises:
        CodecError: `tensor` is not of one dense dimension and one of these dtypes.
    """
    if tensor.dim() != 1 or tensor.dtype not in dtypes or not tensor.is_contiguous():
        got = f"{tensor.dtype} of shape {tuple(tensor.shape)} and strides {tensor.stride()}"
        expected = " or ".join(str(dtype) for dtype in dtypes)
        raise CodecError(f"{what}: got {got}, expected dense {expected} of one dimension; flatten it first")


def check_length(what: str, tensor: torch.Tensor, elems: int) -> None:
    """
    Raises:
        CodecError: `tensor` holds another number of elements.
    """
    if tensor.numel() != elems:
        raise CodecError(f"{what}: got {tensor.numel()} elements, expected {elems}; allocate that many")
