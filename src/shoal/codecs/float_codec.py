"""A codec of floating-point values: all of them pass through float32, in memory order."""

from __future__ import annotations

from abc import abstractmethod

import torch

from shoal.codecs.codec import Codec
from shoal.codecs.memory_order import flat, without_gaps

FLOATS = (torch.float32, torch.float16, torch.bfloat16)


class FloatCodec(Codec):
    """What is left to a data type: (n,) float32 to payload and back, and how far a value comes back from itself."""

    dtypes = FLOATS

    @abstractmethod
    def _encode(self, values: torch.Tensor, payload: torch.Tensor) -> None:
        """Fill the payload from (n,) float32."""

    @abstractmethod
    def _decode(self, payload: torch.Tensor, values: torch.Tensor) -> None:
        """Fill (n,) float32 from the payload."""

    @abstractmethod
    def _error_bound(self, values: torch.Tensor) -> torch.Tensor:
        """Of (n,) float32, in float64."""

    def error_bound(self, tensor: torch.Tensor) -> torch.Tensor:
        dense = without_gaps(tensor.detach())
        return self._error_bound(flat(dense).float()).as_strided(dense.shape, dense.stride())

    def _encode_dense(self, dense: torch.Tensor, payload: torch.Tensor) -> None:
        self._encode(flat(dense).float(), payload)

    def _decode_dense(self, payload: torch.Tensor, dense: torch.Tensor) -> None:
        if dense.dtype == torch.float32:
            self._decode(payload, flat(dense))
            return
        values = torch.empty(dense.numel(), device=dense.device)
        self._decode(payload, values)
        flat(dense).copy_(values)
