"""Max-pool indices in one byte each: the offset of the maximum from its window's corner, not its index in the image.

PyTorch's max pooling saves, for every output, the flat int64 index of the maximum in its input. It is in a
window of known corner and at most 255 elements, so a byte says which: the offset in the flat image itself where no
offset in the window exceeds 254, else the number of the element. Lossless by construction. The 256th byte
is for windows without a maximum, whose gradient is zero.
"""

from __future__ import annotations

from collections.abc import Sequence
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


def encode(
    indices: torch.Tensor,
    input_shape: Sequence[int],
    kernel: Sequence[int],
    stride: Sequence[int],
    padding: Sequence[int],
    dilation: Sequence[int],
) -> torch.Tensor:
    """Turn the int64 indices of `max_pool2d` or `max_pool3d` into one byte each.

    Args:
        indices: (N, C, *output), int64, any memory format.
        input_shape: of the pool's input, (N, C, *input).
        kernel, stride, padding, dilation: of the pool, one number per spatial dimension.

    Returns:
        uint8 codes of the shape and memory format of `indices`.

    >>> x = torch.tensor([[[[1., 2.], [4., 3.]]]])
    >>> _, indices = torch.nn.functional.max_pool2d(x, 2, return_indices=True)
    >>> indices.item(), encode(indices, x.shape, [2, 2], [2, 2], [0, 0], [1, 1]).item()
    (2, 2)
    """
    distances = _distances(input_shape, kernel, dilation)
    corners = _corners(indices, input_shape, stride, padding)
    distance = torch.sub(indices, corners, out=torch.empty_like(indices))
    if distances[-1] < MAX_PLACES:
        return distance.to(torch.uint8)
    number_of = torch.zeros(distances[-1] + 1, dtype=torch.uint8, device=indices.device)
    number_of[distances] = torch.arange(len(distances), dtype=torch.uint8, device=indices.device)
    codes = torch.empty_like(indices, dtype=torch.uint8)
    distance.clamp_(0, distances[-1])
    torch.index_select(number_of, 0, _in_memory_order(distance), out=_in_memory_order(codes))
    return codes


def decode(
    codes: torch.Tensor,
    input_shape: Sequence[int],
    kernel: Sequence[int],
    stride: Sequence[int],
    padding: Sequence[int],
    dilation: Sequence[int],
) -> torch.Tensor:
    """The inverse of `encode`: the int64 indices that `max_pool2d` or `max_pool3d` gave; `NO_PLACE` gives any."""
    distances = _distances(input_shape, kernel, dilation)
    corners = _corners(codes, input_shape, stride, padding)
    if distances[-1] < MAX_PLACES:
        indices = codes.to(torch.int64)
    else:
        indices = torch.empty_like(codes, dtype=torch.int64)
        distance_of = torch.zeros(MAX_PLACES + 1, dtype=torch.int64, device=codes.device)
        distance_of[: len(distances)] = torch.tensor(distances, device=codes.device)
        torch.index_select(distance_of, 0, _in_memory_order(codes).int(), out=_in_memory_order(indices))
    # Whatever the byte, the place lies within the input: kernels do not check.
    return indices.add_(corners).clamp_(0, prod(input_shape[2:]) - 1)


def _distances(input_shape: Sequence[int], kernel: Sequence[int], dilation: Sequence[int]) -> list[int]:
    """How far each place of a window lies from its corner along the flat image, the last place last."""
    distances = [0]
    for size, places, step in zip(input_shape[2:], kernel, dilation, strict=True):
        distances = [distance * size + place * step for distance in distances for place in range(places)]
    return distances


def _corners(
    outputs: torch.Tensor, input_shape: Sequence[int], stride: Sequence[int], padding: Sequence[int]
) -> torch.Tensor:
    """The flat place of every window's corner, to be broadcast against `outputs`; padding puts some outside."""
    corners = torch.zeros((), dtype=torch.int64, device=outputs.device)
    for axis, (size, length) in enumerate(zip(input_shape[2:], outputs.shape[2:], strict=True)):
        along = torch.arange(length, device=outputs.device) * stride[axis] - padding[axis]
        corners = corners.unsqueeze(-1) * size + along
    return corners


def _in_memory_order(tensor: torch.Tensor) -> torch.Tensor:
    """The elements of a dense tensor as they lie in memory."""
    return tensor.as_strided((tensor.numel(),), (1,))
