"""One bit a value in `csrc/codec_bits.cpp`, for float32 on the CPU: the bits of `sign_mask_reference`."""

from __future__ import annotations

import torch

from shoal.codecs.bits_native import call_for
from shoal.codecs.levels_native import are_here, run
from shoal.errors import CodecError


def applies(*tensors: torch.Tensor) -> bool:
    """Whether the kernels are here and take these tensors: float32 and its mask, or the mask and bool."""
    kinds = [x.dtype for x in tensors]
    return kinds in ([torch.float32, torch.uint8], [torch.uint8, torch.bool]) and are_here(*tensors)


def encode(x: torch.Tensor, out: torch.Tensor) -> None:
    """As `sign_mask.encode`, for tensors that `applies` takes."""
    call = call_for(x.numel(), out, x)
    if x.dtype != torch.float32:
        raise CodecError(f"got values of {x.dtype}, expected float32; use sign_mask.encode")
    call.values = x.data_ptr()
    run("shoal_sign_mask_encode", call)


def decode(mask: torch.Tensor, out: torch.Tensor) -> None:
    """As `sign_mask.decode`, for tensors that `applies` takes."""
    call = call_for(out.numel(), mask, out)
    if out.dtype != torch.bool:
        raise CodecError(f"got an output of {out.dtype}, expected bool; use sign_mask.decode")
    call.flags = out.data_ptr()
    run("shoal_sign_mask_decode", call)
