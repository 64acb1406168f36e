"""Improve who is kept, who waits on the host and who is recomputed: a few storages at a time, each change played.

The program of `integer_program` takes the link for a fluid. A real storage leaves and comes back whole, so what it
chooses may wait where it expects no wait. Here every change is placed by `transfer_places` and costs what it then does.

Local search: change one storage while that helps, first between device and host, where a change takes a millisecond to
play, then to and from recomputation. Where nothing helps any more, change a few at random and go on from there
(iterated local search: Lourenco, Martin, Stutzle, 2003). The same input gives the same output, up to the time limit. No
optimum is claimed.
"""

from __future__ import annotations

import itertools
import random
import time
from collections.abc import Iterable
from typing import Literal, NamedTuple

from shoal.core.residence import Residence
from shoal.planners.integer_program import Chosen
from shoal.planners.just_in_time import just_in_time
from shoal.planners.recompute_choice import RecomputeChoice
from shoal.planners.transfer_places import TransferPlaces, placed_residences

_REMEMBERED = 64  # schedules
_PROMISING = 3  # starts that are followed further than to and from the host
_RESTARTS_EACH = 4  # for each storage
_MOST_RESTARTS = 300
_MOST_AT_ONCE = 4
_GIVEN_UP = 0.3  # of the random changes
_NO_LIMIT = 1 << 62
_TICKS = 1e7  # in the time of the plain step: what differs by less takes as long

Where = Literal["device", "host", "nowhere"]


class _Value(NamedTuple):
    """What is to be small, first things first: bytes over the limits, time, bytes on the host."""

    excess_bytes: int
    ticks: int
    host_bytes: int


class Exchange:
    """The search over one step's choice inside one budget.

    Args:
        choice: the step's numbers; its graph has a link.
        budget_bytes: most device bytes in use at any position.
        enough_seconds: a step as fast as this need not be improved.
    """

    def __init__(self, choice: RecomputeChoice, budget_bytes: int, enough_seconds: float = 0.0) -> None:
        graph = choice.graph
        assert graph.link is not None  # asked for steps with a link alone
        self._choice = choice
        self._link = graph.link
        self._budget_bytes = budget_bytes
        self._host_limit_bytes = self._link.host_bytes or _NO_LIMIT
        self._deadline = 0.0
        self._tick_seconds = max(sum(op.seconds for op in graph.ops), 1e-9) / _TICKS
        self._enough = _Value(0, int(enough_seconds / self._tick_seconds), _NO_LIMIT)
        self._schedules: dict[frozenset[int], TransferPlaces] = {}
        least_bytes = min((graph.storages[s].nbytes for s in choice.candidates), default=0)
        saved = {s for s in graph.saved if graph.storages[s].nbytes >= least_bytes} - graph.held_for_second_runs
        self._only_host = frozenset(saved.difference(choice.candidates))  # what must not be recomputed can still leave
        self._movable = sorted(self._only_host.union(choice.candidates))

    def residences(self, chosen: Chosen) -> dict[str, Residence]:
        """The plan that `chosen` stands for."""
        graph = self._choice.graph
        stays = chosen.kept | chosen.offloaded
        kept = just_in_time(graph, self._choice.kept_for(stays))
        return placed_residences(graph, kept, self._schedule(stays).place(chosen.offloaded))

    def improve(self, starts: Iterable[Chosen], time_limit_seconds: float) -> Chosen:
        """The best that is found from any of `starts`, at least one, which are asked for while there is time and need.

        After the time limit the best so far counts.
        """
        self._deadline = time.perf_counter() + time_limit_seconds
        near: set[Chosen] = set()
        for start in starts:
            wide = Chosen(start.kept | (self._only_host - start.offloaded), start.offloaded)
            near.add(self._to_and_from_host(wide))
            best = min(near, key=self._value)
            if self._is_over(best):
                return best
        for found in sorted(near, key=self._promise)[:_PROMISING]:
            best = min(best, self._to_and_from_recomputation(found), key=self._value)
        chance = random.Random(0)
        for _ in range(min(_MOST_RESTARTS, _RESTARTS_EACH * len(self._movable))):
            if self._is_over(best):
                break
            found = self._to_and_from_host(self._shaken(best, chance))
            if self._value(found) < self._value(best):
                best = self._to_and_from_recomputation(found)
        return best

    def _is_over(self, chosen: Chosen) -> bool:
        return time.perf_counter() > self._deadline or self._value(chosen) < self._enough

    def _to_and_from_host(self, best: Chosen) -> Chosen:
        """Move one storage between device and host while that helps."""
        value = self._value(best)
        stays = sorted(best.kept | best.offloaded)
        since_better = 0
        for storage in itertools.cycle(stays):
            if since_better == len(stays) or self._is_over(best):
                break
            changed = _moved(best, storage, _other_side(best, storage))
            changed_value = self._value(changed)
            since_better += 1
            if changed_value < value:
                best, value, since_better = changed, changed_value, 0
        return best

    def _to_and_from_recomputation(self, best: Chosen) -> Chosen:
        """The same, and give up one storage or take one back while that helps."""
        value = self._value(best)
        improved = True
        while improved:
            improved = False
            for storage in self._choice.candidates:
                for where in self._other_ways(best, storage, value):
                    if self._is_over(best):
                        return best
                    changed = _moved(best, storage, where)
                    changed_value = self._value(changed)
                    if changed_value < value:
                        best, value, improved = changed, changed_value, True
                        break
            if improved:
                best = self._to_and_from_host(best)
                value = self._value(best)
        return best

    def _other_ways(self, chosen: Chosen, storage: int, value: _Value) -> tuple[Where, ...]:
        """Where else the storage may be, less what cannot help."""
        stays = chosen.kept | chosen.offloaded
        if storage not in stays:
            return ("device", "host")
        waits_seconds = value.ticks * self._tick_seconds - self._schedule(stays).seconds
        rerun_seconds = self._choice.graph.ops[self._choice.graph.producer[storage]].second.seconds
        return ("nowhere",) if value.excess_bytes or rerun_seconds < waits_seconds else ()

    def _shaken(self, chosen: Chosen, chance: random.Random) -> Chosen:
        """A few storages elsewhere."""
        for storage in chance.choices(self._movable, k=chance.randint(1, _MOST_AT_ONCE)):
            give_up = storage not in self._only_host and chance.random() < _GIVEN_UP
            chosen = _moved(chosen, storage, "nowhere" if give_up else _other_side(chosen, storage))
        return chosen

    def _value(self, chosen: Chosen) -> _Value:
        placed = self._schedule(chosen.kept | chosen.offloaded).place(chosen.offloaded)
        excess_bytes = placed.excess_bytes + max(0, placed.host_bytes - self._host_limit_bytes)
        return _Value(excess_bytes, round(placed.seconds / self._tick_seconds), placed.host_bytes)

    def _promise(self, chosen: Chosen) -> float:
        """The time it takes, and the link for what is over the limits."""
        value = self._value(chosen)
        return value.ticks * self._tick_seconds + self._link.to_host_seconds(value.excess_bytes)

    def _schedule(self, stays: frozenset[int]) -> TransferPlaces:
        if stays not in self._schedules:
            if len(self._schedules) >= _REMEMBERED:
                self._schedules.pop(next(iter(self._schedules)))
            kept = just_in_time(self._choice.graph, self._choice.kept_for(stays))
            self._schedules[stays] = TransferPlaces(self._choice.graph, kept, self._budget_bytes)
        return self._schedules[stays]


def _moved(chosen: Chosen, storage: int, where: Where) -> Chosen:
    kept, offloaded = chosen.kept - {storage}, chosen.offloaded - {storage}
    if where == "device":
        return Chosen(kept | {storage}, offloaded)
    return Chosen(kept, offloaded | {storage} if where == "host" else offloaded)


def _other_side(chosen: Chosen, storage: int) -> Where:
    return "device" if storage in chosen.offloaded else "host"
