"""Weights and optimizer on the host; each step's weights are sent packed, ahead of their use (A2DTWP, ADT).

The masters are in host memory (pinned on CUDA), where the optimizer works. After its step the weights are packed and
sent in the order in which the forward pass reads them; a module waits for its own. Gradients are sent back while the
backward pass runs. The precision follows AWP, or is fixed.
"""

from __future__ import annotations

import time
import weakref
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_leaves
from torch.utils.hooks import RemovableHandle

from shoal.codecs.registry import get
from shoal.core import arguments, presets
from shoal.core.hardware import Hardware, Link
from shoal.cost.measure import measure
from shoal.distributed.comm.traffic import Traffic
from shoal.distributed.weights.parameter_transfer import ParameterTransfer, own_storage
from shoal.distributed.weights.precision import AdaptivePrecision
from shoal.distributed.weights.weight_codecs import WeightCodecs, explained
from shoal.errors import InputError
from shoal.lowlevel.process_groups import sharded_modules
from shoal.lowlevel.torch_state import active_ddp_module, call_at_end_of_backward, is_compiled
from shoal.offload.links.host import HostSlab
from shoal.offload.links.open_link import OpenLink, open_link
from shoal.offload.policy import rehearsed

_INSTEAD = "give it the network itself and all-reduce the gradients of weights.parameters()"
_COMPILED = "HostWeights got a compiled model, whose graphs would not wait for the weights; train it without compiling"


@dataclass
class StepSeconds:
    """Where the time of one step went, on the host's clock. On CUDA unpacking and waiting happen on the device: 0.

    Attributes:
        norm, pack, unpack: of AWP's norms, of packing the weights, of unpacking them.
        waited: the forward pass waited for weights.
        gradients_waited: the end of the backward pass waited for gradients.
    """

    norm: float = 0.0
    pack: float = 0.0
    unpack: float = 0.0
    waited: float = 0.0
    gradients_waited: float = 0.0


class HostWeights:
    """Keeps a model's weights and optimizer on the host from now on; the training loop is unchanged.

    Replaces, in plain PyTorch, a second copy of the model on the CPU with `copy_` both ways. `optimizer.param_groups`
    hold the masters, so `optimizer.step()`, `zero_grad()`, learning rate schedulers and its `state_dict` work on them.
    `model.state_dict()` gives the masters and `model.load_state_dict()` fills them.

    Args:
        model: on its device, with float32 parameters, called as a whole.
        optimizer: any of torch's over the model's parameters that takes no closure; changed in place.
        precision: of the weights that are sent: 8, 16, 24 or 32 bits, a codec's name such as "bf16", or an
            `AdaptivePrecision` of this model. 32 trains as plain PyTorch does, bit for bit. Biases and normalisations
            are always sent uncompressed.
        rounding: of 8, 16 and 24 bits: "cut" (truncated) as in the paper, or "nearest".
        one_byte: the codec that stands in for 8 bits, such as "dynamic_tree", which has a scale for each 4096 weights.
        gradients: "raw", or the codec of the weights' gradients, such as "dynamic_tree".
        rehearse: on the CPU, whose link to stand in for: a preset's name or a `Hardware`, slowed to this CPU's pace, or
            a `Link` as it is.

    Attributes:
        traffic: bytes over the link, of "weights" and "gradients".
        seconds: where the time of the last step went.
        adaptive: the `AdaptivePrecision`, if there is one.

    Raises:
        InputError: the model, the optimizer or an argument is not so.
        TransferError: the host has no room.

    >>> model = nn.Linear(4, 2)
    >>> optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    >>> weights = HostWeights(model, optimizer, precision=16)
    >>> model(torch.ones(3, 4)).sum().backward()
    >>> optimizer.step()
    >>> weights.traffic.last_step("weights")
    Sent(sent_bytes=24, raw_bytes=40)
    >>> weights.close()

    Limits: between a step and the next forward pass `model.parameters()` on the device are not whole: read
    `weights.parameters()`, clip their gradients, average them. The backward pass ends when all gradients have arrived.
    While weights are sent the device holds their packed bytes too. Control flow that reads a parameter outside of its
    module only in some passes is not seen; `weights.wait()` before such a pass. DDP, FSDP and compiled models
    are refused.
    """

    def __init__(
        self,
        model: nn.Module,
        optimizer: torch.optim.Optimizer,
        *,
        precision: int | str | AdaptivePrecision = 32,
        rounding: str = "cut",
        one_byte: str | None = None,
        gradients: str = "raw",
        rehearse: str | Hardware | Link | None = None,
    ) -> None:
        arguments.instance("model", model, nn.Module)
        arguments.instance("optimizer", optimizer, torch.optim.Optimizer)
        arguments.instance("gradients", gradients, str)
        reject_wrapped(model)
        self._weight_codecs = WeightCodecs(model, precision, rounding, one_byte)
        self._gradient_codec = None if gradients == "raw" else get(gradients)
        self.adaptive = self._weight_codecs.adaptive
        self.traffic = Traffic()
        self.seconds = StepSeconds()
        self._next = StepSeconds()
        self._model, self._optimizer = model, optimizer
        self._transfers = _transfers_of(model, optimizer, self._weight_codecs)
        self._by_parameter = {transfer.parameter: transfer for transfer in self._transfers}
        self._order = self._transfers
        self._link = _opened(self._transfers[0].parameter.device, rehearse)
        self._lease = self._link.pool.lease(sum(transfer.host_bytes for transfer in self._transfers))
        slab = self._lease.slab
        assert isinstance(slab, HostSlab)
        offset = 0
        for transfer in self._transfers:
            transfer.settle_in(slab, offset)
            offset += transfer.host_bytes
        _hand_over(optimizer, {transfer.parameter: transfer.master for transfer in self._transfers})
        if self.adaptive is not None:
            self.adaptive.watch({transfer.name: transfer.master for transfer in self._transfers})
        self._stale = True  # what the device has is not what the host would send
        self._watching: FirstUse | None = None
        self._knows_order = False
        self._waits_for_gradients = False
        self._refuse_compiled = torch.compiler.disable(refuse_compiled)
        self._handles = self._hooks()
        self._closer = weakref.finalize(self, self._link.close)

    def parameters(self) -> list[nn.Parameter]:
        """The masters, in the order of the model's parameters that the optimizer has."""
        return [transfer.master for transfer in self._transfers]

    def wait(self) -> None:
        """Have the device's weights whole: as the next forward pass will read them."""
        self._send_if_stale()
        self._receive(self._order)

    def state_dict(self) -> dict[str, Any]:
        """What `model.state_dict()` and `optimizer.state_dict()` do not hold: AWP's state, plain numbers."""
        return self._weight_codecs.state_dict()

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on where `state_dict` was called; load the model and the optimizer as always.

        Raises:
            InputError: the state is of other layers, or of a run with another kind of precision.
        """
        self._weight_codecs.load_state_dict(state)
        self._stale = True

    def explain(self) -> str:
        """In a few lines: the width of each weight, and the bytes of the last step."""
        weights = ((self._weight_codecs.codec(one.name), one.parameter.numel()) for one in self._transfers)
        return explained(weights, self.traffic, self.traffic.kinds)

    def close(self) -> None:
        """Put plain training back: the masters' values in the model, its parameters in the optimizer. Twice is once."""
        if not self._handles:
            return
        self._receive(self._order)
        for handle in self._handles:
            handle.remove()
        self._handles = []
        for transfer in self._transfers:
            transfer.settle()
            transfer.parameter.data.copy_(transfer.master.data)
            if transfer.master.grad is not None:
                transfer.parameter.grad = transfer.master.grad.to(transfer.parameter.device)
        _hand_over(self._optimizer, {transfer.master: transfer.parameter for transfer in self._transfers})
        if self.adaptive is not None:
            self.adaptive.watch({transfer.name: transfer.parameter for transfer in self._transfers})
        self._closer()

    # What the hooks do, in the order of a step.

    def _before_forward(self, model: nn.Module, inputs: Any) -> None:
        if torch.compiler.is_compiling():
            self._refuse_compiled()
        reject_wrapped_since(model, self._by_parameter)
        for transfer in self._transfers:
            transfer.forget()
        self._waits_for_gradients = False
        self._send_if_stale()
        self._receive(transfer for transfer in self._order if transfer.used_early)
        if not self._knows_order and self._watching is None:
            self._watching = FirstUse(self._by_parameter)
            self._watching.__enter__()

    def _before_module(self, transfers: list[ParameterTransfer], module: nn.Module, inputs: Any) -> None:
        if torch.compiler.is_compiling():  # a part that was compiled
            self._refuse_compiled()
        if self._watching is not None:
            self._watching.announce(transfer.parameter for transfer in transfers)
        self._receive(transfers)

    def _after_forward(self, model: nn.Module, inputs: Any, outputs: Any) -> None:
        watched, self._watching = self._watching, None
        if watched is None:
            return
        watched.__exit__(None, None, None)
        if outputs is None:  # it raised: what was seen is not a whole pass
            return
        seen = [self._by_parameter[parameter] for parameter in watched.order]
        early = [self._by_parameter[parameter] for parameter in watched.early]
        self._order = [*seen, *(transfer for transfer in self._transfers if transfer not in seen)]
        for transfer in self._order:
            transfer.used_early = transfer in early or transfer not in seen
        self._knows_order = True

    def _after_gradient(self, transfer: ParameterTransfer, parameter: torch.Tensor) -> None:
        codec = self._gradient_codec if transfer.packs else None
        if not self._waits_for_gradients:
            self._waits_for_gradients = True
            call_at_end_of_backward(self._after_backward)
        self.traffic.add("gradients", transfer.send_gradient(self._link, codec), transfer.raw_bytes)

    def _after_backward(self) -> None:
        self._waits_for_gradients = False
        began = time.perf_counter()
        for transfer in self._transfers:
            transfer.gradient_arrives()
        self._next.gradients_waited += time.perf_counter() - began

    def _before_step(self, optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
        if args[1:] or kwargs.get("closure") is not None:
            raise InputError("got a closure, which the weights on the device would not follow; call step() without one")
        self._receive(self._order)
        for transfer in self._transfers:
            transfer.settle()

    def _after_step(self, optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
        if self.adaptive is not None:
            began = time.perf_counter()
            self.adaptive.update()
            self._next.norm += time.perf_counter() - began
        self.traffic.end_step()  # what is sent from here on is the next step's
        self.seconds, self._next = self._next, StepSeconds()
        self._stale = True
        self._send_if_stale()

    def _send_if_stale(self) -> None:
        if not self._stale:
            return
        self._receive(self._order)
        for transfer in self._order:
            transfer.settle()
        self._link.begin_step()
        began = time.perf_counter()
        for transfer in self._order:
            self.traffic.add(
                "weights", transfer.send(self._link, self._weight_codecs.codec(transfer.name)), transfer.raw_bytes
            )
        self._next.pack += time.perf_counter() - began
        self._stale = False

    def _receive(self, transfers: Iterable[ParameterTransfer]) -> None:
        for transfer in transfers:
            if transfer.is_under_way:
                self._next.waited += transfer.arrive()
                began = time.perf_counter()
                transfer.unpack()
                self._next.unpack += time.perf_counter() - began

    # Checkpoints hold the masters, and fill them.

    def _after_state_dict(
        self,
        transfers: dict[str, ParameterTransfer],
        module: nn.Module,
        state: dict[str, Any],
        prefix: str,
        metadata: Any,
    ) -> None:
        for name, transfer in transfers.items():
            if prefix + name in state:
                state[prefix + name] = transfer.master.detach()

    def _before_load(self, transfers: dict[str, ParameterTransfer], *args: Any) -> None:
        for transfer in transfers.values():
            self._receive([transfer])
            transfer.settle()
            transfer.parameter.data.copy_(transfer.master.data)  # what the file lacks stays as exact as it is

    def _after_load(self, transfers: dict[str, ParameterTransfer], module: nn.Module, keys: Any) -> None:
        for name, transfer in transfers.items():
            if getattr(module, name) is not transfer.parameter:
                raise InputError(f"{transfer.name} was replaced by load_state_dict(assign=True); load without assign")
            transfer.master.data.copy_(transfer.parameter.data)
        self._stale = True

    def _hooks(self) -> list[RemovableHandle]:
        handles = [
            self._model.register_forward_pre_hook(self._before_forward, prepend=True),
            self._model.register_forward_hook(self._after_forward, always_call=True),
            self._optimizer.register_step_pre_hook(self._before_step),
            self._optimizer.register_step_post_hook(self._after_step),
        ]
        for transfer in self._transfers:
            if transfer.parameter.requires_grad:
                hook = partial(self._after_gradient, transfer)
                handles.append(transfer.parameter.register_post_accumulate_grad_hook(hook))
        for module in self._model.modules():
            transfers = {
                name: self._by_parameter[parameter]
                for name, parameter in module.named_parameters(recurse=False, remove_duplicate=False)
                if parameter in self._by_parameter
            }
            if not transfers:
                continue
            handles += [
                module.register_forward_pre_hook(partial(self._before_module, list(transfers.values()))),
                module.register_state_dict_post_hook(partial(self._after_state_dict, transfers)),
                module.register_load_state_dict_pre_hook(partial(self._before_load, transfers)),
                module.register_load_state_dict_post_hook(partial(self._after_load, transfers)),
            ]
        return handles


def _transfers_of(
    model: nn.Module, optimizer: torch.optim.Optimizer, weight_codecs: WeightCodecs
) -> list[ParameterTransfer]:
    """A transfer for each parameter of the model that the optimizer moves."""
    wanted = {id(parameter) for group in optimizer.param_groups for parameter in group["params"]}
    found = {name: parameter for name, parameter in model.named_parameters() if id(parameter) in wanted}
    if not found or len(found) != len(wanted):
        raise InputError(
            f"the optimizer has {len(wanted)} parameters, {len(found)} of them the model's; "
            "make it from model.parameters()"
        )
    if wrong := [name for name, parameter in found.items() if parameter.dtype != torch.float32]:
        raise InputError(f"{wrong[0]} is {found[wrong[0]].dtype}, expected float32; train in float32 or under autocast")
    devices = {parameter.device for parameter in found.values()}
    if len(devices) != 1:
        raise InputError(f"parameters lie on {', '.join(map(str, devices))}, expected one device; move the model")
    transfers = []
    for name, parameter in found.items():
        own_storage(parameter)
        packs = name in weight_codecs.packs
        max_bytes = weight_codecs.max_bytes(parameter.numel()) if packs else 0
        transfers.append(ParameterTransfer(name, parameter, packs, max_bytes))
    return transfers


def _opened(device: torch.device, rehearse: str | Hardware | Link | None) -> OpenLink:
    if rehearse is None:
        return open_link(device)
    if device.type != "cpu":
        raise InputError(f"rehearse={rehearse!r}: a rehearsal runs on the CPU; the model is on {device}")
    arguments.instance("rehearse", rehearse, str, Hardware, Link)
    if isinstance(rehearse, str):
        rehearse = presets.get(rehearse, "rehearse")
    pace = rehearsed(rehearse, measure("cpu")) if isinstance(rehearse, Hardware) else rehearse
    return open_link(
        device,
        to_host_bytes_per_second=pace.to_host_bytes_per_second,
        to_device_bytes_per_second=pace.to_device_bytes_per_second,
        latency_seconds=pace.latency_seconds,
    )


def _hand_over(optimizer: torch.optim.Optimizer, to: Mapping[torch.Tensor, torch.Tensor]) -> None:
    """Have an optimizer work on other parameters, with the state it has."""
    for group in optimizer.param_groups:
        group["params"] = [to[parameter] for parameter in group["params"]]
    for parameter in [parameter for parameter in optimizer.state if parameter in to]:
        state = optimizer.state.pop(parameter)
        device = to[parameter].device
        optimizer.state[to[parameter]] = {
            key: value.to(device) if isinstance(value, torch.Tensor) and value.dim() else value
            for key, value in state.items()
        }


class FirstUse(TorchFunctionMode):
    """Watches in which order a forward pass first reads its parameters, and which before their module is called.

    Attributes:
        order: the parameters that were read, first read first.
        early: those of them that were read before `announce` named them.

    >>> layer = nn.Linear(2, 1)
    >>> watch = FirstUse(layer.parameters())
    >>> watch.announce([layer.weight])
    >>> with watch:
    ...     _ = layer(torch.ones(1, 2))
    >>> [parameter is layer.weight for parameter in watch.order], len(watch.early)
    ([True, False], 1)
    """

    def __init__(self, parameters: Iterable[nn.Parameter]) -> None:
        super().__init__()
        self._unseen = {id(parameter): parameter for parameter in parameters}
        self._announced: set[int] = set()
        self.order: list[nn.Parameter] = []
        self.early: list[nn.Parameter] = []

    def announce(self, parameters: Iterable[nn.Parameter]) -> None:
        """The module that owns these is about to be called."""
        self._announced.update(map(id, parameters))

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        for leaf in tree_leaves((args, kwargs)) if self._unseen else ():
            parameter = self._unseen.pop(id(leaf), None)
            if parameter is not None:
                self.order.append(parameter)
                if id(parameter) not in self._announced:
                    self.early.append(parameter)
        return func(*args, **(kwargs or {}))


def reject_wrapped(model: nn.Module) -> None:
    """Raise InputError if the model or a part of it is distributed over devices or ranks, or compiled."""
    for module in model.modules():
        # FSDP1 is told by its name, because importing it takes a second that other models need not wait for.
        wrappers = {kind.__name__ for kind in type(module).__mro__} & {
            "DataParallel",
            "DistributedDataParallel",
            "FullyShardedDataParallel",
        }
        if wrappers:
            raise InputError(f"HostWeights got a model in {wrappers.pop()}; {_INSTEAD}")
        if is_compiled(module):
            raise InputError(_COMPILED)
    if any(sharded_modules(model)):
        raise InputError("HostWeights got a sharded model; use shoal.distributed.ShardedWeights after fully_shard")


def reject_wrapped_since(model: nn.Module, parameters: Collection[torch.Tensor]) -> None:
    """Raise InputError if the model was wrapped, or its parameters were replaced, after its weights went to the host.

    Args:
        model: as it is called.
        parameters: that it had then.
    """
    ddp = active_ddp_module()
    if ddp is not None and any(module is model for module in ddp.modules()):
        raise InputError(f"HostWeights' model is called in DistributedDataParallel; {_INSTEAD}")
    if not set(model.parameters()).issuperset(parameters):
        raise InputError("parameters were replaced after HostWeights, as by fully_shard; give it what trains")


def refuse_compiled() -> None:
    """Raise InputError; called untraced, because Dynamo would run a hook that raises again, without compiling it."""
    raise InputError(_COMPILED)
