"""Max-pool indices in one byte each: the offset of the maximum from its window's corner, not its index in the image.

PyTorch's max pooling saves, for every output, the flat int64 index of the maximum in its input. It is in a
window of known corner and at most 255 elements, so a byte says which: the offset in the flat image itself where no
offset in the window exceeds 254, else the number of the element. Lossless by construction. The 256th byte
is for windows without a maximum, whose gradient is zero.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from math import prod

import torch

NO_PLACE = 255
MAX_PLACES = 255


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
        torch.index_select(number_of, 0, _in_memory_order(distance), out=_in_memory_order(codes))
        return codes

    def decode(self, codes: torch.Tensor) -> torch.Tensor:
        """The int64 indices of codes; `NO_PLACE` gives any."""
        if self._farthest < MAX_PLACES:
            indices = codes.to(torch.int64)
        else:
            indices = torch.empty_like(codes, dtype=torch.int64)
            distance_of = self._distances(MAX_PLACES + 1)
            torch.index_select(distance_of, 0, _in_memory_order(codes).int(), out=_in_memory_order(indices))
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


def _in_memory_order(tensor: torch.Tensor) -> torch.Tensor:
    """The elements of a dense tensor as they lie in memory."""
    return tensor.as_strided((tensor.numel(),), (1,))
