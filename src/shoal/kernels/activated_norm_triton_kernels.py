"""The Triton kernel of `activated_norm`; imported only where it runs, by `shoal.lowlevel.triton_launch`."""

# mypy: ignore-errors
# Triton compiles this function: its arguments are pointers and numbers of its own language.

import triton
import triton.language as tl

from shoal.kernels.norm.norm_triton_kernels import INTERPRETED as INTERPRETED


@triton.jit
def normalise_and_activate(
    x, mean, invstd, weight, bias, y, channels, pixels, slope, RELU: tl.constexpr, BLOCK: tl.constexpr
):
    """y = leaky_relu(weight * (x - mean) * invstd + bias), or its ReLU, in PyTorch's order of operations.

    Rows of `pixels`, one for each sample and channel; weight and bias may be None. One block of a row a program.
    """
    row = tl.program_id(0)
    channel = row % channels
    columns = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    there = columns < pixels
    at = row.to(tl.int64) * pixels + columns
    value = tl.load(x + at, mask=there, other=0.0).to(tl.float32) - tl.load(mean + channel).to(tl.float32)
    if weight is not None:
        value = tl.load(weight + channel).to(tl.float32) * value
    value = value * tl.load(invstd + channel).to(tl.float32)
    if bias is not None:
        value += tl.load(bias + channel).to(tl.float32)
    value = value.to(y.dtype.element_ty).to(tl.float32)  # what the norm by itself would have written
    if RELU:
        value = tl.where(value <= 0.0, 0.0, value)  # as PyTorch's ReLU a NaN stays one
    else:
        value = tl.where(value > 0.0, value, value * slope)
    tl.store(y + at, value.to(y.dtype.element_ty), mask=there)
