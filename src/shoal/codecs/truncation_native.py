"""The top bytes of float32 in `csrc/codec_truncation.cpp`, for the CPU: the bits of `truncation_reference`."""

from __future__ import annotations

import ctypes

import torch

from shoal.codecs.levels_native import are_here, level_number, run, threads_for
from shoal.errors import CodecError

_LEAST_ELEMS = 1 << 16  # a thread is not worth waking for less


class _Call(ctypes.Structure):
    """ShoalTruncation of csrc/shoal_native.h."""

    _fields_ = (
        ("elements", ctypes.c_int64),
        *((name, ctypes.c_int32) for name in ("width", "nearest", "threads", "level")),
        *((name, ctypes.c_void_p) for name in ("values", "packed")),
    )


def applies(*tensors: torch.Tensor) -> bool:
    """Whether the kernels are here and take these tensors."""
    return are_here(*tensors)


def pack(x: torch.Tensor, width_bytes: int, nearest: bool, out: torch.Tensor) -> None:
    """As `truncation.pack`, for tensors that `applies` takes."""
    call = _call(x, width_bytes, out)
    call.nearest = nearest
    run("shoal_truncation_pack", call)


def unpack(packed: torch.Tensor, width_bytes: int, out: torch.Tensor) -> None:
    """As `truncation.unpack`, for tensors that `applies` takes."""
    run("shoal_truncation_unpack", _call(out, width_bytes, packed))


def _call(values: torch.Tensor, width_bytes: int, packed: torch.Tensor) -> _Call:
    elems = values.numel()
    # No address is passed on unless it is what the kernels believe it to be.
    fits = (
        width_bytes in (1, 2, 3)
        and values.dtype == torch.float32
        and packed.dtype == torch.uint8
        and packed.numel() == width_bytes * elems
        and are_here(values, packed)
    )
    if not fits:
        raise CodecError(
            f"got {values.dtype} {tuple(values.shape)} and {packed.dtype} {tuple(packed.shape)} for {width_bytes} "
            "bytes a value, expected dense float32, and as many uint8 as that, on the CPU"
        )
    return _Call(
        elements=elems,
        width=width_bytes,
        threads=threads_for(elems, _LEAST_ELEMS),
        level=level_number(),
        values=values.data_ptr(),
        packed=packed.data_ptr(),
    )
