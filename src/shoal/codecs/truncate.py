"""truncate1, truncate2, truncate3: the top bytes of each float32, cut towards zero; round1 ... round3: rounded first.

ADT's Bitpack and Bitunpack (A2DTWP, section III): RoundTo = 1, 2, 3 bytes. One byte keeps the sign and seven of eight
exponent bits: values four times apart. Two bytes are bfloat16: cutting takes 0.27 % off each value in the mean,
rounding nothing. No scales: every value stands for itself.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import inf

import torch

from shoal.codecs.codec import Properties
from shoal.codecs.float_codec import FloatCodec
from shoal.codecs.truncation import pack, unpack

_SMALLEST_NORMAL = 2.0**-126
# By bytes kept: of the value when cut, and when rounded.
_RELATIVE = {1: (0.75, 0.6), 2: (2.0**-7, 2.0**-8), 3: (2.0**-15, 2.0**-16)}
# Half a step past the greatest value. One byte's last step is from 2**125 to 2**127; its middle goes down, to the even
# code, and the next float up.
_OVERFLOW = {
    1: (2.0**127, 2.5 * 2.0**125 + 2.0**103),
    2: (inf, 2.0**128 - 2.0**119),
    3: (inf, 2.0**128 - 2.0**111),
}


@dataclass(frozen=True)
class TruncateCodec(FloatCodec):
    """The payload is `width_bytes` a value, the lowest kept byte first, in memory order."""

    name: str
    wire_id: int
    width_bytes: int
    nearest: bool

    @property
    def properties(self) -> Properties:
        relative = _RELATIVE[self.width_bytes][self.nearest]
        return Properties(
            bits_per_value=8 * self.width_bytes,
            lossless=False,
            zero=True,
            odd=True,
            monotone=True,
            idempotent=True,
            nan="NaN",
            infinity="NaN" if self.width_bytes == 1 else "itself",
            overflow=_OVERFLOW[self.width_bytes][self.nearest],
            relative_error=relative,
            absolute_error=relative,
        )

    def payload_bytes(self, elems: int) -> int:
        return self.width_bytes * elems

    def _encode(self, values: torch.Tensor, payload: torch.Tensor) -> None:
        pack(values, self.width_bytes, self.nearest, payload)

    def _decode(self, payload: torch.Tensor, values: torch.Tensor) -> None:
        unpack(payload, self.width_bytes, values)

    def _error_bound(self, values: torch.Tensor) -> torch.Tensor:
        magnitude = values.abs().double()
        least = 2 * _SMALLEST_NORMAL if self.width_bytes == 1 else _SMALLEST_NORMAL
        bound = magnitude.clamp(min=least) * _RELATIVE[self.width_bytes][self.nearest]
        return bound.masked_fill(~(magnitude < self.properties.overflow), inf)
