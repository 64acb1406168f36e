"""What torch.distributed does not document: FSDP2's records of a model's parameters, the default group's store.

PyTorch does not guarantee these names; 2.12 to 2.15 have them, and `tests/lowlevel/test_process_groups.py` tests that.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import nn


def add_in_store(key: str, amount: int) -> int:
    """Add to a counter that all ranks share, in the store of the default process group; what it is afterwards.

    Replaces `store.add(key, amount)` where the store itself is not at hand: `init_process_group` made it.

    Raises:
        RuntimeError: the process that keeps the store has ended.
    """
    return int(_store().add(key, amount))


def store_write(key: str, text: str) -> None:
    """Keep a text for all ranks, in the store of the default process group; errors as of `add_in_store`."""
    _store().set(key, text)


def store_has(key: str) -> bool:
    """Whether a rank has written `key`; returns at once."""
    return bool(_store().check([key]))


def store_read(key: str) -> str:
    """What a rank wrote; waits until one did."""
    return bytes(_store().get(key)).decode()


def _store() -> Any:
    return torch.distributed.distributed_c10d._get_default_store()


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


def reduce_scatter_of(group: Any) -> Any:
    """What a group's gradients are reduced with; FSDP2 documents `set_custom_reduce_scatter` and no way to read it."""
    return group._reduce_scatter_comm


def all_gather_of(group: Any) -> Any:
    """What a group's weights are gathered with."""
    return group._all_gather_comm


def set_all_gather(group: Any, comm: Any) -> None:
    """Gather one group's weights with `comm`; `set_custom_all_gather` sets it for all groups of a module."""
    group._all_gather_comm = comm


def local_shard(record: Any) -> torch.Tensor:
    """The shard of one parameter itself; `DTensor.to_local` returns a view of it that autograd records."""
    shard: torch.Tensor = record.sharded_param._local_tensor
    return shard


def padded_shard(record: Any) -> torch.Tensor:
    """The shard of one parameter with the padding that makes it as long on every rank, flat."""
    shard: torch.Tensor = record._sharded_param_data
    return shard


def unsharded_elems(record: Any) -> int:
    """The elements of the whole parameter."""
    return int(record._orig_size.numel())


def replace_local_shard(record: Any, local: torch.Tensor) -> None:
    """Give a sharded parameter another local tensor on the same memory, and let FSDP2 look at it anew."""
    record.sharded_param._local_tensor = local
    if hasattr(record, "_unsharded_param"):
        del record._unsharded_param
    forget_gathered(record)
    record._init_extensions()


def forget_gathered(record: Any) -> None:
    """Free the buffers that one parameter is gathered into, which FSDP2 keeps for good; the next ones are new."""
    record.all_gather_outputs = []
