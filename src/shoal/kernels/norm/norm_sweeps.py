"""What sweeps over whole tensors for batch norm faster than PyTorch's own kernels, where something does.

No magic: all it does is ask each of `KERNELS` whether it applies.
"""

from __future__ import annotations

from typing import Protocol

import torch

from shoal.kernels.norm import norm_pass_native, norm_triton


class Sweeps(Protocol):
    """One implementation. Every tensor is read or written once; nothing written may overlap anything read."""

    def applies(self, *tensors: torch.Tensor) -> bool:
        """Whether it reads and writes such tensors, (N, C, ...), all of one shape but for their channels."""

    def statistics(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Replaces `torch.var_mean(x, (0, 2, 3), correction=0)`: mean and variance, (C,), in float32."""

    def norm_act(
        self,
        x: torch.Tensor,
        mean: torch.Tensor,
        scale: torch.Tensor,
        shift: torch.Tensor,
        residual: torch.Tensor | None,
        rectify: bool,
        out: torch.Tensor,
    ) -> None:
        """Write relu((x - mean) * scale + shift + residual) into `out`, in its dtype.

        Args:
            x: (N, C, ...).
            mean, scale, shift: (C,); used in float32.
            residual: of the shape of x, or None.
            rectify: whether a ReLU follows.
            out: of the shape of x.
        """

    def norm_act_backward(
        self,
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
        """Gradients of scale and shift, (C,) float32; those of x and the residual are written.

        Args:
            grad: of the result.
            z: the result, read where `rectify` is set; None: made again from x, nothing was added.
            x, mean, scale, shift, rectify: as for `norm_act`.
            grad_x: where the gradient of x is written; None: it is not wanted.
            masked: where `grad` is written as the ReLU lets it through; None: it is not wanted.
        """


KERNELS: list[Sweeps] = [norm_triton, norm_pass_native]  # the first that applies


def sweeps(*tensors: torch.Tensor) -> Sweeps | None:
    """What sweeps over `tensors`; None: PyTorch's own kernels do.

    >>> sweeps(torch.ones(2, 3, 4, 5, dtype=torch.float64))
    """
    return next((kernel for kernel in KERNELS if kernel.applies(*tensors)), None)
