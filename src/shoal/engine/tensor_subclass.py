"""Inputs whose class only adds to `torch.Tensor`, such as MONAI's MetaTensor: planned as plain tensors.

Such a class lives in `__torch_function__`, above the dispatcher. Planned graphs know tensors only. So a planned call
is one function to the class: its arguments are taken as plain tensors, and its results are handed to the class as those
of any function of PyTorch are.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch.utils._pytree import tree_leaves, tree_map


def subclass_among(args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> type[torch.Tensor] | None:
    """The class of the first argument that is of such a class; None where there is none."""
    return next((type(leaf) for leaf in tree_leaves((args, dict(kwargs))) if _only_adds(leaf)), None)


def call_as_function(
    subclass: type[torch.Tensor], call: Callable[..., Any], args: tuple[Any, ...], kwargs: Mapping[str, Any]
) -> Any:
    """What `call` returns for the plain tensors of its arguments, as the class makes it of a function of PyTorch."""
    plain_args, plain_kwargs = tree_map(_plain, (args, dict(kwargs)))
    returned = call(*plain_args, **plain_kwargs)
    return subclass.__torch_function__(lambda *_, **__: returned, (subclass,), args, dict(kwargs))


def _only_adds(value: Any) -> bool:
    if not isinstance(value, torch.Tensor):
        return False
    handler = getattr(type(value).__torch_function__, "__func__", None)  # a Parameter's is none of Python's
    is_own = handler is not None and handler is not torch.Tensor.__torch_function__.__func__  # type: ignore[attr-defined]
    return is_own and type(value).__torch_dispatch__ is torch.Tensor.__torch_dispatch__


def _plain(value: Any) -> Any:
    return value.as_subclass(torch.Tensor) if _only_adds(value) else value
