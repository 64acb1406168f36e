"""Table codes in `csrc/codec_*.cpp`, for the CPU: the bits of `table_codes_reference`, computed instead of searched.

Evenly spaced pieces of a table are found from its thresholds: `linear`, `mantissa` and both dynamic trees are computed
in registers, any other table is looked up. Codes do not depend on the number of threads, torch's.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from weakref import WeakKeyDictionary

import torch

from shoal.codecs.levels_native import are_here, level_number, run, threads_for
from shoal.codecs.table import MAGNITUDES, Table
from shoal.errors import CodecError
from shoal.lowlevel import native

_LEAST_ELEMS = 1 << 15  # a thread is not worth waking for less
_derived: WeakKeyDictionary[Table, ctypes.Array[ctypes.c_double]] = WeakKeyDictionary()


class _Call(ctypes.Structure):
    """ShoalTableCodec of csrc/shoal_native.h."""

    _fields_ = (
        *((name, ctypes.c_int64) for name in ("elements", "block_elements")),
        *((name, ctypes.c_int32) for name in ("threads", "level")),
        *((name, ctypes.c_void_p) for name in ("table", "x", "scales", "codes", "out")),
        ("has_scale", ctypes.c_int32),
        ("scale", ctypes.c_float),
        ("draws", ctypes.c_int32),
        ("seed", ctypes.c_uint32),
        ("first_element", ctypes.c_int64),
    )


class _MeanCall(ctypes.Structure):
    """ShoalTableMean of csrc/shoal_native.h."""

    _fields_ = (
        ("codec", _Call),
        ("messages", ctypes.c_int64),
        *((name, ctypes.POINTER(ctypes.c_void_p)) for name in ("scales", "codes")),
        ("divisor", ctypes.c_float),
    )

    @property
    def level(self) -> int:
        """Of the codec, for errors."""
        return int(self.codec.level)


def applies(*tensors: torch.Tensor) -> bool:
    """Whether the kernels are here and take these tensors."""
    return are_here(*tensors)


def encode_blocks(
    x: torch.Tensor,
    table: Table,
    block_elems: int | None,
    scales: torch.Tensor,
    codes: torch.Tensor,
    *,
    scale: float | None = None,
    seed: int | None = None,
    first_elem: int = 0,
) -> None:
    """As `table_codes.encode_blocks`, for tensors that `applies` takes."""
    call = _call(x, table, block_elems, scales, codes)
    call.x = x.data_ptr()
    if scale is not None:
        call.has_scale, call.scale = 1, scale
    if seed is not None:
        call.draws, call.seed = 1, seed & 0xFFFFFFFF
        call.first_element = first_elem & 0xFFFFFFFF
    run("shoal_table_encode", call)


def decode_blocks(
    codes: torch.Tensor, scales: torch.Tensor, table: Table, block_elems: int | None, out: torch.Tensor
) -> None:
    """As `table_codes.decode_blocks`, for tensors that `applies` takes."""
    call = _call(out, table, block_elems, scales, codes)
    call.out = out.data_ptr()
    run("shoal_table_decode", call)


def mean_blocks(
    values: torch.Tensor,
    messages: Sequence[tuple[torch.Tensor, torch.Tensor]],
    divisor: int,
    table: Table,
    block_elems: int | None,
    scales: torch.Tensor,
    codes: torch.Tensor,
    *,
    scale: float | None = None,
) -> None:
    """Add what messages stand for, divide, encode, and leave what the codes stand for, in one pass.

    The bits are those of `decode_blocks` and `add_` of each message in turn, `div_`, `encode_blocks` and
    `decode_blocks`.

    Args:
        values: (n,) float32, dense; changed.
        messages: scales and codes of each, of the same blocks.
        divisor: of the sum.
        table, block_elems, scales, codes, scale: as of `table_codes.encode_blocks`.
    """
    call = _MeanCall(codec=_call(values, table, block_elems, scales, codes), messages=len(messages), divisor=divisor)
    for their_scales, their_codes in messages:
        _call(values, table, block_elems, their_scales, their_codes)
    call.codec.x = call.codec.out = values.data_ptr()
    if scale is not None:
        call.codec.has_scale, call.codec.scale = 1, scale
    addresses = ctypes.c_void_p * len(messages)
    call.scales = addresses(*(their_scales.data_ptr() for their_scales, _ in messages))
    call.codes = addresses(*(their_codes.data_ptr() for _, their_codes in messages))
    run("shoal_table_mean", call)


def _call(
    values: torch.Tensor, table: Table, block_elems: int | None, scales: torch.Tensor, codes: torch.Tensor
) -> _Call:
    elems = values.numel()
    # No address is passed on unless it is what the kernels believe it to be.
    block = block_elems or max(elems, 1)
    fits = (
        block > 0
        and values.dtype == scales.dtype == torch.float32
        and codes.dtype == torch.uint8
        and codes.numel() == elems
        and scales.numel() == -(-elems // block)
        and are_here(values, scales, codes)
    )
    if not fits:
        raise CodecError(
            f"got {values.dtype} {tuple(values.shape)}, scales {tuple(scales.shape)}, codes {tuple(codes.shape)} for "
            f"blocks of {block}, expected dense float32, a float32 scale a block and a uint8 code a value on the CPU"
        )
    return _Call(
        elements=elems,
        block_elements=min(block, max(elems, 1)),
        threads=threads_for(elems, _LEAST_ELEMS),
        level=level_number(),
        table=ctypes.addressof(_derived_of(table)),
        scales=scales.data_ptr(),
        codes=codes.data_ptr(),
    )


def _derived_of(table: Table) -> ctypes.Array[ctypes.c_double]:
    """What the kernels make of a table, made once and kept as long as the table."""
    found = _derived.get(table)
    if found is None:
        library = native.library()
        assert library is not None
        library.shoal_codec_table_bytes.restype = ctypes.c_int64
        found = (ctypes.c_double * -(-library.shoal_codec_table_bytes() // 8))()
        magnitudes, thresholds = (_floats(part) for part in (table.magnitudes, table.thresholds))
        if len(magnitudes) != MAGNITUDES or len(thresholds) != MAGNITUDES - 1:
            raise CodecError(f"{table.name}: got {len(magnitudes)} magnitudes, expected {MAGNITUDES}")
        library.shoal_codec_table(magnitudes, thresholds, found)
        _derived[table] = found
    return found


def _floats(values: torch.Tensor) -> ctypes.Array[ctypes.c_float]:
    return (ctypes.c_float * values.numel())(*values.tolist())
