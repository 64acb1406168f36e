"""What a checkpoint holds for a network, its optimizer and its scaler, held against those of this run before it is
loaded: PyTorch's own loading takes settings over, and casts whatever it finds to the parameters' types."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from shoal.errors import brief

# Of a group of parameters: which they are, a rate that the run sets before each step, and how, not what, is computed.
_NO_SETTINGS = frozenset({"params", "param_names", "lr", "initial_lr", "foreach", "fused", "capturable"})
_SCALER_SETTINGS = ("growth_factor", "backoff_factor", "growth_interval")

# Keys of parameters as a checkpoint has them, and the parameters, by group.
Groups = Sequence[Sequence[tuple[int | str, torch.Tensor]]]


def fault_of_weights(saved: Mapping[str, Any], own: Mapping[str, Any]) -> str:
    """Why these weights and buffers are not taken; "" if they are. Names and shapes are checked as they are loaded."""
    for name, value in saved.items():
        expected = own.get(name)
        if isinstance(value, torch.Tensor) and isinstance(expected, torch.Tensor) and (fault := _odd(value, expected)):
            return f"has {name} {fault}"
    return ""


def fault_of_optimizer(saved: Any, optimizer: torch.optim.Optimizer, groups: Groups, *, stepped: bool) -> str:
    """Why this state of an optimizer is not taken; "" if it is.

    Args:
        saved: of the checkpoint.
        optimizer: of this run, made with the settings that were asked for.
        groups: its parameters, by the keys that the checkpoint has for them.
        stepped: whether the run has taken steps, after which every parameter has a state.
    """
    if len(saved["param_groups"]) != len(groups):
        return f"has {len(saved['param_groups'])} groups of parameters where this run has {len(groups)}"
    for there, here, parameters in zip(saved["param_groups"], optimizer.param_groups, groups, strict=True):
        if list(there["params"]) != [key for key, _ in parameters]:
            return "has other parameters in a group than this run"
        differing = [
            f"{name}={brief(there[name])} there and {brief(here.get(name))} here"
            for name in there
            if name not in _NO_SETTINGS and there[name] != here.get(name)
        ]
        if differing:
            more = f" and {len(differing) - 2} more" if len(differing) > 2 else ""
            return f"has other settings of its optimizer than this run ({'; '.join(differing[:2])}{more})"
    known = {key: parameter for parameters in groups for key, parameter in parameters}
    if unknown := saved["state"].keys() - known.keys():
        return f"has a state of its optimizer for an unknown parameter {brief(min(map(str, unknown)))}"
    shaped, scalars = state_names(optimizer)
    if not stepped or not (shaped or scalars):
        shaped_state = {key: _filled(state) for key, state in saved["state"].items()}
        expected = {key: parameter for key, parameter in known.items() if shaped_state.get(key)}
    else:
        expected = known
    for key, parameter in expected.items():
        state = _filled(saved["state"].get(key, {}))
        if state.keys() != {*shaped, *scalars}:
            odd = sorted(state.keys() ^ {*shaped, *scalars})
            return f"has a state of parameter {key} with {'no' if odd[0] not in state else 'an unknown'} {odd[0]!r}"
        for name in shaped:
            value = state[name]
            if not isinstance(value, torch.Tensor):
                return f"has {name} of parameter {key} that is {brief(value)}, expected a tensor"
            if value.shape != parameter.shape:
                return f"has {name} of parameter {key} of shape {tuple(value.shape)}, expected {tuple(parameter.shape)}"
            if fault := _odd(value, parameter):
                return f"has {name} of parameter {key} {fault}"
        for name in scalars:
            if not _is_count(state[name]):
                return f"has {name} of parameter {key} that is no finite number of at least 0"
    return ""


def state_names(optimizer: torch.optim.Optimizer) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """What the optimizer keeps for a parameter after a step: tensors of the parameter's shape, and single numbers.

    >>> state_names(torch.optim.AdamW([torch.zeros(2)]))
    (('exp_avg', 'exp_avg_sq'), ('step',))
    """
    if isinstance(optimizer, torch.optim.AdamW):
        return ("exp_avg", "exp_avg_sq"), ("step",)
    return ("momentum_buffer",) if optimizer.defaults["momentum"] else (), ()


def with_settings(saved: Mapping[str, Any], optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    """The state with the settings of this run: one that an older file lacks would be missed by the first step."""
    own = [{name: value for name, value in group.items() if name != "params"} for group in optimizer.param_groups]
    groups = [{**there, **here} for there, here in zip(saved["param_groups"], own, strict=True)]
    return {**saved, "param_groups": groups}


def fault_of_scaler(saved: Mapping[str, Any], scaler: torch.amp.GradScaler) -> str:
    """Why this state of a scaler is not taken; "" if it is."""
    own = scaler.state_dict()
    for name in _SCALER_SETTINGS:
        if name in own and saved[name] != own[name]:
            return f"has {name}={brief(saved[name])} of its scaler, where this run has {own[name]}"
    if own and not (type(saved["scale"]) is float and 0 < saved["scale"] < float("inf")):
        return f"has scale={brief(saved['scale'])} of its scaler, expected a finite number above 0"
    return ""


def _filled(state: Mapping[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in state.items() if value is not None}  # SGD's without momentum was None once


def _odd(value: torch.Tensor, expected: torch.Tensor) -> str:
    if value.dtype != expected.dtype:
        return f"of {str(value.dtype).removeprefix('torch.')}, expected {str(expected.dtype).removeprefix('torch.')}"
    if value.is_floating_point() and not bool(value.isfinite().all()):
        return "with numbers that are not finite"
    return ""


def _is_count(value: Any) -> bool:
    if isinstance(value, torch.Tensor):
        if value.numel() != 1 or value.is_complex():
            return False
        value = value.item()
    return type(value) in (int, float) and 0 <= value < float("inf")
