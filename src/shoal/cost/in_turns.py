"""Ops are timed in turns: while one waits, the others move its operands out of the caches, as they do in a step."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Protocol

_MIN_RUNS = 2
_MAX_RUNS = 30
_ENOUGH_SECONDS = 0.003  # of runs of one op, after the fewest runs
_MAX_SECONDS = 0.06  # of runs of one op, even if they are few
_SPREAD = 0.03  # of the fastest run: a second one this near confirms it
_IN_CACHE_SECONDS = 2e-3  # what takes longer does not find its operands in the cache of a core
_IN_SHARED_CACHE_SECONDS = 2e-2  # nor what takes longer than this in the one that cores share
_IN_CORE_BYTES = 1 << 20  # of operands and results: with fewer, what ran before an op has left them in a cache


class Caches(Protocol):
    """What the operands of an op are moved out of."""

    @property
    def shared_bytes(self) -> int:
        """Of the cache that cores share."""

    def evict(self, *, shared: bool) -> None:
        """Move what was used last out of the cores' own caches, or out of the one that they share as well."""


@dataclass(eq=False)
class Timing:
    """One op while it is timed.

    Attributes:
        run: runs it once and returns the seconds that it took.
        times: in seconds, of the runs that count.
        workspace_bytes: its peak beyond operands and results.
        moved_bytes: of operands and results, each once.
        once: no further run is needed where there is a time.
        launch_seconds: of the host, on CUDA.
        ended_at_bytes: what all ops had moved when this one ran last.
    """

    run: Callable[[], float]
    times: list[float]
    workspace_bytes: int
    moved_bytes: int = 0
    once: bool = False
    launch_seconds: float = 0.0
    ended_at_bytes: int = 0

    @property
    def seconds(self) -> float:
        """Of the fastest run: other load only adds time."""
        return min(self.times)

    @property
    def is_complete(self) -> bool:
        """Whether a second run confirms the fastest, or enough of them were made."""
        if not self.times or self.once:
            return bool(self.times)
        spent = sum(self.times)
        if spent > _MAX_SECONDS or len(self.times) >= _MAX_RUNS:
            return True
        if len(self.times) < 2:
            return False
        fastest, next_fastest = sorted(self.times)[:2]
        confirmed = next_fastest <= (1 + _SPREAD) * fastest
        return confirmed or (spent > _ENOUGH_SECONDS and len(self.times) >= _MIN_RUNS)

    @property
    def leaves_core(self) -> bool:
        """Whether its operands and results are too large for what ran before to have left them in a cache."""
        return self.moved_bytes > _IN_CORE_BYTES

    @property
    def finds_a_cache(self) -> bool:
        """Whether a run is short enough for the next one to find operands in a cache."""
        limit = _IN_SHARED_CACHE_SECONDS if self.leaves_core else _IN_CACHE_SECONDS
        return min(self.times, default=0.0) < limit


class InTurns:
    """Runs ops until their times are known. A large op waits until others have moved as much as the cache holds.

    To empty the cache for every run takes longer than most runs; the ops that wait hold about as many bytes of operands
    as the cache has.
    """

    def __init__(self, caches: Caches) -> None:
        self._caches = caches
        self._waiting: deque[tuple[str, Timing]] = deque()
        self._moved_bytes = 0

    def add(self, key: str, timing: Timing) -> Iterator[tuple[str, Timing | Exception]]:
        """Time one more op, whose first run is over.

        Yields:
            The keys of ops that are complete, with their timing or the error of a run.
        """
        self._ran(timing)
        self._put(key, timing)
        while self._waiting and self._is_due(self._waiting[0][1]):
            yield from self._take_turn()

    def rest(self) -> Iterator[tuple[str, Timing | Exception]]:
        """Complete those that still wait."""
        while self._waiting:
            if not self._is_due(self._waiting[0][1]):
                self._caches.evict(shared=True)
                self._moved_bytes += self._caches.shared_bytes
            yield from self._take_turn()

    def _must_wait(self, timing: Timing) -> bool:
        return timing.leaves_core and timing.finds_a_cache and not timing.is_complete

    def _is_due(self, timing: Timing) -> bool:
        return not self._must_wait(timing) or self._moved_bytes - timing.ended_at_bytes >= self._caches.shared_bytes

    def _take_turn(self) -> Iterator[tuple[str, Timing | Exception]]:
        key, timing = self._waiting.popleft()
        if not timing.is_complete:
            if not timing.leaves_core and timing.finds_a_cache:
                self._caches.evict(shared=False)
            try:
                timing.times.append(timing.run())
            except Exception as error:
                yield key, error
                return
            self._ran(timing)
        if timing.is_complete:
            yield key, timing
        else:
            self._put(key, timing)

    def _put(self, key: str, timing: Timing) -> None:
        if self._must_wait(timing):
            self._waiting.append((key, timing))
        else:
            self._waiting.appendleft((key, timing))

    def _ran(self, timing: Timing) -> None:
        self._moved_bytes += timing.moved_bytes
        timing.ended_at_bytes = self._moved_bytes
