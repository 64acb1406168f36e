"""pool_index as a codec: the indices of a max pooling, a byte each, for a file or a link.

The step rewrites call `shoal.codecs.pool_index` itself; this gives it a header, and checks what it is given.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from dataclasses import dataclass
from math import prod
from numbers import Integral
from typing import Any

import torch

from shoal.codecs import pool_index
from shoal.codecs.codec import Codec, Properties
from shoal.codecs.memory_order import flat
from shoal.errors import CodecError, brief

_LARGEST = 2**31 - 1
_MIN = {"input_shape": 0, "kernel": 1, "stride": 1, "padding": 0, "dilation": 1}
OPTIONS = tuple(_MIN)


@dataclass(frozen=True)
class PoolIndexCodec(Codec):
    """The payload is a byte a value, in memory order.

    Attributes:
        input_shape: of the pool's input, (N, C, *input), one to three spatial dimensions.
        kernel, stride, padding, dilation: of the pool, one number for each of them.
    """

    wire_id: int
    input_shape: Sequence[int]
    kernel: Sequence[int]
    stride: Sequence[int]
    padding: Sequence[int]
    dilation: Sequence[int]
    name: str = "pool_index"
    dtypes = (torch.int64,)

    def __post_init__(self) -> None:
        dims = len(self.kernel) if isinstance(self.kernel, Sequence) else 2
        for option, lowest in _MIN.items():
            given, count = getattr(self, option), dims + 2 * (option == "input_shape")
            if not isinstance(given, Sequence) or len(given) != count or not all(_is_size(n, lowest) for n in given):
                raise CodecError(
                    f"pool_index: got {option}={brief(given)}, expected {count} whole numbers from {lowest} on; "
                    "give those of the pooling"
                )
            object.__setattr__(self, option, tuple(map(int, given)))
        if not 1 <= len(self.kernel) <= 3 or prod(self.kernel) > pool_index.MAX_PLACES:
            raise CodecError(
                f"pool_index: got a window of {self.kernel}, expected one to three dimensions and at most "
                f"{pool_index.MAX_PLACES} places; save the indices as they are"
            )
        if 0 in self.input_shape[2:] or prod(self.input_shape[2:]) >= 2**60:
            raise CodecError(f"pool_index: got an input of {self.input_shape}, expected images of 1 to 2**60 values")

    @property
    def options(self) -> dict[str, Any]:
        return {option: getattr(self, option) for option in OPTIONS}

    @property
    def properties(self) -> Properties:
        return Properties(
            bits_per_value=8,
            lossless=True,
            odd=False,
            nan="none",
            infinity="none",
            relative_error=0.0,
            absolute_error=0.0,
        )

    def payload_bytes(self, elems: int) -> int:
        return elems

    def check_decoded(self, dtype: torch.dtype, shape: Sequence[int]) -> None:
        super().check_decoded(dtype, shape)
        self._check_shape(shape)

    def wire_options(self) -> bytes:
        numbers = (*self.input_shape, *self.kernel, *self.stride, *self.padding, *self.dilation)
        return struct.pack(f"<B{len(numbers)}I", len(self.kernel), *numbers)

    def _encode_dense(self, dense: torch.Tensor, payload: torch.Tensor) -> None:
        self._check_shape(dense.shape)
        codes = pool_index.encode(dense, *self._geometry)
        if not torch.equal(pool_index.decode(codes, *self._geometry), dense):
            raise CodecError("pool_index: got an index outside of its window; give the indices of that pooling")
        payload.copy_(flat(codes))

    def _decode_dense(self, payload: torch.Tensor, dense: torch.Tensor) -> None:
        codes = payload.as_strided(dense.shape, dense.stride(), payload.storage_offset())
        dense.copy_(pool_index.decode(codes, *self._geometry))

    @property
    def _geometry(self) -> tuple[Sequence[int], ...]:
        return self.input_shape, self.kernel, self.stride, self.padding, self.dilation

    def _check_shape(self, shape: Sequence[int]) -> None:
        begins = [
            (length - 1) * step - pad for length, step, pad in zip(shape[2:], self.stride, self.padding, strict=False)
        ]
        if (
            len(shape) != len(self.input_shape)
            or tuple(shape[:2]) != self.input_shape[:2]
            or any(begin >= size for begin, size in zip(begins, self.input_shape[2:], strict=True))
        ):
            raise CodecError(
                f"pool_index: got indices of shape {tuple(shape)} for an input of {self.input_shape}; "
                "give the indices of that pooling"
            )


def _is_size(number: Any, lowest: int) -> bool:
    return isinstance(number, Integral) and not isinstance(number, bool) and lowest <= int(number) <= _LARGEST


def read_options(wire_id: int, options: bytes) -> PoolIndexCodec:
    """The codec whose `wire_options` these are.

    Raises:
        CodecError: no codec has written them.
    """
    dims = options[0] if options else 0
    if not 1 <= dims <= 3 or len(options) != 1 + 4 * (5 * dims + 2):
        raise CodecError(f"pool_index: got {len(options)} bytes of options for {dims} dimensions; encode it again")
    numbers = struct.unpack_from(f"<{5 * dims + 2}I", options, 1)
    shape, rest = numbers[: dims + 2], numbers[dims + 2 :]
    kernel, stride, padding, dilation = (rest[dims * part : dims * (part + 1)] for part in range(4))
    return PoolIndexCodec(wire_id, shape, kernel, stride, padding, dilation)
