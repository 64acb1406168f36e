"""cuDNN's batch norm without a GPU: PyTorch is told to choose it, and its ops get implementations for the CPU."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import pytest
import torch

from shoal.rewrites import norms

aten = torch.ops.aten
RESERVE_BYTES = 96
WRITES_INTO_RESERVE = False


def forward(x, weight, bias, mean, var, training, momentum, eps):  # type: ignore[no-untyped-def]
    made = aten.native_batch_norm(x, weight, bias, mean, var, training, momentum, eps)
    reserve = torch.frombuffer(bytearray(range(RESERVE_BYTES)), dtype=torch.uint8).clone()
    return (*made, reserve if training else reserve[:0])


def backward(x, grad, weight, running_mean, running_var, mean, invstd, eps, reserve):  # type: ignore[no-untyped-def]
    """NaN without what the forward pass reserved, as where its time is measured."""
    assert grad.stride() == x.stride()
    if reserve.tolist() != list(range(RESERVE_BYTES)):
        grad = torch.full_like(x, torch.nan)
    if WRITES_INTO_RESERVE:
        reserve.zero_()
    return aten.native_batch_norm_backward(grad, x, weight, None, None, mean, invstd, True, eps, [True] * 3)


@contextmanager
def cudnn_on_the_cpu() -> Iterator[pytest.MonkeyPatch]:
    """It is chosen for each batch norm with a weight."""
    library = torch.library.Library("aten", "IMPL")  # its registrations end with it
    library.impl("cudnn_batch_norm", forward, "CPU")
    library.impl("cudnn_batch_norm_backward", backward, "CPU")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(norms, "is_left_to_cudnn", lambda x, weight, *_: weight is not None)
        patch.setattr(norms, "cudnn_reserve_bytes", lambda _: RESERVE_BYTES)
        yield patch
    library._destroy()
