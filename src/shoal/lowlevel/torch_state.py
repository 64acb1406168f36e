"""What PyTorch is doing on this thread, and what a call of a module runs: state that torch has no public name for.

PyTorch does not guarantee these names; 2.12 to 2.15 have them, and `tests/lowlevel/test_torch_state.py` tests that.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from functools import cache
from typing import Any

import torch
from torch import nn
from torch.autograd import Variable, forward_ad
from torch.fx._symbolic_trace import is_fx_symbolic_tracing
from torch.multiprocessing.reductions import StorageWeakRef
from torch.nn.modules.module import _has_any_global_hook
from torch.nn.parallel import DistributedDataParallel

# As `__torch_function__` of a tensor subclass: its operations return plain tensors. nn.Parameter has the same.
no_torch_function = torch._C._disabled_torch_function_impl
_guards: Any = torch._C._dynamo.guards  # its stubs lack these
# (tensor, sizes, strides, offset) -> a tensor on the same storage, that many elements further; not a view to autograd.
new_view = _guards._reinterpret_tensor
negated_view = torch._neg_view  # as `conj().imag` returns one: whoever reads it negates
# (sizes, strides, dtype) -> `torch.empty_strided` on this device, of CUDA on the current one: in half of its time.
_NEW_BY_DEVICE = {"cpu": _guards._empty_strided_cpu, "cuda": _guards._empty_strided_cuda}


def new_tensors(
    device: torch.device, layouts: Iterable[tuple[tuple[int, ...], tuple[int, ...], torch.dtype]]
) -> list[torch.Tensor]:
    """`[torch.empty_strided(sizes, strides, dtype=dtype, device=device) for sizes, strides, dtype in layouts]`.

    >>> [x.stride() for x in new_tensors(torch.device("cpu"), [((2, 3), (1, 2), torch.float32)])]
    [(1, 2)]
    """
    make = _NEW_BY_DEVICE.get(device.type)
    if make is None or (device.type == "cuda" and device.index not in (None, torch._C._cuda_getDevice())):
        return [torch.empty_strided(sizes, strides, dtype=dtype, device=device) for sizes, strides, dtype in layouts]
    return [make(sizes, strides, dtype) for sizes, strides, dtype in layouts]


def backward_pass() -> int | None:
    """A number for the backward pass that runs on this thread; None outside of one.

    >>> seen = []
    >>> x = torch.ones(2, requires_grad=True)
    >>> _ = x.register_hook(lambda gradient: seen.append(backward_pass() is not None))
    >>> x.sum().backward()
    >>> seen, backward_pass()
    ([True], None)
    """
    number: int = torch._C._current_graph_task_id()
    return None if number in (-1, _left.number) else number


class _LeftBackward(threading.local):
    number = -1  # of the backward pass that `outside_backward` was entered in


_left = _LeftBackward()


@contextmanager
def outside_backward() -> Iterator[None]:
    """Let code that runs at the end of a backward pass, such as a capture, be taken for code outside of it.

    >>> seen = []
    >>> def look(gradient):
    ...     with outside_backward():
    ...         seen.append(backward_pass())
    >>> x = torch.ones(2, requires_grad=True)
    >>> _ = x.register_hook(look)
    >>> x.sum().backward()
    >>> seen
    [None]
    """
    before, _left.number = _left.number, torch._C._current_graph_task_id()
    try:
        yield
    finally:
        _left.number = before


def call_at_end_of_backward(callback: Callable[[], None]) -> None:
    """Call something once, when the backward pass that runs on this thread has ended, after what asked before.

    Raises:
        RuntimeError: none runs.
    """
    Variable._execution_engine.queue_callback(callback)


def autograd_node() -> Any:
    """The node of autograd's graph whose backward function runs on this thread; None outside of one."""
    return torch._C._current_autograd_node()


def without_autocast() -> Any:
    """A context in which autocast changes nothing, also where a user's is in force."""
    return torch._C._DisableAutocast()


def saved_tensors_hooks() -> Any:
    """The innermost `torch.autograd.graph.saved_tensors_hooks` in force; None where there are none."""
    return torch._C._autograd._top_saved_tensors_default_hooks(True)


def in_functorch() -> bool:
    """Whether a transform of `torch.func` is active; a compiler is not asked."""
    return not torch.compiler.is_compiling() and torch._C._functorch.peek_interpreter_stack() is not None


def in_transform() -> bool:
    """Whether a transform of `torch.func` or forward-mode AD is active; a compiler is not asked."""
    return in_functorch() or (not torch.compiler.is_compiling() and forward_ad._current_level >= 0)


def in_trace() -> bool:
    """Whether `torch.jit.trace` or `torch.fx.symbolic_trace` records what is called."""
    return bool(torch._C._get_tracing_state()) or is_fx_symbolic_tracing()


def is_exporting() -> bool:
    """`torch.compiler.is_exporting()`, which Dynamo of torch 2.11 takes for True in whatever it traces."""
    return torch.compiler._is_exporting_flag


def active_ddp_module() -> DistributedDataParallel | None:
    """The DistributedDataParallel whose forward pass runs."""
    module: DistributedDataParallel | None = DistributedDataParallel._get_active_ddp_module()
    return module


def on_this_rank(tensor: torch.Tensor) -> torch.Tensor:
    """What a tensor holds on this rank: a DTensor's shard, or the tensor itself."""
    own: torch.Tensor = getattr(tensor, "_local_tensor", tensor)
    return own


_SPARSE_PARTS: dict[torch.layout, tuple[str, ...]] = {
    torch.sparse_coo: ("_indices", "_values"),
    torch.sparse_csr: ("crow_indices", "col_indices", "values"),
    torch.sparse_bsr: ("crow_indices", "col_indices", "values"),
    torch.sparse_csc: ("ccol_indices", "row_indices", "values"),
    torch.sparse_bsc: ("ccol_indices", "row_indices", "values"),
}


def dense_parts(tensor: torch.Tensor) -> list[torch.Tensor]:
    """The strided tensors that hold what a tensor has on this rank: a sparse tensor has no storage of its own.

    >>> [part.nbytes for part in dense_parts(torch.eye(3).to_sparse())]  # indices and values
    [48, 12]
    >>> x = torch.ones(3)
    >>> dense_parts(x)[0] is x
    True
    """
    own = on_this_rank(tensor)
    if own.layout is torch.strided:
        return [own]
    if own.layout in _SPARSE_PARTS:
        own = own.detach()
        return [getattr(own, name)() for name in _SPARSE_PARTS[own.layout]]
    names, _ = own.__tensor_flatten__()  # type: ignore[attr-defined]
    return [part for name in names for part in dense_parts(getattr(own, name))]


def has_gradient_hook(parameter: torch.Tensor) -> bool:
    """Whether something takes a parameter's gradient as soon as it is accumulated, such as an optimizer that steps.

    >>> weight = nn.Parameter(torch.ones(2))
    >>> has_gradient_hook(weight)
    False
    >>> handle = weight.register_post_accumulate_grad_hook(lambda weight: None)
    >>> has_gradient_hook(weight)
    True
    """
    return bool(parameter._post_accumulate_grad_hooks) or hasattr(parameter, "_in_backward_optimizers")


def has_hooks(module: nn.Module) -> bool:
    """Whether something else runs where the module is called."""
    return bool(
        module._forward_hooks or module._forward_pre_hooks or module._backward_hooks or module._backward_pre_hooks
    )


def has_global_hooks() -> bool:
    """Whether hooks are registered for the calls of all modules."""
    return bool(_has_any_global_hook())


def compiled_call(module: nn.Module) -> Any:
    """What `module.compile()` put in place of its call; None where nothing."""
    return module._compiled_call_impl


def is_compiled(module: nn.Module) -> bool:
    """Whether `torch.compile` made the module, or `module.compile()` compiles its call."""
    from torch._dynamo.eval_frame import OptimizedModule  # importing Dynamo takes a second

    return isinstance(module, OptimizedModule) or module._compiled_call_impl is not None


def autocast_state(values: Iterable[object]) -> dict[str, torch.dtype]:
    """Where autocast is on, of the devices of these tensors and the CPU: device type → dtype."""
    devices = {value.device.type for value in values if isinstance(value, torch.Tensor)} | {"cpu"}
    known = sorted(devices & {"cpu", "cuda", "xpu"})
    return {device: torch.get_autocast_dtype(device) for device in known if torch.is_autocast_enabled(device)}


@contextmanager
def autocasting(state: Mapping[str, torch.dtype]) -> Iterator[None]:
    """Autocast as it was: AOTAutograd switches it off while it hands over what it has traced."""
    with ExitStack() as stack:
        for device, dtype in state.items():
            stack.enter_context(torch.autocast(device, dtype))
        yield


def check_batch_norm_input(layer: nn.Module, x: torch.Tensor) -> None:
    """Raise what a batch norm's own forward raises for an `x` of another number of dimensions."""
    layer._check_input_dim(x)  # type: ignore[operator]


def check_batch_size(x: torch.Tensor) -> None:
    """Raise what `batch_norm` raises in training mode where `x` has one value per channel."""
    torch.nn.functional._verify_batch_size(x.size())  # type: ignore[attr-defined]


def check_group_size(x: torch.Tensor, groups: int) -> None:
    """Raise what `group_norm` raises where `x` has one value per group."""
    samples, channels, *spatial = x.shape
    torch.nn.functional._verify_batch_size([samples * channels // groups, groups, *spatial])  # type: ignore[attr-defined]


def check_spatial_size(x: torch.Tensor) -> None:
    """Raise what `instance_norm` raises where `x` has one value per sample and channel."""
    torch.nn.functional._verify_spatial_size(x.size())  # type: ignore[attr-defined]


def storage_of(reference: StorageWeakRef) -> torch.UntypedStorage | None:
    """The storage that is weakly referenced, if a tensor still uses it."""
    storage: torch.UntypedStorage | None = torch.UntypedStorage._new_with_weak_ptr(reference.cdata)
    return storage


def has_other_owners(tensor: torch.Tensor) -> bool:
    """Whether another tensor, or an op that runs, owns the storage of `tensor`. Storages held by Python do not count.

    >>> x = torch.ones(2)
    >>> y = x.view(1, 2)
    >>> has_other_owners(x)
    True
    >>> del y
    >>> has_other_owners(x)
    False
    """
    return torch._C._storage_Use_Count(tensor.untyped_storage()._cdata) > _owners_of_one_tensor()


@cache
def _owners_of_one_tensor() -> int:
    """The tensor, and the Python object of its storage, which lives as long as the storage does."""
    tensor = torch.empty(1)
    return torch._C._storage_Use_Count(tensor.untyped_storage()._cdata)


def allocated_bytes(nbytes: int, device: torch.device) -> int:
    """What a device's allocator counts for that many bytes: CUDA hands out blocks of 512 bytes."""
    return -(-nbytes // 512) * 512 if device.type == "cuda" else nbytes


def reserved_bytes(device: torch.device) -> int:
    """`torch.accelerator.memory_reserved`, which makes a flat dictionary of all that the allocator counts."""
    if not torch._C._accelerator_isAllocatorInitialized():
        return 0
    index = torch.accelerator.current_device_index() if device.index is None else device.index
    return int(torch._C._accelerator_getDeviceStats(index)["reserved_bytes"]["all"]["current"])


def on_device(device: torch.device) -> AbstractContextManager[object]:
    """Within it an accelerator's kernels are started on `device`; the CPU has none to choose from.

    A device without an index is the current one.
    """
    if device.type == "cpu" or device.index is None:
        return nullcontext()
    return torch.accelerator.device_index(device.index)
