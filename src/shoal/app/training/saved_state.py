"""What a checkpoint holds for a network, its optimizer and its scaler, compared with those of this run before loading:
PyTorch's own loading takes settings over, and casts values to the parameters' types."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import chain
from typing import Any

import torch

from shoal.errors import brief

# Of a group of parameters: which they are, a rate that the run sets before each step, and how, not what, is computed.
_NO_SETTINGS = frozenset({"params", "param_names", "lr", "initial_lr", "foreach", "fused", "capturable"})
_SCALER_SETTINGS = ("growth_factor", "backoff_factor", "growth_interval")

# Keys of parameters as a checkpoint has them, and the parameters, by group.
Groups = Sequence[Sequence[tuple[int | str, torch.Tensor]]]


class UnfitError(Exception):
    """Why a state is not loaded: what the file "has"."""


def check_weights(saved: Mapping[str, Any], own: Mapping[str, Any]) -> None:
    """Raise `UnfitError` for values of another type, or not finite. Loading itself checks names and shapes."""
    for name, value in saved.items():
        if isinstance(value, torch.Tensor) and isinstance(own.get(name), torch.Tensor):
            _check_values(name, value, own[name])


def check_optimizer(saved: Any, optimizer: torch.optim.Optimizer, groups: Groups, *, stepped: bool) -> None:
    """Raise `UnfitError` for an optimizer with other settings or parameters, or a state that is not theirs.

    Args:
        saved: of the checkpoint.
        optimizer: of this run, made with the settings that were asked for.
        groups: its parameters, by the keys that the checkpoint has for them.
        stepped: whether the run has taken steps, after which every parameter has a state.
    """
    if len(saved["param_groups"]) != len(groups):
        raise UnfitError(f"has {len(saved['param_groups'])} groups of parameters where this run has {len(groups)}")
    for there, here, parameters in zip(saved["param_groups"], optimizer.param_groups, groups, strict=True):
        if list(there["params"]) != [key for key, _ in parameters]:
            raise UnfitError("has other parameters in a group than this run")
        differing = [
            f"{name}={brief(there[name])} there and {brief(here.get(name))} here"
            for name in there
            if name not in _NO_SETTINGS and there[name] != here.get(name)
        ]
        if differing:
            more = f" and {len(differing) - 2} more" if len(differing) > 2 else ""
            raise UnfitError(f"has other settings of its optimizer than this run ({'; '.join(differing[:2])}{more})")
    known = dict(chain.from_iterable(groups))
    if unknown := saved["state"].keys() - known.keys():
        raise UnfitError(f"has a state of its optimizer for an unknown parameter {brief(min(map(str, unknown)))}")
    shaped, numbers = _state_names(optimizer)
    for key, parameter in known.items():
        # SGD's without momentum was None once.
        state = {name: value for name, value in saved["state"].get(key, {}).items() if value is not None}
        if not state and not stepped:
            continue
        if odd := sorted(state.keys() ^ {*shaped, *numbers}):
            raise UnfitError(
                f"has a state of parameter {key} with {'no' if odd[0] not in state else 'an unknown'} {odd[0]!r}"
            )
        for name in shaped:
            value = state[name]
            if not isinstance(value, torch.Tensor):
                raise UnfitError(f"has {name} of parameter {key} that is {brief(value)}, expected a tensor")
            if value.shape != parameter.shape:
                shapes = f"of shape {tuple(value.shape)}, expected {tuple(parameter.shape)}"
                raise UnfitError(f"has {name} of parameter {key} {shapes}")
            _check_values(f"{name} of parameter {key}", value, parameter)
        for name in numbers:
            number = state[name]
            if isinstance(number, torch.Tensor) and number.numel() == 1:
                number = number.item()
            if type(number) not in (int, float) or not 0 <= number < float("inf"):
                raise UnfitError(f"has {name} of parameter {key} that is no finite number of at least 0")


def _state_names(optimizer: torch.optim.Optimizer) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """What the optimizer keeps for a parameter after a step: tensors of the parameter's shape, and single numbers.

    >>> _state_names(torch.optim.AdamW([torch.zeros(2)]))
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


def check_scaler(saved: Mapping[str, Any], scaler: torch.amp.GradScaler) -> None:
    """Raise `UnfitError` for a scaler with other settings, or a scale that none has."""
    own = scaler.state_dict()
    for name in _SCALER_SETTINGS:
        if name in own and saved[name] != own[name]:
            raise UnfitError(f"has {name}={brief(saved[name])} of its scaler, where this run has {own[name]}")
    if own and not (type(saved["scale"]) is float and 0 < saved["scale"] < float("inf")):
        raise UnfitError(f"has scale={brief(saved['scale'])} of its scaler, expected a finite number above 0")


def _check_values(what: str, value: torch.Tensor, expected: torch.Tensor) -> None:
    if value.dtype != expected.dtype:
        got, wanted = (str(dtype).removeprefix("torch.") for dtype in (value.dtype, expected.dtype))
        raise UnfitError(f"has {what} of {got}, expected {wanted}")
    if value.is_floating_point() and not bool(value.isfinite().all()):
        raise UnfitError(f"has {what} with numbers that are not finite")
