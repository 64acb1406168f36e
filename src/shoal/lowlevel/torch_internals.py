"""Context managers over private state of torch: traces with eager kernels and strides, real tensors within a trace.

While AOTAutograd traces, Python decompositions take some ops apart: interpolation becomes dozens of gathers and
products, recurrent layers become matrix products. The results differ from the eager kernels' in the last bits and cost
more. And a view's stride along a dimension of one element can be any number: the fake `aten.view` chooses others than
the real one. Kernels read them (`is_contiguous`, `suggest_memory_format`), so with a batch of one a trace would take
another path than eager PyTorch does.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from functools import cache
from typing import Any

import torch
from torch._C import DispatchKey
from torch._subclasses.fake_impls import op_implementations_dict
from torch._subclasses.fake_tensor import FakeTensorMode, unset_fake_temporarily
from torch.utils._python_dispatch import _disable_current_modes

_aten = torch.ops.aten
_FAMILIES = ("upsample_", "_upsample_", "lstm", "gru", "rnn_")
_KEYS = (DispatchKey.Autograd, DispatchKey.CompositeImplicitAutograd)
_VIEWS = (_aten.view.default, _aten._unsafe_view.default)


@contextmanager
def eager_kernels() -> Iterator[None]:
    """While the block runs, traces keep the ops of `_FAMILIES` whole, and views have the strides of eager PyTorch."""
    taken = []
    for overload in _decomposed():
        for key in _KEYS:
            if key in overload.py_kernels:
                taken.append((overload, key, overload.py_kernels.pop(key)))
        overload._dispatch_cache.clear()
    try:
        with _eager_views():
            yield
    finally:
        for overload, key, kernel in taken:
            overload.py_kernels[key] = kernel
            overload._dispatch_cache.clear()


@contextmanager
def isolated(device: torch.device) -> Iterator[None]:
    """Run real tensors, also within a trace: no fake tensors, gradients or autocast; the random state is restored."""
    with ExitStack() as stack:
        # A trace puts fake tensors and the Python dispatcher in force.
        stack.enter_context(_disable_current_modes())
        stack.enter_context(torch._C._DisablePythonDispatcher())
        stack.enter_context(torch._C._DisableAutocast())
        stack.enter_context(torch.no_grad())
        stack.enter_context(torch.random.fork_rng(devices=[device] if device.type == "cuda" else []))
        if device.type == "cuda":
            stack.enter_context(torch.cuda.device(device))
        yield


@cache
def _decomposed() -> tuple[Any, ...]:

    packets = (getattr(_aten, name) for name in dir(_aten) if name.startswith(_FAMILIES))
    return tuple(getattr(packet, overload) for packet in packets for overload in packet.overloads())


@contextmanager
def _eager_views() -> Iterator[None]:
    before = {view: op_implementations_dict[view] for view in _VIEWS if view in op_implementations_dict}
    op_implementations_dict.update({view: _with_real_strides(view, traced) for view, traced in before.items()})
    FakeTensorMode.cache_clear()  # of what was traced outside of the block, as Dynamo does
    try:
        yield
    finally:
        op_implementations_dict.update(before)
        FakeTensorMode.cache_clear()


def _with_real_strides(view: Any, traced: Any) -> Any:
    def implementation(mode: FakeTensorMode, func: Any, x: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        result: torch.Tensor = traced(mode, func, x, *args, **kwargs)
        if not any(isinstance(size, torch.SymInt) for size in (*x.shape, *x.stride(), *result.shape)):
            with unset_fake_temporarily(), torch._C._DisablePythonDispatcher():  # whose view is the fake one
                like = torch.empty_strided(x.shape, x.stride(), dtype=x.dtype, device="meta")
                strides = view(like, result.shape).stride()
            if strides != result.stride():
                with mode:
                    return result.as_strided(result.shape, strides)
        return result

    return implementation
