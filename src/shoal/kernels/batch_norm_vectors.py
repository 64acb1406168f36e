"""Batch norm's arithmetic on vectors, one op each: `shoal::batch_norm_scale`, `shoal::moved_statistics` and
`shoal::cumulative_statistics`, the mean over all batches that a batch norm with `momentum=None` updates.

In plain PyTorch ops each batch norm would be twenty ops of a few elements in a captured step, all of which a planner
would have to consider.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.nn.modules.batchnorm import _BatchNorm

from shoal.lowlevel.direct_call import in_places, needs_dispatch, register_op
from shoal.lowlevel.torch_state import backward_pass


def measures(layer: _BatchNorm) -> bool:
    """Whether a batch norm normalises by the statistics of the batch, as PyTorch's own forward decides it.

    >>> measures(torch.nn.BatchNorm2d(1).eval()), measures(torch.nn.BatchNorm2d(1, track_running_stats=False).eval())
    (False, True)
    """
    return layer.training or layer.running_mean is None


def batch_norm_scale(variance: Tensor, weight: Tensor | None, eps: float) -> Tensor:
    """Replaces `weight * torch.rsqrt(variance + eps)`, (C,), in the dtype of `variance`; differentiable once.

    >>> batch_norm_scale(torch.tensor([3.0]), torch.tensor([8.0]), 1.0)
    tensor([4.])
    """
    if not needs_dispatch((variance, weight)):  # PyTorch's own ops are called sooner than one of ours
        inverse = torch.rsqrt(variance + eps)
        return inverse if weight is None else inverse * weight
    scale: Tensor = torch.ops.shoal.batch_norm_scale(variance, weight, eps)
    return scale


def move_statistics(layer: _BatchNorm, mean: Tensor, variance: Tensor, count: int) -> None:
    """Update running statistics and the number of batches as the layer's own forward pass does in training mode.

    Nothing is updated in a layer that does not train or does not track, or where checkpointing repeats a forward pass.

    Args:
        layer: a batch norm.
        mean, variance: of the batch, (C,), the variance biased.
        count: elements of a channel.
    """
    if runs_again() or not (layer.training and layer.track_running_stats):
        return
    if layer.num_batches_tracked is not None:
        layer.num_batches_tracked.add_(1)
    if layer.running_mean is None or layer.running_var is None:
        return
    momentum = layer.momentum if layer.momentum is not None else 0.0
    batches = layer.num_batches_tracked if layer.momentum is None else None
    # An earlier call of the layer's own forward saved them for its backward pass, which does not read them in training
    # mode. So `.data`: as in that forward, autograd's count of versions does not see the write.
    running, mean, variance = (layer.running_mean.data, layer.running_var.data), mean.detach(), variance.detach()
    if batches is None and running[0].dtype == mean.dtype and not needs_dispatch((*running, mean)):
        for moving, now in zip(running, (mean, variance * (count / (count - 1))), strict=True):
            moving.lerp_(now, momentum)
        return
    # Nothing here needs a gradient; `no_grad` in a captured graph would refuse every rewrite of it.
    moved = torch.ops.shoal.moved_statistics(*running, mean, variance, batches, momentum, count)
    running[0].copy_(moved[0])
    running[1].copy_(moved[1])


def runs_again() -> bool:
    """Whether a backward pass is running, so that this forward pass is a checkpointed one, repeated."""
    return not torch.compiler.is_compiling() and backward_pass() is not None


def _scale(variance: Tensor, weight: Tensor | None, eps: float) -> Tensor:
    inverse = torch.rsqrt(variance + eps)
    return inverse if weight is None else inverse.mul_(weight)


def _scale_backward(
    grad: Tensor, variance: Tensor, weight: Tensor | None, eps: float, needs: list[bool]
) -> list[Tensor]:
    inverse = torch.rsqrt(variance + eps)
    of_inverse = grad if weight is None else grad * weight
    found = [of_inverse * inverse.pow(3) * -0.5] if needs[0] else []
    return [*found, (grad * inverse).to(weight.dtype)] if needs[1] and weight is not None else found


def _setup(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    *vectors, ctx.eps = inputs
    ctx.save_for_backward(*vectors)


def _differentiate(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
    needs = list(ctx.needs_input_grad[:2])
    return *in_places(batch_norm_scale_backward(grad, *ctx.saved_tensors, ctx.eps, needs), needs), None


def _moved(
    running_mean: Tensor,
    running_variance: Tensor,
    mean: Tensor,
    variance: Tensor,
    batches: Tensor | None,
    momentum: float,
    count: int,
) -> tuple[Tensor, Tensor]:
    share: Any = momentum if batches is None else 1.0 / batches.to(mean.dtype)
    unbiased = variance * (count / (count - 1))
    pairs = ((running_mean, mean), (running_variance, unbiased))
    moved_mean, moved_variance = (running.to(now.dtype).lerp(now, share).to(running.dtype) for running, now in pairs)
    return moved_mean, moved_variance


# They compute a few numbers: what computes those describes them, too.
register_op(
    "batch_norm_scale(Tensor variance, Tensor? weight, float eps) -> Tensor",
    *(_scale, _scale, _setup, _differentiate),
)
batch_norm_scale_backward = register_op(
    "batch_norm_scale_backward(Tensor grad, Tensor variance, Tensor? weight, float eps, bool[] needs) -> Tensor[]",
    *(_scale_backward, _scale_backward),
)
register_op(
    "moved_statistics(Tensor running_mean, Tensor running_variance, Tensor mean, Tensor variance, Tensor? batches,"
    " float momentum, SymInt count) -> (Tensor, Tensor)",
    *(_moved, _moved),
)


@torch.library.custom_op("shoal::cumulative_statistics", mutates_args=())
def cumulative_statistics(
    x: Tensor, running_mean: Tensor, running_var: Tensor, batches: Tensor
) -> tuple[Tensor, Tensor]:
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
def _fake(x: Tensor, running_mean: Tensor, running_var: Tensor, batches: Tensor) -> tuple[Tensor, Tensor]:
    return torch.empty_like(running_mean), torch.empty_like(running_var)
