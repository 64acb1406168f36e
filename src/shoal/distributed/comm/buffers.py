"""Bytes that are used again: a new buffer for every message would be cleared by the system every time."""

from __future__ import annotations

from threading import Lock

import torch


class Buffers:
    """Lends buffers to any thread; those given back are lent again."""

    def __init__(self) -> None:
        self._lock = Lock()
        self._free: list[torch.Tensor] = []
        self._lent: dict[int, torch.Tensor] = {}  # by address

    def take(self, size_bytes: int, device: torch.device) -> torch.Tensor:
        """(size_bytes,) uint8, with anything in it.

        >>> buffers = Buffers()
        >>> first = buffers.take(100, torch.device("cpu"))
        >>> address = first.data_ptr()
        >>> buffers.give(first)
        >>> buffers.take(80, torch.device("cpu")).data_ptr() == address
        True
        """
        if size_bytes == 0:
            return torch.empty(0, dtype=torch.uint8, device=device)
        with self._lock:
            here = [place for place, free in enumerate(self._free) if free.device == device]
            fits = [place for place in here if self._free[place].numel() >= size_bytes]
            if fits:
                whole = self._free.pop(min(fits, key=lambda place: self._free[place].numel()))
            else:
                if here:  # a larger one takes the place of the largest
                    self._free.pop(max(here, key=lambda place: self._free[place].numel()))
                whole = torch.empty(size_bytes, dtype=torch.uint8, device=device)
            self._lent[whole.data_ptr()] = whole
            return whole[:size_bytes]

    def give(self, lent: torch.Tensor) -> None:
        """Take back what `take` lent; it is not to be used any more."""
        with self._lock:
            if lent.numel():
                self._free.append(self._lent.pop(lent.data_ptr()))
