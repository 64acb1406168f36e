"""How `one_bit_native` and `sign_mask_native` call `csrc/codec_bits.cpp`."""

from __future__ import annotations

import ctypes

import torch

from shoal.codecs.levels_native import are_here, level_number, threads_for
from shoal.errors import CodecError

_LEAST_ELEMS = 1 << 16  # a thread is not worth waking for less


class Call(ctypes.Structure):
    """ShoalBits of csrc/shoal_native.h."""

    _fields_ = (
        *((name, ctypes.c_int64) for name in ("elements", "block_elements")),
        *((name, ctypes.c_int32) for name in ("threads", "level")),
        *((name, ctypes.c_void_p) for name in ("values", "means", "bits", "flags")),
    )


def call_for(elems: int, bits: torch.Tensor, *others: torch.Tensor) -> Call:
    """A call for so many elements, with the address of their bits.

    Raises:
        CodecError: `bits` are not as many, or a tensor is not dense and on the CPU.
    """
    # No address is passed on unless it is what the kernels believe it to be.
    if bits.dtype != torch.uint8 or bits.numel() != -(-elems // 8) or not are_here(bits, *others):
        shapes = ", ".join(f"{x.dtype} {tuple(x.shape)}" for x in (bits, *others))
        raise CodecError(f"got {shapes} for {elems} values, expected a uint8 for eight, all dense and on the CPU")
    return Call(
        elements=elems,
        block_elements=max(elems, 1),
        threads=threads_for(elems, _LEAST_ELEMS),
        level=level_number(),
        bits=bits.data_ptr(),
    )
