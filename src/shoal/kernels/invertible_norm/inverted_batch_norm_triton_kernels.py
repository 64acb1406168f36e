"""Triton kernels of `inverted_batch_norm`; imported by `inverted_batch_norm_sweeps` only, and only where they run.

Tensors, tiles and programs are those of `shoal.kernels.norm.norm_triton_kernels`. ACTIVATION is "leaky_relu", "elu" or
"identity". All arithmetic is float32.
"""

# mypy: ignore-errors
# Triton compiles these functions: their arguments are pointers and numbers of its own language.

import triton
import triton.language as tl

from shoal.kernels.norm.norm_triton_kernels import place, tile


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
def _undone(y, grad, slope, ACTIVATION: tl.constexpr):
    """What was activated, and its gradient."""
    if ACTIVATION == "leaky_relu":
        return tl.where(y > 0.0, y, y * (1.0 / slope)), tl.where(y > 0.0, grad, grad * slope)
    elif ACTIVATION == "elu":
        # Rounded to -alpha, the result has no inverse: the smallest that has one stands for it. A NaN stays one.
        w = tl.where(y > 0.0, 0.0, y * (1.0 / slope))
        w = tl.where(w < -0.99999994, -0.99999994, w)
        return tl.where(y > 0.0, y, _log1p(w)), tl.where(y > 0.0, grad, grad * (y + slope))
    else:
        return y, grad


@triton.jit
def forward(
    x,
    ld_x,
    mean,
    scale,
    shift,
    y,
    ld_y,
    slope,
    pixels,
    channels,
    blocks_an_image,
    ACTIVATION: tl.constexpr,
    CHANNELS_LAST: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    """y = act((x - mean) * scale + shift), y may be x. One block a program."""
    image, first = place(tl.program_id(0), blocks_an_image, ROWS)
    rows = tl.arange(0, ROWS)
    columns = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    ours = columns < channels
    there = (first + rows < pixels)[:, None] & ours[None, :]
    middle = tl.load(mean + columns, mask=ours, other=0.0)[None, :]
    factor = tl.load(scale + columns, mask=ours, other=0.0)[None, :]
    added = tl.load(shift + columns, mask=ours, other=0.0)[None, :]
    value = tl.load(tile(x, ld_x, image, first, rows, columns, pixels, CHANNELS_LAST), mask=there, other=0.0)
    value = (value.to(tl.float32) - middle) * factor + added
    if ACTIVATION == "leaky_relu":
        value = tl.where(value > 0.0, value, value * slope)
    elif ACTIVATION == "elu":
        value = tl.where(value > 0.0, value, _expm1(tl.where(value > 0.0, 0.0, value)) * slope)
    to = tile(y, ld_y, image, first, rows, columns, pixels, CHANNELS_LAST)
    tl.store(to, value.to(y.dtype.element_ty), mask=there)


@triton.jit
def sums(
    grad,
    ld_grad,
    y,
    ld_y,
    shift,
    centred,
    of_shift,
    slope,
    pixels,
    channels,
    blocks_an_image,
    blocks,
    blocks_a_part,
    ACTIVATION: tl.constexpr,
    CHANNELS_LAST: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    """With z undone from y and dz from grad: each part's sums of dz * (z - shift) and dz."""
    part = tl.program_id(0)
    rows = tl.arange(0, ROWS)
    columns = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    ours = columns < channels
    added = tl.load(shift + columns, mask=ours, other=0.0)[None, :]
    total = tl.zeros((ROWS, COLUMNS), dtype=tl.float32)
    product = tl.zeros((ROWS, COLUMNS), dtype=tl.float32)
    begin = part * blocks_a_part
    for block in range(begin, tl.minimum(begin + blocks_a_part, blocks)):
        image, first = place(block, blocks_an_image, ROWS)
        there = (first + rows < pixels)[:, None] & ours[None, :]
        dz = tl.load(tile(grad, ld_grad, image, first, rows, columns, pixels, CHANNELS_LAST), mask=there, other=0.0)
        z = tl.load(tile(y, ld_y, image, first, rows, columns, pixels, CHANNELS_LAST), mask=there, other=0.0)
        z, dz = _undone(z.to(tl.float32), dz.to(tl.float32), slope, ACTIVATION)
        total += dz
        product += dz * (z - added)
    to = part.to(tl.int64) * channels + columns
    tl.store(centred + to, tl.sum(product, axis=0), mask=ours)
    tl.store(of_shift + to, tl.sum(total, axis=0), mask=ours)


@triton.jit
def result(
    grad,
    ld_grad,
    y,
    ld_y,
    of_x,
    ld_of_x,
    scale,
    shift,
    invstd,
    of_scale,
    of_shift,
    count,
    slope,
    pixels,
    channels,
    blocks_an_image,
    FROZEN: tl.constexpr,
    ACTIVATION: tl.constexpr,
    CHANNELS_LAST: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    """of_x = (dz - mean of dz - (z - shift) / scale * of_scale / count) * scale * invstd; with FROZEN only of dz.

    of_x may be grad. One block a program.
    """
    image, first = place(tl.program_id(0), blocks_an_image, ROWS)
    rows = tl.arange(0, ROWS)
    columns = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    ours = columns < channels
    there = (first + rows < pixels)[:, None] & ours[None, :]
    factor = tl.load(scale + columns, mask=ours, other=1.0)[None, :]
    gamma_invstd = factor * tl.load(invstd + columns, mask=ours, other=0.0)[None, :]
    dz = tl.load(tile(grad, ld_grad, image, first, rows, columns, pixels, CHANNELS_LAST), mask=there, other=0.0)
    z = tl.load(tile(y, ld_y, image, first, rows, columns, pixels, CHANNELS_LAST), mask=there, other=0.0)
    z, dz = _undone(z.to(tl.float32), dz.to(tl.float32), slope, ACTIVATION)
    if not FROZEN:
        added = tl.load(shift + columns, mask=ours, other=0.0)[None, :]
        mean_grad = tl.load(of_shift + columns, mask=ours, other=0.0).to(tl.float32)[None, :] / count
        # Over gamma: it is multiplied by gamma * xhat.
        mean_grad_xhat = tl.load(of_scale + columns, mask=ours, other=0.0).to(tl.float32)[None, :] / count / factor
        dz = dz - mean_grad - (z - added) * mean_grad_xhat
    to = tile(of_x, ld_of_x, image, first, rows, columns, pixels, CHANNELS_LAST)
    tl.store(to, (dz * gamma_invstd).to(of_x.dtype.element_ty), mask=there)
