"""Images of noise in the place of CIFAR-10's, for benchmarks that train."""

from __future__ import annotations

import torch


def noise_images() -> dict[str, tuple[torch.Tensor, torch.Tensor]]:
    """Images and labels of "train" and "test"."""
    draw = torch.Generator().manual_seed(0)
    return {
        name: (torch.randn(n, 3, 32, 32, generator=draw), torch.randint(10, (n,), generator=draw))
        for name, n in (("train", 200), ("test", 100))
    }
