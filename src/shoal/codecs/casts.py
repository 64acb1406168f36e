"""bf16 and fp16: PyTorch's own casts, the baseline of every other codec."""

from __future__ import annotations

from dataclasses import dataclass
from math import inf

import torch

from shoal.codecs.codec import Properties
from shoal.codecs.float_codec import FloatCodec
from shoal.codecs.payload import aligned

_RELATIVE = {torch.bfloat16: 2.0**-8, torch.float16: 2.0**-11}
_SMALLEST_NORMAL = {torch.bfloat16: 2.0**-126, torch.float16: 2.0**-14}
# Half a step past the largest: from there on a cast gives infinity.
_OVERFLOW = {torch.bfloat16: 2.0**128 - 2.0**119, torch.float16: 65520.0}


@dataclass(frozen=True)
class CastCodec(FloatCodec):
    """The payload is the cast tensor, two bytes a value, little-endian, in memory order."""

    name: str
    wire_id: int
    to: torch.dtype

    @property
    def properties(self) -> Properties:
        return Properties(
            bits_per_value=16,
            nan="NaN",
            infinity="itself",
            overflow=_OVERFLOW[self.to],
            relative_error=_RELATIVE[self.to],
            absolute_error=_RELATIVE[self.to],
        )

    def payload_bytes(self, elems: int) -> int:
        return 2 * elems

    def _encode(self, values: torch.Tensor, payload: torch.Tensor) -> None:
        if aligned(payload, 2):
            payload.view(self.to).copy_(values)
        else:
            payload.copy_(values.to(self.to).view(torch.uint8))

    def _decode(self, payload: torch.Tensor, values: torch.Tensor) -> None:
        whole = payload if aligned(payload, 2) else payload.clone()
        values.copy_(whole.view(self.to))

    def _error_bound(self, values: torch.Tensor) -> torch.Tensor:
        magnitude = values.abs().double()
        bound = magnitude.clamp(min=_SMALLEST_NORMAL[self.to]) * _RELATIVE[self.to]
        return bound.masked_fill(~(magnitude < _OVERFLOW[self.to]), inf)
