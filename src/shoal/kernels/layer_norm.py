"""Layer norm's gradient over the incoming one, with the bits of PyTorch's CPU kernel, which allocates it.

Rows are independent in the gradient of the input; those of weight and bias are asked for first, by themselves.
`backward_repeats_bits` tests on this machine that the bits are the same.
"""

from __future__ import annotations

from math import prod
from typing import Any

import torch
from torch import Tensor

from shoal.kernels.pieces import TensorLayout, repeats_bits

_PIECE_ELEMS = 1 << 18  # 1 MiB of float32: a piece stays in L2 until it is copied
_WHOLE = torch.ops.aten.native_layer_norm_backward
Gradients = tuple[Tensor, Tensor, Tensor]  # of input, weight and bias


def backward(grad: Tensor, *operands: Any) -> Gradients:
    """Layer norm's backward of contiguous tensors: gradients of input, weight and bias.

    Args:
        grad: (..., *shape).
        operands: x, like `grad`; shape, of what is normalised; mean and invstd, what the forward pass saved,
            (..., 1, ...); weight and bias, of that shape.
    """
    found: Gradients = _WHOLE(grad, *operands, [True, True, True])
    return found


def backward_(grad: Tensor, x: Tensor, *others: Any) -> Gradients:
    """`backward` that writes the gradient of the input over `grad`."""
    if not (grad.is_contiguous() and x.is_contiguous()):
        of_input, of_weight, of_bias = backward(grad, x, *others)
        return grad.copy_(of_input), of_weight, of_bias
    return _backward_in_pieces(grad, x, *others, _PIECE_ELEMS)


def _backward_in_pieces(grad: Tensor, x: Tensor, shape: list[int], *others: Any) -> Gradients:
    mean, invstd, weight, bias, piece_elems = others
    _, of_weight, of_bias = _WHOLE(grad, x, shape, mean, invstd, weight, bias, [False, True, True])
    rows = mean.numel()
    flat, x = grad.view(rows, *shape), x.view(rows, *shape)
    mean, invstd = (one.reshape(rows, *[1] * len(shape)) for one in (mean, invstd))
    step = max(1, piece_elems // max(1, prod(shape)))
    for start in range(0, rows, step):
        some = slice(start, start + step)
        operands = (flat[some], x[some], shape, mean[some], invstd[some], weight, bias)
        flat[some] = _WHOLE(*operands, [True, False, False])[0]
    return grad, of_weight, of_bias


def backward_repeats_bits(dtype: torch.dtype, weight_dtype: torch.dtype, normalised: int) -> bool:
    """Whether `backward_` gives the bits of layer norm's backward on this CPU, found out on random data of odd size.

    Args:
        dtype, weight_dtype: of input and weight.
        normalised: how many elements each row has.
    """
    rows, vector = 37, TensorLayout((normalised,), (1,), weight_dtype)
    x = TensorLayout((rows, normalised), (normalised, 1), dtype)
    statistics = TensorLayout((rows, 1), (1, 1), weight_dtype)
    arguments = (x, x, [normalised], statistics, statistics, vector, vector)
    return repeats_bits(backward, _backward_of_a_copy, arguments, 5 * normalised, device=torch.device("cpu"))


def _backward_of_a_copy(grad: Tensor, *operands: Any) -> Gradients:
    return _backward_in_pieces(grad.clone(), *operands)
