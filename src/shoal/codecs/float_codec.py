"""A codec of floating-point values: all of them pass through float32, in memory order."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence

import torch

from shoal.codecs.codec import Codec
from shoal.codecs.memory_order import flat, without_gaps

FLOATS = (torch.float32, torch.float16, torch.bfloat16)


class FloatCodec(Codec):
    """What is left to a data type: (n,) float32 to payload and back, and the error of a value."""

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

    def mean(
        self, values: torch.Tensor, payloads: Sequence[torch.Tensor], divisor: int, out: torch.Tensor
    ) -> torch.Tensor:
        """What a rank does with its share in an all-reduce: `values` become the mean, as all ranks decode it.

        Replaces, with the same bits, decoding and adding each payload in turn, a division, and encoding and decoding
        the result.

        Args:
            values: (n,) float32, dense: this rank's own; changed.
            payloads: of the others', (payload_bytes(n),) uint8 each.
            divisor: of the sum.
            out: (payload_bytes(n),) uint8, dense: filled with the encoded mean.

        Raises:
            CodecError: a tensor is not so.

        >>> from shoal.codecs import get
        >>> codec = get("bf16")
        >>> values, out = torch.tensor([1.0, 2.0]), torch.empty(4, dtype=torch.uint8)
        >>> codec.mean(values, [codec.encode(torch.tensor([3.0, 5.0])).payload], 2, out)
        tensor([2.0000, 3.5000])
        """
        came = torch.empty_like(values)
        for payload in payloads:
            values.add_(self.decode(self._encoded(values, payload), out=came))
        return self.decode(self.encode(values.div_(divisor), out=out), out=values)

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
