"""A convolution's gradients in fewer bytes and the same bits: of its input without it, of its weight in pieces.

PyTorch's `convolution_backward` takes the input even for the input's gradient only, for which only its shape and
strides matter. On the CPU an anonymous mapping that is never touched, so that it takes no memory, stands in for it, and
the input can be freed before its gradient is allocated. On CUDA one element does that is expanded to the shape, as in
`torch.nn.grad`; where its layout would choose another one for the kernel, the input stays.

For the gradient of a weight that is larger than the images it works on, oneDNN may take a scratch of several times the
weight's size (on processors without AVX-512: 72 MiB for the 9 MiB of 512 x 512 x 3 x 3, on two threads). Output
channels are independent, so a few at a time need scratch for those few. `weight_gradient_pieces` tests on this
machine, with the same shapes, whether that gives the same bits and pays.
"""

from __future__ import annotations

import mmap
from collections.abc import Callable, Sequence
from functools import lru_cache
from math import prod
from typing import Any, NamedTuple

import torch

from shoal.kernels.memory_format import channels_last_format, suggested_memory_format
from shoal.kernels.pieces import WORTH_PIECES_BYTES, are_sizes_known, have_same_bits
from shoal.lowlevel import allocations
from shoal.lowlevel.torch_internals import isolated

_convolution: Any = torch.convolution
_gradients: Any = torch.ops.aten.convolution_backward.default
_OF_INPUT = (True, False, False)
_Layout = tuple[tuple[int, ...], tuple[int, ...]]  # shape, strides

_PIECES_A_THREAD = 2  # the scratch grows with the threads
_MIN_PIECES = 4
_MAX_PIECES = 16  # on fewer channels at a time oneDNN slows down


class ConvOptions(NamedTuple):
    """What `aten.convolution` takes after its bias."""

    stride: Sequence[int]
    padding: Sequence[int]
    dilation: Sequence[int]
    transposed: bool
    output_padding: Sequence[int]
    groups: int


def input_gradient(
    grad: torch.Tensor, weight: torch.Tensor, input_shape: Sequence[int], input_stride: Sequence[int], *options: Any
) -> torch.Tensor:
    """`aten.convolution_backward(grad, input, weight, ..., [True, False, False])[0]` without `input`.

    On the CPU a tensor that takes no memory stands in for it. cuDNN's gradient is a convolution the other way, which is
    asked for by that name: where strides of a stand-in are 0, PyTorch copies `grad` to another layout, and back.
    """
    shape = tuple(input_shape)
    stride, padding, dilation, transposed, _, groups = options
    if not grad.is_cpu and groups == 1:
        turned = _turned(shape, weight.shape, *map(tuple, (grad.shape, stride, padding, dilation)), transposed)
        if turned is not None and torch.backends.cudnn.enabled:
            return _convolution(grad, weight, None, stride, padding, dilation, not transposed, turned, 1)
    unread = (
        _unread(shape, tuple(input_stride), grad.dtype) if grad.is_cpu else grad.as_strided(shape, (0,) * len(shape))
    )
    gradient: torch.Tensor = _gradients(grad, unread, weight, None, *options, _OF_INPUT)[0]
    return gradient


def resolved_input_gradient(
    grad: torch.Tensor, weight: torch.Tensor, input_shape: Sequence[int], input_stride: Sequence[int], *options: Any
) -> Callable[..., torch.Tensor] | None:
    """`input_gradient` of tensors in these layouts, which may be fake, with what stands in for the input made once.

    Returns:
        It; None on another device than the CPU.
    """
    if not grad.is_cpu:
        return None
    unread = _unread(tuple(input_shape), tuple(input_stride), grad.dtype)

    def resolved(grad: torch.Tensor, weight: torch.Tensor, *_: Any) -> torch.Tensor:
        return _gradients(grad, unread, weight, None, *options, _OF_INPUT)[0]

    return resolved


@lru_cache(maxsize=4096)
def _turned(
    shape: tuple[int, ...],
    weight_shape: tuple[int, ...],
    grad_shape: tuple[int, ...],
    stride: tuple[int, ...],
    padding: tuple[int, ...],
    dilation: tuple[int, ...],
    transposed: bool,
) -> tuple[int, ...] | None:
    """The output padding with which the convolution the other way has results of this shape; None: with none has it."""
    axes = zip(shape[2:], grad_shape[2:], weight_shape[2:], stride, padding, dilation, strict=True)
    extra = []
    for size, given, kernel, step, pad, spread in axes:
        reach = spread * (kernel - 1) + 1
        if transposed:
            extra.append(size - ((given + 2 * pad - reach) // step + 1))
        else:
            extra.append(size - ((given - 1) * step - 2 * pad + reach))
    fits = not any(extra) if transposed else all(0 <= more < step for more, step in zip(extra, stride, strict=True))
    return tuple(extra) if fits and 0 not in grad_shape else None


def can_do_without_input(
    grad: torch.Tensor, x: torch.Tensor, weight: torch.Tensor, groups: int, *, on_cpu: bool
) -> bool:
    """Whether `input_gradient` gives what PyTorch's gradient of an input of this layout would be; all may be fake.

    Args:
        on_cpu: whether it runs on the CPU of this machine.

    >>> x = torch.ones(2, 3, 8, 8).contiguous(memory_format=torch.channels_last)
    >>> grad, weight = torch.ones(2, 4, 8, 8), torch.ones(4, 3, 1, 1)
    >>> can_do_without_input(grad, x, weight, 1, on_cpu=False)  # x only says that it is channels_last
    False
    >>> can_do_without_input(grad.contiguous(memory_format=torch.channels_last), x, weight, 1, on_cpu=False)
    True
    """
    has_format = x.dim() > 3 and x.is_contiguous(memory_format=channels_last_format(x.dim()))
    if not x.is_contiguous() and not has_format:
        return False
    told = (grad, weight) if groups == 1 else (weight,)
    return on_cpu or suggested_memory_format(x, weight) == suggested_memory_format(*told)


def weight_gradient(
    grad: torch.Tensor, x: torch.Tensor, weight: torch.Tensor, bias_sizes: Sequence[int] | None, *rest: Any
) -> tuple[None, torch.Tensor, torch.Tensor | None]:
    """`aten.convolution_backward` of the same arguments, the channels along `dim` of the weight in that many pieces.

    Args:
        rest: options of the convolution, which is not grouped; which gradients are wanted, not that of the input; how
            many pieces; and `dim`, if not 0.
    """
    *options, wanted, pieces, dim = rest if len(rest) > len(ConvOptions._fields) + 2 else (*rest, 0)
    transposed = ConvOptions(*options).transposed
    of_weight, of_bias = torch.empty_like(weight), grad.new_empty(grad.shape[1]) if wanted[2] else None
    of_results = (dim == 0) != transposed  # those channels are the result's, or the input's
    step = -(-weight.shape[dim] // pieces)
    for begin in range(0, weight.shape[dim], step):
        some = slice(begin, begin + step)
        read = (grad[:, some], x) if of_results else (grad, x[:, some])
        sizes = None if bias_sizes is None else [read[0].shape[1]]
        mask = [False, True, wanted[2] and (of_results or begin == 0)]
        part = weight[some] if dim == 0 else weight[:, some]
        _, piece, bias = torch.ops.aten.convolution_backward(*read, part, sizes, *options, mask)
        (of_weight[some] if dim == 0 else of_weight[:, some]).copy_(piece)
        if of_bias is not None and bias is not None:
            (of_bias[some] if of_results else of_bias).copy_(bias)
        del piece  # before the next is allocated
    return None, of_weight, of_bias


def weight_gradient_pieces(grad: torch.Tensor, x: torch.Tensor, weight: torch.Tensor, *options: Any) -> int | None:
    """Into how many pieces `weight_gradient` of these arguments is best cut; None: none.

    Tensors may be fake: only their shapes, strides, dtypes and devices are read; `options` are the arguments of
    `weight_gradient` from `bias_sizes` to `wanted`. Pieces repeat the bits of the whole here and save at least the
    bytes of the result.
    """
    tensors = (grad, x, weight)
    transposed, _, groups, wanted = options[-4:]
    if transposed or groups != 1 or not wanted[1] or not are_sizes_known(*tensors):
        return None
    if any(tensor.dtype != weight.dtype or tensor.device.type != "cpu" for tensor in tensors):
        return None
    grad_bytes, x_bytes, weight_bytes = (prod(tensor.shape) * tensor.dtype.itemsize for tensor in tensors)
    if weight_bytes < max(WORTH_PIECES_BYTES, grad_bytes, x_bytes):
        return None
    layouts = tuple((tuple(tensor.shape), tensor.stride()) for tensor in tensors)
    frozen = tuple(tuple(option) if isinstance(option, Sequence) else option for option in options)
    pieces = max(_MIN_PIECES, min(_MAX_PIECES, _PIECES_A_THREAD * torch.get_num_threads()))
    same = allocations.unprofiled(lambda: _pieces_repeat_bits(layouts, weight.dtype, frozen, pieces))
    return pieces if same else None


@lru_cache(maxsize=1024)
def _pieces_repeat_bits(
    layouts: tuple[_Layout, ...], dtype: torch.dtype, options: tuple[Any, ...], pieces: int
) -> bool:
    with isolated(torch.device("cpu")):
        operands = [draw(seed, layout, dtype) for seed, layout in enumerate(layouts)]
        arguments: tuple[Any, ...] = (*operands, *options)
        whole, changes = allocations.record(lambda: torch.ops.aten.convolution_backward(*arguments))
        cut, fewer_changes = allocations.record(lambda: weight_gradient(*(*arguments, pieces)))
        saved_bytes = allocations.peak_bytes(changes) - allocations.peak_bytes(fewer_changes)
        return saved_bytes >= operands[2].nbytes and have_same_bits(cut[1:], whole[1:])


def draw(seed: int, layout: _Layout, dtype: torch.dtype) -> torch.Tensor:
    shape, stride = layout
    memory = torch.empty(_span_elems(shape, stride), dtype=dtype)
    return memory.normal_(generator=torch.Generator().manual_seed(seed)).as_strided(shape, stride)


@lru_cache(maxsize=4096)
def _unread(shape: tuple[int, ...], stride: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
    """A tensor of that shape and layout that takes no memory as long as no one writes to it; it reads as zeros."""
    if 0 in shape:  # of an empty batch; no map is of zero bytes
        return torch.empty_strided(shape, stride, dtype=dtype)
    pages = mmap.mmap(-1, _span_elems(shape, stride) * dtype.itemsize, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    return torch.frombuffer(pages, dtype=dtype).as_strided(shape, stride)


def _span_elems(shape: Sequence[int], stride: Sequence[int]) -> int:
    return 0 if 0 in shape else 1 + sum((size - 1) * step for size, step in zip(shape, stride, strict=True))
