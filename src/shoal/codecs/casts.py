"""bf16 and fp16: PyTorch's own casts, the plain rivals of every other codec."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from shoal.codecs.codec import Codec, Properties

_RELATIVE = {torch.bfloat16: 2.0**-8, torch.float16: 2.0**-11}
_SMALLEST_NORMAL = {torch.bfloat16: 2.0**-126, torch.float16: 2.0**-14}
# Half a step past the largest: from there on a cast gives infinity.
_INFINITE_FROM = {torch.bfloat16: 2.0**128 - 2.0**119, torch.float16: 65520.0}


@dataclass(frozen=True)
class CastCodec(Codec):
    """The payload is the cast tensor, two bytes a value, little-endian, in memory order."""

    name: str
    wire_id: int
    to: torch.dtype

    @property
    def properties(self) -> Properties:
        least = "2**-126" if self.to == torch.bfloat16 else "2**-14"
        past = "" if self.to == torch.bfloat16 else "; magnitudes from 65520 on become infinite"
        return Properties(
            bits_per_value=16,
            lossless=False,
            zero=True,
            odd=True,
            monotone=True,
            idempotent=True,
            nan="NaN",
            infinity="itself",
            bound=f"{_RELATIVE[self.to]:.2g} of the value (below {least}: of {least}){past}",
        )

    def payload_bytes(self, elems: int) -> int:
        return 2 * elems

    def _encode(self, values: torch.Tensor, payload: torch.Tensor) -> None:
        payload.copy_(values.to(self.to).view(torch.uint8))

    def _decode(self, payload: torch.Tensor, out: torch.Tensor) -> None:
        whole = payload if payload.storage_offset() % 2 == 0 and payload.data_ptr() % 2 == 0 else payload.clone()
        out.copy_(whole.view(self.to))

    def _error_bound(self, values: torch.Tensor) -> torch.Tensor:
        magnitude = values.abs().double()
        bound = magnitude.clamp(min=_SMALLEST_NORMAL[self.to]) * _RELATIVE[self.to]
        return bound.masked_fill(~(magnitude < _INFINITE_FROM[self.to]), torch.inf)
