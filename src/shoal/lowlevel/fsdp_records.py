"""FSDP2's records of a model's parameters, in attributes that torch does not document (2.11 to 2.13)."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from torch import nn


def sharded_modules(model: nn.Module) -> Iterator[tuple[str, Any]]:
    """The modules that `fully_shard` was applied to, and their names."""
    for name, module in model.named_modules():
        if hasattr(module, "set_custom_reduce_scatter"):  # without loading FSDP2, which not every model needs
            yield name, module


def parameter_groups(module: Any) -> list[Any]:
    """The records of what one sharded module gathers and reduces together: one, or one for each mesh; none beside."""
    state = module._get_fsdp_state()
    groups = getattr(state, "_fsdp_param_groups", None)
    return [group for group in ([state._fsdp_param_group] if groups is None else groups) if group is not None]
