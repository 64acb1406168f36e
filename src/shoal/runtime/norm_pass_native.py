"""Native passes over whole channels_last tensors: statistics, normalise (+ residual, + ReLU), its gradient.

For a batch norm whose producer is no convolution or whose result others than one convolution read. Each reads and
writes every element once. float32, on the CPU; `pitch` says which layouts.
"""

from __future__ import annotations

import ctypes

import torch

from shoal.errors import InputError
from shoal.runtime.norm_rows import (
    bytes_of,
    empty_rows,
    in_rows,
    level_number,
    levels,
    pitch,
    place,
    run,
    vector,
    workspace,
)


class _Pass(ctypes.Structure):
    """ShoalNormPass of csrc/shoal_native.h."""

    _fields_ = (
        *((name, ctypes.c_int64) for name in ("rows", "channels")),
        *((name, ctypes.c_int32) for name in ("rectify", "accumulate", "threads", "level")),
        ("x", ctypes.c_void_p),
        ("ld_x", ctypes.c_int64),
        *((name, ctypes.c_void_p) for name in ("mean", "scale", "shift", "residual")),
        ("ld_residual", ctypes.c_int64),
        ("out", ctypes.c_void_p),
        ("ld_out", ctypes.c_int64),
        ("grad", ctypes.c_void_p),
        ("ld_grad", ctypes.c_int64),
        ("grad_x", ctypes.c_void_p),
        ("ld_grad_x", ctypes.c_int64),
        ("grad_residual", ctypes.c_void_p),
        ("ld_grad_residual", ctypes.c_int64),
        *((name, ctypes.c_void_p) for name in ("sum_of_centred", "sum", "statistic_mean", "statistic_variance")),
        ("workspace", ctypes.c_void_p),
    )


def applies(x: torch.Tensor) -> bool:
    """Whether the passes read `x`, (N, C, H, W), here."""
    return bool(levels()) and pitch(x) is not None


def statistics(x: torch.Tensor, *, level: str | None = None) -> tuple[torch.Tensor, torch.Tensor]:
    """Replaces `torch.var_mean(x, (0, 2, 3), correction=0)`: mean and variance, (C,), in one sweep.

    Sums are taken around a pivot in every block of rows and put together in doubles.
    """
    mean, variance = torch.empty(x.shape[1]), torch.empty(x.shape[1])
    call = _call(x, level)
    call.statistic_mean, call.statistic_variance = mean.data_ptr(), variance.data_ptr()
    space = _workspace(call)
    call.workspace = space.data_ptr()
    run("shoal_statistics", call)
    return mean, variance


def norm_act(
    x: torch.Tensor,
    mean: torch.Tensor,
    scale: torch.Tensor,
    shift: torch.Tensor,
    residual: torch.Tensor | None,
    rectify: bool,
    *,
    out: torch.Tensor | None = None,
    level: str | None = None,
) -> torch.Tensor:
    """Replaces `relu((x - mean) * scale + shift + residual)`.

    Args:
        x: (N, C, H, W), float32, as `applies` wants it.
        mean, scale, shift: (C,).
        residual: of the shape of x, or None.
        rectify: whether a ReLU follows.
        out: where the result is written, channels_last, its pixels perhaps apart; x itself where x dies.
        level: "portable", "avx2" or "avx512"; None: the variable SHOAL_NORM_LEVEL, else the best.
    """
    result = empty_rows(*x.shape) if out is None else out
    vectors = [vector(values) for values in (mean, scale, shift)]
    added = None if residual is None else in_rows(residual)
    if added is not None and added.shape != x.shape:
        raise InputError(f"residual is {tuple(added.shape)}, x is {tuple(x.shape)}; give one of the same shape")
    call = _call(x, level)
    call.rectify = rectify
    call.mean, call.scale, call.shift = (values.data_ptr() for values in vectors)
    call.residual, call.ld_residual = place(added), 0 if added is None else _pitch(added)
    call.out, call.ld_out = result.data_ptr(), _pitch(result)
    run("shoal_norm_act", call)
    return result


def norm_act_backward(
    grad: torch.Tensor,
    z: torch.Tensor | None,
    x: torch.Tensor,
    mean: torch.Tensor,
    scale: torch.Tensor,
    *,
    residual: bool = False,
    grad_x: torch.Tensor | None = None,
    level: str | None = None,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor | None]:
    """Gradients of x, mean, scale, shift and the residual.

    Args:
        grad: of the result, (N, C, H, W).
        z: the result where it was rectified, else None.
        x, mean, scale: as for `norm_act`.
        residual: whether its gradient is wanted.
        grad_x: channels_last, its pixels perhaps apart: the gradient of x is added to it; None: a new tensor.
    """
    grad, masked = in_rows(grad), None if z is None else in_rows(z)
    into = empty_rows(*x.shape) if grad_x is None else grad_x
    of_residual = empty_rows(*x.shape) if residual else None
    of_scale, of_shift = torch.empty(x.shape[1]), torch.empty(x.shape[1])
    means, scales = vector(mean), vector(scale)
    call = _call(x, level)
    call.rectify, call.accumulate = masked is not None, grad_x is not None
    call.mean, call.scale = means.data_ptr(), scales.data_ptr()
    call.grad, call.ld_grad = grad.data_ptr(), _pitch(grad)
    call.out, call.ld_out = place(masked), 0 if masked is None else _pitch(masked)
    call.grad_x, call.ld_grad_x = into.data_ptr(), _pitch(into)
    call.grad_residual, call.ld_grad_residual = place(of_residual), 0 if of_residual is None else _pitch(of_residual)
    call.sum_of_centred, call.sum = of_scale.data_ptr(), of_shift.data_ptr()
    space = _workspace(call)
    call.workspace = space.data_ptr()
    run("shoal_norm_act_backward", call)
    return into, -scales * of_shift, of_scale, of_shift, of_residual


def _pitch(x: torch.Tensor) -> int:
    found = pitch(x)
    if found is None:
        raise InputError(f"{x.dtype} of strides {x.stride()}; give a channels_last float32 tensor on the CPU")
    return found


def _call(x: torch.Tensor, level: str | None) -> _Pass:
    rows = x.numel() // x.shape[1] if x.numel() else 0
    threads = max(1, min(torch.get_num_threads(), rows))
    return _Pass(
        rows=rows, channels=x.shape[1], threads=threads, level=level_number(level), x=x.data_ptr(), ld_x=_pitch(x)
    )


def _workspace(call: _Pass) -> torch.Tensor:
    return workspace(bytes_of("shoal_norm_pass_workspace_bytes", ctypes.byref(call)))
