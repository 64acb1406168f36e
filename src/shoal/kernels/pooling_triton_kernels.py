"""The Triton kernels of `pooling`; imported only where they run, by `shoal.lowlevel.triton_launch`.

A tensor is planes of depth x height x width pixels of `pixel` values: one of NHWC order has an image a plane and its
channels in a pixel, one of NCHW order a channel a plane and one value a pixel. A program has BLOCK elements of a plane.
"""

# mypy: ignore-errors
# Triton compiles these functions: their arguments are pointers and numbers of its own language.

import triton
import triton.language as tl

from shoal.kernels.norm.norm_triton_kernels import INTERPRETED as INTERPRETED

_NO_PLACE = tl.constexpr(255)


@triton.jit
def _element(blocks, elems, deep, high, wide, pixel, BLOCK: tl.constexpr):
    """The plane, the elements of it, which of them there are, and where in it each lies."""
    program = tl.program_id(0)
    element = program % blocks * BLOCK + tl.arange(0, BLOCK)
    at = element // pixel
    plane = (program // blocks).to(tl.int64)
    return plane, element, element < elems, at // (high * wide), at // wide % high, at % wide, element % pixel


@triton.jit
def _corner(window, STRIDE: tl.constexpr, PADDING: tl.constexpr):
    return window * STRIDE - PADDING


@triton.jit
def winners(
    x, pooled, codes,
    blocks, elems, x_elems, pixel, deep, high, wide, x_deep, x_high, x_wide, deep_step, high_step,
    KERNEL_D: tl.constexpr, KERNEL_H: tl.constexpr, KERNEL_W: tl.constexpr,
    STRIDE_D: tl.constexpr, STRIDE_H: tl.constexpr, STRIDE_W: tl.constexpr,
    PADDING_D: tl.constexpr, PADDING_H: tl.constexpr, PADDING_W: tl.constexpr,
    AFTER_RELU: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Of each window the first of its greatest values, or its last NaN, and its code; 255 of zero after a ReLU."""
    plane, element, there, d, h, w, channel = _element(blocks, elems, deep, high, wide, pixel, BLOCK)
    d, h, w = _corner(d, STRIDE_D, PADDING_D), _corner(h, STRIDE_H, PADDING_H), _corner(w, STRIDE_W, PADDING_W)
    best = tl.full([BLOCK], float("-inf"), tl.float32)
    # The first place in the input, should nothing be greater.
    code = tl.maximum(-d, 0) * deep_step + tl.maximum(-h, 0) * high_step + tl.maximum(-w, 0)
    from_plane = x + plane * x_elems
    for k in range(KERNEL_D):
        for i in range(KERNEL_H):
            inside = there & (d + k >= 0) & (d + k < x_deep) & (h + i >= 0) & (h + i < x_high)
            row = ((d + k) * x_high + h + i) * x_wide + w
            for j in range(KERNEL_W):
                reads = inside & (w + j >= 0) & (w + j < x_wide)
                value = tl.load(from_plane + (row + j) * pixel + channel, mask=reads, other=float("-inf"))
                value = value.to(tl.float32)
                wins = (value > best) | (value != value)
                best = tl.where(wins, value, best)
                code = tl.where(wins, k * deep_step + i * high_step + j, code)
    if AFTER_RELU:
        code = tl.where(best == 0.0, _NO_PLACE, code)
    tl.store(pooled + plane * elems + element, best.to(pooled.dtype.element_ty), mask=there)
    tl.store(codes + plane * elems + element, code.to(tl.uint8), mask=there)


@triton.jit
def gradients(
    grad, codes, grad_x,
    blocks, elems, x_elems, pixel, deep, high, wide, x_deep, x_high, x_wide, deep_step, high_step,
    KERNEL_D: tl.constexpr, KERNEL_H: tl.constexpr, KERNEL_W: tl.constexpr,
    STRIDE_D: tl.constexpr, STRIDE_H: tl.constexpr, STRIDE_W: tl.constexpr,
    PADDING_D: tl.constexpr, PADDING_H: tl.constexpr, PADDING_W: tl.constexpr,
    AFTER_RELU: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Of each pixel the sum, in float32, of the gradients of those windows whose code is its place in them."""
    plane, element, there, d, h, w, channel = _element(blocks, x_elems, x_deep, x_high, x_wide, pixel, BLOCK)
    d, h, w = d + PADDING_D, h + PADDING_H, w + PADDING_W
    # The first windows that do not end before the pixel.
    first_d = tl.maximum(d - KERNEL_D + STRIDE_D, 0) // STRIDE_D
    first_h = tl.maximum(h - KERNEL_H + STRIDE_H, 0) // STRIDE_H
    first_w = tl.maximum(w - KERNEL_W + STRIDE_W, 0) // STRIDE_W
    total = tl.zeros([BLOCK], tl.float32)
    from_grad, from_codes = grad + plane * elems, codes + plane * elems
    for k in range((KERNEL_D + STRIDE_D - 1) // STRIDE_D):
        place_d = d - (first_d + k) * STRIDE_D
        for i in range((KERNEL_H + STRIDE_H - 1) // STRIDE_H):
            place_h = h - (first_h + i) * STRIDE_H
            inside = there & (place_d >= 0) & (first_d + k < deep) & (place_h >= 0) & (first_h + i < high)
            row = ((first_d + k) * high + first_h + i) * wide + first_w
            for j in range((KERNEL_W + STRIDE_W - 1) // STRIDE_W):
                place_w = w - (first_w + j) * STRIDE_W
                reads = inside & (place_w >= 0) & (first_w + j < wide)
                at = (row + j) * pixel + channel
                code = tl.load(from_codes + at, mask=reads, other=_NO_PLACE)
                own = reads & (code.to(tl.int32) == place_d * deep_step + place_h * high_step + place_w)
                total += tl.load(from_grad + at, mask=own, other=0.0).to(tl.float32)
    tl.store(grad_x + plane * x_elems + element, total.to(grad_x.dtype.element_ty), mask=there)
