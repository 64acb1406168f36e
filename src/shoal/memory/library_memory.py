"""What cuBLAS keeps of a CUDA device: a workspace for each thread and stream that it has computed a product on.

PyTorch allocates it with the first product and never frees it; on a Hopper GPU it is 32 MiB. The thread of autograd's
that runs the device's backward passes has one too.
"""

from __future__ import annotations

import threading
from collections.abc import Callable

import torch

from shoal.core.step import StepGraph
from shoal.lowlevel.backward_thread import on_backward_thread
from shoal.lowlevel.cuda_calls import capability
from shoal.lowlevel.torch_internals import isolated
from shoal.lowlevel.torch_versions import cublas_workspace_size

_PRODUCTS = ("mm", "addmm", "_addmm_activation", "bmm", "baddbmm", "addbmm", "mv", "addmv", "dot", "vdot", "linear")
Caller = tuple[torch.device, int, int]  # device, thread and stream
_kept_bytes: dict[Caller, int] = {}


def library_bytes(graph: StepGraph, device: torch.device) -> dict[Caller, int]:
    """Bytes that cuBLAS keeps while a step runs that is called from here, on the current stream, for each caller.

    They are allocated here, if they are not yet, so that the first step finds them.

    Args:
        graph: the step; where it has no matrix product, cuBLAS is not asked for any.
        device: where it runs; none on any but a CUDA device.
    """
    return kept_bytes(device) if any(_is_product(op.target) for op in graph.ops) else {}


def caller(device: torch.device) -> Caller:
    """Who calls cuBLAS on a CUDA device now."""
    return device, threading.get_ident(), torch.accelerator.current_stream(device).stream_id


def is_known(one: Caller) -> bool:
    """Whether the caller was seen itself; else another one of the same device stands for it."""
    return one[1] >= 0


def kept_bytes(device: torch.device) -> dict[Caller, int]:
    """`library_bytes` of a step whose ops are not known yet."""
    if device.type != "cuda":
        return {}
    found: dict[Caller, int] = {}

    def note() -> None:
        key = caller(device)
        if key not in _kept_bytes:
            _kept_bytes[key] = _kept_by_a_product(device)
        found[key] = _kept_bytes[key]

    with isolated(device):
        note()
        on_backward_thread(device, note)
    # Called from a backward pass, both are of one thread; the one that called the model has had its product.
    if len(found) == 1:
        [(where, thread, stream)] = found
        found[where, -thread, stream] = found[where, thread, stream]
    return found


def _is_product(target: str) -> bool:
    names = target.split(".")
    return names[0] == "aten" and names[1] in _PRODUCTS


def _kept_by_a_product(device: torch.device) -> int:
    """What the first products of this thread and stream leave; where they were not the first, what PyTorch says."""
    operand = torch.zeros(16, 16, device=device)
    plain_bytes = _left_by(lambda: operand.mm(operand), device)
    with_bias_bytes = _left_by(lambda: torch.addmm(operand[0], operand, operand), device)
    if cublas_workspace_size is not None:
        return plain_bytes + with_bias_bytes or int(cublas_workspace_size())
    return (plain_bytes or _workspace_bytes(device)) + with_bias_bytes


def _left_by(product: Callable[[], torch.Tensor], device: torch.device) -> int:
    with torch.no_grad():
        before_bytes = torch.accelerator.memory_allocated(device)
        product()
    return torch.accelerator.memory_allocated(device) - before_bytes


def _workspace_bytes(device: torch.device) -> int:
    """cuBLAS's own, where no thread was seen to allocate it: PyTorch's default."""
    known = (nbytes for (other, _, _), nbytes in _kept_bytes.items() if other == device)
    return next(known, (32 if capability(device)[0] >= 9 else 8) << 20)
