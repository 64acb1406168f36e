"""Backward of ReLU and leaky ReLU from one byte per element, and an encoded ReLU's bits of where its gradient is zero.

Native for float32 on the CPU (`csrc/gradient_sweeps.cpp`): one sweep that reads the bytes as they are. The references
are PyTorch's ops on a piece at a time, for its own kernel would first turn a whole mask into floats; the same bits.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from shoal.codecs.launch import are_here, threads_for
from shoal.codecs.tables import SIGN
from shoal.kernels.pieces import span_elems
from shoal.lowlevel import native
from shoal.lowlevel.dispatch import DispatchedOp, Implementation, choose, level_number, register

_aten = torch.ops.aten
_PIECE_ELEMS = 1 << 18
_SIGN_PIECE_ELEMS = 1 << 16
_MIN_ELEMS = 1 << 15  # of a thread that is worth waking


def backward(grad: Tensor, positive: Tensor) -> Tensor:
    """`grad` where `positive`, zero elsewhere; both (N, ...) of one shape and layout."""
    return where_above(grad, positive.view(torch.uint8), 0)


def backward_(grad: Tensor, positive: Tensor) -> Tensor:
    """`backward` that writes over `grad`."""
    return where_above_(grad, positive.view(torch.uint8), 0)


def zeroed(grad: Tensor, where: Tensor) -> Tensor:
    """`grad`, zero where `where`; laid out as it, while `masked_fill` returns a contiguous tensor."""
    if grad.stride() != where.stride():
        # The library decides the layout of the result, as it does for the plain network.
        return _aten.threshold_backward(grad, where.logical_not().view(torch.uint8), 0)
    return grad.clone().masked_fill_(where, 0)


def zeroed_(grad: Tensor, where: Tensor) -> Tensor:
    """`zeroed` that writes over `grad`."""
    return grad.masked_fill_(where, 0)


def leaky_backward(grad: Tensor, positive: Tensor, slope: float) -> Tensor:
    """`grad` where `positive`, `slope` times it elsewhere; both (N, ...) of one shape."""
    return _gated(_aten.leaky_relu_backward, grad, positive.view(torch.uint8), None, slope, True)


def leaky_backward_(grad: Tensor, positive: Tensor, slope: float) -> Tensor:
    """`leaky_backward` that writes over `grad`."""
    return _gated(_aten.leaky_relu_backward, grad, positive.view(torch.uint8), grad, slope, True)


def where_above(grad: Tensor, mask: Tensor, threshold: int) -> Tensor:
    """`grad` where `mask`, bytes of its shape, is above `threshold`; zero elsewhere."""
    return _gated(_aten.threshold_backward, grad, mask, None, threshold)


def where_above_(grad: Tensor, mask: Tensor, threshold: int) -> Tensor:
    """`where_above` that writes over `grad`."""
    return _gated(_aten.threshold_backward, grad, mask, grad, threshold)


def _gated(op: Any, grad: Tensor, mask: Tensor, over: Tensor | None, *numbers: float) -> Tensor:
    """PyTorch's backward op of a gradient and what was activated, which `mask` is, in a new tensor or over `grad`."""
    if not _lie_alike(grad, mask):
        # The library decides the layout of the result, as it does for the plain network.
        return op(grad, mask, *numbers) if over is None else op.grad_input(grad, mask, *numbers, grad_input=over)
    result = torch.empty_like(grad, memory_format=torch.preserve_format) if over is None else over
    choose(_GATE, op, grad, mask)(op, grad, mask, result, *numbers)
    return result


def _gate_in_pieces(op: Any, *tensors: Any) -> None:
    """Write into the third of them, which may be the first; all of one layout that fills its block."""
    *flat, result = (tensor.as_strided((tensor.numel(),), (1,)) for tensor in tensors[:3])
    step = _PIECE_ELEMS if result.is_cpu else max(1, result.numel())
    for start in range(0, result.numel(), step):
        some = slice(start, start + step)
        op.grad_input(*(tensor[some] for tensor in flat), *tensors[3:], grad_input=result[some])


def _native_gate_applies(op: Any, grad: Tensor, mask: Tensor) -> bool:
    known = op is _aten.threshold_backward and grad.dtype == torch.float32 and mask.dtype == torch.uint8
    return known and grad.is_cpu and native.library() is not None


def _native_gate(op: Any, grad: Tensor, mask: Tensor, result: Tensor, threshold: int) -> None:
    native.run_on_numbers(
        *("shoal_gate", "pointer grad gates, int32 above, int64 elements, int32 threads level, pointer result"),
        *(grad.data_ptr(), mask.data_ptr(), threshold, grad.numel()),
        *(threads_for(grad.numel(), _MIN_ELEMS), level_number(), result.data_ptr()),
    )


def _lie_alike(tensor: Tensor, mask: Tensor) -> bool:
    """Whether both have the same strides, and fill their blocks."""
    return tensor.stride() == mask.stride() and span_elems(tensor.shape, tensor.stride()) == tensor.numel()


def note_closed(x: Tensor, codes: Tensor, above: float) -> None:
    """Set the sign bit where the value lets no gradient through, and clear it elsewhere. NaN lets it through.

    Args:
        x: (n,) dense, what a ReLU gave that is clipped at `above` (infinity: not clipped).
        codes: (n,) uint8, dense, of `x`; their sign bits are written.
        above: where the ReLU is clipped.
    """
    choose(_SIGNS, x, codes)(x, codes, above)


def _note_in_pieces(x: Tensor, codes: Tensor, above: float) -> None:
    closed = torch.empty(min(_SIGN_PIECE_ELEMS, x.numel()), dtype=torch.bool, device=x.device)
    clipped = torch.empty_like(closed) if math.isfinite(above) else None
    for start in range(0, x.numel(), _SIGN_PIECE_ELEMS):
        piece, code = x[start : start + _SIGN_PIECE_ELEMS], codes[start : start + _SIGN_PIECE_ELEMS]
        shut = closed[: piece.numel()]
        torch.le(piece, 0, out=shut)
        if clipped is not None:
            shut.logical_or_(torch.ge(piece, above, out=clipped[: piece.numel()]))
        code.bitwise_and_(SIGN - 1).bitwise_or_(shut.view(torch.uint8).mul_(SIGN))


def _native_note_applies(x: Tensor, codes: Tensor) -> bool:
    return x.dtype == torch.float32 and codes.dtype == torch.uint8 and x.numel() == codes.numel() and are_here(x, codes)


def _native_note(x: Tensor, codes: Tensor, above: float) -> None:
    native.run_on_numbers(
        *("shoal_note_closed", "pointer x, int64 elements, float above, int32 threads level, pointer codes"),
        *(x.data_ptr(), x.numel(), above if math.isfinite(above) else math.nan),  # NaN: which nothing reaches
        *(threads_for(x.numel(), _MIN_ELEMS), level_number(), codes.data_ptr()),
    )


_GATE: DispatchedOp[Callable[..., None]] = register(
    "relu_gate", _gate_in_pieces, Implementation("native", _native_gate, _native_gate_applies)
)
_SIGNS = register("relu_sign_bits", _note_in_pieces, Implementation("native", _native_note, _native_note_applies))
