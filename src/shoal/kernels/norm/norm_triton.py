"""Batch norm's sweeps on CUDA, in Triton; a kernel of `shoal.kernels.norm.norm_sweeps`.

float32, float16 and bfloat16, measured and summed up in float32, of any shape whose pixels lie in one run: contiguous
or channels_last, also a slice of the channels. Without Triton, or with SHOAL_TRITON=0, PyTorch's own kernels do the
work. With TRITON_INTERPRET=1 tensors on the CPU are swept too, by Triton's interpreter: slow, for tests.
"""

from __future__ import annotations

import torch

from shoal.errors import InputError
from shoal.kernels.norm.norm_tiles import is_channels_last, laid_out, power
from shoal.lowlevel.triton_launch import TritonKernels, on_device

_DTYPES = (torch.float32, torch.float16, torch.bfloat16)


def applies(*tensors: torch.Tensor) -> bool:
    """Whether the sweeps read and write such tensors, (N, C, ...), here."""
    device = tensors[0].device
    if not KERNELS.run_on(device) or any(x.device != device or x.dtype not in _DTYPES for x in tensors):
        return False
    return is_channels_last(*tensors) is not None


def statistics(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """As `Sweeps.statistics`; a tensor for which `applies` is true."""
    grid, (at,) = laid_out(x)
    moments = x.new_empty((3, grid.parts, grid.channels), dtype=torch.float32)
    counts = x.new_empty(grid.parts, dtype=torch.int32)
    mean, variance = (x.new_empty(grid.channels, dtype=torch.float32) for _ in range(2))  # an op's results: none a view
    found, columns = KERNELS.found(), min(grid.columns, 16)
    with on_device(x.device):
        found.moments[grid.by_part](x, at, *moments, counts, *grid.extent, *grid.shares, *grid.tile)
        found.merge[(-(-grid.channels // columns),)](
            *moments, counts, mean, variance, grid.parts, grid.channels, min(power(grid.parts), 64), columns
        )
    return mean, variance


def norm_act(
    x: torch.Tensor,
    mean: torch.Tensor,
    scale: torch.Tensor,
    shift: torch.Tensor,
    residual: torch.Tensor | None,
    rectify: bool,
    out: torch.Tensor,
) -> None:
    """As `Sweeps.norm_act`; tensors for which `applies` is true together."""
    grid, at = laid_out(x, residual, out)
    with on_device(x.device):
        KERNELS.found().activate[grid.by_block](
            x,
            at[0],
            *dense(mean, scale, shift),
            residual,
            at[1],
            out,
            at[2],
            *grid.extent,
            rectify,
            *grid.tile,
        )


def norm_act_backward(
    grad: torch.Tensor,
    z: torch.Tensor | None,
    x: torch.Tensor,
    mean: torch.Tensor,
    scale: torch.Tensor,
    shift: torch.Tensor,
    rectify: bool,
    grad_x: torch.Tensor | None,
    masked: torch.Tensor | None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """As `Sweeps.norm_act_backward`; tensors for which `applies` is true together."""
    grid, at = laid_out(x, grad, z, grad_x, masked)
    sums = x.new_empty((2, grid.parts, grid.channels), dtype=torch.float32)
    with on_device(x.device):
        KERNELS.found().activate_backward[grid.by_part](
            grad,
            at[1],
            z,
            at[2],
            x,
            at[0],
            *dense(mean, scale, shift),
            grad_x,
            at[3],
            masked,
            at[4],
            *sums,
            *grid.extent,
            *grid.shares,
            rectify,
            *grid.tile,
        )
    of_scale, of_shift = sums.sum(1)
    return of_scale, of_shift


def dense(*vectors: torch.Tensor) -> list[torch.Tensor]:
    """Vectors of channels as the kernels read them."""
    return [vector.detach().float().contiguous() for vector in vectors]


def _try_on(device: torch.device) -> None:
    one = torch.ones((1, 1), device=device)
    norm_act(one, one[0], one[0], one[0], None, True, torch.empty_like(one))


KERNELS = TritonKernels("shoal.kernels.norm.norm_triton_kernels", "PyTorch's own kernels", InputError, _try_on)
