"""Activations in 8 bits a value between forward and backward pass: the ops that encode, decode and read them.

`encode` comes in the step after the last forward reader of an activation, `decode` before each convolution whose
weight gradient needs it. The payload is one block of bytes: a float32 scale for each block of values, then one code a
value in memory order, as the table codecs of `shoal.codecs` lay it out.

A ReLU's output is never negative, so the sign bits of its codes are free. `encode` stores in them where the ReLU's
gradient is zero, and `relu_backward` reads that instead of the output: exact, and in no additional bytes.

Scratch is a few hundred KiB, whatever the size of the activation.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor

from shoal import codecs
from shoal.codecs.table_codes import decode_blocks, encode_blocks
from shoal.kernels.relu import note_closed, where_above, where_above_
from shoal.memory.limit import no_memory_limit

SCALE_BYTES = 4
_PIECE_ELEMS = 1 << 17
_SAMPLES = 256


def encode(x: Tensor, codec: str, block_elems: int, seed: int | None, closed_above: float | None) -> Tensor:
    """The payload of an activation, uint8 of `payload_bytes`.

    Args:
        x: (N, ...) of float32, bfloat16 or float16, dense in any order of its dimensions.
        codec: a table codec's name.
        block_elems: values that share a scale; 0 for all of them.
        seed: None rounds to nearest. Else stochastic rounding, by this seed and what `x` holds: each step and
            each layer draws again, and a second run on the same values gives the same bits.
        closed_above: None: signs are signs. Else `x` is a ReLU's output clipped there (infinity: not clipped), and a
            sign bit says that the value is 0 or clipped.
    """
    n_scales = _scales(x.numel(), block_elems)
    payload = torch.empty(SCALE_BYTES * n_scales + x.numel(), dtype=torch.uint8, device=x.device)
    scales, codes = _parts(payload, n_scales)
    flat = x.as_strided((x.numel(),), (1,))
    if seed is not None:
        seed = _mixed(flat, seed)
    if x.dtype == torch.float32 and not block_elems:
        encode_blocks(flat, _table(codec), None, scales, codes, seed=seed)
        if closed_above is not None:
            note_closed(flat, codes, closed_above)
    else:
        _encode_in_pieces(flat, codec, block_elems, seed, closed_above, scales, codes)
    if _meters:
        with no_memory_limit():  # it is no part of the step
            _meters[-1].append(_relative_error(flat, payload, codec, block_elems, closed_above))
    return payload


def decode(
    payload: Tensor,
    shape: Sequence[int],
    stride: Sequence[int],
    dtype: torch.dtype,
    codec: str,
    block_elems: int,
    closed_above: float | None,
) -> Tensor:
    """The activation that `encode` made `payload` of, as its codes approximate it."""
    out = torch.empty_strided(tuple(shape), tuple(stride), dtype=dtype, device=payload.device)
    n_elems = out.numel()
    scales, codes = _parts(payload, _scales(n_elems, block_elems))
    flat = out.as_strided((n_elems,), (1,))
    if dtype == torch.float32:
        decode_blocks(codes, scales, _table(codec), block_elems or None, flat)
    else:
        for start, piece in _decoded_pieces(scales, codes, codec, block_elems):
            flat[start : start + piece.numel()] = piece
    if closed_above is not None and math.isfinite(closed_above):
        flat.abs_()  # a clipped value is not negative
    return out


def relu_backward(
    grad: Tensor, payload: Tensor, shape: Sequence[int], stride: Sequence[int], block_elems: int
) -> Tensor:
    """`grad` where the encoded ReLU lets it through, zero elsewhere; shape and strides are of the ReLU's output."""
    return where_above(grad, _open(payload, shape, stride, block_elems), -1)


def relu_backward_(
    grad: Tensor, payload: Tensor, shape: Sequence[int], stride: Sequence[int], block_elems: int
) -> Tensor:
    """`relu_backward` that writes over `grad`."""
    return where_above_(grad, _open(payload, shape, stride, block_elems), -1)


def payload_bytes(n_elems: Any, block_elems: int) -> Any:
    """Bytes of the payload of that many values: scales and codes. The number may be symbolic."""
    return SCALE_BYTES * _scales(n_elems, block_elems) + n_elems


@contextmanager
def measured_errors() -> Iterator[list[float]]:
    """Record the relative error of every encoding in the block: ||decoded - x|| / ||x||, in order."""
    errors: list[float] = []
    _meters.append(errors)
    try:
        yield errors
    finally:
        _meters.remove(errors)


_meters: list[list[float]] = []


@lru_cache(maxsize=32)
def _table(codec: str) -> Any:
    return codecs.get(codec).table()


def _scales(n_elems: Any, block_elems: int) -> Any:
    return (n_elems + block_elems - 1) // block_elems if block_elems else 1


def _parts(payload: Tensor, n_scales: int) -> tuple[Tensor, Tensor]:
    header_bytes = SCALE_BYTES * n_scales
    return payload[:header_bytes].view(torch.float32), payload[header_bytes:]


def _open(payload: Tensor, shape: Sequence[int], stride: Sequence[int], block_elems: int) -> Tensor:
    """Codes as signed bytes of the activation's shape: at least 0 where the sign bit is not set."""
    header_bytes = SCALE_BYTES * _scales(math.prod(shape), block_elems)
    return payload.view(torch.int8).as_strided(tuple(shape), tuple(stride), header_bytes)


def _mixed(flat: Tensor, seed: int) -> int:
    """A seed that depends on a few of the values."""
    some = flat[:: max(1, flat.numel() // _SAMPLES)].float().contiguous()
    found = int(some.view(torch.int32).sum(dtype=torch.int64))
    return (seed ^ found ^ (found >> 32)) & 0xFFFFFFFF


def _encode_in_pieces(
    flat: Tensor,
    codec: str,
    block_elems: int,
    seed: int | None,
    closed_above: float | None,
    scales: Tensor,
    codes: Tensor,
) -> None:
    """A few blocks at a time: half precision is converted, and signs are noted while values and codes are near."""
    scale = None
    if not block_elems:
        low, high = torch.aminmax(flat)
        scale = float(max(-low, high))
    for start, own, into in _pieces(scales, codes, block_elems):
        piece = flat[start : start + into.numel()].float()
        if scale is None or 0 < scale < math.inf:
            form = _table(codec), block_elems or None
            encode_blocks(piece, *form, own, into, scale=scale, seed=seed, first_elem=start)
        else:  # nothing but zeros, or NaN
            own.fill_(0.0 if scale == 0 else math.nan)
            into.zero_()
        if closed_above is not None:
            note_closed(piece, into, closed_above)


def _decoded_pieces(scales: Tensor, codes: Tensor, codec: str, block_elems: int) -> Iterator[tuple[int, Tensor]]:
    """The values in float32, a few blocks at a time: where a piece starts, and the piece, which the next overwrites."""
    values: Tensor | None = None
    for start, own, piece in _pieces(scales, codes, block_elems):
        if values is None:  # the first is the longest
            values = torch.empty(piece.numel(), dtype=torch.float32, device=codes.device)
        into = values[: piece.numel()]
        decode_blocks(piece, own, _table(codec), block_elems or None, into)
        yield start, into


def _pieces(scales: Tensor, codes: Tensor, block_elems: int) -> Iterator[tuple[int, Tensor, Tensor]]:
    """A few blocks at a time: where they start, their scales and their codes."""
    step = max(block_elems, _PIECE_ELEMS // block_elems * block_elems) if block_elems else _PIECE_ELEMS
    for start in range(0, codes.numel(), step):
        some, first = codes[start : start + step], start // block_elems if block_elems else 0
        yield start, scales[first : first + _scales(some.numel(), block_elems)], some


def _relative_error(flat: Tensor, payload: Tensor, codec: str, block_elems: int, closed_above: float | None) -> float:
    scales, codes = _parts(payload, _scales(flat.numel(), block_elems))
    off = whole = 0.0
    for start, piece in _decoded_pieces(scales, codes, codec, block_elems):
        exact = flat[start : start + piece.numel()].float()
        if closed_above is not None and math.isfinite(closed_above):
            piece.abs_()
        off += float((piece - exact).square().sum(dtype=torch.float64))
        whole += float(exact.square().sum(dtype=torch.float64))
    return math.sqrt(off / whole) if whole else 0.0
