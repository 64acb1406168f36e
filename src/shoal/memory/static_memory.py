"""Static memory: bytes in use throughout a step. Parameters, buffers, accumulated gradients and optimizer state."""

from __future__ import annotations

import weakref
from collections.abc import Iterable, Mapping, Sequence

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from shoal.core.step import StepGraph
from shoal.lowlevel.torch_state import dense_parts, has_gradient_hook, on_this_rank
from shoal.memory.library_memory import Caller, caller, is_known, kept_bytes, library_bytes
from shoal.memory.optimizer_state import (
    Declared,
    NamedOptimizer,
    optimizer_state_bytes,
    state_entries,
    state_tensors,
    step_scratch_bytes,
    tensors_in,
)
from shoal.memory.storage_bytes import bytes_on, distinct_bytes


class StaticMemory:
    """The bytes of models and their optimizers. References are weak: compiled code in Dynamo's caches outlives them.

    Args:
        model: its parameters and buffers count even if a step does not read them.
        optimizer: its state counts from now on; that of other optimizers from their first step on. One that has only a
            name yet counts for every parameter that is to be trained, until an optimizer that has it steps.
        parameters: where there is no model, those that are trained, as far as they are known.

    Attributes:
        gradients_pass: gradients from before a step are freed before its backward pass, so they do not count.
        hook_is_metered: the communication hook runs within the step that is metered, which counts its bytes there.
        copies_inputs: whether the batch and the gradients of results are copied to fixed addresses before they are
            read, as CUDA graphs need it. input_copies: those copies, once they are there.
    """

    def __init__(
        self, model: nn.Module | None = None, optimizer: Declared | None = None, parameters: Iterable[torch.Tensor] = ()
    ) -> None:
        self._models: list[weakref.ref[nn.Module]] = []
        # FSDP2 puts gathered parameters in the place of these while the model runs.
        self._shards: dict[weakref.ref[nn.Module], list[weakref.ref[torch.Tensor]]] = {}
        self._parameters = [weakref.ref(parameter) for parameter in parameters]
        self._named: list[tuple[weakref.ref[nn.Module] | None, NamedOptimizer]] = []
        self._optimizers: list[weakref.ref[torch.optim.Optimizer]] = []
        self._have_stepped: weakref.WeakSet[torch.optim.Optimizer] = weakref.WeakSet()
        self._entries: weakref.WeakKeyDictionary[torch.optim.Optimizer, int] = weakref.WeakKeyDictionary()
        self.gradients_pass = self.hook_is_metered = self.copies_inputs = False
        self.input_copies: list[torch.Tensor] = []
        self._library: dict[Caller, int] = {}  # what cuBLAS keeps for the steps planned so far
        self._wrapper: weakref.ref[DistributedDataParallel] | None = None
        self.add(model, optimizer)

    def add(self, model: nn.Module | None, optimizer: Declared | None = None) -> None:
        """Count another model, and the optimizer that trains it; what several have in common counts once."""
        reference = None if model is None else weakref.ref(model)
        if model is not None and reference is not None:
            self._models.append(reference)
            self._shards[reference] = [weakref.ref(p) for p in model.parameters() if on_this_rank(p) is not p]
        if isinstance(optimizer, NamedOptimizer):
            self._named.append((reference, optimizer))
        elif optimizer is not None and all(optimizer is not known for known in self._alive()[1]):
            self._optimizers.append(weakref.ref(optimizer))

    def keep_library_memory(self) -> None:
        """Count what cuBLAS keeps from now on, for steps that are run before they are planned."""
        for device in {parameter.device for parameter in self._trained()}:
            self._keep(kept_bytes(device))

    def _keep(self, found: Mapping[Caller, int]) -> None:
        """Count what cuBLAS keeps for these callers; one that was not seen itself gives way to those that were."""
        self._library |= found
        seen = {one: nbytes for one, nbytes in self._library.items() if is_known(one)}
        if len(seen) > 1:
            self._library = seen

    @property
    def library_bytes(self) -> int:
        """Bytes that cuBLAS keeps for the steps planned so far."""
        return sum(self._library.values())

    def called_from_elsewhere(self) -> int:
        """Bytes that cuBLAS keeps from here on because this thread, or this stream, calls a step for the first time."""
        device = next(iter(self._library), (None,))[0]
        if device is None or caller(device) in self._library:
            return 0
        before_bytes = self.library_bytes
        self._keep(kept_bytes(device))
        return self.library_bytes - before_bytes

    def called_by(self, wrapper: DistributedDataParallel | None) -> None:
        """Set the `DistributedDataParallel` wrapper that calls the model, if any: its gradient buckets count."""
        self._wrapper = None if wrapper is None else weakref.ref(wrapper)

    @property
    def hook_bytes(self) -> int:
        """Most bytes of the DDP wrapper's communication hook: its attribute `hook_bytes`, if it has one."""
        wrapper = self._wrapper() if self._wrapper is not None else None
        return int(getattr(wrapper, "hook_bytes", 0))

    def trains(self, optimizer: torch.optim.Optimizer) -> bool:
        """Whether the optimizer is registered here, or has a parameter of the model."""
        if any(optimizer is known for known in self._alive()[1]):
            return True
        own = set(map(id, self._trained()))
        return any(id(p) in own for p in _parameters_of(optimizer))

    def stepped(self, optimizer: torch.optim.Optimizer) -> str:
        """Register an optimizer that `trains` this model and has stepped.

        Registered ones that never stepped and have no other parameters are dropped.

        Returns:
            What is new, in words; "" if the optimizer was registered already.
        """
        self._have_stepped.add(optimizer)
        _, optimizers = self._alive()
        if any(optimizer is known for known in optimizers):
            return ""
        own = {id(p) for p in _parameters_of(optimizer)}
        idle = [
            known for known in optimizers if not known.state and own.issuperset(id(p) for p in _parameters_of(known))
        ]
        self._optimizers = [weakref.ref(known) for known in optimizers if known not in idle] + [weakref.ref(optimizer)]
        declared = f"{type(idle[0]).__name__} was declared, but " if idle else ""
        named = [one.name for reference, one in self._named if own & set(map(id, self._trained(reference)))]
        if named:
            declared = f"{named[0]!r} was declared, and "
        return f"{declared}{type(optimizer).__name__} has stepped"

    def has_grown(self, optimizer: torch.optim.Optimizer) -> bool:
        """Whether the state of an optimizer that has stepped has other entries than when this was last asked."""
        before = self._entries.get(optimizer)
        now = self._entries[optimizer] = state_entries(optimizer)
        return now != before

    def tensors(self) -> list[torch.Tensor]:
        """Parameters, buffers, and the gradients and optimizer state that exist already."""
        return [*self.lasting_tensors(), *self.gradients()]

    def gradients(self) -> list[torch.Tensor]:
        """The gradients that exist."""
        models, _ = self._alive()
        found: list[torch.Tensor] = []
        for model in models:
            if self._shards.get(weakref.ref(model)):
                found += [p.grad for p in self._parameters_in(model) if p.grad is not None]
            else:
                found += _gradients_in(model)
        return [part for gradient in found for part in dense_parts(gradient)]

    def lasting_tensors(self) -> list[torch.Tensor]:
        """`tensors` without the gradients."""
        models, optimizers = self._alive()
        tensors: list[torch.Tensor] = []
        for model in models:
            tensors += (*self._parameters_in(model), *model.buffers())
        for optimizer in optimizers:
            tensors += state_tensors(optimizer)
        tensors = [part for tensor in tensors for part in dense_parts(tensor)]
        # Of what DDP and cuBLAS hold there are no tensors to be had.
        for held_bytes in (self.bucket_bytes() - self.hook_bytes * self.hook_is_metered, self.library_bytes):
            if held_bytes:
                tensors.append(torch.empty(held_bytes, dtype=torch.uint8, device="meta"))
        return tensors + self.input_copies

    def bytes_beside(self, graph: StepGraph, *, runs_here: bool = True) -> int:
        """Bytes in use throughout the step that are not storages of its graph.

        Args:
            graph: the step.
            runs_here: whether it runs on this machine: what cuBLAS keeps for it is allocated then, and counts.
        """
        models, _ = self._alive()
        trained = self._trained() if runs_here else []
        if trained:
            self._keep(library_bytes(graph, trained[0].device))
        held_bytes = self.state_bytes() + self.bucket_bytes() + (self.library_bytes if runs_here else 0)
        if self.copies_inputs:
            held_bytes += sum(s.nbytes for s in graph.storages if s.kind in ("input", "tangent"))
        if not models:
            return held_bytes
        in_graph_bytes = sum(s.nbytes for s in graph.storages if s.kind in ("parameter", "buffer"))
        held = [t for model in models for t in (*self._parameters_in(model), *model.buffers())]
        model_bytes = self._counted_bytes(held) if runs_here else distinct_bytes(held)
        return max(0, model_bytes - in_graph_bytes) + self.gradient_bytes() + held_bytes

    @property
    def awaits_optimizer(self) -> bool:
        """Whether an optimizer that is known has not stepped yet: what its first step allocates is still to come."""
        optimizers = self._alive()[1]
        if not optimizers:
            return bool(self._named)
        return any(not one.state and one not in self._have_stepped for one in optimizers)

    @property
    def has_optimizer(self) -> bool:
        """Whether any optimizer is registered, or declared by name."""
        return bool(self._named) or bool(self._alive()[1])

    def state_bytes(self) -> int:
        """Bytes of the optimizers' state, including what their first step will allocate."""
        optimizers = self._alive()[1]
        total_bytes = sum(map(optimizer_state_bytes, optimizers))
        taken = {id(p) for optimizer in optimizers for p in _parameters_of(optimizer)}
        for reference, named in self._named:
            left = [p for p in self._trained(reference) if id(p) not in taken]
            total_bytes += named.state_bytes(left)
            taken.update(map(id, left))
        return total_bytes

    def state_there_bytes(self) -> int:
        """Bytes of the state that the optimizers have allocated."""
        return self._counted_bytes([tensor for optimizer in self._alive()[1] for tensor in state_tensors(optimizer)])

    def state_of(self, parameters: Iterable[torch.Tensor]) -> list[torch.Tensor]:
        """The state that the optimizers have of some parameters."""
        found = [optimizer.state[p] for p in parameters for optimizer in self._alive()[1] if p in optimizer.state]
        return [tensor for state in found for value in state.values() for tensor in tensors_in(value)]

    def optimizer_step_bytes(self) -> tuple[int, int]:
        """Bytes in use while an optimizer steps, and how many of them that step allocates and frees again."""
        models, optimizers = self._alive()
        trained = [p for p in self._trained() if p.requires_grad]
        if not trained:
            return 0, 0
        stepping: list[torch.optim.Optimizer | None] = [*optimizers]
        if not optimizers:
            stepping += [named.made_for(self._trained(reference)) for reference, named in self._named]
        own_bytes = max(
            (step_scratch_bytes(one, trained[0].device.type) for one in stepping if one is not None), default=0
        )
        held = [t for model in models for t in (*self._parameters_in(model), *model.buffers())] or trained
        gradient_bytes = distinct_bytes(p for p in trained if not has_gradient_hook(p))
        return distinct_bytes(held) + gradient_bytes + self.state_bytes() + own_bytes, own_bytes

    def step_in_hook_bytes(self, parameter: torch.Tensor) -> int:
        """Bytes that an optimizer which steps in a hook of this parameter allocates and frees again.

        Twice the parameter's where the optimizer is not known.
        """
        having = (one for one in self._alive()[1] if any(p is parameter for p in _parameters_of(one)))
        named = (one.made_for([parameter]) for model, one in self._named if _is_in(parameter, self._trained(model)))
        optimizer = next(having, None) or next(named, None)
        if optimizer is None:
            return 2 * parameter.numel() * parameter.element_size()
        return step_scratch_bytes(optimizer, parameter.device.type)

    def gradient_bytes(self) -> int:
        """Bytes of the gradients that the step accumulates into."""
        return 0 if self.gradients_pass else distinct_bytes(self.gradients())

    def bucket_bytes(self) -> int:
        """Bytes of the DDP wrapper's buckets, without those that gradients are views of, and of its hook."""
        wrapper = self._wrapper() if self._wrapper is not None else None
        if wrapper is None:
            return 0
        ignored = wrapper.parameters_to_ignore
        exchanged = [p for name, p in wrapper.module.named_parameters() if p.requires_grad and name not in ignored]
        if wrapper.gradient_as_bucket_view:
            exchanged = [p for p in exchanged if p.grad is None]
        return sum(p.numel() * p.element_size() for p in exchanged) + self.hook_bytes

    def _counted_bytes(self, tensors: Sequence[torch.Tensor]) -> int:
        """Bytes of these tensors, as the allocator of the parameters' device counts them."""
        devices = {parameter.device for parameter in self._trained() if parameter.device.type == "cuda"}
        return bytes_on(devices.pop(), tensors) if len(devices) == 1 else distinct_bytes(tensors)

    def trained_tensors(self) -> list[torch.Tensor]:
        """The parameters of all models."""
        return self._trained()

    def _trained(self, of: weakref.ref[nn.Module] | None = None) -> list[torch.Tensor]:
        """The parameters of one model, or of all."""
        models = self._alive()[0] if of is None else [model for model in [of()] if model is not None]
        if models:
            return list({id(p): p for model in models for p in self._parameters_in(model)}.values())
        if of is not None:
            return []
        return [parameter for reference in self._parameters if (parameter := reference()) is not None]

    def _parameters_in(self, model: nn.Module) -> list[torch.Tensor]:
        """The model's parameters; of a sharded one what this rank holds of them, and not what is gathered now."""
        shards = self._shards.get(weakref.ref(model))
        if not shards:
            return list(model.parameters())
        return [shard for reference in shards if (shard := reference()) is not None]

    @property
    def is_sharded(self) -> bool:
        """Whether parameters are in shards, as of FSDP2."""
        return any(self._shards.values())

    def _alive(self) -> tuple[list[nn.Module], list[torch.optim.Optimizer]]:
        models = [model for reference in self._models if (model := reference()) is not None]
        return models, [known for reference in self._optimizers if (known := reference()) is not None]


def _gradients_in(model: nn.Module) -> list[torch.Tensor]:
    """Those of `model.parameters()`, a shared one as often as it is found: every step asks, and names take most of
    the time of that walk."""
    found: list[torch.Tensor] = []
    modules: set[nn.Module] = set()
    ahead: list[nn.Module | None] = [model]
    while ahead:
        module = ahead.pop()
        if module is None or module in modules:
            continue
        modules.add(module)
        for parameter in module._parameters.values():
            if parameter is not None and parameter.grad is not None:
                found.append(parameter.grad)
        ahead += module._modules.values()
    return found


def _is_in(parameter: torch.Tensor, tensors: Iterable[torch.Tensor]) -> bool:
    return any(parameter is tensor for tensor in tensors)


def _parameters_of(optimizer: torch.optim.Optimizer) -> list[torch.Tensor]:
    return [parameter for group in optimizer.param_groups for parameter in group["params"]]
