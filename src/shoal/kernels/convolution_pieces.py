"""A convolution and its gradients in pieces: the same bits with less scratch.

PyTorch's convolutions on the CPU may take a scratch of many times their tensors: 27 times the input of a small 3-D one
on a batch of one, which is unfolded for a matrix product, and two to three times in oneDNN, which converts tensors into
blocked layouts. A part of the result needs scratch only for that part. Samples are independent, and so are slabs along
the first spatial dimension with what the kernel reaches beyond them, and the channels of a weight's gradient.

For the gradient of a weight that is larger than the images it works on, the scratch may be several times the weight's
size (on processors without AVX-512: 72 MiB for the 9 MiB of 512 x 512 x 3 x 3, on two threads).

A piece may be computed by another kernel than the whole, so `choose` and `cut_of_large_weight` test on this machine,
with the same shapes, whether pieces repeat its bits and what they save.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import lru_cache
from math import prod
from typing import Any, NamedTuple

import torch
from torch import Tensor

from shoal.kernels.convolution import ConvOptions
from shoal.kernels.convolution import input_gradient as whole_input_gradient
from shoal.kernels.memory_format import dense_strides, suggested_memory_format
from shoal.kernels.pieces import (
    WORTH_PIECES_BYTES,
    Cut,
    are_sizes_known,
    bytes_of,
    described,
    drawn,
    have_same_bits,
    results_of,
    spans,
)
from shoal.lowlevel import allocations
from shoal.lowlevel.torch_internals import isolated

_aten = torch.ops.aten

_SAMPLES, _SLABS = 0, 2
_N_SLABS = (4, 8)
_N_CHANNEL_PIECES = (4, 8)  # with fewer channels at a time oneDNN slows down
_MAX_PIECES = 16  # on fewer channels at a time oneDNN slows down
_PIECES_A_THREAD = 2  # of a large weight: the scratch grows with the threads
_MIN_PIECES = 4
_WORTH_SHARE = 0.25  # of the scratch, to be saved
_DTYPES = (torch.float32, torch.float64, torch.bfloat16, torch.float16)


def forward(x: Tensor, weight: Tensor, bias: Tensor | None, *rest: Any) -> Tensor:
    """`aten.convolution` of the same arguments in that many pieces along `dim` of its result: 0, samples; 2, slabs.

    `rest`: options of the convolution, `dim`, and how many pieces.
    """
    *options, dim, pieces = rest
    given = ConvOptions(*options)
    length, window = x.shape[dim], _window(weight, given)
    if dim == _SLABS:
        step, pad, reach = window
        scattered = (length - 1) * step - 2 * pad + reach + 1 + given.output_padding[0]
        length = scattered if given.transposed else (length + 2 * pad - reach - 1) // step + 1

    def of(read: Tensor, _: int, own: ConvOptions) -> Tensor:
        result: Tensor = _aten.convolution(read, weight, bias, *own)
        return result

    return _in_pieces(x, length, dim, pieces, given, window, not given.transposed, of, bias)


def input_gradient(
    grad: Tensor, weight: Tensor, input_shape: Sequence[int], input_stride: Sequence[int], *rest: Any
) -> Tensor:
    """`convolution.input_gradient` of the same arguments in that many pieces along `dim`: 0, samples; 2, slabs.

    The input is contiguous or channels_last.
    """
    *options, dim, pieces = rest
    given = ConvOptions(*options)
    channels_last = tuple(input_stride) != dense_strides(input_shape, False)

    def of(read: Tensor, n: int, own: ConvOptions) -> Tensor:
        shape = [n if axis == dim else size for axis, size in enumerate(input_shape)]
        return whole_input_gradient(read, weight, shape, dense_strides(shape, channels_last), *own)

    return _in_pieces(grad, input_shape[dim], dim, pieces, given, _window(weight, given), given.transposed, of)


def weight_gradient(
    grad: Tensor, x: Tensor, weight: Tensor, bias_sizes: Sequence[int] | None, *rest: Any
) -> tuple[None, Tensor, Tensor | None]:
    """`aten.convolution_backward` of the same arguments, the channels along `dim` of the weight in that many pieces.

    Args:
        rest: options of the convolution, which is not grouped; which gradients are wanted, not that of the input;
            `dim`; and how many pieces.
    """
    *options, wanted, dim, pieces = rest
    transposed = ConvOptions(*options).transposed
    of_weight, of_bias = torch.empty_like(weight), grad.new_empty(grad.shape[1]) if wanted[2] else None
    of_results = (dim == 0) != transposed  # those channels are the result's, or the input's
    for some in spans(weight.shape[dim], pieces):
        read = (grad[:, some], x) if of_results else (grad, x[:, some])
        sizes = None if bias_sizes is None else [read[0].shape[1]]
        mask = [False, True, wanted[2] and (of_results or some.start == 0)]
        part = weight[some] if dim == 0 else weight[:, some]
        _, piece, bias = _aten.convolution_backward(*read, part, sizes, *options, mask)
        (of_weight[some] if dim == 0 else of_weight[:, some]).copy_(piece)
        if of_bias is not None and bias is not None:
            (of_bias[some] if of_results else of_bias).copy_(bias)
        del piece  # before the next is allocated
    return None, of_weight, of_bias


class _Window(NamedTuple):
    """Of a filter along the first spatial dimension; `reach`: to how many elements beyond the first."""

    step: int
    pad: int
    reach: int


def _window(weight: Tensor, options: ConvOptions) -> _Window:
    return _Window(options.stride[0], options.padding[0], (weight.shape[2] - 1) * options.dilation[0])


_Part = tuple[slice, Tensor]  # from where to where in the result


def _in_pieces(
    source: Tensor,
    length: int,
    dim: int,
    pieces: int,
    options: ConvOptions,
    window: _Window,
    gathers: bool,
    compute: Callable[[Tensor, int, ConvOptions], Tensor],
    fill: Tensor | None = None,
) -> Tensor:
    """A result of that many elements along `dim`.

    Args:
        source: what is read.
        gathers: whether each row of the result reads a window of rows; else each row that is read adds to one.
        compute: what is read, elements wanted along `dim`, and the options of a piece → the piece.
        fill: where no window adds to, by channels; None: zeros.
    """
    if dim == _SAMPLES:
        made = ((some, compute(source[some], _size(some), options)) for some in spans(length, pieces))
        return _joined(length, dim, made)

    def of_slab(read: Tensor, n: int, pad: int = 0) -> Tensor:
        more = read.shape[2] + 2 * pad - window.reach - 1 - (n - 1) * window.step if gathers else 0
        _, pads, _, transposed, extra, _ = options
        extra = [more, *extra[1:]] if transposed else extra
        return compute(read, n, options._replace(padding=[pad, *pads[1:]], output_padding=extra))

    parts = (_gathered if gathers else _scattered)(source, length, pieces, window, of_slab)
    return _joined(length, dim, parts, None if gathers else fill)


def _gathered(
    source: Tensor, length: int, pieces: int, window: _Window, compute: Callable[[Tensor, int, int], Tensor]
) -> Iterator[_Part]:
    """Slabs of a result of which each row reads a window of rows. `compute`: rows read, rows wanted, padding → rows."""
    step, pad, reach = window
    n_rows = source.shape[2]
    for made in spans(length, pieces):
        begin, end = made.start, made.stop
        first, stop = begin * step - pad, (end - 1) * step - pad + reach + 1
        if first >= 0 and stop <= n_rows:
            yield made, compute(source[:, :, first:stop], end - begin, 0)
            continue
        # At an edge the convolution pads by itself, on both sides: rows besides are computed and dropped.
        start = max(0, min(begin - -(-pad // step), (n_rows - 1) // step))
        read = source[:, :, start * step : max(start * step + 1, stop)]
        some = compute(read, (read.shape[2] + 2 * pad - reach - 1) // step + 1, pad)
        yield made, some[:, :, begin - start : end - start]
        del some  # before the next is allocated


def _scattered(
    source: Tensor, length: int, pieces: int, window: _Window, compute: Callable[[Tensor, int], Tensor]
) -> Iterator[_Part]:
    """Slabs of a result to which each row read adds a window of rows. `compute`: rows read, rows wanted → rows.

    What no window covers is left out. The first slab reads something: the padding is not larger than the reach.
    """
    step, pad, reach = window
    for made in spans(length, pieces):
        start = max(0, -(-(made.start + pad - reach) // step))
        beyond = min(source.shape[2], (made.stop - 1 + pad) // step + 1)
        if beyond <= start:  # between the windows
            continue
        first, stop = start * step - pad, (beyond - 1) * step - pad + reach + 1
        some = compute(source[:, :, start:beyond], stop - first)
        inner, outer = max(made.start, first), min(made.stop, stop)
        yield slice(inner, outer), some[:, :, inner - first : outer - first]
        del some  # before the next is allocated


def _joined(length: int, dim: int, parts: Iterator[_Part], fill: Tensor | None = None) -> Tensor:
    """The result of that many elements along `dim`, in order; between its parts, `fill` by channels, or zeros."""
    out: Tensor | None = None
    done = 0

    def leave_out(upto: int) -> None:
        assert out is not None
        gap = out.narrow(dim, done, upto - done)
        if fill is None:
            gap.zero_()
        else:
            gap.copy_(fill.view(-1, *[1] * (gap.dim() - 2)).expand_as(gap))

    for some, part in parts:
        out = _empty(part, dim, length) if out is None else out
        leave_out(some.start)
        out.narrow(dim, some.start, _size(some)).copy_(part)
        done = some.stop
        del part  # before the next is allocated
    leave_out(length)
    assert out is not None
    return out


def choose(whole: Callable[..., Any], arguments: Sequence[Any]) -> Cut | None:
    """How a convolution or one of its gradients is best cut into pieces; None: not at all.

    It is cut where its scratch is at least the bytes of its result and 4 MiB, pieces repeat its bits on this machine
    with these shapes, and save a quarter of the scratch; of several ways, the one that needs least.

    Args:
        whole: `aten.convolution.default`, `convolution.input_gradient` or `aten.convolution_backward.default` for the
            weight's gradient.
        arguments: its arguments. Tensors may be fake: only their shapes, strides, dtypes and devices are read.

    Returns:
        What `IN_PIECES[whole]` takes besides, and what that saves.
    """
    tensors = [value for value in arguments if isinstance(value, Tensor)]
    if not are_sizes_known(*tensors):
        return None
    if any(tensor.device.type != "cpu" or tensor.dtype not in _DTYPES for tensor in tensors):
        return None
    key = described(arguments)
    return allocations.unprofiled(lambda: _best_cut(whole, key, tuple(_ways(whole, key)), torch.get_num_threads()))


def cut_of_large_weight(grad: Tensor, x: Tensor, weight: Tensor, *options: Any) -> Cut | None:
    """How the gradient of a weight is cut that is larger than the images; None: not at all.

    It is wherever that saves the bytes of the result and repeats the bits; whether or not the op sets a peak.

    Args:
        grad, x, weight, options: of `aten.convolution_backward`. Tensors may be fake, as for `choose`.
    """
    tensors = (grad, x, weight)
    transposed, _, groups, wanted = options[-4:]
    if transposed or groups != 1 or not wanted[1] or not are_sizes_known(*tensors):
        return None
    if any(tensor.dtype != weight.dtype or tensor.device.type != "cpu" for tensor in tensors):
        return None
    if bytes_of(weight) < max(WORTH_PIECES_BYTES, bytes_of(grad), bytes_of(x)):
        return None
    threads = torch.get_num_threads()
    ways = ((0, max(_MIN_PIECES, min(_MAX_PIECES, _PIECES_A_THREAD * threads))),)
    key = described((*tensors, *options))
    cut = allocations.unprofiled(lambda: _best_cut(_aten.convolution_backward.default, key, ways, threads))
    return cut if cut is not None and cut.saved_bytes >= bytes_of(weight) else None


def may_be_worth_pieces(x: Tensor, weight: Tensor, result: Tensor) -> bool:
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


@lru_cache(maxsize=1024)
def _best_cut(
    whole: Callable[..., Any], key: tuple[Any, ...], ways: tuple[tuple[int, int], ...], n_threads: int
) -> Cut | None:
    del n_threads  # kernels and scratches differ by it, so it is part of the key
    if not ways:
        return None
    best: Cut | None = None
    with isolated(torch.device("cpu")):
        arguments = drawn(key, torch.device("cpu"))
        expected, changes = allocations.record(lambda: results_of(whole(*arguments)))
        result_bytes = sum(result.nbytes for result in expected)
        whole_bytes = allocations.peak_bytes(changes)
        scratch_bytes = whole_bytes - result_bytes
        if scratch_bytes < max(result_bytes, WORTH_PIECES_BYTES):
            return None
        least_saved_bytes = _WORTH_SHARE * scratch_bytes
        for way in ways:
            found, changes = allocations.record(lambda way=way: results_of(IN_PIECES[whole](*arguments, *way)))  # type: ignore[misc]
            saved_bytes = whole_bytes - allocations.peak_bytes(changes)
            if have_same_bits(found, expected) and saved_bytes > least_saved_bytes:
                best, least_saved_bytes = Cut(*way, saved_bytes), saved_bytes
    return best


def _ways(whole: Callable[..., Any], key: tuple[Any, ...]) -> Iterator[tuple[int, int]]:
    if whole is _aten.convolution_backward.default:
        weight, groups, wanted = (key[place] for place in (2, 9, 10))
        if groups == 1 and not wanted[0] and wanted[1]:
            yield from ((dim, n) for dim in (0, 1) for n in _N_CHANNEL_PIECES if weight.shape[dim] >= n)
        return
    shape = key[2] if whole is whole_input_gradient else key[0].shape
    weight, padding, dilation = key[1], key[-5], key[-4]
    if len(shape) != len(weight.shape) or 0 in shape:
        return
    if shape[0] > 1:
        yield _SAMPLES, min(shape[0], _MAX_PIECES)
    reach = (weight.shape[2] - 1) * dilation[0]
    for pieces in _N_SLABS if padding[0] <= reach else ():
        if shape[2] // pieces >= max(1, reach):  # what slabs share is computed twice
            yield _SLABS, pieces


def _size(some: slice) -> int:
    return int(some.stop - some.start)


def _empty(piece: Tensor, dim: int, length: int) -> Tensor:
    """Room for a result of that many elements along `dim`, laid out as its piece is."""
    shape = list(piece.shape)
    shape[dim] = length
    return piece.new_empty_strided(
        shape, dense_strides(shape, suggested_memory_format(piece) is not torch.contiguous_format)
    )
