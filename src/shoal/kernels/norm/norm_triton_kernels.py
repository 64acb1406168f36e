"""Triton kernels of `norm_sweeps_triton`; imported only where they run, by `shoal.lowlevel.triton_launch`.

A tensor is `images` of `pixels` of `channels`. With CHANNELS_LAST all pixels are one image, `ld` elements apart; else
its pixels lie side by side, its channels `pixels` apart and its images `ld`. Programs (part, columns) each sweep over
a run of blocks of ROWS pixels for COLUMNS channels. All arithmetic is float32, but for the last merge.
"""

# mypy: ignore-errors
# Triton compiles these functions: their arguments are pointers and numbers of its own language.

import triton
import triton.language as tl


@triton.jit
def place(block, blocks_an_image, ROWS: tl.constexpr):
    """Image, first pixel of a block."""
    return block // blocks_an_image, block % blocks_an_image * ROWS


@triton.jit
def tile(at, ld, image, first, rows, columns, pixels, CHANNELS_LAST: tl.constexpr):
    """Addresses of a tile (ROWS, COLUMNS)."""
    if CHANNELS_LAST:
        return at + first.to(tl.int64) * ld + (rows[:, None] * ld + columns[None, :])
    else:
        return at + (image.to(tl.int64) * ld + first) + (rows[:, None] + columns[None, :] * pixels)


@triton.jit
def _expm1(z):
    """exp(z) - 1 for z <= 0. Near 0, where the difference cancels, its Taylor series; libdevice is not interpreted."""
    series = 1 / 5040 + z * (1 / 40320)
    series = 1 / 720 + z * series
    series = 1 / 120 + z * series
    series = 1 / 24 + z * series
    series = 1 / 6 + z * series
    series = 1 / 2 + z * series
    return tl.where(z > -0.5, z + z * z * series, tl.exp(z) - 1.0)


@triton.jit
def _log1p(w):
    """log(1 + w) for -1 < w <= 0: what rounding takes from the sum it takes from the quotient too (Goldberg 1991)."""
    whole = 1.0 + w
    kept = whole - 1.0
    return tl.where(kept == 0.0, w, tl.log(whole) * (w / tl.where(kept == 0.0, 1.0, kept)))


@triton.jit
def _activated(z, alpha, ACTIVATION: tl.constexpr):
    """A NaN stays one."""
    if ACTIVATION == "relu":
        return tl.where(z <= 0.0, 0.0, z)
    elif ACTIVATION == "leaky_relu":
        return tl.where(z > 0.0, z, z * alpha)
    elif ACTIVATION == "elu":
        return tl.where(z > 0.0, z, _expm1(tl.where(z > 0.0, 0.0, z)) * alpha)
    else:
        return z


@triton.jit
def _before(z, grad, alpha, ACTIVATION: tl.constexpr):
    """The gradient of what was activated, which `z` is; of a ReLU its result does too."""
    if ACTIVATION == "relu":
        return tl.where(z <= 0.0, 0.0, grad)
    elif ACTIVATION == "leaky_relu":
        return tl.where(z > 0.0, grad, grad * alpha)
    elif ACTIVATION == "elu":
        return tl.where(z > 0.0, grad, grad * (_expm1(tl.where(z > 0.0, 0.0, z)) * alpha + alpha))
    else:
        return grad


@triton.jit
def _undone(y, grad, alpha, ACTIVATION: tl.constexpr):
    """What was activated, and its gradient, from the result."""
    if ACTIVATION == "leaky_relu":
        return tl.where(y > 0.0, y, y * (1.0 / alpha)), tl.where(y > 0.0, grad, grad * alpha)
    elif ACTIVATION == "elu":
        # Rounded to -alpha, the result has no inverse: the smallest that has one stands for it. A NaN stays one.
        w = tl.where(y > 0.0, 0.0, y * (1.0 / alpha))
        w = tl.where(w < -0.99999994, -0.99999994, w)
        return tl.where(y > 0.0, y, _log1p(w)), tl.where(y > 0.0, grad, grad * (y + alpha))
    else:
        return y, grad


@triton.jit
def activate(
    x, mean, weight, scale, shift, residual, out,
    ld_x, ld_residual, ld_out, pixels, channels, blocks_an_image, alpha,
    ACTIVATION: tl.constexpr, ROUNDED: tl.constexpr,
    CHANNELS_LAST: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    """out = act((x - mean) * weight * scale + shift + residual); weight and residual may be None. One block a program.

    ROUNDED: what is activated is rounded first as `out` is. ACTIVATION has a number, its slope or alpha, or none.
    """
    image, first = place(tl.program_id(0), blocks_an_image, ROWS)
    rows = tl.arange(0, ROWS)
    columns = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    ours = columns < channels
    there = (first + rows < pixels)[:, None] & ours[None, :]
    middle = tl.load(mean + columns, mask=ours, other=0.0)[None, :]
    factor = tl.load(scale + columns, mask=ours, other=0.0)[None, :]
    added = tl.load(shift + columns, mask=ours, other=0.0)[None, :]
    value = tl.load(tile(x, ld_x, image, first, rows, columns, pixels, CHANNELS_LAST), mask=there, other=0.0)
    value = value.to(tl.float32) - middle
    if weight is not None:
        value = tl.load(weight + columns, mask=ours, other=0.0)[None, :] * value
    value = value * factor + added
    if residual is not None:
        more = tile(residual, ld_residual, image, first, rows, columns, pixels, CHANNELS_LAST)
        value += tl.load(more, mask=there, other=0.0).to(tl.float32)
    if ROUNDED:
        value = value.to(out.dtype.element_ty).to(tl.float32)
    value = _activated(value, alpha, ACTIVATION)
    to = tile(out, ld_out, image, first, rows, columns, pixels, CHANNELS_LAST)
    tl.store(to, value.to(out.dtype.element_ty), mask=there)


@triton.jit
def moments(
    x, ld_x, pivots, offs, squares, counts, pixels, channels, blocks_an_image, blocks, blocks_a_part,
    CHANNELS_LAST: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    """Of each part: how many pixels, and every channel's mean (pivot + off) and sum of squared deviations.

    The pivot is the mean of the part's first block, so that a mean a thousand times the deviation costs no digits.
    """
    part = tl.program_id(0)
    rows = tl.arange(0, ROWS)
    columns = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    ours = columns < channels
    begin = part * blocks_a_part
    image, first = place(begin, blocks_an_image, ROWS)
    there = (first + rows < pixels)[:, None] & ours[None, :]
    values = tl.load(tile(x, ld_x, image, first, rows, columns, pixels, CHANNELS_LAST), mask=there, other=0.0)
    around = tl.sum(values.to(tl.float32), axis=0) / tl.minimum(pixels - first, ROWS).to(tl.float32)
    total = tl.zeros((ROWS, COLUMNS), dtype=tl.float32)
    square = tl.zeros((ROWS, COLUMNS), dtype=tl.float32)
    count = begin * 0
    for block in range(begin, tl.minimum(begin + blocks_a_part, blocks)):
        image, first = place(block, blocks_an_image, ROWS)
        there = (first + rows < pixels)[:, None] & ours[None, :]
        values = tl.load(tile(x, ld_x, image, first, rows, columns, pixels, CHANNELS_LAST), mask=there, other=0.0)
        off = tl.where(there, values.to(tl.float32) - around[None, :], 0.0)
        total += off
        square += off * off
        count += tl.minimum(pixels - first, ROWS)
    off = tl.sum(total, axis=0)
    each = off / count.to(tl.float32)
    to = part.to(tl.int64) * channels + columns
    tl.store(pivots + to, around, mask=ours)
    tl.store(offs + to, each, mask=ours)
    tl.store(squares + to, tl.sum(square, axis=0) - off * each, mask=ours)
    if tl.program_id(1) == 0:
        tl.store(counts + part, count)


@triton.jit
def _part(pivots, offs, counts, begin, parts, columns, channels, PARTS: tl.constexpr):
    """Where PARTS parts lie, whether they are there, how many pixels they have, and their means; in float64."""
    part = begin + tl.arange(0, PARTS)
    there = (part < parts)[:, None] & (columns < channels)[None, :]
    at = part.to(tl.int64)[:, None] * channels + columns[None, :]
    count = tl.load(counts + part, mask=part < parts, other=0).to(tl.float64)
    mean = tl.load(pivots + at, mask=there, other=0.0).to(tl.float64)
    mean += tl.load(offs + at, mask=there, other=0.0).to(tl.float64)
    return at, there, count, mean


@triton.jit
def merge(pivots, offs, squares, counts, mean, variance, parts, channels, PARTS: tl.constexpr, COLUMNS: tl.constexpr):
    """Mean and variance of the whole from those of the parts (Chan, Golub and LeVeque 1979)."""
    columns = tl.program_id(0) * COLUMNS + tl.arange(0, COLUMNS)
    ours = columns < channels
    pixels = tl.zeros((PARTS,), dtype=tl.float64)
    total = tl.zeros((PARTS, COLUMNS), dtype=tl.float64)
    for begin in range(0, parts, PARTS):
        at, there, count, theirs = _part(pivots, offs, counts, begin, parts, columns, channels, PARTS)
        pixels += count
        total += theirs * count[:, None]
    whole = tl.sum(pixels, axis=0)
    middle = tl.sum(total, axis=0) / whole
    square = tl.zeros((PARTS, COLUMNS), dtype=tl.float64)
    for begin in range(0, parts, PARTS):
        at, there, count, theirs = _part(pivots, offs, counts, begin, parts, columns, channels, PARTS)
        between = theirs - middle[None, :]
        square += tl.load(squares + at, mask=there, other=0.0).to(tl.float64)
        square += tl.where(there, between * between * count[:, None], 0.0)
    spread = tl.sum(square, axis=0) / whole
    tl.store(mean + columns, middle.to(tl.float32), mask=ours)
    tl.store(variance + columns, tl.where(spread <= 0.0, 0.0, spread).to(tl.float32), mask=ours)


@triton.jit
def activate_backward(
    x, grad, z, mean, scale, shift, slope, constant, grad_x, masked, of_scale, of_shift,
    ld_x, ld_grad, ld_z, ld_grad_x, ld_masked, pixels, channels, blocks_an_image, blocks, blocks_a_part, alpha,
    ACTIVATION: tl.constexpr, INVERTED: tl.constexpr,
    CHANNELS_LAST: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    """With da the gradient before the activation: grad_x = da * scale, masked = da, and each part's sums of da * off
    and da, where off is x - mean. With a slope and a constant grad_x is (da + off * slope + constant) * scale.

    z, the result of a ReLU, may be None: it is then computed from x. So may grad_x, masked, and both sums. INVERTED: x
    is the result of the activation, and off is (x - mean) * scale of what was normalised.
    """
    part = tl.program_id(0)
    rows = tl.arange(0, ROWS)
    columns = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    ours = columns < channels
    middle = tl.load(mean + columns, mask=ours, other=0.0)[None, :]
    factor = tl.load(scale + columns, mask=ours, other=0.0)[None, :]
    added = tl.load(shift + columns, mask=ours, other=0.0)[None, :]
    total = tl.zeros((ROWS, COLUMNS), dtype=tl.float32)
    product = tl.zeros((ROWS, COLUMNS), dtype=tl.float32)
    begin = part * blocks_a_part
    for block in range(begin, tl.minimum(begin + blocks_a_part, blocks)):
        image, first = place(block, blocks_an_image, ROWS)
        there = (first + rows < pixels)[:, None] & ours[None, :]
        da = tl.load(tile(grad, ld_grad, image, first, rows, columns, pixels, CHANNELS_LAST), mask=there, other=0.0)
        da = da.to(tl.float32)
        off = tl.load(tile(x, ld_x, image, first, rows, columns, pixels, CHANNELS_LAST), mask=there, other=0.0)
        if INVERTED:
            off, da = _undone(off.to(tl.float32), da, alpha, ACTIVATION)
            off -= added
        else:
            off = off.to(tl.float32) - middle
            if z is not None:
                kept = tile(z, ld_z, image, first, rows, columns, pixels, CHANNELS_LAST)
                da = _before(tl.load(kept, mask=there, other=0.0).to(tl.float32), da, alpha, ACTIVATION)
            else:
                da = _before(off * factor + added, da, alpha, ACTIVATION)
        total += da
        product += tl.where(there, da * off, 0.0)
        if grad_x is not None:
            to = tile(grad_x, ld_grad_x, image, first, rows, columns, pixels, CHANNELS_LAST)
            moved = da
            if slope is not None:
                moved += off * tl.load(slope + columns, mask=ours, other=0.0)[None, :]
                moved += tl.load(constant + columns, mask=ours, other=0.0)[None, :]
            tl.store(to, (moved * factor).to(grad_x.dtype.element_ty), mask=there)
        if masked is not None:
            to = tile(masked, ld_masked, image, first, rows, columns, pixels, CHANNELS_LAST)
            tl.store(to, da.to(masked.dtype.element_ty), mask=there)
    if of_scale is not None:
        to = part.to(tl.int64) * channels + columns
        tl.store(of_scale + to, tl.sum(product, axis=0), mask=ours)
        tl.store(of_shift + to, tl.sum(total, axis=0), mask=ours)


INTERPRETED = not isinstance(activate, triton.JITFunction)  # TRITON_INTERPRET=1 was set before this was imported
