"""Device bytes counted apart from Shoal's meter: by the stand-in itself, and from the allocator's record."""

from __future__ import annotations

import ctypes
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch


class DeviceCounts(ctypes.Structure):
    """What was asked of the stand-in since the process began; see `device/standin.h`.

    Attributes:
        mallocs, frees, copies, launches, synchronizations: how many.
        used_bytes: taken from the device now. peak_bytes: the most of them since `reset_device_peak`.
        graph_launches: replays of CUDA graphs, each of them one launch. graph_kernels: kernels in these.
    """

    mallocs: int
    launches: int
    synchronizations: int
    used_bytes: int
    peak_bytes: int
    copies: int
    graph_launches: int
    graph_kernels: int
    _fields_ = [
        (name, ctypes.c_long)
        for name in (
            "mallocs",
            "frees",
            "copies",
            "launches",
            "synchronizations",
            "used_bytes",
            "peak_bytes",
            "graph_launches",
            "graph_kernels",
        )
    ]


def device_counts() -> DeviceCounts:
    """The counts as they are now."""
    found = DeviceCounts()
    ctypes.CDLL(None).standin_read(ctypes.byref(found))
    return found


def launches_by_kernel() -> Counter[str]:
    """How often each of torch's own kernels was launched since the process began, by its name in the binary."""
    found: Counter[str] = Counter()

    def add(name: bytes, launches: int) -> None:
        found[name.decode()] += launches

    ctypes.CDLL(None).standin_each_kernel(ctypes.CFUNCTYPE(None, ctypes.c_char_p, ctypes.c_long)(add))
    return found


def reset_device_peak() -> None:
    """Let `peak_bytes` begin with what is in use now."""
    ctypes.CDLL(None).standin_reset_peak()


@dataclass
class Record:
    """What the allocator handed out while it was recorded.

    Attributes:
        before_bytes: in use before, as torch.cuda.memory_allocated reads.
        peak_bytes: most in use at once, what was there before included.
        freed_of_before_bytes: of what was there before, by the end.
    """

    before_bytes: int = 0
    peak_bytes: int = 0
    freed_of_before_bytes: int = 0


@contextmanager
def recorded() -> Iterator[Record]:
    """Replay the allocator's own record of the block, allocation by allocation; `record_all` comes before."""
    record = Record(torch.cuda.memory_allocated())
    start = len(_entries())
    yield record
    _replay(record, _entries()[start:])


def record_all() -> None:
    """Have the allocator write down what it does from here on."""
    torch.cuda.memory._record_memory_history(context=None, stacks="python", max_entries=1_000_000)


def _entries() -> list[dict[str, int | str]]:
    entries: list[dict[str, int | str]] = torch.cuda.memory._snapshot()["device_traces"][0]
    return entries


def _replay(record: Record, events: list[dict[str, int | str]]) -> None:
    new: set[object] = set()
    in_use_bytes = record.peak_bytes = record.before_bytes
    for event in events:
        block_bytes = -(-int(event["size"]) // 512) * 512  # the record names what was asked for, blocks are larger
        if event["action"] == "alloc":
            new.add(event["addr"])
            in_use_bytes += block_bytes
        elif event["action"] == "free_requested":
            in_use_bytes -= block_bytes
            record.freed_of_before_bytes += 0 if event["addr"] in new else block_bytes
            new.discard(event["addr"])
        record.peak_bytes = max(record.peak_bytes, in_use_bytes)
