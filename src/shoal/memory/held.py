"""Storages that somebody else holds: how large they are, and whether they are still there."""

from __future__ import annotations

import torch
from torch.multiprocessing.reductions import StorageWeakRef


class HeldStorage:
    """A storage seen from outside; it is not kept alive.

    Attributes:
        nbytes: its bytes.
        key: tells it from every other storage that is alive.

    >>> x = torch.empty(100)
    >>> held = HeldStorage(x)
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
        """Whether any tensor still looks at it."""
        return not self._reference.expired()
