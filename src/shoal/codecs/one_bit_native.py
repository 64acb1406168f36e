"""One bit a value and two means a block in `csrc/codec_bits.cpp`, for the CPU: the bits of `one_bit_reference`."""

from __future__ import annotations

import torch

from shoal.codecs.bits_native import Call, call_for
from shoal.codecs.levels_native import are_here, run
from shoal.errors import CodecError


def applies(*tensors: torch.Tensor) -> bool:
    """Whether the kernels are here and take these tensors."""
    return are_here(*tensors)


def encode_blocks(x: torch.Tensor, block_elems: int | None, means: torch.Tensor, bits: torch.Tensor) -> None:
    """As `one_bit.encode_blocks`, for tensors that `applies` takes."""
    run("shoal_one_bit_encode", _call(x, block_elems, means, bits))


def decode_blocks(bits: torch.Tensor, means: torch.Tensor, block_elems: int | None, out: torch.Tensor) -> None:
    """As `one_bit.decode_blocks`, for tensors that `applies` takes."""
    run("shoal_one_bit_decode", _call(out, block_elems, means, bits))


def _call(values: torch.Tensor, block_elems: int | None, means: torch.Tensor, bits: torch.Tensor) -> Call:
    elems = values.numel()
    call = call_for(elems, bits, values, means)
    block = block_elems or max(elems, 1)
    blocks = -(-elems // block) if block > 0 else -1
    if not values.dtype == means.dtype == torch.float32 or means.numel() != 2 * blocks or (block_elems or 8) % 8:
        raise CodecError(
            f"got {values.dtype} {tuple(values.shape)} and {means.dtype} {tuple(means.shape)} for blocks of {block}, "
            "expected float32, two means a block, and blocks of a multiple of 8"
        )
    call.block_elements = min(block, max(elems, 1))
    call.values, call.means = values.data_ptr(), means.data_ptr()
    return call
