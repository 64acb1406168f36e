"""Batch norm of fake tensors in one go.

PyTorch's fake kernel takes it apart into about twenty ops, each of which is dispatched: a sixth of the time in which a
convolutional network is traced. What it comes to follows from the operands, where they are laid out in one way only.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensorMode

_aten = torch.ops.aten
_FORWARD, _BACKWARD = _aten._native_batch_norm_legit_functional.default, _aten.native_batch_norm_backward.default


def fake_batch_norm(mode: FakeTensorMode, func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    """What the fake kernel returns for batch norm in training mode; None for any other op, and where it has to say.

    Args:
        mode: of the operands.
        func, args, kwargs: the op as it is dispatched.
    """
    if kwargs or func not in (_FORWARD, _BACKWARD):
        return None
    if func is _FORWARD:
        x, *vectors, trains = args[:6]
        n_results, with_all = 5, trains
    else:
        grad, x, weight, _, _, mean, invstd, trains, _, asked = args
        vectors = [weight, mean, invstd]
        n_results, with_all = 3, trains and all(asked) and grad.shape == x.shape and grad.stride() == x.stride()
        with_all = with_all and (grad.dtype, grad.device) == (x.dtype, x.device)
    if not (with_all and _has_one_layout(x) and all(_is_vector_of(x, vector) for vector in vectors)):
        return None
    with mode:
        first = torch.empty_strided(x.shape, x.stride(), dtype=x.dtype, device=x.device)
        return (first, *(torch.empty_like(vectors[0]) for _ in range(n_results - 1)))


def _has_one_layout(x: torch.Tensor) -> bool:
    """Whether no axis could have another stride: contiguous or channels_last, and no axis of one."""
    if x.dtype not in (torch.float32, torch.float64) or not 2 <= x.dim() <= 5:
        return False
    if any(isinstance(size, torch.SymInt) for size in (*x.shape, *x.stride())) or min(x.shape) <= 1:
        return False
    last = {4: torch.channels_last, 5: torch.channels_last_3d}.get(x.dim(), torch.contiguous_format)
    return x.is_contiguous() or x.is_contiguous(memory_format=last)


def _is_vector_of(x: torch.Tensor, vector: torch.Tensor | None) -> bool:
    return (
        vector is not None
        and (vector.dtype, vector.device, vector.shape) == (x.dtype, x.device, x.shape[1:2])
        and vector.is_contiguous()
    )
