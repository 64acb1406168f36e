"""Batch norm's gradient in fewer bytes and the same bits: in place.

PyTorch's backward kernel for the CPU allocates the gradient twice. It is called for the two sums only, which allocates
nothing, and in channels_last the rest is elementwise over the incoming gradient: one native sweep for float32, and for
bfloat16 under autocast (`csrc/gradient_sweeps.cpp`), else, where all is of one dtype, in pieces. In the contiguous
layout the kernel rounds its sums later than it returns them; channels are independent there, so it runs on a few of
them at a time. `backward_repeats_bits` tests on this machine that the bits are the same.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Sequence
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor

from shoal.codecs.launch import threads_for
from shoal.kernels import pieces
from shoal.kernels.memory_format import are_channels_last
from shoal.kernels.pieces import TensorLayout, drawn, have_same_bits, of_odd_size, tiles
from shoal.lowlevel import native
from shoal.lowlevel.dispatch import DispatchedOp, Implementation, allowed, choose, level_number, register
from shoal.lowlevel.torch_internals import isolated

_CHANNELS_ELEMS = 1 << 19  # 2 MiB of float32, of a piece that is copied out and back; but no less than 16 pieces
_MIN_PIECES = 16
_NATIVE = (torch.float32, torch.bfloat16)
_MIN_ELEMS = 1 << 15  # of a thread that is worth waking
_CANCELLING_TRIALS = 16  # with two channels, half of them tell one arithmetic from the other

Gradients = tuple[Tensor, Tensor, Tensor]  # of input, weight and bias
Gradient = Callable[..., Gradients]


def backward(
    grad: Tensor, x: Tensor, weight: Tensor | None, mean: Tensor, invstd: Tensor
) -> tuple[Tensor, Tensor | None, Tensor | None]:
    """Batch norm's backward in training mode, channels_last or contiguous: gradients of input, weight and bias.

    Without a weight the last two are None.
    """
    if weight is None:  # a product with 1 has the bits of the other factor
        return backward(grad, x, torch.ones_like(mean), mean, invstd)[0], None, None
    run = choose(_GRADIENT, grad, x, weight)
    if run is _native:
        return _native(grad, x, weight, mean, invstd, torch.empty_like(grad, memory_format=torch.preserve_format))
    of_input = grad.clone(memory_format=torch.preserve_format)
    return run(of_input, x, weight, mean, invstd, of_input)


def backward_(
    grad: Tensor, x: Tensor, weight: Tensor | None, mean: Tensor, invstd: Tensor
) -> tuple[Tensor, Tensor | None, Tensor | None]:
    """`backward` that writes the gradient of the input over `grad`."""
    if weight is None:
        return backward_(grad, x, torch.ones_like(mean), mean, invstd)[0], None, None
    return choose(_GRADIENT, grad, x, weight)(grad, x, weight, mean, invstd, grad)


def resolved_backward(grad: Tensor, x: Tensor, weight: Tensor | None, *, overwrite: bool = False) -> Gradient | None:
    """`backward` of tensors in these layouts, which may be fake: calls of it need not look at them again.

    Args:
        overwrite: `backward_` instead.

    Returns:
        It, with the kernel that SHOAL_KERNELS lets run now; None where that is not a native one.
    """
    if weight is None or choose(_GRADIENT, grad, x, weight) is not _native:
        return None
    call = _native_of(x)

    def resolved(grad: Tensor, *others: Tensor) -> Gradients:
        return call(grad, *others, grad if overwrite else torch.empty_like(grad))

    return resolved


def _in_pieces(grad: Tensor, x: Tensor, *others: Tensor) -> Gradients:
    """`backward_` of weight, mean, invstd and where the gradient of the input is written, which is `grad`."""
    weight, mean, invstd, of_input = others
    if x.shape[2:].numel() == 1:  # PyTorch adds single pixels up in another order on a few channels than on all
        return _whole_backward(grad, x, weight, mean, invstd)
    if x.is_contiguous() and grad.is_contiguous():
        return _backward_by_channels(grad, x, weight, mean, invstd, min(_CHANNELS_ELEMS, x.numel() // _MIN_PIECES))
    if not are_channels_last(grad, x) or weight.dtype != x.dtype:  # in bfloat16 each piece would be rounded five times
        return _whole_backward(grad, x, weight, mean, invstd)
    _, of_weight, of_bias = _whole_backward(grad, x, weight, mean, invstd, of_input=False)
    rows = x.numel() // x.shape[1]
    mean_grad, projection = of_bias / rows, of_weight * invstd / rows
    # As matrices: over pixels as they lie, PyTorch's loops may round otherwise.
    for of_some, some in tiles(*(tensor.movedim(1, -1).view(rows, -1) for tensor in (grad, x))):
        of_some.sub_(mean_grad).addcmul_(some - mean, projection, value=-1).mul_(invstd).mul_(weight)
    return of_input, of_weight, of_bias


class _NormGradient(ctypes.Structure):
    """ShoalNormGradient of csrc/shoal_native.h."""

    _fields_ = native.fields(
        "int64 rows channels, int32 bfloat16 fused threads level,"
        "pointer grad x mean invstd weight of_weight of_bias scratch result"
    )


def _native_applies(grad: Tensor, x: Tensor, weight: Tensor) -> bool:
    if native.library() is None or x.dtype not in _NATIVE or weight.dtype != torch.float32 or not x.is_cpu:
        return False
    if grad.shape != x.shape or grad.dtype != x.dtype or x.is_contiguous() or not are_channels_last(grad, x):
        return False
    return _native_arithmetic(x.dtype, x.shape[1], allowed().level) is not None


def _native(grad: Tensor, x: Tensor, *others: Tensor) -> Gradients:
    return _native_of(x)(grad, x, *others)


def _native_of(x: Tensor) -> Gradient:
    return _native_call(x, bool(_native_arithmetic(x.dtype, x.shape[1], allowed().level)))


def _native_call(x: Tensor, fused: bool) -> Gradient:
    """The native kernel for inputs like `x`: of gradient, input, weight, mean, inverse deviation and where to write."""
    library = native.library()
    assert library is not None
    sweep = library.shoal_norm_gradient
    sweep.restype = None
    elems, channels, is_bfloat16, level = x.numel(), x.shape[1], x.dtype == torch.bfloat16, level_number()
    rows = elems // channels

    def run(grad: Tensor, x: Tensor, *others: Tensor) -> Gradients:
        weight, mean, invstd, of_input = others
        _, of_weight, of_bias = _whole_backward(grad, x, weight, mean, invstd, of_input=False)
        scratch = mean.new_empty((2, channels))
        threads = threads_for(elems, _MIN_ELEMS)
        addresses = [t.data_ptr() for t in (grad, x, mean, invstd, weight, of_weight, of_bias, scratch, of_input)]
        sweep(ctypes.byref(_NormGradient(rows, channels, is_bfloat16, fused, threads, level, *addresses)))
        return of_input, of_weight, of_bias

    return run


@lru_cache(maxsize=1024)
def _native_arithmetic(dtype: torch.dtype, channels: int, level: str | None) -> bool | None:
    """Whether PyTorch's kernel leaves a product unrounded here; None if neither gives its bits."""
    del level  # is part of the key
    cpu = torch.device("cpu")
    with isolated(cpu):
        trials = [drawn(_operands(dtype, torch.float32, 4, channels, True), cpu)]
        trials += [_cancelling(dtype, channels, seed) for seed in range(_CANCELLING_TRIALS)]

        def repeats(fused: bool) -> bool:
            return all(
                have_same_bits(
                    _native_call(trial[0], fused)(*trial, torch.empty_like(trial[0])), _whole_backward(*trial)
                )
                for trial in trials
            )

        return next((fused for fused in (False, True) if repeats(fused)), None)


def _cancelling(dtype: torch.dtype, channels: int, seed: int) -> list[Tensor]:
    """Operands of the backward pass of two pixels, channels_last, whose gradient is all but zero.

    The rounding of a product is most of what is left then. In bfloat16 it is hardly ever seen otherwise.
    """
    generator = torch.Generator().manual_seed(seed)
    grad, x = (torch.randn(1, 1, 2, channels, generator=generator).to(dtype).movedim(3, 1) for _ in range(2))
    weight = torch.randn(channels, generator=generator)
    _, mean, invstd = torch.ops.aten._native_batch_norm_legit.no_stats(x, weight, weight, True, 0.1, 1e-5)
    return [grad, x, weight, mean, invstd]


def _backward_by_channels(
    grad: Tensor, x: Tensor, weight: Tensor, mean: Tensor, invstd: Tensor, piece_elems: int
) -> Gradients:
    channels = x.shape[1]
    step = max(1, piece_elems // (x.numel() // channels))
    if step >= channels:
        return _whole_backward(grad, x, weight, mean, invstd)

    def of(some: slice) -> Gradients:
        copies = grad[:, some].contiguous(), x[:, some].contiguous()
        return _whole_backward(*copies, weight[some], mean[some], invstd[some])

    return by_channels(grad, mean, [True, True, True], -(-channels // step), of)


def by_channels(grad: Tensor, like: Tensor, wanted: Sequence[bool], count: int, of: Any) -> Any:
    """Gradients of input, weight and bias in so many pieces of the channels, the first written over `grad`.

    Args:
        grad: of the result, (N, C, ...).
        like: as the gradients of weight and bias, (C,).
        wanted: which of the three; the first is.
        count: of pieces.
        of: the gradients of some channels, given a slice.
    """
    of_layer = [torch.empty_like(like) if asked else None for asked in wanted[1:]]
    for some in pieces.spans(grad.shape[1], count):
        of_input, *of_some = of(some)
        grad[:, some].copy_(of_input)
        for whole, part in zip(of_layer, of_some, strict=True):
            if whole is not None and part is not None:
                whole[some].copy_(part)
        del of_input  # before the next is allocated
    return grad, *of_layer


def _whole_backward(
    grad: Tensor, x: Tensor, weight: Tensor, mean: Tensor, invstd: Tensor, *, of_input: bool = True
) -> Gradients:
    whole: Gradients = torch.ops.aten.native_batch_norm_backward.default(
        grad, x, weight, None, None, mean, invstd, True, 0.0, [of_input, True, True]
    )
    return whole


def backward_repeats_bits(
    dtype: torch.dtype, weight_dtype: torch.dtype, device: torch.device, dims: int, channels: int, channels_last: bool
) -> bool:
    """Whether `backward` gives the bits of batch norm's backward in place here, found out on random data of odd size.

    `weight_dtype` is that of weight and statistics: float32 where autocast made `dtype` another.
    """
    operands = _operands(dtype, weight_dtype, dims, channels, channels_last)
    if not channels_last:
        return pieces.repeats_bits(_whole_backward, _backward_by_two_channels, operands, device=device)
    with isolated(device):
        is_native = choose(_GRADIENT, *drawn(operands[:3], device)) is _native
    if weight_dtype != dtype and not is_native:
        return False
    return pieces.repeats_bits(_whole_backward, backward, operands, device=device)


def _backward_by_two_channels(grad: Tensor, *others: Any) -> Gradients:
    x, weight, mean, invstd = others
    return _backward_by_channels(grad.clone(), x, weight, mean, invstd, 2 * grad.numel() // grad.shape[1])


def _operands(
    dtype: torch.dtype, weight_dtype: torch.dtype, dims: int, channels: int, channels_last: bool
) -> tuple[TensorLayout, ...]:
    """What batch norm's backward reads: gradient, input, weight, mean and inverse deviation."""
    x, vector = of_odd_size(dtype, dims, channels, channels_last), TensorLayout((channels,), (1,), weight_dtype)
    return x, x, vector, vector, vector


_GRADIENT: DispatchedOp[Gradient] = register(
    "batch_norm_gradient", _in_pieces, Implementation("native", _native, _native_applies)
)
