"""Context managers over private state of torch: traces with eager kernels, real tensors within a trace.

While AOTAutograd traces, Python decompositions take some ops apart: interpolation becomes dozens of gathers and
products, recurrent layers become matrix products, and a margin loss takes four times the memory. The results differ
from the eager kernels' in the last bits and cost more.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from functools import cache
from typing import Any

import torch
from torch._C import DispatchKey
from torch._library.utils import is_builtin
from torch._subclasses.fake_tensor import unset_fake_temporarily
from torch.utils._python_dispatch import _disable_current_modes, _get_current_dispatch_mode, _pop_mode_temporarily

from shoal.lowlevel.eager_strides import eager_strides, is_dense
from shoal.lowlevel.torch_state import on_device

_aten = torch.ops.aten
_FAMILIES = (
    *("upsample_", "_upsample_", "lstm", "gru", "rnn_"),
    *("hardshrink", "softshrink", "multi_margin_loss", "multilabel_margin_loss_forward"),
)
_KEYS = (DispatchKey.Autograd, DispatchKey.CompositeImplicitAutograd)


@contextmanager
def eager_kernels() -> Iterator[None]:
    """While the block runs, traces keep the ops of `_FAMILIES` whole, have the strides of eager PyTorch, and take dense
    gradients of results that are not dense. What is compiled may run backward with retain_graph=True: AOTAutograd
    refuses that of graphs whose saved tensors a compiler may write into, which ours does not."""
    taken = []
    for overload in _decomposed():
        # An op made of others has no kernel of its own. One for fake tensors on "meta" would be called instead of them,
        # and the backward pass would end there.
        made_of_others = torch._C._dispatch_has_kernel_for_dispatch_key(overload.name(), "CompositeImplicitAutograd")
        for key in (*_KEYS, DispatchKey.Meta) if made_of_others else _KEYS:
            if key in overload.py_kernels:
                taken.append((overload, key, overload.py_kernels.pop(key)))
        overload._dispatch_cache.clear()
    try:
        with eager_strides(), _dense_gradients(), _nothing_donated():
            yield
    finally:
        for overload, key, kernel in taken:
            overload.py_kernels[key] = kernel
            overload._dispatch_cache.clear()


@contextmanager
def _nothing_donated() -> Iterator[None]:
    """AOTAutograd refuses another backward pass of a graph that has saved what a compiler may write into; what it finds
    is noted when the graph is compiled. Its own switch is read again when the backward pass runs."""
    from torch._functorch._aot_autograd import graph_compile  # not with `import shoal`, as below

    collect: Any = graph_compile.collect_bw_donated_buffer_idxs
    graph_compile.collect_bw_donated_buffer_idxs = lambda *_: []
    try:
        yield
    finally:
        graph_compile.collect_bw_donated_buffer_idxs = collect


@contextmanager
def _dense_gradients() -> Iterator[None]:
    """AOTAutograd lays a gradient out as its result: of an unfolded tensor, whose windows share elements, gradients
    overwrite each other, and those of some columns of a result take the memory of all."""
    # Not with `import shoal`: they import the compiler.
    from torch._functorch import config as functorch_config
    from torch._functorch._aot_autograd.schemas import MemoryFormatMeta

    known = MemoryFormatMeta.from_tensor

    def of(result: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        if _is_dense(result):
            return known(result, *args, **kwargs)
        with functorch_config.patch(guess_tangent_strides_as_outputs=False):
            return known(result, *args, **kwargs)

    MemoryFormatMeta.from_tensor = staticmethod(of)  # type: ignore[method-assign, assignment]
    try:
        yield
    finally:
        MemoryFormatMeta.from_tensor = staticmethod(known)  # type: ignore[method-assign]


def _is_dense(tensor: torch.Tensor) -> bool:
    """Whether a strided tensor of known sizes has one address for each element, and no others between them."""
    if tensor.layout != torch.strided or tensor._has_symbolic_sizes_strides or not tensor.numel():
        return True
    return is_dense(tensor.shape, tensor.stride())


@contextmanager
def isolated(device: torch.device) -> Iterator[None]:
    """Run real tensors, also within a trace: no fake tensors, gradients or autocast; the random state is restored.

    What CUDA's allocator keeps of them goes back to the device, so that a step does not find its room in pieces.
    """
    with ExitStack() as stack:
        # A trace puts fake tensors and the Python dispatcher in force.
        stack.enter_context(_disable_current_modes())
        stack.enter_context(torch._C._DisablePythonDispatcher())
        stack.enter_context(torch._C._DisableAutocast())
        stack.enter_context(torch.no_grad())
        stack.enter_context(torch.random.fork_rng(devices=[device] if device.type == "cuda" else []))
        if device.type == "cuda":
            stack.enter_context(on_device(device))
            stack.callback(torch.accelerator.empty_cache)
        yield


@contextmanager
def without_aliasing_check(op: object) -> Iterator[None]:
    """Call `op` outside of PyTorch's check of what custom ops return, unless it is a custom op.

    AOTAutograd makes the first call of each graph under a dispatch mode that looks whether results of custom ops share
    memory with their arguments. Under any such mode complex `linalg.pinv` and `linalg.lstsq` are wrong: their kernels
    read conjugated views as if they were not.
    """
    mode = _get_current_dispatch_mode()
    is_check = type(mode).__name__ == "_AnalyzeCustomOpInputOutputMode"
    if not is_check or (isinstance(op, torch._ops.OpOverload) and not is_builtin(op)):
        yield
        return
    with _pop_mode_temporarily():
        yield


@cache
def _decomposed() -> tuple[Any, ...]:
    packets = (getattr(_aten, name) for name in dir(_aten) if name.startswith(_FAMILIES))
    return tuple(getattr(packet, overload) for packet in packets for overload in packet.overloads())


def with_real_tensors() -> AbstractContextManager[Any]:
    """Within it tensors are made on their device, also while a graph is traced with fake ones."""
    found: AbstractContextManager[Any] = unset_fake_temporarily()
    return found
