"""Max-pool indices in one byte each: the place within the window instead of the place within the image.

PyTorch's max pooling saves, for every output, the flat int64 place of the winner in its input. The winner lies in a
window of known corner and at most 256 places, so a byte tells which. Lossless by construction.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

MOST_PLACES = 256


def fits(kernel: Sequence[int]) -> bool:
    """Whether every place of the window has a code."""
    places = 1
    for size in kernel:
        places *= size
    return places <= MOST_PLACES


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
    spatial = list(input_shape[2:])
    code = torch.zeros_like(indices)
    rest = indices
    places = 1
    for axis, corner in reversed(list(enumerate(_corners(indices, stride, padding)))):
        place = rest.remainder(spatial[axis])
        rest = rest.div(spatial[axis], rounding_mode="floor")
        code += place.sub_(corner).div_(dilation[axis], rounding_mode="floor").mul_(places)
        places *= kernel[axis]
    return code.to(torch.uint8)


def decode(
    codes: torch.Tensor,
    input_shape: Sequence[int],
    kernel: Sequence[int],
    stride: Sequence[int],
    padding: Sequence[int],
    dilation: Sequence[int],
) -> torch.Tensor:
    """The inverse of `encode`: the int64 indices that `max_pool2d` or `max_pool3d` gave."""
    spatial = list(input_shape[2:])
    rest = codes.to(torch.int64)
    indices = torch.zeros_like(rest)
    pitch = 1
    for axis, corner in reversed(list(enumerate(_corners(codes, stride, padding)))):
        place = rest.remainder(kernel[axis])
        rest = rest.div(kernel[axis], rounding_mode="floor")
        # Whatever the byte, the place lies within the input: kernels do not check.
        indices += place.mul_(dilation[axis]).add_(corner).clamp_(0, spatial[axis] - 1).mul_(pitch)
        pitch *= spatial[axis]
    return indices


def _corners(outputs: torch.Tensor, stride: Sequence[int], padding: Sequence[int]) -> list[torch.Tensor]:
    """The first place of every window along each axis, to be broadcast against `outputs`."""
    corners = []
    for axis, length in enumerate(outputs.shape[2:]):
        shape = [1] * outputs.dim()
        shape[axis + 2] = length
        corners.append((torch.arange(length, device=outputs.device) * stride[axis] - padding[axis]).view(shape))
    return corners
