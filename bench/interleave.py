"""Contenders timed in turns, so that a slow minute of the machine meets them all; medians, and ratios within a turn.

An A/A contender, the baseline under a second name, shows how far equal contenders lie apart: the noise.
`torch.utils.benchmark.Timer` runs all repeats of one contender before the next and sets one thread, so it cannot do
this.
"""

from __future__ import annotations

import gc
import statistics
import time
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, TypeVar

import torch

K = TypeVar("K", bound=Hashable)
T = TypeVar("T")
Clock = Callable[[], float]


def turns(order: Sequence[K], rounds: int, warm_ups: int = 0) -> Iterator[tuple[K, bool]]:
    """Whose turn it is, and whether it counts: each once a round. Each round starts one further, so that no contender
    always follows the same neighbour.

    >>> [who for who, counts in turns("abc", 2, warm_ups=1) if counts]
    ['a', 'b', 'c', 'b', 'c', 'a']
    """
    for turn in range(-warm_ups, rounds):
        first = turn % max(1, len(order))
        for who in [*order[first:], *order[:first]]:
            yield who, turn >= 0


def in_turns(calls: Mapping[K, Callable[[], T]], rounds: int, warm_ups: int = 1) -> dict[K, list[T]]:
    """What each call returned in each round that counts.

    >>> in_turns({"a": lambda: 1.0, "b": lambda: 2.0}, rounds=2)
    {'a': [1.0, 1.0], 'b': [2.0, 2.0]}
    """
    found: dict[K, list[T]] = {name: [] for name in calls}
    for name, counts in turns(list(calls), rounds, warm_ups):
        result = calls[name]()
        if counts:
            found[name].append(result)
        del result
    return found


def timed(call: Callable[[], Any], clock: Clock = time.perf_counter) -> Callable[[], float]:
    """A call that returns the seconds `call` took."""

    def run() -> float:
        started = clock()
        result = call()
        seconds = clock() - started
        del result
        return seconds

    return run


def median_ratio(ours: Sequence[float], theirs: Sequence[float]) -> float:
    """The median over the turns of our seconds divided by theirs in the same turn.

    >>> median_ratio([2.0, 6.0, 4.0], [1.0, 2.0, 2.0])
    2.0
    """
    return statistics.median(a / b for a, b in zip(ours, theirs, strict=True))


@contextmanager
def no_collection() -> Iterator[None]:
    """Garbage collection would add its time to whoever is being timed."""
    collecting = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if collecting:
            gc.enable()


def synchronize(device: torch.device) -> None:
    """Wait for what runs on a GPU."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
