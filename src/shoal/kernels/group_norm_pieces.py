"""Group norm's backward on CUDA in pieces, written over the incoming gradient: two tensors instead of three.

PyTorch's kernel returns a gradient of its own. Groups are independent: it is called for the gradients of weight and
bias only, then for the input's some groups of one sample at a time, which are copied over the incoming gradient. That
takes more launches and sweeps, so only the gradients that set a step's peak are cut, and on CUDA only where `choose`
finds that pieces repeat the bits of the whole.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import lru_cache
from typing import Any

import torch

from shoal.kernels.group_norm import backward_in_pieces
from shoal.kernels.pieces import WORTH_PIECES_BYTES, Cut, are_sizes_known, have_same_bits, repeats

_WHOLE = torch.ops.aten.native_group_norm_backward.default
_CHANNELS = 1
_PIECES = 8  # of a sample
_ALL = [True, True, True]
Gradients = tuple[torch.Tensor, torch.Tensor, torch.Tensor]


def backward(grad: torch.Tensor, *rest: Any) -> Gradients:
    """`aten.native_group_norm_backward` of contiguous tensors, in that many pieces of each sample's groups."""
    return backward_(grad.clone(), *rest)


def backward_(
    grad: torch.Tensor, x: torch.Tensor, mean: torch.Tensor, invstd: torch.Tensor, weight: torch.Tensor, *rest: Any
) -> Gradients:
    """`backward` that writes the gradient of the input over `grad`."""
    *settings, _, pieces = rest  # sizes, groups, and what is wanted; along which dimension
    if not (grad.is_contiguous() and x.is_contiguous()):
        of_input, *others = _WHOLE(grad, x, mean, invstd, weight, *settings)
        return grad.copy_(of_input), *others
    return backward_in_pieces(grad, x, weight, mean, invstd, -(-mean.shape[1] // pieces))


IN_PIECES: dict[Any, Callable[..., Gradients]] = {_WHOLE: backward}
"""What computes it in pieces."""


def choose(whole: Callable[..., Any], arguments: Sequence[Any]) -> Cut | None:
    """How group norm's backward is cut into pieces on CUDA; None: not at all.

    It is cut where its tensors have 4 MiB and more, and pieces repeat its bits on the device with these shapes.

    Args:
        whole: `aten.native_group_norm_backward.default`.
        arguments: its arguments. Tensors may be fake: only their shapes, strides, dtypes and devices are read.

    Returns:
        What `IN_PIECES[whole]` takes besides, and what that saves.
    """
    cut, x = cut_elsewhere(whole, arguments), arguments[1]
    if cut is None or x.device.type != "cuda":
        return None
    dtypes = x.dtype, arguments[4].dtype
    return cut if _repeats_bits(tuple(x.shape), dtypes, x.device, arguments[8], cut.count) else None


def cut_elsewhere(whole: Callable[..., Any], arguments: Sequence[Any]) -> Cut | None:
    """`choose` for a GPU that is not here, on which it cannot be tried whether pieces repeat the bits."""
    grad, x, mean, _, weight, *_, groups, wanted = arguments
    if not are_sizes_known(grad, x) or weight is None or list(wanted) != _ALL or x.dim() < 3:
        return None
    if not (grad.is_contiguous() and x.is_contiguous()) or grad.dtype != x.dtype or weight.dtype != mean.dtype:
        return None
    parts = x.shape[0] * min(_PIECES, groups)
    if x.nbytes < WORTH_PIECES_BYTES or parts < 2:
        return None
    return Cut(_CHANNELS, min(_PIECES, groups), x.nbytes - x.nbytes // parts)


@lru_cache(maxsize=256)
def _repeats_bits(
    shape: tuple[int, ...], dtypes: tuple[torch.dtype, torch.dtype], device: torch.device, groups: int, pieces: int
) -> bool:
    """Whether pieces give the bits of the whole on this device; False where it has no room to find out."""
    dtype, of_weight = dtypes
    samples, channels, *_ = shape

    def compare(generator: torch.Generator) -> bool:
        grad, x = (torch.randn(shape, dtype=dtype, device=device, generator=generator) for _ in range(2))
        weight = torch.linspace(0.5, 2, channels, dtype=of_weight, device=device)
        sizes = samples, channels, x[0, 0].numel(), groups
        _, mean, invstd = torch.ops.aten.native_group_norm(x, weight, weight, *sizes, 1e-5)
        arguments = (grad, x, mean, invstd, weight, *sizes, _ALL)
        return have_same_bits(backward(*arguments, _CHANNELS, pieces), _WHOLE(*arguments))

    return repeats(device, compare)
