"""The Triton kernel of `odd_products`; imported only where it runs, by `shoal.lowlevel.triton_launch`."""

# mypy: ignore-errors
# Triton compiles these functions: their arguments are pointers and numbers of its own language.

import triton
import triton.language as tl

from shoal.kernels.norm.norm_triton_kernels import INTERPRETED as INTERPRETED


# Rows of one of both begin anywhere: were the other's known to begin at multiples of 16 bytes, each thread would take
# 16 bytes of a row, and neighbours lie apart in the other tensor.
@triton.jit(do_not_specialize=["into_step", "step"])
def copy_blocks(into, rows, into_step, step, columns, blocks, BLOCK: tl.constexpr):
    """A program copies BLOCK elements of a row, neighbours by neighbours."""
    program = tl.program_id(0)
    row = (program // blocks).to(tl.int64)
    column = program % blocks * BLOCK + tl.arange(0, BLOCK)
    there = column < columns
    tl.store(into + (row * into_step + column), tl.load(rows + (row * step + column), mask=there), mask=there)
