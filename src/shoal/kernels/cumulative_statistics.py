"""Running statistics that are the mean over all batches: what a batch norm with `momentum=None` updates."""

from __future__ import annotations

import torch


@torch.library.custom_op("shoal::cumulative_statistics", mutates_args=())
def cumulative_statistics(
    x: torch.Tensor, running_mean: torch.Tensor, running_var: torch.Tensor, batches: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """The running statistics after one more batch, with the bits of `F.batch_norm(..., momentum=1 / float(batches))`.

    The share that a batch has in them is a tensor's value, which no captured graph can hold as a number: it is read
    where this runs, on CUDA too, as PyTorch's own layer does.

    Args:
        x: (N, C, ...), the batch.
        running_mean, running_var: (C,), over the batches before.
        batches: how many there are with this one, one integer.

    Returns:
        The new mean and variance, (C,) each. They carry no gradient.

    >>> mean, _ = cumulative_statistics(torch.tensor([[2.0], [4.0]]), torch.zeros(1), torch.ones(1), torch.tensor(3))
    >>> mean
    tensor([1.])
    """
    mean, var = running_mean.clone(), running_var.clone()
    share = 1.0 / (float(batches) or 1.0)  # ops are timed on counters of 0
    if x.device.type == "cpu":
        torch.batch_norm_update_stats(x, mean, var, share)
    else:  # cuDNN's statistics have bits of their own
        torch.nn.functional.batch_norm(x, mean, var, None, None, True, share)
    return mean, var


@cumulative_statistics.register_fake
def _fake(
    x: torch.Tensor, running_mean: torch.Tensor, running_var: torch.Tensor, batches: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    return torch.empty_like(running_mean), torch.empty_like(running_var)
