"""The state of optimizers: of one that exists, also before its first step, and of one that has only a name yet."""

from __future__ import annotations

import copy
import difflib
from collections import Counter
from collections.abc import Iterable
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn, optim
from torch.multiprocessing.reductions import StorageWeakRef
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_leaves

from shoal.core.sizes import format_bytes
from shoal.errors import InputError, brief
from shoal.lowlevel.torch_state import allocated_bytes, on_this_rank

_KINDS: dict[str, tuple[type[optim.Optimizer], dict[str, Any]]] = {
    "adadelta": (optim.Adadelta, {}),
    "adagrad": (optim.Adagrad, {}),
    "adam": (optim.Adam, {}),
    "adam-amsgrad": (optim.Adam, {"amsgrad": True}),
    "adamax": (optim.Adamax, {}),
    "adamw": (optim.AdamW, {}),
    "adamw-amsgrad": (optim.AdamW, {"amsgrad": True}),
    "nadam": (optim.NAdam, {}),
    "radam": (optim.RAdam, {}),
    "rmsprop": (optim.RMSprop, {}),
    "rmsprop-centered": (optim.RMSprop, {"centered": True}),
    "rmsprop-momentum": (optim.RMSprop, {"momentum": 0.9}),
    "rprop": (optim.Rprop, {}),
    "sgd": (optim.SGD, {}),
    "sgd-momentum": (optim.SGD, {"momentum": 0.9}),
}
NAMES = tuple(_KINDS)
_ON_DEVICE = ("fused", "capturable")  # options by which steps are counted on the parameters' device


@dataclass(frozen=True)
class NamedOptimizer:
    """An optimizer that will train a model and is not made yet: a class of `torch.optim` by one of `NAMES`."""

    name: str

    def made_for(self, parameters: Iterable[torch.Tensor]) -> optim.Optimizer | None:
        """One over parameters on the meta device, as large as these; None where none is trained."""
        kind, options = _KINDS[self.name]
        trained = [_on_meta(on_this_rank(p).shape, p.dtype) for p in parameters if p.requires_grad]
        return kind(trained, **options) if trained else None

    def state_bytes(self, parameters: Iterable[torch.Tensor]) -> int:
        """Device bytes of its state once it has trained these parameters.

        >>> NamedOptimizer("sgd-momentum").state_bytes(torch.nn.Linear(10, 10, bias=False).parameters())
        400
        """
        kind, options = _KINDS[self.name]
        alike = Counter((on_this_rank(p).shape, p.dtype, p.device) for p in parameters if p.requires_grad)
        return sum(
            count * _bytes_after_one_step(kind, [{**options, "params": [_on_meta(shape, dtype)]}], [device])
            for (shape, dtype, device), count in alike.items()
        )


Declared = optim.Optimizer | NamedOptimizer


def declared_optimizer(optimizer: Any) -> Declared | None:
    """What `optimizer=` of `shoal.compile` stands for: an optimizer, or one of `NAMES`.

    Raises:
        InputError: it is neither, nor None.
    """
    if optimizer is None or isinstance(optimizer, Declared):
        return optimizer
    if not isinstance(optimizer, str):
        raise InputError(
            f"optimizer is a {type(optimizer).__name__}; expected a torch.optim.Optimizer, or a name such as 'adamw'"
        )
    name = optimizer.strip().lower().replace("_", "-")
    if name not in _KINDS:
        close = difflib.get_close_matches(name, NAMES, n=1) or ["adamw"]
        raise InputError(
            f"optimizer={brief(optimizer)}: no optimizer is called that; type {close[0]!r} or another name",
            details={"names": ", ".join(NAMES)},
        )
    return NamedOptimizer(name)


def reject_copy(optimizer: Declared | None, parameters: Iterable[torch.Tensor]) -> None:
    """Raise InputError for an optimizer that was copied with its parameters, as `copy.deepcopy` of options does.

    Args:
        optimizer: what was declared.
        parameters: those that are to be trained.
    """
    if not isinstance(optimizer, optim.Optimizer):
        return
    held = [p for group in optimizer.param_groups for p in group["params"]]
    own = [p for p in parameters if p.requires_grad]
    if not own or {id(p) for p in held} & {id(p) for p in own}:
        return
    alike = (Counter((p.shape, p.dtype, p.device) for p in parameters) for parameters in (own, held))
    if next(alike) - next(alike):  # such as masters in another dtype or on the host
        return
    name = _name_of(optimizer)
    raise InputError(
        f"optimizer= is {type(optimizer).__name__} over a copy of the parameters; make it over model.parameters()"
        f"{f', or give its name: optimizer={name!r}' if name else ''}",
        details={"its parameters": format_bytes(sum(p.nbytes for p in held))},
    )


def _name_of(optimizer: optim.Optimizer) -> str:
    """The name that stands for an optimizer, of `NAMES`; "" where none does."""
    group = optimizer.param_groups[0]
    alike = [
        name
        for name, (kind, options) in _KINDS.items()
        if type(optimizer) is kind and all(group.get(option) for option in options)
    ]
    return max(alike, key=lambda name: len(_KINDS[name][1]), default="")


def optimizer_state_bytes(optimizer: optim.Optimizer) -> int:
    """Device bytes of the optimizer's state once it has stepped.

    State that exists is counted. For parameters without state, an optimizer of the same class takes one step on meta
    tensors, which shows what it would allocate. LBFGS counts with its history full.

    >>> model = torch.nn.Linear(10, 10, bias=False)
    >>> optimizer_state_bytes(torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9))
    400
    """
    if isinstance(optimizer, optim.LBFGS):
        return _lbfgs_bytes(optimizer)
    present_bytes = 0
    new_groups = []
    devices = []
    for group in optimizer.param_groups:
        new = []
        for parameter in group["params"]:
            state = optimizer.state.get(parameter, {})
            if state:
                present_bytes += sum(_device_bytes(value, parameter.device) for value in state.values())
            elif parameter.requires_grad:
                new.append(parameter)
        if new:
            new_groups.append({**_options_of(group), "params": [_on_meta(on_this_rank(p).shape, p.dtype) for p in new]})
            devices += [p.device for p in new]
    return present_bytes + _bytes_after_one_step(type(optimizer), new_groups, devices)


def state_tensors(optimizer: optim.Optimizer) -> list[torch.Tensor]:
    """The tensors of the optimizer's state, those in lists and mappings of it too."""
    return [tensor for state in optimizer.state.values() for value in state.values() for tensor in tensors_in(value)]


def tensors_in(value: object) -> list[torch.Tensor]:
    """The tensors of one entry of an optimizer's state."""
    if isinstance(value, torch.Tensor):
        return [value]
    if isinstance(value, (list, tuple, dict)):
        return [tensor for tensor in tree_leaves(value) if isinstance(tensor, torch.Tensor)]
    return []


def state_entries(optimizer: optim.Optimizer) -> int:
    """How many entries the state has: while there are as many as before, it takes as many bytes.

    Asked for after each step, so it looks at no tensor.
    """
    return sum(
        len(value) if isinstance(value, (list, tuple, dict)) else 1
        for state in optimizer.state.values()
        for value in state.values()
    )


def _lbfgs_bytes(optimizer: optim.LBFGS) -> int:
    """What LBFGS holds while it calls its closure once its history is full, in vectors as long as all parameters."""
    group = optimizer.param_groups[0]
    parameters = [on_this_rank(parameter) for parameter in group["params"]]
    history = group["history_size"]
    lasting = 2 * history + 2  # steps and changes of the gradient; a direction, the gradient before
    in_a_step = 5  # the gradient, the next direction and what it is made from, a pair that may not enter the history
    if group["line_search_fn"] is not None:
        in_a_step += 5  # where the search began, and the gradients there, at both ends of the interval and in between
    numbers = 2 * history + 8
    device = parameters[0].device
    vector_bytes = allocated_bytes(sum(p.numel() * p.element_size() for p in parameters), device)
    return (lasting + in_a_step) * vector_bytes + numbers * allocated_bytes(parameters[0].element_size(), device)


def step_scratch_bytes(optimizer: optim.Optimizer, device_type: str) -> int:
    """Device bytes that each step of the optimizer allocates and frees again, in addition to its state.

    An optimizer that is asked for neither `foreach` nor `fused` is of the first kind on CUDA, which computes with
    copies of all parameters at once, and goes from parameter to parameter on the CPU. 0 where it cannot be told.

    >>> model = torch.nn.Linear(10, 10, bias=False)
    >>> step_scratch_bytes(torch.optim.AdamW(model.parameters(), foreach=True), "cpu")
    400
    """
    groups = []
    for group in optimizer.param_groups:
        if group.get("fused"):
            continue
        shadows = [_on_meta(on_this_rank(p).shape, p.dtype) for p in group["params"] if p.requires_grad]
        for parameter in shadows:
            parameter.grad = torch.empty_like(parameter)
        foreach = group.get("foreach")
        how = {"foreach": device_type == "cuda" if foreach is None else foreach, "capturable": False, "fused": False}
        if shadows:
            groups.append(
                {**_options_of(group), **{name: how[name] for name in how if name in group}, "params": shadows}
            )
    if not groups:
        return 0
    try:
        shadow = type(optimizer)(groups)  # type: ignore[call-arg]
        shadow.step()
        held = [p for group in groups for p in group["params"]]
        with _NewBytes([*held, *(p.grad for p in held), *(list(shadow.state[p].values()) for p in held)]) as new:
            shadow.step()
    except Exception:  # an unusual class
        return 0
    return new.peak_bytes


class _NewBytes(TorchFunctionMode):
    """Counts what functions of PyTorch return that was not there before.

    Args:
        held: what was, on the meta device.

    Attributes:
        peak_bytes: most bytes of the rest that were alive at once.
    """

    def __init__(self, held: Any) -> None:
        super().__init__()
        self.peak_bytes = 0
        self._held = {storage._cdata for storage in _storages(held)}
        self._alive: dict[int, tuple[StorageWeakRef, int]] = {}

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        for storage in _storages(result):
            if storage._cdata not in self._held:
                self._alive[storage._cdata] = StorageWeakRef(storage), storage.nbytes()
        self._alive = {key: held for key, held in self._alive.items() if not held[0].expired()}
        self.peak_bytes = max(self.peak_bytes, sum(nbytes for _, nbytes in self._alive.values()))
        return result


def _storages(*values: Any) -> list[torch.UntypedStorage]:
    tensors = (value for value in tree_leaves(values) if isinstance(value, torch.Tensor))
    return [tensor.untyped_storage() for tensor in tensors if tensor.device.type == "meta"]


def _options_of(group: dict[str, Any]) -> dict[str, Any]:
    """A parameter group's options, copied: some optimizers count their steps there, in a tensor."""
    options = {}
    for name, value in group.items():
        if name != "params":
            with suppress(Exception):  # of what cannot be copied the trial does without
                options[name] = copy.deepcopy(value)
    return options


def _on_meta(shape: torch.Size, dtype: torch.dtype) -> nn.Parameter:
    return nn.Parameter(torch.empty(shape, dtype=dtype, device="meta"))


def _bytes_after_one_step(
    kind: type[optim.Optimizer], groups: list[dict[str, Any]], devices: list[torch.device]
) -> int:
    """What the state takes once parameters on the meta device have been trained, each on behalf of one elsewhere."""
    if not groups:
        return 0
    for group in groups:
        for parameter in group["params"]:
            parameter.grad = torch.empty_like(parameter)
    shadows = [{**group, **{name: False for name in _ON_DEVICE if name in group}, "foreach": False} for group in groups]
    try:
        shadow = kind(shadows)  # type: ignore[call-arg]
        shadow.step()
    except Exception:  # an unusual class: count one copy of its parameters
        return sum(p.numel() * p.element_size() for group in groups for p in group["params"])
    counts_there = [any(group.get(name) for name in _ON_DEVICE) for group in groups for _ in group["params"]]
    stepped = [parameter for group in shadow.param_groups for parameter in group["params"]]
    return sum(
        _device_bytes(value, device, counts_there=there)
        for parameter, device, there in zip(stepped, devices, counts_there, strict=True)
        for value in shadow.state.get(parameter, {}).values()
    )


def _device_bytes(value: object, device: torch.device, *, counts_there: bool = False) -> int:
    """Bytes of an entry of an optimizer's state; step counters on the CPU do not count on another device."""
    total_bytes = 0
    for tensor in map(on_this_rank, tensors_in(value)):
        if tensor.device.type in (device.type, "meta") or tensor.dim() > 0 or counts_there:
            total_bytes += allocated_bytes(tensor.numel() * tensor.element_size(), device)
    return total_bytes
