"""sign_mask: one bit a value, whether it is > 0: all that a ReLU's backward pass reads of its output.

Replaces saving `x` for `grad * (x > 0)`. Lossless: what decodes is `x > 0`, exactly, as bool.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from shoal.codecs.blocks import pieces
from shoal.codecs.checks import check_flat, check_length
from shoal.codecs.codec import Codec, Encoded, Properties
from shoal.codecs.float_codec import FLOATS
from shoal.codecs.launch import TILE_ELEMS, are_here, bits_call, tiles, triton_applies, triton_kernels
from shoal.codecs.memory_order import flat
from shoal.codecs.payload import bytes_of, pack_bits, unpack_bits
from shoal.errors import CodecError
from shoal.lowlevel.dispatch import DispatchedOp, Implementation, choose, register
from shoal.lowlevel.native import run_native
from shoal.lowlevel.torch_state import on_device

# The integers of a number's bits, and the greatest that is one.
_AS = {
    torch.float32: (torch.int32, 0x7F800000),
    torch.float16: (torch.int16, 0x7C00),
    torch.bfloat16: (torch.int16, 0x7F80),
    torch.uint8: (torch.uint8, 0xFF),
    torch.bool: (torch.uint8, 0xFF),
}


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
    choose(_OP, x, out).encode(x, out)


def decode(mask: torch.Tensor, out: torch.Tensor) -> None:
    """The inverse: write (n,) bool from (ceil(n / 8),) uint8."""
    _check(out, mask, torch.bool)
    choose(_OP, mask, out).decode(mask, out)


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
            odd=False,
            nan="sign",
            infinity="sign",
            relative_error=0.0,
            absolute_error=0.0,
        )

    def check_decoded(self, dtype: torch.dtype, shape: Sequence[int]) -> None:
        if dtype != torch.bool:
            raise CodecError(f"sign_mask: got a header of {dtype}, expected bool; encode it again")

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


class _SignMaskReference:
    """Plain torch: the definition that every implementation equals bit for bit."""

    def encode(self, x: torch.Tensor, out: torch.Tensor) -> None:
        for elements, _, _ in pieces(x.numel(), None):
            pack_bits(x[elements] > 0, out[bytes_of(elements)])

    def decode(self, mask: torch.Tensor, out: torch.Tensor) -> None:
        for elements, _, _ in pieces(out.numel(), None):
            unpack_bits(mask[bytes_of(elements)], out[elements])


class _SignMaskNative:
    """`csrc/codec_bits.cpp`, for float32 on the CPU."""

    def encode(self, x: torch.Tensor, out: torch.Tensor) -> None:
        call = bits_call(x.numel(), out)
        call.values = x.data_ptr()
        run_native("shoal_sign_mask_encode", call)

    def decode(self, mask: torch.Tensor, out: torch.Tensor) -> None:
        call = bits_call(out.numel(), mask)
        call.flags = out.data_ptr()
        run_native("shoal_sign_mask_decode", call)


class _SignMaskTriton:
    """`kernels_triton`, of any dtype that is taken."""

    def encode(self, x: torch.Tensor, out: torch.Tensor) -> None:
        if x.numel():
            with on_device(x.device):
                bits, largest = _AS[x.dtype]
                triton_kernels().sign_mask[tiles(x.numel())](x.view(bits), out, x.numel(), largest, TILE_ELEMS)

    def decode(self, mask: torch.Tensor, out: torch.Tensor) -> None:
        if out.numel():
            with on_device(out.device):
                triton_kernels().unpack_flags[tiles(out.numel())](mask, out.view(torch.uint8), out.numel(), TILE_ELEMS)


def _native_applies(*tensors: torch.Tensor) -> bool:
    """Whether they are float32 and its mask, or the mask and bool, and native kernels are here."""
    kinds = [x.dtype for x in tensors]
    return kinds in ([torch.float32, torch.uint8], [torch.uint8, torch.bool]) and are_here(*tensors)


_OP: DispatchedOp[_SignMaskReference | _SignMaskNative | _SignMaskTriton] = register(
    "sign_mask",
    _SignMaskReference(),
    Implementation("triton", _SignMaskTriton(), triton_applies),
    Implementation("native", _SignMaskNative(), _native_applies),
)
