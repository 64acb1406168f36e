"""A convolution and its gradients in pieces: the same bits with less scratch.

PyTorch's convolutions on the CPU may take a scratch of many times their tensors: 27 times the input of a small 3-D one
on a batch of one, which is unfolded for a matrix product, and two to three times in oneDNN, which converts tensors into
blocked layouts. A part of the result needs scratch for that part alone. Samples are independent, and so are slabs along
the first spatial dimension with what the kernel reaches beyond them, and the input channels of a weight's gradient.

A piece may be computed by another kernel than the whole, so `choose` tests on this machine, with the same shapes,
whether pieces repeat its bits and what they save.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import lru_cache
from math import prod
from typing import Any, NamedTuple

import torch

from shoal.kernels.convolution import draw
from shoal.kernels.convolution import input_gradient as whole_input_gradient
from shoal.lowlevel import allocations
from shoal.lowlevel.torch_internals import isolated

_aten = torch.ops.aten
Cut = tuple[int, int]  # along which dimension, into how many pieces

WORTH_PIECES_BYTES = 4 << 20
"""A smaller scratch is left alone."""
_SAMPLES, _CHANNELS, _SLABS = 0, 1, 2
_N_SLABS = (4, 8)
_MAX_PIECES = 16
_DTYPES = (torch.float32, torch.float64, torch.bfloat16, torch.float16)


def forward(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    stride: Sequence[int],
    padding: Sequence[int],
    dilation: Sequence[int],
    transposed: bool,
    output_padding: Sequence[int],
    groups: int,
    dim: int,
    pieces: int,
) -> torch.Tensor:
    """`aten.convolution` of the same arguments in so many pieces along `dim` of its result: 0, samples; 2, slabs.

    A transposed convolution is cut into samples only.
    """
    options = (transposed, output_padding, groups)
    out: torch.Tensor | None = None
    if dim == _SAMPLES:
        for begin, end in _spans(x.shape[0], pieces):
            some = _aten.convolution(x[begin:end], weight, bias, stride, padding, dilation, *options)
            out = _empty(some, dim, x.shape[0]) if out is None else out
            out[begin:end] = some
            del some  # before the next is allocated
    else:
        step, pad, reach = stride[0], padding[0], (weight.shape[2] - 1) * dilation[0]
        length = x.shape[2]
        n_out = (length + 2 * pad - reach - 1) // step + 1
        for begin, end in _spans(n_out, pieces):
            first, stop = begin * step - pad, (end - 1) * step - pad + reach + 1
            inside = first >= 0 and stop <= length
            # At an edge the convolution pads by itself, on both sides: rows besides are computed and dropped.
            start = begin if inside else max(0, min(begin - -(-pad // step), (length - 1) // step))
            read = x[:, :, first:stop] if inside else x[:, :, start * step : max(start * step + 1, stop)]
            some = _aten.convolution(
                read, weight, bias, stride, [0 if inside else pad, *padding[1:]], dilation, *options
            )
            del read
            out = _empty(some, dim, n_out) if out is None else out
            out[:, :, begin:end] = some[:, :, begin - start : end - start]
            del some
    assert out is not None
    return out


def input_gradient(
    grad: torch.Tensor,
    weight: torch.Tensor,
    input_shape: Sequence[int],
    input_stride: Sequence[int],
    stride: Sequence[int],
    padding: Sequence[int],
    dilation: Sequence[int],
    transposed: bool,
    output_padding: Sequence[int],
    groups: int,
    dim: int,
    pieces: int,
) -> torch.Tensor:
    """`convolution.input_gradient` of the same arguments in so many pieces along `dim`: 0, samples; 2, slabs.

    The input is contiguous or channels_last. That of a transposed convolution is cut into samples only.
    """
    options = (dilation, transposed, output_padding, groups)
    shape, length = list(input_shape), input_shape[dim]
    channels_last = tuple(input_stride) != _strides(shape, False)
    out: torch.Tensor | None = None
    for begin, end in _spans(length, pieces):
        first, stop, read, pads = begin, end, grad[begin:end], list(padding)
        if dim == _SLABS:
            step, pad, reach = stride[0], padding[0], (weight.shape[2] - 1) * dilation[0]
            start = max(0, -(-(begin + pad - reach) // step))
            beyond = min(grad.shape[2], (end - 1 + pad) // step + 1)
            if beyond <= start:  # between the windows
                assert out is not None
                out[:, :, begin:end] = 0
                continue
            read, pads[0] = grad[:, :, start:beyond], 0
            first, stop = start * step - pad, (beyond - 1) * step - pad + reach + 1
        shape[dim] = stop - first
        some = whole_input_gradient(read, weight, shape, _strides(shape, channels_last), stride, pads, *options)
        out = _empty(some, dim, length) if out is None else out
        inner, outer = max(begin, first), min(end, stop)
        out.narrow(dim, begin, inner - begin).zero_()
        out.narrow(dim, inner, outer - inner).copy_(some.narrow(dim, inner - first, outer - inner))
        out.narrow(dim, outer, end - outer).zero_()
        del some
    assert out is not None
    return out


def weight_gradient(
    grad: torch.Tensor,
    x: torch.Tensor,
    weight: torch.Tensor,
    bias_sizes: Sequence[int] | None,
    stride: Sequence[int],
    padding: Sequence[int],
    dilation: Sequence[int],
    transposed: bool,
    output_padding: Sequence[int],
    groups: int,
    wanted: Sequence[bool],
    dim: int,
    pieces: int,
) -> tuple[None, torch.Tensor, torch.Tensor | None]:
    """`aten.convolution_backward` of the same arguments, the input channels (dimension 1) in so many pieces.

    The convolution is neither transposed nor grouped, and `wanted` asks for no gradient of the input.
    """
    options = (stride, padding, dilation, transposed, output_padding, groups)
    of_weight, of_bias = torch.empty_like(weight), None
    for begin, end in _spans(x.shape[dim], pieces):
        some = slice(begin, end)
        mask = [False, True, wanted[2] and begin == 0]
        _, piece, bias = _aten.convolution_backward(grad, x[:, some], weight[:, some], bias_sizes, *options, mask)
        of_weight[:, some] = piece
        of_bias = bias if begin == 0 else of_bias
        del piece
    return None, of_weight, of_bias


def choose(whole: Callable[..., Any], arguments: Sequence[Any]) -> Cut | None:
    """How a convolution or one of its gradients is best cut into pieces; None: not at all.

    It is cut where its scratch is at least the bytes of its result and 4 MiB, pieces repeat its bits on this machine
    with these shapes, and halve the scratch; of several ways, the one that needs least.

    Args:
        whole: `aten.convolution.default`, `convolution.input_gradient` or `aten.convolution_backward.default` for the
            weight's gradient.
        arguments: its arguments. Tensors may be fake: only their shapes, strides, dtypes and devices are read.

    Returns:
        What `IN_PIECES[whole]` takes besides: a dimension, and the number of pieces along it.
    """
    tensors = [value for value in arguments if isinstance(value, torch.Tensor)]
    numbers = [size for tensor in tensors for size in (*tensor.shape, *tensor.stride())]
    if not all(type(size) is int for size in numbers) or allocations.is_busy():
        return None
    if any(tensor.device.type != "cpu" or tensor.dtype not in _DTYPES for tensor in tensors):
        return None
    return _best_cut(whole, tuple(_frozen(value) for value in arguments), torch.get_num_threads())


def may_be_worth_pieces(x: torch.Tensor, weight: torch.Tensor, result: torch.Tensor) -> bool:
    """Whether the scratch of a convolution of these shapes, or of its gradients, may be as large as `choose` asks for.

    Tensors may be fake.
    """
    if x.device.type != "cpu" or x.dim() != weight.dim():
        return False
    elems = x.numel() + result.numel()
    if x.dim() == 5 and x.shape[0] == 1:  # it may be unfolded
        elems = max(elems, prod(weight.shape[2:]) * max(x.numel(), result.numel()))
    return bool(elems * x.element_size() >= WORTH_PIECES_BYTES)


IN_PIECES: dict[Any, Callable[..., Any]] = {
    _aten.convolution.default: forward,
    whole_input_gradient: input_gradient,
    _aten.convolution_backward.default: weight_gradient,
}
"""What computes each in pieces."""


class _Tensor(NamedTuple):
    """What is read of a tensor."""

    shape: tuple[int, ...]
    stride: tuple[int, ...]
    dtype: torch.dtype


@lru_cache(maxsize=1024)
def _best_cut(whole: Callable[..., Any], frozen: tuple[Any, ...], n_threads: int) -> Cut | None:
    del n_threads  # kernels and scratches differ by it, so it is part of the key
    ways = list(_ways(whole, frozen))
    if not ways:
        return None
    best: Cut | None = None
    with isolated(torch.device("cpu")):
        arguments = [
            draw(place, (value.shape, value.stride), value.dtype) if isinstance(value, _Tensor) else value
            for place, value in enumerate(frozen)
        ]
        expected, changes = allocations.record(lambda: _results(whole(*arguments)))
        result_bytes = sum(result.nbytes for result in expected)
        scratch_bytes = allocations.peak_bytes(changes) - result_bytes
        if scratch_bytes < max(result_bytes, WORTH_PIECES_BYTES):
            return None
        least_bytes = result_bytes + scratch_bytes // 2
        for way in ways:
            found, changes = allocations.record(lambda way=way: _results(IN_PIECES[whole](*arguments, *way)))  # type: ignore[misc]
            same = all(
                torch.equal(ours, theirs) and ours.stride() == theirs.stride()
                for ours, theirs in zip(found, expected, strict=True)
            )
            if same and allocations.peak_bytes(changes) < least_bytes:
                best, least_bytes = way, allocations.peak_bytes(changes)
    return best


def _ways(whole: Callable[..., Any], frozen: tuple[Any, ...]) -> Iterator[Cut]:
    if whole is _aten.convolution_backward.default:
        weight, transposed, groups, wanted = (frozen[place] for place in (2, 7, 9, 10))
        if not transposed and groups == 1 and not wanted[0] and wanted[1] and weight.shape[1] > 1:
            yield _CHANNELS, min(weight.shape[1], _MAX_PIECES)
        return
    shape = frozen[2] if whole is whole_input_gradient else frozen[0].shape
    weight, dilation, transposed = frozen[1], frozen[-4], frozen[-3]
    if len(shape) != len(weight.shape) or 0 in shape:
        return
    if shape[0] > 1:
        yield _SAMPLES, min(shape[0], _MAX_PIECES)
    reach = (weight.shape[2] - 1) * dilation[0]
    for pieces in _N_SLABS if not transposed else ():
        if shape[2] // pieces >= max(1, reach):  # what slabs share is computed twice
            yield _SLABS, pieces


def _results(made: Any) -> list[torch.Tensor]:
    return [one for one in (made if isinstance(made, tuple) else (made,)) if one is not None]


def _frozen(value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        return _Tensor(tuple(value.shape), value.stride(), value.dtype)
    return tuple(value) if isinstance(value, Sequence) else value


def _spans(length: int, pieces: int) -> Iterator[tuple[int, int]]:
    step = -(-length // pieces)
    return ((begin, min(length, begin + step)) for begin in range(0, length, step))


def _empty(piece: torch.Tensor, dim: int, length: int) -> torch.Tensor:
    """Room for a result of so many elements along `dim`, laid out as its piece is."""
    shape = list(piece.shape)
    shape[dim] = length
    return piece.new_empty_strided(shape, _strides(shape, not piece.is_contiguous()))


def _strides(shape: Sequence[int], channels_last: bool) -> tuple[int, ...]:
    order = [0, *range(2, len(shape)), 1] if channels_last else range(len(shape))
    strides, step = [0] * len(shape), 1
    for axis in reversed(order):
        strides[axis] = step
        step *= max(1, shape[axis])
    return tuple(strides)
