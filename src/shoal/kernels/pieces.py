"""Shared by ops that are computed in pieces: how one is cut, and whether pieces give the bits of the whole."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import repeat
from math import prod
from typing import Any, NamedTuple

import torch
from torch import Tensor

from shoal.kernels.memory_format import dense_strides
from shoal.lowlevel.torch_internals import isolated

WORTH_PIECES_BYTES = 4 << 20
"""Tensors and scratch smaller than this are not cut."""
TILE_ELEMS = 1 << 17
"""512 KiB of float32: the operands and temporaries of a tile stay in L2."""
_DEVICE_TILE_ELEMS = 1 << 24  # where every tile costs launches of kernels
_MIN_TILES = 8  # so that temporaries are small compared with small tensors too
_MIN_TILE_ELEMS = 1 << 15


@dataclass(frozen=True)
class Cut:
    """How something is cut: along which dimension, into how many pieces, and how much less memory they take.

    `reordered`: sums are in another order than those of the whole, and so their bits others.
    """

    dim: int
    count: int
    saved_bytes: int
    reordered: bool = False


def spans(length: int, pieces: int) -> Iterator[slice]:
    """Slices that cut a length into at most `pieces` parts; the last may be shorter.

    >>> list(spans(5, 2))
    [slice(0, 3, None), slice(3, 5, None)]
    """
    step = -(-length // pieces)
    return (slice(begin, min(length, begin + step)) for begin in range(0, length, step))


def tiles(first: Tensor, *others: Tensor | None) -> Iterator[tuple[Any, ...]]:
    """Views of tensors of one shape, (N, C, ...), that together cover them, of all channels; None stays None."""
    most = min(TILE_ELEMS, max(_MIN_TILE_ELEMS, first.numel() // _MIN_TILES)) if first.is_cpu else _DEVICE_TILE_ELEMS
    return _split((first, *others), most, 0)


def _split(tensors: tuple[Any, ...], most_elems: int, dim: int) -> Iterator[tuple[Any, ...]]:
    shape, elems = tensors[0].shape, tensors[0].numel()
    if elems <= most_elems or dim >= len(shape):
        yield tensors
        return
    step = max(1, most_elems * shape[dim] // elems)
    parts = (repeat(None) if tensor is None else tensor.split(step, dim) for tensor in tensors)
    for tile in zip(*parts, strict=False):  # None has no end
        yield from _split(tile, most_elems, dim + 1 if dim else 2)


def are_sizes_known(*tensors: Tensor) -> bool:
    """Whether all shapes and strides are integers: those of fake tensors may be symbolic."""
    return all(type(size) is int for tensor in tensors for size in (*tensor.shape, *tensor.stride()))


def bytes_of(tensor: Tensor) -> int:
    """`tensor.nbytes`, which a fake tensor of symbolic sizes does not have even where they are known."""
    return prod(tensor.shape) * tensor.element_size()


class TensorLayout(NamedTuple):
    """What kernels are chosen by: shape, strides and dtype of a tensor."""

    shape: tuple[int, ...]
    stride: tuple[int, ...]
    dtype: torch.dtype


def described(arguments: Sequence[Any]) -> tuple[Any, ...]:
    """Arguments of an op as the key of a cache: layouts for tensors, which may be fake, tuples for lists."""

    def key(value: Any) -> Any:
        if isinstance(value, Tensor):
            return TensorLayout(tuple(value.shape), value.stride(), value.dtype)
        return tuple(map(key, value)) if type(value) in (list, tuple) else value

    return tuple(map(key, arguments))


def drawn(arguments: Sequence[Any], device: torch.device) -> list[Any]:
    """Arguments that were `described`, of random numbers, the same in every call."""

    def made(value: Any, seed: int) -> Any:
        if isinstance(value, TensorLayout):
            return _random(value, device, seed)
        return drawn(value, device) if isinstance(value, tuple) else value

    return [made(value, place) for place, value in enumerate(arguments)]


def _random(layout: TensorLayout, device: torch.device, seed: int) -> Tensor:
    shape, stride, dtype = layout
    memory = torch.empty(span_elems(shape, stride), dtype=dtype, device=device)
    return memory.normal_(generator=torch.Generator(device).manual_seed(seed)).as_strided(shape, stride)


def span_elems(shape: Sequence[int], stride: Sequence[int]) -> int:
    """From the first element of a tensor to the last, both included."""
    return 0 if 0 in shape else 1 + sum((size - 1) * step for size, step in zip(shape, stride, strict=True))


def results_of(made: Any) -> list[Tensor]:
    """What an op returned, a tensor or several of which some may be None, without these."""
    return [one for one in (made if isinstance(made, (tuple, list)) else (made,)) if one is not None]


def have_same_bits(found: Any, expected: Any) -> bool:
    """Whether what two ops returned is equal in elements and strides."""
    return all(
        torch.equal(ours, theirs) and ours.stride() == theirs.stride()
        for ours, theirs in zip(results_of(found), results_of(expected), strict=True)
    )


def of_odd_size(dtype: torch.dtype, dims: int, channels: int, channels_last: bool = False) -> TensorLayout:
    """A few elements, (3, channels, ...), of sizes that no vector and no block divides."""
    shape = (3, channels, *(7, 5, 3)[: dims - 2])
    return TensorLayout(shape, dense_strides(shape, channels_last), dtype)


def repeats_bits(
    whole: Callable[..., Any],
    other: Callable[..., Any],
    arguments: Sequence[Any],
    *more: Any,
    device: torch.device | None = None,
) -> bool:
    """Whether another form of an op gives the bits of the whole on a device, found out on random numbers.

    Args:
        whole: of the arguments.
        other: of the arguments, and of `more`.
        arguments: layouts, or tensors, which may be fake: only shapes, strides and dtypes are read.
        device: None: that of the arguments.

    Returns:
        False, too, if the device is out of memory.
    """
    device = device or next(value.device for value in arguments if isinstance(value, Tensor))
    return _repeats_bits(whole, other, described(arguments), described(more), device, torch.get_num_threads())


@lru_cache(maxsize=1024)
def _repeats_bits(
    whole: Callable[..., Any],
    other: Callable[..., Any],
    arguments: tuple[Any, ...],
    more: tuple[Any, ...],
    device: torch.device,
    n_threads: int,
) -> bool:
    del n_threads  # kernels differ by it, so it is part of the key
    try:
        with isolated(device):
            operands = drawn(arguments, device)
            expected = whole(*operands)
            return have_same_bits(other(*operands, *more), expected)
    except torch.OutOfMemoryError:
        return False
