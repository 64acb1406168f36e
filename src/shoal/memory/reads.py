"""Which storages eager code reads: the inputs of a loss other than the model's outputs, such as targets."""

from __future__ import annotations

import ctypes
import logging
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from typing import NamedTuple

import torch

from shoal.errors import InputError
from shoal.lowlevel.extension import loaded

log = logging.getLogger("shoal")

_SOURCE = Path(__file__).with_name("reads.cpp")
_FIELDS = 5  # of a row of `reads_take`


class Read(NamedTuple):
    """A storage that was read.

    Attributes:
        key: as of `WeakStorage`.
        nbytes: of its bytes, those of the largest tensor in it that was read.
        address: where it begins.
        device: where it is.
    """

    key: int
    nbytes: int
    address: int
    device: torch.device


def start() -> None:
    """Note what this thread's ops read from here on. Without a C++ compiler nothing is noted, which is logged once."""
    library = _library()
    if library is not None:
        library.reads_start()


def stop() -> list[Read]:
    """End what `start` began: the storages that were read and are still there. Without a `start` there are none."""
    library = _loaded[0] if _loaded else None
    if library is None:
        return []
    library.reads_stop()
    count = library.reads_take(None, 0)
    rows = (ctypes.c_int64 * (_FIELDS * count))()
    library.reads_take(rows, count)
    found = (rows[place : place + _FIELDS] for place in range(0, len(rows), _FIELDS))
    return [Read(key, nbytes, address, _device(kind, index)) for key, nbytes, address, kind, index in found]


@contextmanager
def paused() -> Iterator[None]:
    """Note nothing inside the block: ops of planned steps, whose memory counts otherwise."""
    library = _loaded[0] if _loaded else None
    if library is None:
        yield
        return
    library.reads_pause(1)
    try:
        yield
    finally:
        library.reads_pause(-1)


_loaded: list[ctypes.CDLL] = []


@cache
def _library() -> ctypes.CDLL | None:
    try:
        library = loaded(_SOURCE, "counting what a loss reads", links=("c10", "torch_cpu"))
    except InputError as error:
        log.warning("targets, and other tensors that only the loss reads, do not count in the budget: %s", error)
        return None
    library.reads_take.argtypes = [ctypes.c_void_p, ctypes.c_int64]
    library.reads_take.restype = ctypes.c_int64
    for name in ("reads_start", "reads_stop", "reads_pause"):
        getattr(library, name).restype = None
    _loaded.append(library)
    return library


def _device(kind: int, index: int) -> torch.device:
    name = {0: "cpu", 1: "cuda"}.get(kind, "meta")  # c10::DeviceType; of the others none is metered
    return torch.device(name) if index < 0 or name != "cuda" else torch.device(name, index)
