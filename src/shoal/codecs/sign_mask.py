"""sign_mask: one bit a value, whether it is > 0: all that a ReLU's backward pass reads of its output.

Replaces saving `x` for `grad * (x > 0)`. Lossless: what decodes is `x > 0`, exactly, as bool.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import inf

import torch

from shoal.codecs.codec import Codec, Encoded, Properties
from shoal.codecs.float_codec import FLOATS
from shoal.codecs.kernels import kernel
from shoal.codecs.memory_order import flat
from shoal.codecs.raw import check_flat, check_length
from shoal.errors import CodecError


def encode(x: torch.Tensor, out: torch.Tensor) -> None:
    """Write a bit for each value, set where it is > 0 (a NaN is not); eight a byte, the first in the lowest bit.

    Args:
        x: (n,) of a floating dtype or bool, dense.
        out: (ceil(n / 8),) uint8, dense, written; unused bits are 0.

    >>> out = torch.empty(1, dtype=torch.uint8)
    >>> encode(torch.tensor([1.0, -1.0, 0.0, 5.0]), out)
    >>> out.item()
    9
    """
    _check(x, out, *FLOATS, torch.bool)
    kernel("sign_mask", x, out).encode(x, out)


def decode(mask: torch.Tensor, out: torch.Tensor) -> None:
    """The inverse: write (n,) bool from (ceil(n / 8),) uint8."""
    _check(out, mask, torch.bool)
    kernel("sign_mask", mask, out).decode(mask, out)


@dataclass(frozen=True)
class SignMaskCodec(Codec):
    """The payload is one bit a value, eight a byte, in memory order; it decodes to bool."""

    wire_id: int
    name: str = "sign_mask"
    dtypes = (*FLOATS, torch.bool)

    @property
    def properties(self) -> Properties:
        return Properties(
            bits_per_value=1,
            lossless=True,
            zero=True,
            odd=False,
            monotone=True,
            idempotent=True,
            nan="sign",
            infinity="sign",
            overflow=inf,
            relative_error=0.0,
            absolute_error=0.0,
        )

    def check_decoded(self, dtype: torch.dtype, shape: Sequence[int]) -> None:
        if dtype != torch.bool:
            raise CodecError(f"sign_mask: got a header of {dtype}, expected bool; write it anew")

    def payload_bytes(self, elems: int) -> int:
        return -(-elems // 8)

    def _encode_dense(self, dense: torch.Tensor, payload: torch.Tensor) -> None:
        encode(flat(dense), payload)

    def _decode_dense(self, payload: torch.Tensor, dense: torch.Tensor) -> None:
        decode(payload, flat(dense))

    def _encoded(self, dense: torch.Tensor, payload: torch.Tensor) -> Encoded:
        made = super()._encoded(dense, payload)
        return Encoded(self, torch.bool, made.shape, made.stride, payload)


def _check(x: torch.Tensor, mask: torch.Tensor, *dtypes: torch.dtype) -> None:
    check_flat("values", x, *dtypes)
    check_flat("mask", mask, torch.uint8)
    check_length("mask", mask, -(-x.numel() // 8))
