"""Bytes of the storages behind tensors, as sizes and as a device's allocator counts them."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import nn
from torch.nn.parameter import UninitializedBuffer, UninitializedParameter

from shoal.errors import InputError
from shoal.lowlevel.cuda_allocator import blocks_in_use
from shoal.lowlevel.torch_state import allocated_bytes, on_this_rank


def distinct_bytes(tensors: Iterable[torch.Tensor]) -> int:
    """Bytes of the distinct storages behind `tensors`, on whatever device (also "meta")."""
    storages = {t.untyped_storage()._cdata: t.untyped_storage().nbytes() for t in map(on_this_rank, tensors)}
    return sum(storages.values())


def reject_without_shape(model: nn.Module) -> None:
    """Raise for parameters and buffers of lazy modules that have not been called: they have no bytes yet.

    Raises:
        InputError: there is one.
    """
    for name, tensor in [*model.named_parameters(), *model.named_buffers()]:
        if isinstance(tensor, (UninitializedParameter, UninitializedBuffer)):
            owner = type(model.get_submodule(name.rpartition(".")[0])).__name__
            raise InputError(
                f"{name} of {owner} has no shape yet, so its bytes are not known; call the model once with a sample, "
                "then ask again"
            )


def bytes_on(device: torch.device, tensors: Iterable[torch.Tensor]) -> int:
    """What the device's allocator counts for the distinct storages behind `tensors`, of those on it or on "meta".

    A block of CUDA's is larger than what was asked for: by up to 1 MiB where it was allocated before segments could
    grow, as a model that is moved to the device before `shoal.compile`.
    """
    here = (t.untyped_storage() for t in map(on_this_rank, tensors) if t.device.type in (device.type, "meta"))
    storages = {storage._cdata: storage for storage in here}
    known = blocks_in_use(device) if device.type == "cuda" and storages else {}
    return sum(known.get(_address(storage), allocated_bytes(storage.nbytes(), device)) for storage in storages.values())


def _address(storage: torch.UntypedStorage) -> int:
    return 0 if storage.device.type == "meta" or not storage.nbytes() else storage.data_ptr()
