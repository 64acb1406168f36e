"""Native sweeps over whole channels_last tensors: statistics, normalise (+ residual, + ReLU), its gradient.

For a batch norm whose producer is no convolution or whose result others than one convolution read. Each reads and
writes every element once. float32, on the CPU; `pitch` says which layouts. A kernel of
`shoal.kernels.norm.norm_sweeps`.
"""

from __future__ import annotations

import ctypes

import torch

from shoal.errors import InputError
from shoal.kernels.norm.norm_rows import bytes_of, level_number, pitch, run, vector, workspace
from shoal.lowlevel.native import levels


class _Pass(ctypes.Structure):
    """ShoalNormPass of csrc/shoal_native.h."""

    _fields_ = (
        *((name, ctypes.c_int64) for name in ("rows", "channels")),
        *((name, ctypes.c_int32) for name in ("rectify", "threads", "level", "unused")),
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


def applies(*tensors: torch.Tensor) -> bool:
    """Whether the sweeps read and write such tensors, (N, C, H, W), here."""
    return bool(levels()) and all(pitch(x) is not None for x in tensors)


def statistics(x: torch.Tensor, *, level: str | None = None) -> tuple[torch.Tensor, torch.Tensor]:
    """As `Sweeps.statistics`. Sums are taken around a pivot in every block of rows and put together in doubles.

    Args:
        x: (N, C, H, W), for which `applies` is true.
        level: "portable", "avx2" or "avx512"; None: the variable SHOAL_NORM_LEVEL, else the best.
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
    out: torch.Tensor,
    *,
    level: str | None = None,
) -> None:
    """As `Sweeps.norm_act`; tensors for which `applies` is true, `level` as for `statistics`."""
    vectors = [vector(values) for values in (mean, scale, shift)]
    call = _call(x, level)
    call.rectify = rectify
    call.mean, call.scale, call.shift = (values.data_ptr() for values in vectors)
    call.residual, call.ld_residual = _rows(residual, x)
    call.out, call.ld_out = _rows(out, x)
    run("shoal_norm_act", call)


def norm_act_backward(
    grad: torch.Tensor,
    z: torch.Tensor | None,
    x: torch.Tensor,
    mean: torch.Tensor,
    scale: torch.Tensor,
    shift: torch.Tensor,
    rectify: bool,
    grad_x: torch.Tensor | None,
    masked: torch.Tensor | None,
    *,
    level: str | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """As `Sweeps.norm_act_backward`; tensors for which `applies` is true, `level` as for `statistics`."""
    of_scale, of_shift = torch.empty(x.shape[1]), torch.empty(x.shape[1])
    vectors = [vector(values) for values in (mean, scale, shift)]
    call = _call(x, level)
    call.rectify = rectify
    call.mean, call.scale, call.shift = (values.data_ptr() for values in vectors)
    call.grad, call.ld_grad = _rows(grad, x)
    call.out, call.ld_out = _rows(z, x)
    call.grad_x, call.ld_grad_x = _rows(grad_x, x)
    call.grad_residual, call.ld_grad_residual = _rows(masked, x)
    call.sum_of_centred, call.sum = of_scale.data_ptr(), of_shift.data_ptr()
    space = _workspace(call)
    call.workspace = space.data_ptr()
    run("shoal_norm_act_backward", call)
    return of_scale, of_shift


def _pitch(x: torch.Tensor) -> int:
    found = pitch(x)
    if found is None:
        raise InputError(f"{x.dtype} of strides {x.stride()}; give a channels_last float32 tensor on the CPU")
    return found


def _rows(tensor: torch.Tensor | None, x: torch.Tensor) -> tuple[int | None, int]:
    """Address and pitch of a tensor of the shape of `x`; null for None."""
    if tensor is None:
        return None, 0
    if tensor.shape != x.shape:
        raise InputError(f"{tuple(tensor.shape)} beside x of {tuple(x.shape)}; give tensors of one shape")
    return tensor.data_ptr(), _pitch(tensor)


def _call(x: torch.Tensor, level: str | None) -> _Pass:
    rows = x.numel() // x.shape[1] if x.numel() else 0
    threads = max(1, min(torch.get_num_threads(), rows))
    return _Pass(
        rows=rows, channels=x.shape[1], threads=threads, level=level_number(level), x=x.data_ptr(), ld_x=_pitch(x)
    )


def _workspace(call: _Pass) -> torch.Tensor:
    return workspace(bytes_of("shoal_norm_pass_workspace_bytes", ctypes.byref(call)))
