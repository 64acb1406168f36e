"""A codec of 8 bits a value, by a table of 128 magnitudes and a scale for each block.

The payload is the scales, float32 little-endian, then the codes, a byte each in memory order.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cache
from math import inf
from typing import Any

import torch

from shoal.codecs.blocks import blocks_of
from shoal.codecs.checks import real_number, whole_number
from shoal.codecs.codec import Encoded, Properties
from shoal.codecs.float_codec import FloatCodec
from shoal.codecs.memory_order import flat
from shoal.codecs.payload import FLOAT_BYTES, floats_to_write, part_of, read_floats, write_floats
from shoal.codecs.table_codes import NATIVE, as_float32, decode_blocks, encode_blocks, native_runs
from shoal.codecs.tables import Table
from shoal.errors import CodecError

BLOCK_ELEMS = 4096
# values in a block (0: all), what sets the scale, three zeros, and a number: nothing, a float32, an int32
_OPTIONS = struct.Struct("<QB3x4s")
_LARGEST, _SCALE, _OFFSET = range(3)
_STEP = 2.0**-23
_MAX_OFFSET = 30


@dataclass(frozen=True)
class TableCodec(FloatCodec):
    """One 8-bit type.

    Attributes:
        block: values that share a scale, their greatest magnitude; None: all of the tensor, as in the paper.
        scale: of every block instead; greater magnitudes decode to the greatest value of the table, and the errors
            of `properties` are for the others.
        exponent_offset: k for the scale 10**k times `unit`, the paper's fitting offset; where the type has one.
        unit: what the type's exponents count by: the scale at an offset of 0; None where it has no offset.
    """

    codes: Table
    wire_id: int
    unit: float | None = None
    block: int | None = BLOCK_ELEMS
    scale: float | None = None
    exponent_offset: int | None = None
    name: str = field(init=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "name", self.codes.name)
        if self.block is not None:
            expected = "a number of values, at least 1, or None for all"
            block = whole_number(self.name, "block", self.block, expected, 1, 2**63 - 1)
            object.__setattr__(self, "block", block)
        if self.exponent_offset is not None and self.unit is None:
            raise CodecError(f"{self.name} has no exponent offset; give scale=, or take static_tree or mantissa")
        if self.exponent_offset is not None:
            expected = f"a whole number from -{_MAX_OFFSET} to {_MAX_OFFSET}"
            offset = whole_number(
                self.name, "exponent_offset", self.exponent_offset, expected, -_MAX_OFFSET, _MAX_OFFSET
            )
            object.__setattr__(self, "exponent_offset", offset)
        if self.exponent_offset is not None and self.scale is not None:
            raise CodecError(f"{self.name}: got both scale and exponent_offset; each sets the scale, give one")
        if self.scale is not None:
            scale = real_number(self.name, "scale", self.scale, "a number > 0")
            object.__setattr__(self, "scale", as_float32(scale))
        if self.fixed_scale is not None and not 2.0**-100 <= self.fixed_scale <= 2.0**100:
            raise CodecError(f"{self.name}: got a scale of {self.fixed_scale:g}, expected 1e-30 to 1e30")

    @property
    def fixed_scale(self) -> float | None:
        """The scale of every block, a float32; None: each has its greatest magnitude."""
        if self.exponent_offset is None or self.unit is None:
            return self.scale
        return as_float32(self.unit * 10.0**self.exponent_offset)

    @property
    def options(self) -> dict[str, Any]:
        given = {"scale": self.scale, "exponent_offset": self.exponent_offset}
        return {"block": self.block} | {option: value for option, value in given.items() if value is not None}

    @property
    def properties(self) -> Properties:
        relative, absolute = greatest_errors(self.codes)
        return Properties(
            bits_per_value=8,
            idempotent=self.fixed_scale is not None or bool(self.codes.magnitudes[-1] == 1),
            nan="block",
            infinity="block",
            relative_error=relative,
            absolute_error=absolute,
        )

    def payload_bytes(self, elems: int) -> int:
        return FLOAT_BYTES * blocks_of(elems, self.block) + elems

    def encode(self, tensor: torch.Tensor, out: torch.Tensor | None = None, *, seed: int | None = None) -> Encoded:
        """As `Codec.encode`.

        Args:
            tensor: of one of `dtypes`.
            out: as there.
            seed: round up or down at random, by this seed and each element's place in memory order, so that what is
                decoded is unbiased; None: round to the nearest. Decoding needs no seed.

        >>> from shoal.codecs import get
        >>> get("dynamic_tree", block=None).encode(torch.tensor([0.5, -1.0, 0.0])).payload.tolist()
        [0, 0, 128, 63, 98, 255, 0]
        """
        if seed is not None:
            seed = whole_number(self.name, "seed", seed, "an int below 2**63, or None to round", -(2**63), 2**63 - 1)
        dense, payload = self._ready(tensor, out)
        self._encode(flat(dense).float(), payload, seed)
        return self._encoded(dense, payload)

    def mean(
        self, values: torch.Tensor, payloads: Sequence[torch.Tensor], divisor: int, out: torch.Tensor
    ) -> torch.Tensor:
        if not native_runs(values, out, *payloads):
            return super().mean(values, payloads, divisor, out)
        dense, out = self._ready(values, out)
        for payload in payloads:
            self._check_payload(payload, out.numel())
        blocks = blocks_of(values.numel(), self.block)
        first = FLOAT_BYTES * blocks
        messages = [(read_floats(one, blocks), part_of(one, first, values.numel())) for one in payloads]
        scales, codes = floats_to_write(out, blocks), part_of(out, first, values.numel())
        NATIVE.mean_blocks(
            flat(dense), messages, divisor, self.codes, self.block, scales, codes, scale=self.fixed_scale
        )
        write_floats(out, scales)
        return values

    def table(self) -> Table:
        return self.codes

    def wire_options(self) -> bytes:
        kind, number = _LARGEST, bytes(4)
        if self.exponent_offset is not None:
            kind, number = _OFFSET, struct.pack("<i", self.exponent_offset)
        elif self.scale is not None:
            kind, number = _SCALE, struct.pack("<f", self.scale)
        return _OPTIONS.pack(self.block or 0, kind, number)

    def _encode(self, values: torch.Tensor, payload: torch.Tensor, seed: int | None = None) -> None:
        blocks = blocks_of(values.numel(), self.block)
        codes = part_of(payload, FLOAT_BYTES * blocks, values.numel())
        scales = floats_to_write(payload, blocks)
        encode_blocks(values, self.codes, self.block, scales, codes, scale=self.fixed_scale, seed=seed)
        write_floats(payload, scales)

    def _decode(self, payload: torch.Tensor, values: torch.Tensor) -> None:
        blocks = blocks_of(values.numel(), self.block)
        codes = part_of(payload, FLOAT_BYTES * blocks, values.numel())
        decode_blocks(codes, read_floats(payload, blocks), self.codes, self.block, values)

    def _error_bound(self, values: torch.Tensor) -> torch.Tensor:
        """Half of the gap that the value lies in, and the roundings of a division, a threshold and a product."""
        blocks, block = blocks_of(values.numel(), self.block), self.block or max(values.numel(), 1)
        scales = torch.empty(blocks, device=values.device)
        encode_blocks(
            values, self.codes, self.block, scales, torch.empty_like(values, dtype=torch.uint8), scale=self.fixed_scale
        )
        scale = scales[torch.arange(values.numel(), device=values.device) // block].double()
        share = (values.abs().double() / scale).nan_to_num(0)
        magnitudes = self.codes.magnitudes.to(values.device, torch.float64)
        above = torch.bucketize(share, magnitudes, right=True).clamp(1, len(magnitudes) - 1)
        half_gap = (magnitudes[above] - magnitudes[above - 1]) / 2
        bound = torch.where(share > magnitudes[-1], share - magnitudes[-1], half_gap) + 2 * _STEP * share
        # A product that is denormal is rounded to a multiple of 2**-149.
        return (bound * scale + 2.0**-149).masked_fill(scale.isnan(), inf)


def read_options(codes: Table, wire_id: int, unit: float | None, options: bytes) -> TableCodec:
    """The codec whose `wire_options` these are.

    Raises:
        CodecError: no codec has written them.
    """
    if len(options) != _OPTIONS.size:
        raise CodecError(
            f"{codes.name}: got {len(options)} bytes of options, expected {_OPTIONS.size}; encode it again"
        )
    block, kind, number = _OPTIONS.unpack(options)
    scale = struct.unpack("<f", number)[0] if kind == _SCALE else None
    offset = struct.unpack("<i", number)[0] if kind == _OFFSET else None
    made = TableCodec(codes, wire_id, unit, block or None, scale, offset)
    if made.wire_options() != options:
        raise CodecError(f"{codes.name}: got options {options.hex(' ')}, which no codec has; encode it again")
    return made


@cache
def greatest_errors(codes: Table) -> tuple[float, float]:
    """Of shares of the scale from 0.1 to 1, relative to themselves; of all from 0 to 1, as a share of the scale.

    >>> from shoal.codecs.tables import LINEAR
    >>> [round(error, 5) for error in greatest_errors(LINEAR)]
    [0.03704, 0.00394]
    """
    magnitudes = codes.magnitudes.double()
    # The worst of a gap is its middle, or where the tenth cuts it.
    low, high = magnitudes[:-1], magnitudes[1:]
    worst = ((low + high) / 2).clamp(min=0.1)
    relative = (torch.minimum(worst - low, high - worst) / worst)[high >= 0.1].max()
    at_the_top = 1 - magnitudes[-1]
    absolute = torch.maximum((high - low).max() / 2, at_the_top)
    return float(torch.maximum(relative, at_the_top)) + _STEP, float(absolute) + _STEP
