"""Max-pool indices in one byte each: the offset of the maximum from its window's corner, not its index in the image.

PyTorch's max pooling saves, for every output, the flat int64 index of the maximum in its input. It is in a
window of known corner and at most 255 elements, so a byte says which: the offset in the flat image itself where no
offset in the window exceeds 254, else the number of the element. Lossless by construction. The 256th byte
is for windows without a maximum, whose gradient is zero.

The step rewrites call `encode` and `decode`; `PoolIndexCodec` gives their bytes a header, for a file or a link, and
checks what it is given.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from math import prod
from numbers import Integral
from typing import Any

import torch

from shoal.codecs.codec import Codec, Properties
from shoal.codecs.memory_order import flat
from shoal.errors import CodecError, brief

NO_PLACE = 255
MAX_PLACES = 255
_LARGEST = 2**31 - 1
_MIN = {"input_shape": 0, "kernel": 1, "stride": 1, "padding": 0, "dilation": 1}
OPTIONS = tuple(_MIN)


def fits(kernel: Sequence[int]) -> bool:
    """Whether every place of the window has a code."""
    places = 1
    for size in kernel:
        places *= size
    return places <= MAX_PLACES


def steps(input_shape: Sequence[int], kernel: Sequence[int], dilation: Sequence[int]) -> list[int]:
    """By how much a code grows from a place of the window to the next, along each spatial dimension.

    >>> steps((1, 1, 8, 8), (3, 3), (1, 1)), steps((1, 1, 8, 200), (3, 3), (1, 1))
    ([8, 1], [3, 1])
    """
    inner = _inner(input_shape[2:])
    if _farthest(inner, kernel, dilation) < MAX_PLACES:
        return [step * elems for step, elems in zip(dilation, inner, strict=True)]
    return _inner(kernel)


class Windows:
    """The windows of one pooling on one device, for any number of images: which byte stands for which place.

    Nothing is copied from the host: what is looked up is made on the device, in few launches.

    Args:
        input_shape: of the pool's input, (N, C, *input).
        output_sizes: how many windows there are along each spatial dimension.
        window: kernel, stride, padding and dilation of the pool, one number per spatial dimension.
        device: where the indices are.
    """

    def __init__(
        self, input_shape: Sequence[int], output_sizes: Sequence[int], *window: Sequence[int], device: torch.device
    ) -> None:
        kernel, stride, padding, dilation = window
        sizes = tuple(input_shape[2:])
        self._image_elems = prod(sizes)
        self._device = device
        self._inner = _inner(sizes)
        self._kernel, self._dilation = tuple(kernel), tuple(dilation)
        rows = zip(output_sizes, stride, padding, self._inner, strict=True)
        # The flat place of every window's corner; padding puts some outside.
        self._corners = _outer_sum(self._run(count, step * inner, -pad * inner) for count, step, pad, inner in rows)
        self._farthest = _farthest(self._inner, kernel, dilation)

    def encode(self, indices: torch.Tensor) -> torch.Tensor:
        """The codes of int64 indices, in their shape and memory format."""
        distance = torch.sub(indices, self._corners, out=torch.empty_like(indices))
        if self._farthest < MAX_PLACES:
            return distance.to(torch.uint8)
        n_places = prod(self._kernel)
        numbers = torch.arange(n_places, dtype=torch.uint8, device=self._device)
        number_of = torch.zeros(self._farthest + 1, dtype=torch.uint8, device=self._device)
        number_of.scatter_(0, self._distances(n_places)[:n_places], numbers)
        codes = torch.empty_like(indices, dtype=torch.uint8)
        distance.clamp_(0, self._farthest)
        torch.index_select(number_of, 0, flat(distance), out=flat(codes))
        return codes

    def decode(self, codes: torch.Tensor) -> torch.Tensor:
        """The int64 indices of codes; `NO_PLACE` gives any."""
        if self._farthest < MAX_PLACES:
            indices = codes.to(torch.int64)
        else:
            indices = torch.empty_like(codes, dtype=torch.int64)
            distance_of = self._distances(MAX_PLACES + 1)
            torch.index_select(distance_of, 0, flat(codes).int(), out=flat(indices))
        # Whatever the byte, the place lies within the input: kernels do not check.
        return indices.add_(self._corners).clamp_(0, self._image_elems - 1)

    def _distances(self, at_least: int) -> torch.Tensor:
        """How far each place of a window lies from its corner along the flat image, and more rows of it up to that."""
        counts = [-(-at_least // prod(self._kernel[1:])), *self._kernel[1:]]
        runs = zip(counts, self._dilation, self._inner, strict=True)
        return _outer_sum(self._run(count, step * inner) for count, step, inner in runs).flatten()

    def _run(self, count: int, step: int, start: int = 0) -> torch.Tensor:
        return torch.arange(start, start + count * step, step, device=self._device)


def encode(indices: torch.Tensor, input_shape: Sequence[int], *window: Sequence[int]) -> torch.Tensor:
    """Turn the int64 indices of `max_pool2d` or `max_pool3d` into one byte each.

    Args:
        indices: (N, C, *output), int64, any memory format.
        input_shape: of the pool's input, (N, C, *input).
        window: kernel, stride, padding and dilation of the pool, one number per spatial dimension.

    Returns:
        uint8 codes of the shape and memory format of `indices`.

    >>> x = torch.tensor([[[[1., 2.], [4., 3.]]]])
    >>> _, indices = torch.nn.functional.max_pool2d(x, 2, return_indices=True)
    >>> indices.item(), encode(indices, x.shape, [2, 2], [2, 2], [0, 0], [1, 1]).item()
    (2, 2)
    """
    return Windows(input_shape, indices.shape[2:], *window, device=indices.device).encode(indices)


def decode(codes: torch.Tensor, input_shape: Sequence[int], *window: Sequence[int]) -> torch.Tensor:
    """The inverse of `encode`: the int64 indices that `max_pool2d` or `max_pool3d` gave; `NO_PLACE` gives any."""
    return Windows(input_shape, codes.shape[2:], *window, device=codes.device).decode(codes)


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
        if not 1 <= len(self.kernel) <= 3 or prod(self.kernel) > MAX_PLACES:
            raise CodecError(
                f"pool_index: got a window of {self.kernel}, expected one to three dimensions and at most "
                f"{MAX_PLACES} places; save the indices as they are"
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
        codes = encode(dense, *self._geometry)
        if not torch.equal(decode(codes, *self._geometry), dense):
            raise CodecError("pool_index: got an index outside of its window; give the indices of that pooling")
        payload.copy_(flat(codes))

    def _decode_dense(self, payload: torch.Tensor, dense: torch.Tensor) -> None:
        codes = payload.as_strided(dense.shape, dense.stride(), payload.storage_offset())
        dense.copy_(decode(codes, *self._geometry))

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


def _inner(sizes: Sequence[int]) -> list[int]:
    """How many elements lie from one place to the next, along each dimension."""
    return [prod(sizes[axis + 1 :]) for axis in range(len(sizes))]


def _farthest(inner: Sequence[int], kernel: Sequence[int], dilation: Sequence[int]) -> int:
    """The flat offset of a window's last place from its corner."""
    reach = zip(kernel, dilation, inner, strict=True)
    return sum((places - 1) * step * elems for places, step, elems in reach)


def _outer_sum(runs: Iterator[torch.Tensor]) -> torch.Tensor:
    """One axis for each of them, along which it counts."""
    total = next(runs)
    for run in runs:
        total = total.unsqueeze(-1) + run
    return total
