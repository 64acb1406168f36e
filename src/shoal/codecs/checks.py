"""Checks of codecs' options and tensors: each error says what was got and what is expected."""

from __future__ import annotations

from numbers import Integral, Real
from typing import Any

import torch

from shoal.errors import CodecError, brief


def whole_number(codec: str, option: str, value: Any, expected: str, lowest: int, highest: int) -> int:
    """`value` as an int; a NumPy integer is one, a bool is none.

    Raises:
        CodecError: it is not a whole number from `lowest` to `highest`.

    >>> whole_number("linear", "block", 8, "at least 1 value", 1, 100)
    8
    """
    if isinstance(value, bool) or not isinstance(value, Integral) or not lowest <= int(value) <= highest:
        raise CodecError(f"{codec}: got {option}={brief(value)}, expected {expected}")
    return int(value)


def real_number(codec: str, option: str, value: Any, expected: str) -> float:
    """`value` as a float, infinite where its magnitude is too large for one.

    Raises:
        CodecError: it is not a real number.
    """
    if isinstance(value, bool) or not isinstance(value, Real):
        raise CodecError(f"{codec}: got {option}={brief(value)}, expected {expected}")
    try:
        return float(value)
    except OverflowError:
        return float("inf")


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
