"""What sweeps over whole tensors for the inverted batch norm: kernels where some apply, else PyTorch's pointwise ops.

No magic: all it does is ask each of `KERNELS` whether it applies.
"""

from __future__ import annotations

from typing import Protocol

import torch

from shoal.kernels.invertible_norm import (
    inverted_batch_norm_native,
    inverted_batch_norm_reference,
    inverted_batch_norm_triton,
)


class Sweeps(Protocol):
    """One implementation. What is written may be the very tensor that is read, and overlaps nothing else."""

    def applies(self, source: torch.Tensor, y: torch.Tensor, activation: str) -> bool:
        """Whether it reads `source`, and reads or writes `y`, here; (N, C, ...) of one shape and one layout."""

    def forward_into(
        self,
        x: torch.Tensor,
        y: torch.Tensor,
        mean: torch.Tensor,
        scale: torch.Tensor,
        shift: torch.Tensor,
        activation: str,
        slope: float,
    ) -> None:
        """Write the activation of (x - mean) * scale + shift into `y`, which may be `x`.

        The mean is taken off first: far from zero it would take digits of the product with it.

        Args:
            x, y: (N, C, ...) of one dtype and layout.
            mean, scale, shift: (C,), float32, or float64 for a float64 `x`.
            activation, slope: as for `inverted_batch_norm`.
        """

    def backward_into(
        self,
        grad: torch.Tensor,
        result: torch.Tensor,
        y: torch.Tensor,
        scale: torch.Tensor,
        shift: torch.Tensor,
        inverse_deviation: torch.Tensor,
        frozen: bool,
        activation: str,
        slope: float,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Write the gradient of x into `result`, which may be `grad`.

        Args:
            grad, result, y: (N, C, ...) of one dtype and layout.
            scale, shift, inverse_deviation: (C,), float32, or float64 for a float64 `y`.
            frozen: whether the statistics were given.
            activation, slope: as for `inverted_batch_norm`.

        Returns:
            Gradients of scale and shift, (C,) float64.
        """


KERNELS: list[Sweeps] = [inverted_batch_norm_triton, inverted_batch_norm_native]  # the first that applies


def sweeps(source: torch.Tensor, y: torch.Tensor, activation: str) -> Sweeps:
    """What sweeps over these tensors.

    >>> x = torch.ones(2, 3, 4, 5, dtype=torch.float64)
    >>> sweeps(x, x, "elu") is inverted_batch_norm_reference
    True
    """
    found = (kernel for kernel in KERNELS if kernel.applies(source, y, activation))
    return next(found, inverted_batch_norm_reference)
