"""Capture the kernels that eager PyTorch runs.

While AOTAutograd traces, some ops are taken apart by Python decompositions (interpolation becomes dozens of gathers and
products, recurrent layers become matrix products). The results differ from the eager kernels' in the last bits and cost
more. Inside `eager_kernels` they stay whole, and views
have the strides that they have in eager PyTorch.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from typing import Any

from torch._C import DispatchKey

from shoal.lowlevel.eager_views import eager_views

_FAMILIES = ("upsample_", "_upsample_", "lstm", "gru", "rnn_")
_KEYS = (DispatchKey.Autograd, DispatchKey.CompositeImplicitAutograd)


@contextmanager
def eager_kernels() -> Iterator[None]:
    """Leave the named families whole while the block runs."""
    taken = []
    for overload in _decomposed():
        for key in _KEYS:
            if key in overload.py_kernels:
                taken.append((overload, key, overload.py_kernels.pop(key)))
        overload._dispatch_cache.clear()
    try:
        with eager_views():
            yield
    finally:
        for overload, key, kernel in taken:
            overload.py_kernels[key] = kernel
            overload._dispatch_cache.clear()


@cache
def _decomposed() -> tuple[Any, ...]:
    import torch._decomp.decompositions  # registers them

    packets = (getattr(torch.ops.aten, name) for name in dir(torch.ops.aten) if name.startswith(_FAMILIES))
    return tuple(getattr(packet, overload) for packet in packets for overload in packet.overloads())
