"""What is in use all step long beside the step itself: the rest of the model, gradients so far, optimizer state."""

from __future__ import annotations

import weakref
from collections.abc import Iterable
from typing import Any

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from shoal.core.step import StepGraph


class Standing:
    """A model and its optimizer, as far as they are known, held weakly: compiled code outlives them in Dynamo's caches.

    Args:
        model: its parameters and buffers count even where a step does not read them.
        optimizer: its state counts, also before its first step. Others count from their first step on.

    Attributes:
        gradients_pass: gradients that are there before a step are dropped before its backward pass, and do not count.
    """

    def __init__(self, model: nn.Module | None = None, optimizer: torch.optim.Optimizer | None = None) -> None:
        self._model = None if model is None else weakref.ref(model)
        self._optimizers = [] if optimizer is None else [weakref.ref(optimizer)]
        self.gradients_pass = False
        self._wrapper: weakref.ref[DistributedDataParallel] | None = None

    def called_by(self, wrapper: DistributedDataParallel | None) -> None:
        """Say which data parallel wrapper calls the model, if any: the buckets of its gradients count."""
        self._wrapper = None if wrapper is None else weakref.ref(wrapper)

    def trains(self, optimizer: torch.optim.Optimizer) -> bool:
        """Whether an optimizer is known, or has a parameter of the model."""
        model, optimizers = self._alive()
        if any(optimizer is known for known in optimizers):
            return True
        own = set() if model is None else set(map(id, model.parameters()))
        return any(id(p) in own for group in optimizer.param_groups for p in group["params"])

    def stepped(self, optimizer: torch.optim.Optimizer) -> str:
        """An optimizer that `trains` this model has stepped: it counts from now on.

        Known ones that never stepped, and whose parameters are all among its own, count no longer.

        Returns:
            What was not known, in words; "" where all was.
        """
        _, optimizers = self._alive()
        if any(optimizer is known for known in optimizers):
            return ""
        own = {id(p) for group in optimizer.param_groups for p in group["params"]}
        idle = [
            known
            for known in optimizers
            if not known.state and own.issuperset(id(p) for group in known.param_groups for p in group["params"])
        ]
        self._optimizers = [weakref.ref(known) for known in optimizers if known not in idle] + [weakref.ref(optimizer)]
        declared = f"{type(idle[0]).__name__} was declared, but " if idle else ""
        return f"{declared}{type(optimizer).__name__} has stepped"

    def tensors(self) -> list[torch.Tensor]:
        """Parameters, buffers, and the gradients and optimizer state that are there already."""
        return [*self.lasting_tensors(), *self.gradients()]

    def gradients(self) -> list[torch.Tensor]:
        """The gradients that are there."""
        model, _ = self._alive()
        return [] if model is None else [p.grad for p in model.parameters() if p.grad is not None]

    def lasting_tensors(self) -> list[torch.Tensor]:
        """`tensors` but for the gradients."""
        model, optimizers = self._alive()
        tensors: list[torch.Tensor] = []
        if model is not None:
            tensors += [*model.parameters(), *model.buffers()]
        for optimizer in optimizers:
            tensors += [v for state in optimizer.state.values() for v in state.values() if torch.is_tensor(v)]
        if bucket_bytes := self.bucket_bytes():
            tensors.append(torch.empty(bucket_bytes, dtype=torch.uint8, device="meta"))  # its reducer shows none
        return tensors

    def bytes_beside(self, graph: StepGraph) -> int:
        """Bytes in use all step that are no storage of the step."""
        model, _ = self._alive()
        state_bytes = self.state_bytes()
        if model is None:
            return state_bytes + self.bucket_bytes()
        in_graph_bytes = sum(s.nbytes for s in graph.storages if s.kind in ("parameter", "buffer"))
        model_bytes = distinct_bytes([*model.parameters(), *model.buffers()])
        return max(0, model_bytes - in_graph_bytes) + self.gradient_bytes() + self.bucket_bytes() + state_bytes

    @property
    def has_optimizer(self) -> bool:
        """Whether any optimizer is known."""
        return bool(self._alive()[1])

    def state_bytes(self) -> int:
        """Bytes of the optimizers' state, also of what their first step will make."""
        return sum(map(optimizer_state_bytes, self._alive()[1]))

    def gradient_bytes(self) -> int:
        """Bytes of the gradients that are there before the step and stay: those it accumulates onto."""
        return 0 if self.gradients_pass else distinct_bytes(self.gradients())

    def bucket_bytes(self) -> int:
        """Bytes of the data parallel wrapper's buckets, but for those that gradients are views of already.

        What its communication hook holds counts as far as the wrapper's attribute `hook_bytes` tells.
        """
        wrapper = self._wrapper() if self._wrapper is not None else None
        if wrapper is None:
            return 0
        ignored = wrapper.parameters_to_ignore
        exchanged = [p for name, p in wrapper.module.named_parameters() if p.requires_grad and name not in ignored]
        if wrapper.gradient_as_bucket_view:
            exchanged = [p for p in exchanged if p.grad is None]
        return sum(p.numel() * p.element_size() for p in exchanged) + getattr(wrapper, "hook_bytes", 0)

    def _alive(self) -> tuple[nn.Module | None, list[torch.optim.Optimizer]]:
        model = self._model() if self._model is not None else None
        return model, [known for reference in self._optimizers if (known := reference()) is not None]


def distinct_bytes(tensors: Iterable[torch.Tensor]) -> int:
    """Bytes of the distinct storages behind `tensors`, on whatever device (also "meta")."""
    storages = {t.untyped_storage()._cdata: t.untyped_storage().nbytes() for t in tensors}
    return sum(storages.values())


def optimizer_state_bytes(optimizer: torch.optim.Optimizer) -> int:
    """Device bytes of the optimizer's state once it has stepped.

    Parameters that have state already count what they have; for the others the optimizer's class takes one step on
    tensors without memory, which shows what it would allocate for any class that follows PyTorch's conventions.

    >>> model = torch.nn.Linear(10, 10, bias=False)
    >>> optimizer_state_bytes(torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9))
    400
    """
    present_bytes = 0
    new_groups = []
    for group in optimizer.param_groups:
        new = []
        for parameter in group["params"]:
            state = optimizer.state.get(parameter, {})
            if state:
                present_bytes += sum(_device_bytes(value, parameter.device) for value in state.values())
            elif parameter.requires_grad:
                new.append(parameter)
        if new:
            new_groups.append({**group, "params": new})
    return present_bytes + _bytes_after_one_step(optimizer, new_groups)


def _bytes_after_one_step(optimizer: torch.optim.Optimizer, groups: list[dict[str, Any]]) -> int:
    if not groups:
        return 0
    shadows = []
    real_devices = []
    for group in groups:
        parameters = [torch.nn.Parameter(torch.empty_like(p, device="meta")) for p in group["params"]]
        for parameter in parameters:
            parameter.grad = torch.empty_like(parameter)
        real_devices += [p.device for p in group["params"]]
        shadows.append({**group, "params": parameters, "foreach": False, "fused": False})
    try:
        shadow = type(optimizer)(shadows)  # type: ignore[call-arg]
        shadow.step()
    except Exception:  # a class of its own making: count one copy of its parameters
        return sum(p.numel() * p.element_size() for group in shadows for p in group["params"])
    stepped = [parameter for group in shadow.param_groups for parameter in group["params"]]
    return sum(
        _device_bytes(value, real_device)
        for parameter, real_device in zip(stepped, real_devices, strict=True)
        for value in shadow.state.get(parameter, {}).values()
    )


def _device_bytes(value: object, device: torch.device) -> int:
    """Bytes of an entry of an optimizer's state, but for counters that it holds on the CPU for another device."""
    if isinstance(value, torch.Tensor) and (value.device.type in (device.type, "meta") or value.dim() > 0):
        return value.numel() * value.element_size()
    return 0
