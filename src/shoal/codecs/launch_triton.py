"""Where the codecs' Triton kernels run: on CUDA tensors, and in Triton's interpreter on the CPU, slow, for tests.

Without Triton, or with SHOAL_TRITON=0, the torch reference does the work. TRITON_INTERPRET=1 chooses the interpreter.
"""

from __future__ import annotations

import os
import warnings
from contextlib import AbstractContextManager, nullcontext
from functools import cache
from importlib import import_module
from types import ModuleType

import torch

from shoal.errors import CodecError

VARIABLE = "SHOAL_TRITON"
TILE_ELEMS = 4096
_DTYPES = (torch.float32, torch.float16, torch.bfloat16, torch.uint8, torch.bool)


def kernels() -> ModuleType | None:
    """`shoal.codecs.kernels_triton`, or None where SHOAL_TRITON=0 or Triton is not installed."""
    return None if os.environ.get(VARIABLE) == "0" else _kernels()


def applies(*tensors: torch.Tensor) -> bool:
    """Whether the kernels read and write these tensors here: all on one such device, and each one dimension, dense."""
    device = tensors[0].device
    if device.type != "cuda" and not (device.type == "cpu" and os.environ.get("TRITON_INTERPRET")):
        return False
    if any(x.device != device or x.dim() != 1 or not x.is_contiguous() or x.dtype not in _DTYPES for x in tensors):
        return False
    return kernels() is not None and _run_on(device)


def found() -> ModuleType:
    """The kernels.

    Raises:
        CodecError: there are none.
    """
    here = kernels()
    if here is None:
        raise CodecError(f"{VARIABLE}=0, or Triton is not installed; install triton, or use the torch reference")
    return here


def on(device: torch.device) -> AbstractContextManager[object]:
    """The device for the launches inside."""
    return torch.cuda.device(device) if device.type == "cuda" else nullcontext()


def tiles(elems: int) -> tuple[int]:
    """The grid of `TILE_ELEMS` elements a program."""
    return (-(-elems // TILE_ELEMS),)


def block_tiles(elems: int, block_elems: int | None) -> tuple[int, int, int, int]:
    """How many programs, a tile's blocks and elements of each, and how many tiles share one block.

    >>> block_tiles(10_000, 64), block_tiles(10_000, 4096), block_tiles(10_000, None)
    ((3, 64, 64, 1), (3, 1, 4096, 1), (3, 1, 4096, 3))
    """
    block = min(block_elems or elems, elems)
    if not block:
        return 0, 1, 1, 1
    columns = min(1 << (block - 1).bit_length(), TILE_ELEMS)
    rows, parts = TILE_ELEMS // columns, -(-block // columns)
    blocks = -(-elems // block)
    return -(-blocks // rows) * parts, rows, columns, parts


@cache
def _kernels() -> ModuleType | None:
    try:
        return import_module("shoal.codecs.kernels_triton")
    except ImportError:
        return None


@cache
def _run_on(device: torch.device) -> bool:
    """Whether a kernel runs there: Triton wants a device that it knows and a C compiler."""
    if device.type != "cuda":
        return bool(found().INTERPRETED)
    try:
        with on(device):
            x, mask = torch.ones((2, 1), dtype=torch.uint8, device=device)
            found().sign_mask[(1,)](x, mask, 1, 0xFF, 8)
    except Exception as error:  # whatever the compiler raises: the torch reference remains
        reason = (str(error).splitlines() or [type(error).__name__])[0]
        warnings.warn(f"Triton does not run on {device} ({reason}); {VARIABLE}=0 spares the attempt", stacklevel=2)
        return False
    return True
