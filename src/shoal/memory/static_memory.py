"""Static memory: bytes in use throughout a step. Parameters, buffers, accumulated gradients and optimizer state."""

from __future__ import annotations

import weakref
from collections.abc import Iterable
from typing import Any

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from shoal.core.step import StepGraph


class StaticMemory:
    """The bytes of a model and its optimizers. References are weak: compiled code in Dynamo's caches outlives them.

    Args:
        model: its parameters and buffers count even if a step does not read them.
        optimizer: its state counts from now on; that of other optimizers from their first step on.

    Attributes:
        gradients_pass: gradients from before a step are freed before its backward pass, so they do not count.
    """

    def __init__(self, model: nn.Module | None = None, optimizer: torch.optim.Optimizer | None = None) -> None:
        self._model = None if model is None else weakref.ref(model)
        self._optimizers = [] if optimizer is None else [weakref.ref(optimizer)]
        self.gradients_pass = False
        self._wrapper: weakref.ref[DistributedDataParallel] | None = None

    def called_by(self, wrapper: DistributedDataParallel | None) -> None:
        """Set the `DistributedDataParallel` wrapper that calls the model, if any: its gradient buckets count."""
        self._wrapper = None if wrapper is None else weakref.ref(wrapper)

    def trains(self, optimizer: torch.optim.Optimizer) -> bool:
        """Whether the optimizer is registered here, or has a parameter of the model."""
        model, optimizers = self._alive()
        if any(optimizer is known for known in optimizers):
            return True
        own = set() if model is None else set(map(id, model.parameters()))
        return any(id(p) in own for group in optimizer.param_groups for p in group["params"])

    def stepped(self, optimizer: torch.optim.Optimizer) -> str:
        """Register an optimizer that `trains` this model and has stepped.

        Registered ones that never stepped and have no other parameters are dropped.

        Returns:
            What is new, in words; "" if the optimizer was registered already.
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
        """Parameters, buffers, and the gradients and optimizer state that exist already."""
        return [*self.lasting_tensors(), *self.gradients()]

    def gradients(self) -> list[torch.Tensor]:
        """The gradients that exist."""
        model, _ = self._alive()
        return [] if model is None else [p.grad for p in model.parameters() if p.grad is not None]

    def lasting_tensors(self) -> list[torch.Tensor]:
        """`tensors` without the gradients."""
        model, optimizers = self._alive()
        tensors: list[torch.Tensor] = []
        if model is not None:
            tensors += [*model.parameters(), *model.buffers()]
        for optimizer in optimizers:
            tensors += [v for state in optimizer.state.values() for v in state.values() if torch.is_tensor(v)]
        if bucket_bytes := self.bucket_bytes():
            tensors.append(torch.empty(bucket_bytes, dtype=torch.uint8, device="meta"))  # DDP does not expose them
        return tensors

    def bytes_beside(self, graph: StepGraph) -> int:
        """Bytes in use throughout the step that are not storages of its graph."""
        model, _ = self._alive()
        state_bytes = self.state_bytes()
        if model is None:
            return state_bytes + self.bucket_bytes()
        in_graph_bytes = sum(s.nbytes for s in graph.storages if s.kind in ("parameter", "buffer"))
        model_bytes = distinct_bytes([*model.parameters(), *model.buffers()])
        return max(0, model_bytes - in_graph_bytes) + self.gradient_bytes() + self.bucket_bytes() + state_bytes

    @property
    def has_optimizer(self) -> bool:
        """Whether any optimizer is registered."""
        return bool(self._alive()[1])

    def state_bytes(self) -> int:
        """Bytes of the optimizers' state, including what their first step will allocate."""
        return sum(map(optimizer_state_bytes, self._alive()[1]))

    def gradient_bytes(self) -> int:
        """Bytes of the gradients that the step accumulates into."""
        return 0 if self.gradients_pass else distinct_bytes(self.gradients())

    def bucket_bytes(self) -> int:
        """Bytes of the DDP wrapper's buckets, without those that gradients are views of.

        The wrapper's attribute `hook_bytes`, if it has one, adds the bytes of its communication hook.
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

    State that exists is counted. For parameters without state, an optimizer of the same class takes one step on meta
    tensors, which shows what it would allocate.

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
    except Exception:  # an unusual class: count one copy of its parameters
        return sum(p.numel() * p.element_size() for group in shadows for p in group["params"])
    stepped = [parameter for group in shadow.param_groups for parameter in group["params"]]
    return sum(
        _device_bytes(value, real_device)
        for parameter, real_device in zip(stepped, real_devices, strict=True)
        for value in shadow.state.get(parameter, {}).values()
    )


def _device_bytes(value: object, device: torch.device) -> int:
    """Bytes of an entry of an optimizer's state; step counters on the CPU do not count on another device."""
    if isinstance(value, torch.Tensor) and (value.device.type in (device.type, "meta") or value.dim() > 0):
        return value.numel() * value.element_size()
    return 0
