"""one_bit: a sign bit for each value and two means for each block, with the error fed back into the next tensor.

A codec of the papers, kept to compare with: 1-bit SGD, Seide et al. 2014, as in Dettmers 2016, section 4.2. It is used
only where it is named. A value decodes to the mean of the values of its sign in its block. By itself that is far
too coarse to train with; with error feedback, a residual that is added to the next tensor, errors are only delayed.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator
from dataclasses import dataclass
from math import inf
from typing import Any

import torch
from torch.nn.functional import pad

from shoal.codecs.blocks import PIECE_ELEMS, blocks_of, pieces
from shoal.codecs.checks import check_flat, check_length, whole_number
from shoal.codecs.codec import Encoded, Properties
from shoal.codecs.float_codec import FloatCodec
from shoal.codecs.launch import Bits, are_here, bits_call, block_tiles, triton_applies, triton_kernels
from shoal.codecs.memory_order import flat, same_places
from shoal.codecs.payload import (
    FLOAT_BYTES,
    bytes_of,
    floats_to_write,
    pack_bits,
    read_floats,
    unpack_bits,
    write_floats,
)
from shoal.errors import CodecError, brief
from shoal.lowlevel.dispatch import DispatchedOp, Implementation, choose, register
from shoal.lowlevel.native import run_native
from shoal.lowlevel.torch_state import on_device

BLOCK_ELEMS = 4096
_OPTIONS = struct.Struct("<Q")
# A sum has an order, so that all implementations give the same bits: in float64, in runs of 4096 values of the block;
# within a run 64 lanes each add every 64th value to 0.0, lanes are added by halves, and runs are added in order.
_RUN_ELEMS = 4096
_LANES = 64
# Of a Triton program.
_RUNS = 16
_BLOCKS = 64
_AHEAD = 16


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
    choose(_OP, x, means, bits).encode_blocks(x, block_elems, means, bits)


def decode_blocks(bits: torch.Tensor, means: torch.Tensor, block_elems: int | None, out: torch.Tensor) -> None:
    """The inverse: write each value's mean, (n,) float32; the other arguments are those of `encode_blocks`."""
    _check(out, block_elems, means, bits)
    choose(_OP, bits, means, out).decode_blocks(bits, means, block_elems, out)


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
            zero=False,
            odd=False,
            nan="block",
            infinity="side",
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
        CodecError: no codec has written them.
    """
    if len(options) != _OPTIONS.size:
        raise CodecError(f"one_bit: got {len(options)} bytes of options, expected {_OPTIONS.size}; encode it again")
    return OneBitCodec(wire_id, _OPTIONS.unpack(options)[0] or None)


def _check(x: torch.Tensor, block_elems: int | None, means: torch.Tensor, bits: torch.Tensor) -> None:
    if block_elems is not None and (block_elems < 1 or block_elems % 8):
        raise CodecError(f"block_elems={block_elems}: expected a multiple of 8; None is one block for all")
    check_flat("values", x, torch.float32)
    check_flat("means", means.view(-1) if means.is_contiguous() else means, torch.float32)
    check_flat("bits", bits, torch.uint8)
    check_length("means", means, 2 * blocks_of(x.numel(), block_elems))
    check_length("bits", bits, -(-x.numel() // 8))


class _OneBitReference:
    """Plain torch: the definition that every implementation equals bit for bit."""

    def encode_blocks(self, x: torch.Tensor, block_elems: int | None, means: torch.Tensor, bits: torch.Tensor) -> None:
        for first, rows in _whole_blocks(x, block_elems or max(x.numel(), 1)):
            nan = rows.new_zeros(len(rows), dtype=torch.bool)
            for part in _parts(rows):
                nan |= part.isnan().any(1)
            for side in (0, 1):
                sums, counts = _of_side(rows, side)
                mean = (sums / counts.clamp(min=1)).float()
                means[first : first + len(rows), side] = mean.masked_fill(nan, torch.nan)
        for elements, _, _ in pieces(x.numel(), None):
            pack_bits(x[elements] < 0, bits[bytes_of(elements)])

    def decode_blocks(
        self, bits: torch.Tensor, means: torch.Tensor, block_elems: int | None, out: torch.Tensor
    ) -> None:
        for elements, blocks, columns in pieces(out.numel(), block_elems):
            negative = torch.empty(elements.stop - elements.start, dtype=torch.bool, device=out.device)
            unpack_bits(bits[bytes_of(elements)], negative)
            out[elements] = torch.where(negative.view(-1, columns), means[blocks, 1:], means[blocks, :1]).view(-1)


def _whole_blocks(x: torch.Tensor, block: int) -> Iterator[tuple[int, torch.Tensor]]:
    """The number of a block and, from there on, some blocks of one length as rows; the last, short one only."""
    at_once = max(PIECE_ELEMS // block, 1) * block
    whole = x.numel() // block * block
    for first in range(0, whole, at_once):
        yield first // block, x[first : min(first + at_once, whole)].view(-1, block)
    if whole < x.numel():
        yield whole // block, x[whole:].view(1, -1)


def _parts(rows: torch.Tensor) -> Iterator[torch.Tensor]:
    """Their columns in whole runs, few elements at a time."""
    return (rows[:, first : first + PIECE_ELEMS] for first in range(0, rows.shape[1], PIECE_ELEMS))


def _of_side(rows: torch.Tensor, side: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Sums of each row's values that are not negative (side 0) or that are (1), float64, and how many they are."""
    totals = rows.new_zeros(len(rows), dtype=torch.float64)
    counts = rows.new_zeros(len(rows), dtype=torch.int64)
    for part in _parts(rows):
        members = part < 0 if side else ~(part < 0)
        counts += members.sum(1)
        values = part.where(members, 0).double()
        # Zeros at the end of a lane change no sum.
        run = _RUN_ELEMS if values.shape[1] > _RUN_ELEMS else -(-values.shape[1] // _LANES) * _LANES
        runs = pad(values, (0, -values.shape[1] % run)).view(len(rows), -1, run // _LANES, _LANES)
        lanes = torch.zeros_like(runs[:, :, 0])
        for number in range(runs.shape[2]):
            lanes += runs[:, :, number]
        while lanes.shape[2] > 1:
            half = lanes.shape[2] // 2
            lanes = lanes[:, :, :half] + lanes[:, :, half:]
        for number in range(lanes.shape[1]):
            totals += lanes[:, number, 0]
    return totals, counts


class _OneBitNative:
    """`csrc/codec_bits.cpp`, on the CPU."""

    def encode_blocks(self, x: torch.Tensor, block_elems: int | None, means: torch.Tensor, bits: torch.Tensor) -> None:
        run_native("shoal_one_bit_encode", _bits_call(x, block_elems, means, bits))

    def decode_blocks(
        self, bits: torch.Tensor, means: torch.Tensor, block_elems: int | None, out: torch.Tensor
    ) -> None:
        run_native("shoal_one_bit_decode", _bits_call(out, block_elems, means, bits))


def _bits_call(values: torch.Tensor, block_elems: int | None, means: torch.Tensor, bits: torch.Tensor) -> Bits:
    elems = values.numel()
    call = bits_call(elems, bits)
    call.block_elements = min(block_elems or elems, elems) or 1
    call.values, call.means = values.data_ptr(), means.data_ptr()
    return call


def _triton_applies(*tensors: torch.Tensor) -> bool:
    return triton_applies(*(x.view(-1) if x.is_contiguous() else x for x in tensors))  # means are two a block


class _OneBitTriton:
    """`kernels_triton`: a program adds the lanes of a few runs, a second kernel adds the runs of a block."""

    def encode_blocks(self, x: torch.Tensor, block_elems: int | None, means: torch.Tensor, bits: torch.Tensor) -> None:
        elems = x.numel()
        if not elems:
            return
        block = min(block_elems or elems, elems)
        blocks, runs_a_block = -(-elems // block), -(-block // _RUN_ELEMS)
        runs = blocks * runs_a_block
        sums = torch.empty((runs, 2), dtype=torch.float64, device=x.device)
        counts = torch.empty((runs, 2), dtype=torch.int32, device=x.device)
        with on_device(x.device):
            triton_kernels().sum_sides[(-(-runs // _RUNS),)](
                x,
                bits,
                sums,
                counts,
                elems,
                block,
                runs_a_block,
                runs,
                min(block, _RUN_ELEMS),
                _RUN_ELEMS,
                _RUNS,
                _LANES,
            )
            ahead = min(runs_a_block, _AHEAD)
            triton_kernels().mean_sides[(-(-blocks // _BLOCKS),)](
                sums, counts, means, runs_a_block, runs, blocks, _BLOCKS, ahead
            )

    def decode_blocks(
        self, bits: torch.Tensor, means: torch.Tensor, block_elems: int | None, out: torch.Tensor
    ) -> None:
        elems = out.numel()
        programs, rows, columns, parts = block_tiles(elems, block_elems)
        if not programs:
            return
        block = min(block_elems or elems, elems)
        with on_device(out.device):
            triton_kernels().decode_sides[(programs,)](
                bits, means, out, elems, -(-elems // block), block, parts, rows, columns
            )


_OP: DispatchedOp[_OneBitReference | _OneBitNative | _OneBitTriton] = register(
    "one_bit",
    _OneBitReference(),
    Implementation("triton", _OneBitTriton(), _triton_applies),
    Implementation("native", _OneBitNative(), are_here),
)
