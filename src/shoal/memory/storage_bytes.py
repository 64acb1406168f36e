"""Bytes of the storages of tensors, as sizes and as a device's allocator counts them."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import nn
from torch.multiprocessing.reductions import StorageWeakRef
from torch.nn.parameter import UninitializedBuffer, UninitializedParameter
from torch.utils._pytree import tree_leaves

from shoal.errors import InputError
from shoal.lowlevel.cuda_allocator import blocks_in_use
from shoal.lowlevel.torch_state import allocated_bytes, dense_parts


def distinct_bytes(tensors: Iterable[torch.Tensor]) -> int:
    """Bytes of the distinct storages of `tensors`, on whatever device (also "meta")."""
    return sum(storage_sizes(tensors).values())


def storage_sizes(tensors: Iterable[torch.Tensor]) -> dict[int, int]:
    """Bytes of each distinct storage of `tensors`, by a number that no other live storage has."""
    storages = (part.untyped_storage() for tensor in tensors for part in dense_parts(tensor))
    return {storage._cdata: storage.nbytes() for storage in storages}


def dense_tensors(values: object) -> list[torch.Tensor]:
    """The strided tensors of all that are found among arguments or results; see `dense_parts`."""
    return [part for one in tree_leaves(values) if isinstance(one, torch.Tensor) for part in dense_parts(one)]


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
    """What the device's allocator counts for the distinct storages of `tensors`, of those on it or on "meta".

    A block of CUDA's is larger than what was asked for: by up to 1 MiB where it was allocated before segments could
    grow, as a model that is moved to the device before `shoal.compile`.
    """
    parts = (part for tensor in tensors for part in dense_parts(tensor))
    here = (part.untyped_storage() for part in parts if part.device.type in (device.type, "meta"))
    storages = {storage._cdata: storage for storage in here}
    known = blocks_in_use(device) if device.type == "cuda" and storages else {}
    return sum(known.get(_address(storage), allocated_bytes(storage.nbytes(), device)) for storage in storages.values())


def _address(storage: torch.UntypedStorage) -> int:
    return 0 if storage.device.type == "meta" or not storage.nbytes() else storage.data_ptr()


class WeakStorage:
    """A weak reference to a tensor's storage.

    Attributes:
        nbytes: its bytes.
        key: no other live storage has it.

    >>> x = torch.empty(100)
    >>> held = WeakStorage(x)
    >>> held.nbytes, held.is_alive
    (400, True)
    >>> del x
    >>> held.is_alive
    False
    """

    def __init__(self, tensor: torch.Tensor) -> None:
        storage = tensor.untyped_storage()
        self.nbytes = storage.nbytes()
        self.key: int = storage._cdata
        self._reference = StorageWeakRef(storage)

    @property
    def is_alive(self) -> bool:
        """Whether any tensor still uses it."""
        return not self._reference.expired()
