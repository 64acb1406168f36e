"""Float32 into 8-bit codes of a table and a scale for each block, and back: the raw layer of the 8-bit data types.

Replaces, for one block and up to the rounding, `torch.bucketize(x.abs() / x.abs().max(), thresholds)` and
`magnitudes[code] * scale`. Dettmers 2016, section 3.2 (there a binary search in shared memory).
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from math import inf
from weakref import WeakKeyDictionary

import torch

from shoal.codecs.blocks import blocks_of, pieces
from shoal.codecs.checks import check_flat, check_length
from shoal.codecs.launch import are_here, threads_for, triton_applies
from shoal.codecs.table_codes_triton import TO_NEAREST, Rounding, TableCodesTriton
from shoal.codecs.tables import MAGNITUDES, SIGN, Table
from shoal.errors import CodecError
from shoal.lowlevel.dispatch import DispatchedOp, Implementation, choose, level_number, register
from shoal.lowlevel.native import fields, library, run_native

_MIN_ELEMS = 1 << 15  # of a thread that is worth waking
_derived: WeakKeyDictionary[Table, ctypes.Array[ctypes.c_double]] = WeakKeyDictionary()


def as_float32(number: float) -> float:
    """The nearest float32; infinite where it is too large.

    >>> as_float32(0.1)
    0.10000000149011612
    """
    return ctypes.c_float(number).value


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
    """Write the code of each value and the scale of each block.

    A block's scale is its greatest magnitude, or `scale`. A value's code is its sign, and how many thresholds are at
    most |x| / scale. In a block of zeros the codes are 0 or 128; in one that holds a NaN or an infinity they are too,
    and its scale is NaN.

    Args:
        x: (n,) float32, dense.
        table: what the codes stand for.
        block_elems: values that share a scale; None: all.
        scales: (blocks,) float32, written.
        codes: (n,) uint8, written.
        scale: of every block, > 0, rounded to float32; greater magnitudes get the last code.
        seed: stochastic rounding instead of to the nearest, so that decoding is unbiased; the same seed and element
            number give the same outcome.
        first_elem: the number of x[0] in the tensor it is a part of: what `seed` draws by.

    Raises:
        CodecError: a tensor has another dtype, length or layout.

    >>> from shoal.codecs.tables import LINEAR
    >>> scales, codes = torch.empty(1), torch.empty(3, dtype=torch.uint8)
    >>> encode_blocks(torch.tensor([0.0, -2.54, 1.0]), LINEAR, None, scales, codes)
    >>> codes.tolist(), round(scales.item(), 2)
    ([0, 255, 50], 2.54)
    """
    _check(x, scales, codes, block_elems)
    rounded = None if scale is None else as_float32(scale)
    if rounded is not None and not 0 < rounded < inf:
        raise CodecError(f"scale={scale}: expected a finite float32 > 0; leave it out for the greatest magnitude")
    rounding = Rounding(rounded, seed, first_elem)
    choose(_OP, x, scales, codes).encode_blocks(x, table, block_elems, scales, codes, rounding)


def decode_blocks(
    codes: torch.Tensor, scales: torch.Tensor, table: Table, block_elems: int | None, out: torch.Tensor
) -> None:
    """Write each code's magnitude times its block's scale, with its sign; NaN where the scale is NaN.

    Args:
        codes: (n,) uint8.
        scales: (blocks,) float32.
        table, block_elems: those of `encode_blocks`.
        out: (n,) float32, dense, written.

    Raises:
        CodecError: a tensor has another dtype, length or layout.

    >>> from shoal.codecs.tables import LINEAR
    >>> out = torch.empty(2)
    >>> decode_blocks(torch.tensor([255, 50], dtype=torch.uint8), torch.tensor([2.54]), LINEAR, None, out)
    >>> out
    tensor([-2.5400,  1.0000])
    """
    _check(out, scales, codes, block_elems)
    choose(_OP, codes, scales, out).decode_blocks(codes, scales, table, block_elems, out)


def _check(x: torch.Tensor, scales: torch.Tensor, codes: torch.Tensor, block_elems: int | None) -> None:
    if block_elems is not None and block_elems < 1:
        raise CodecError(f"block_elems={block_elems}: expected at least 1; None is one block for all")
    check_flat("values", x, torch.float32)
    check_flat("scales", scales, torch.float32)
    check_flat("codes", codes, torch.uint8)
    check_length("scales", scales, blocks_of(x.numel(), block_elems))
    check_length("codes", codes, x.numel())


class _TableCodesReference:
    """Plain torch: the definition that every implementation equals bit for bit."""

    def encode_blocks(
        self,
        x: torch.Tensor,
        table: Table,
        block_elems: int | None,
        scales: torch.Tensor,
        codes: torch.Tensor,
        rounding: Rounding = TO_NEAREST,
    ) -> None:
        scale, seed, first_elem = rounding
        scales.copy_(_scales(x, block_elems or max(x.numel(), 1), scale))
        thresholds = table.thresholds.to(x.device)
        magnitudes = table.magnitudes.to(x.device)
        for elements, blocks, columns in pieces(x.numel(), block_elems):
            part = x[elements].view(-1, columns)
            of_block = scales[blocks, None]
            share = part.abs().div_(of_block)
            if seed is None:
                index = torch.bucketize(share, thresholds, right=True, out_int32=True)
            else:
                index = torch.bucketize(share, magnitudes[1:], right=True, out_int32=True)
                low, high = magnitudes[index], magnitudes[(index + 1).clamp_(max=MAGNITUDES - 1)]
                number = torch.arange(elements.start, elements.stop, device=x.device).view_as(part) + first_elem
                up = uniform(number, seed) < (share - low) / (high - low)
                index += up & (index < MAGNITUDES - 1)
            index.masked_fill_(~(of_block > 0), 0)  # nothing but zeros, or NaN
            codes[elements] = index.add_(part.signbit(), alpha=SIGN).to(torch.uint8).view(-1)

    def decode_blocks(
        self, codes: torch.Tensor, scales: torch.Tensor, table: Table, block_elems: int | None, out: torch.Tensor
    ) -> None:
        magnitudes = table.magnitudes.to(out.device)
        for elements, blocks, columns in pieces(out.numel(), block_elems):
            code = codes[elements].view(-1, columns)
            of_block = scales[blocks, None]
            value = magnitudes[(code & (SIGN - 1)).int()].mul_(of_block)
            value = torch.where(code < SIGN, value, -value)
            # Processors differ in the NaN that a product gives.
            out[elements] = value.masked_fill_(of_block.isnan(), torch.nan).view(-1)


def uniform(element: torch.Tensor, seed: int) -> torch.Tensor:
    """lowbias32 of each element's number and the seed, as float32 in [0, 1): the same for an element on every device.

    >>> uniform(torch.arange(3), seed=1)
    tensor([0.4083, 0.0000, 0.3279])
    """
    mask = 0xFFFFFFFF
    h = (element & mask) ^ (seed & mask)
    h = h ^ (h >> 16)
    h = (h * 0x7FEB352D) & mask
    h = h ^ (h >> 15)
    h = (h * 0x846CA68B) & mask
    h = h ^ (h >> 16)
    return (h >> 8).float() * 2**-24


def _scales(x: torch.Tensor, block: int, scale: float | None) -> torch.Tensor:
    whole = x.numel() // block * block
    parts = [_largest(x[:whole].view(-1, block))] if whole else []
    if whole < x.numel():
        parts.append(_largest(x[whole:].view(1, -1)))
    largest = torch.cat(parts) if parts else x.new_empty(0)
    chosen = largest if scale is None else torch.full_like(largest, scale)
    return chosen.masked_fill_(~largest.isfinite(), torch.nan)


def _largest(rows: torch.Tensor) -> torch.Tensor:
    """The greatest magnitude of each row, without the scratch of `rows.abs()`; NaN where there is one."""
    low, high = rows.aminmax(dim=1)
    return torch.maximum(low.abs_(), high.abs_())


class _TableCodesCall(ctypes.Structure):
    """ShoalTableCodec of csrc/shoal_native.h."""

    _fields_ = fields(
        "int64 elements block_elements, int32 threads level, pointer table x scales codes out, int32 has_scale,"
        "float scale, int32 draws, uint32 seed, int64 first_element"
    )


class _MeanCall(ctypes.Structure):
    """ShoalTableMean of csrc/shoal_native.h."""

    _fields_ = (
        ("codec", _TableCodesCall),
        ("messages", ctypes.c_int64),
        *((name, ctypes.POINTER(ctypes.c_void_p)) for name in ("scales", "codes")),
        ("divisor", ctypes.c_float),
    )


class _TableCodesNative:
    """`csrc/codec_*.cpp`, on the CPU: codes are computed instead of searched.

    Evenly spaced pieces of a table are found from its thresholds: `linear`, `mantissa` and both dynamic trees are
    computed in registers, any other table is looked up. Codes do not depend on the number of threads, torch's.
    """

    def encode_blocks(
        self,
        x: torch.Tensor,
        table: Table,
        block_elems: int | None,
        scales: torch.Tensor,
        codes: torch.Tensor,
        rounding: Rounding = TO_NEAREST,
    ) -> None:
        scale, seed, first_elem = rounding
        call = _native_call(x, table, block_elems, scales, codes)
        call.x = x.data_ptr()
        if scale is not None:
            call.has_scale, call.scale = 1, scale
        if seed is not None:
            call.draws, call.seed = 1, seed & 0xFFFFFFFF
            call.first_element = first_elem & 0xFFFFFFFF
        run_native("shoal_table_encode", call)

    def decode_blocks(
        self, codes: torch.Tensor, scales: torch.Tensor, table: Table, block_elems: int | None, out: torch.Tensor
    ) -> None:
        call = _native_call(out, table, block_elems, scales, codes)
        call.out = out.data_ptr()
        run_native("shoal_table_decode", call)

    def mean_blocks(
        self,
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
        call = _MeanCall(
            codec=_native_call(values, table, block_elems, scales, codes), messages=len(messages), divisor=divisor
        )
        call.codec.x = call.codec.out = values.data_ptr()
        if scale is not None:
            call.codec.has_scale, call.codec.scale = 1, scale
        addresses = ctypes.c_void_p * len(messages)
        call.scales = addresses(*(their_scales.data_ptr() for their_scales, _ in messages))
        call.codes = addresses(*(their_codes.data_ptr() for _, their_codes in messages))
        run_native("shoal_table_mean", call)


def _native_call(
    values: torch.Tensor, table: Table, block_elems: int | None, scales: torch.Tensor, codes: torch.Tensor
) -> _TableCodesCall:
    """Of tensors that were checked: the kernels believe what they are told of an address."""
    elems = values.numel()
    return _TableCodesCall(
        elements=elems,
        block_elements=min(block_elems or elems, elems) or 1,
        threads=threads_for(elems, _MIN_ELEMS),
        level=level_number(),
        table=ctypes.addressof(_derived_of(table)),
        scales=scales.data_ptr(),
        codes=codes.data_ptr(),
    )


def _derived_of(table: Table) -> ctypes.Array[ctypes.c_double]:
    """What the kernels make of a table, made once and kept as long as the table."""
    found = _derived.get(table)
    if found is None:
        native = library()
        assert native is not None
        native.shoal_codec_table_bytes.restype = ctypes.c_int64
        found = (ctypes.c_double * -(-native.shoal_codec_table_bytes() // 8))()
        magnitudes, thresholds = (_floats(part) for part in (table.magnitudes, table.thresholds))
        if len(magnitudes) != MAGNITUDES or len(thresholds) != MAGNITUDES - 1:
            raise CodecError(f"{table.name}: got {len(magnitudes)} magnitudes, expected {MAGNITUDES}")
        native.shoal_codec_table(magnitudes, thresholds, found)
        _derived[table] = found
    return found


def _floats(values: torch.Tensor) -> ctypes.Array[ctypes.c_float]:
    return (ctypes.c_float * values.numel())(*values.tolist())


NATIVE = _TableCodesNative()
_OP: DispatchedOp[_TableCodesReference | _TableCodesNative | TableCodesTriton] = register(
    "table_codes",
    _TableCodesReference(),
    Implementation("triton", TableCodesTriton(), triton_applies),
    Implementation("native", NATIVE, are_here),
)


def native_runs(*tensors: torch.Tensor) -> bool:
    """Whether `NATIVE` is what runs on these tensors."""
    return choose(_OP, *tensors) is NATIVE
