"""one_bit: a sign bit for each value and two means for each block, with the error fed back into the next tensor.

1-bit SGD, Seide et al. 2014, as the rival of Dettmers 2016, section 4.2. A value comes back as the mean of the values
of its side of zero. Alone that is far too coarse to train with; with a residual, which holds what was lost and is added
to the next tensor, nothing is lost but time.
"""

from __future__ import annotations

import struct
from dataclasses import dataclass
from math import inf
from typing import Any

import torch

from shoal.codecs.codec import Encoded, Properties
from shoal.codecs.float_codec import FloatCodec
from shoal.codecs.float_views import FLOAT_BYTES, floats_to_write, read_floats, write_floats
from shoal.codecs.kernels import kernel
from shoal.codecs.memory_order import flat, same_places
from shoal.codecs.option_checks import whole_number
from shoal.codecs.raw import check_flat, check_length
from shoal.codecs.table_codes import blocks_of
from shoal.errors import CodecError, brief

BLOCK_ELEMS = 4096
_OPTIONS = struct.Struct("<Q")


def encode_blocks(x: torch.Tensor, block_elems: int | None, means: torch.Tensor, bits: torch.Tensor) -> None:
    """Write the sign bit of each value, set where it is < 0, and the means of both sides of zero of each block.

    The first mean is of the values that are not negative (-0.0 among them), the second of the others; 0 where there
    are none. Both are NaN where the block holds a NaN; an infinity makes that of its side infinite.

    Args:
        x: (n,) float32, dense.
        block_elems: values that share means, a multiple of 8; None: all.
        means: (blocks, 2) float32, dense, written.
        bits: (ceil(n / 8),) uint8, dense, written: eight a byte, the first in the lowest bit; unused bits are 0.

    Raises:
        CodecError: a tensor has another dtype, length or layout.

    >>> means, bits = torch.empty(1, 2), torch.empty(1, dtype=torch.uint8)
    >>> encode_blocks(torch.tensor([1.0, -4.0, 2.0]), None, means, bits)
    >>> means.tolist(), bits.tolist()
    ([[1.5, -4.0]], [2])
    """
    _check(x, block_elems, means, bits)
    kernel("one_bit", x, means, bits).encode_blocks(x, block_elems, means, bits)


def decode_blocks(bits: torch.Tensor, means: torch.Tensor, block_elems: int | None, out: torch.Tensor) -> None:
    """The inverse: write each value's mean, (n,) float32; the other arguments are those of `encode_blocks`."""
    _check(out, block_elems, means, bits)
    kernel("one_bit", bits, means, out).decode_blocks(bits, means, block_elems, out)


@dataclass(frozen=True)
class OneBitCodec(FloatCodec):
    """The payload is two means a block, float32 little-endian, then one bit a value, eight a byte, in memory order.

    Attributes:
        block: values that share means, a multiple of 8; None: all of the tensor.
    """

    wire_id: int
    block: int | None = BLOCK_ELEMS
    name: str = "one_bit"

    def __post_init__(self) -> None:
        if self.block is None:
            return
        expected = "a multiple of 8, or None for all"
        block = whole_number("one_bit", "block", self.block, expected, 8, 2**63 - 1)
        if block % 8:
            raise CodecError(f"one_bit: got block={block}, expected {expected}")
        object.__setattr__(self, "block", block)

    @property
    def options(self) -> dict[str, Any]:
        return {"block": self.block}

    @property
    def properties(self) -> Properties:
        return Properties(
            bits_per_value=1,
            lossless=False,
            zero=False,
            odd=False,
            monotone=True,
            idempotent=True,
            nan="block",
            infinity="side",
            overflow=inf,
            relative_error=None,
            absolute_error=1.0,
        )

    def payload_bytes(self, elems: int) -> int:
        return 2 * FLOAT_BYTES * blocks_of(elems, self.block) + -(-elems // 8)

    def encode(
        self, tensor: torch.Tensor, out: torch.Tensor | None = None, *, residual: torch.Tensor | None = None
    ) -> Encoded:
        """As `Codec.encode`.

        Args:
            tensor: of one of `dtypes`.
            out: as there.
            residual: float32 of the tensor's shape, strides and device, zeros at first: added to the tensor, then
                overwritten with what the encoding loses. Its owner keeps it from step to step.

        >>> from shoal.codecs import get
        >>> codec, left = get("one_bit"), torch.zeros(3)
        >>> codec.encode(torch.tensor([1.0, -4.0, 2.0]), residual=left).decode(), left
        (tensor([ 1.5000, -4.0000,  1.5000]), tensor([-0.5000,  0.0000,  0.5000]))
        """
        dense, payload = self._ready(tensor, out)
        values = flat(dense).float()
        if residual is None:
            self._encode(values, payload)
            return self._encoded(dense, payload)
        if not isinstance(residual, torch.Tensor):
            raise CodecError(f"one_bit: got residual={brief(residual)}, expected a torch.Tensor; see torch.zeros_like")
        if (
            residual.shape != tensor.shape
            or residual.dtype != torch.float32
            or residual.device != tensor.device
            or not same_places(dense.shape, residual.stride(), dense.stride())
        ):
            got = f"{residual.dtype} of shape {tuple(residual.shape)} and strides {residual.stride()}"
            expected = f"float32 of shape {tuple(dense.shape)} and strides {dense.stride()} on {dense.device}"
            raise CodecError(f"one_bit: got a residual of {got}, expected {expected}; make it with torch.zeros_like")
        left = flat(residual)
        left.add_(values)
        self._encode(left, payload)
        came = torch.empty_like(left)
        self._decode(payload, came)
        left.sub_(came)
        return self._encoded(dense, payload)

    def wire_options(self) -> bytes:
        return _OPTIONS.pack(self.block or 0)

    def _encode(self, values: torch.Tensor, payload: torch.Tensor) -> None:
        numbers = 2 * blocks_of(values.numel(), self.block)
        means = floats_to_write(payload, numbers)
        encode_blocks(values, self.block, means.view(-1, 2), payload[FLOAT_BYTES * numbers :])
        write_floats(payload, means)

    def _decode(self, payload: torch.Tensor, values: torch.Tensor) -> None:
        numbers = 2 * blocks_of(values.numel(), self.block)
        means = read_floats(payload, numbers).view(-1, 2)
        decode_blocks(payload[FLOAT_BYTES * numbers :], means, self.block, values)

    def _error_bound(self, values: torch.Tensor) -> torch.Tensor:
        bound = torch.empty(values.numel(), dtype=torch.float64, device=values.device)
        block = self.block or max(values.numel(), 1)
        for first in range(0, values.numel(), block):
            part = values[first : first + block].double()
            for members in (part >= 0, part < 0):
                side = part[members].abs()
                bound[first : first + block][members] = side.max() if side.numel() else 0.0
            if not bool(part.isfinite().all()):
                bound[first : first + block] = inf
        return bound


def read_options(wire_id: int, options: bytes) -> OneBitCodec:
    """The codec whose `wire_options` these are.

    Raises:
        CodecError: they are nobody's.
    """
    if len(options) != _OPTIONS.size:
        raise CodecError(f"one_bit: got {len(options)} bytes of options, expected {_OPTIONS.size}; write it anew")
    return OneBitCodec(wire_id, _OPTIONS.unpack(options)[0] or None)


def _check(x: torch.Tensor, block_elems: int | None, means: torch.Tensor, bits: torch.Tensor) -> None:
    if block_elems is not None and (block_elems < 1 or block_elems % 8):
        raise CodecError(f"block_elems={block_elems}: expected a multiple of 8; None is one block for all")
    check_flat("values", x, torch.float32)
    check_flat("means", means.view(-1) if means.is_contiguous() else means, torch.float32)
    check_flat("bits", bits, torch.uint8)
    check_length("means", means, 2 * blocks_of(x.numel(), block_elems))
    check_length("bits", bits, -(-x.numel() // 8))
