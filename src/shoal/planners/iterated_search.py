"""Iterated local search: who is kept, who waits on the host and who is recomputed, every change played.

The program of `integer_program` models the link as divisible bandwidth. A real storage leaves and comes back whole, so
what it chooses may wait where it expects no wait. Here every change is placed by `transfer_places` and costs what it
then does.

Local search: change one storage while that helps, first between device and host, where a change takes a millisecond to
play, then to and from recomputation. Where nothing helps any more, change a few at random and go on from there
(Lourenco, Martin, Stutzle, "Iterated local search", 2003). The same input gives the same output. No optimum is claimed.
"""

from __future__ import annotations

import itertools
import random
from collections.abc import Iterable
from typing import Literal, NamedTuple

from shoal.core.residence import Residence
from shoal.core.sizes import MAX_BYTES
from shoal.planners.integer_program import Chosen
from shoal.planners.just_in_time import just_in_time
from shoal.planners.limits import Effort, Limits
from shoal.planners.native_places import Places, places_of
from shoal.planners.recompute_choice import RecomputeChoice
from shoal.planners.transfer_places import placed_residences

_TICKS = 1e7  # in the time of the plain step: what differs by less takes as long
_PLACING = 8  # making a schedule costs that many times what placing the copies of one does

Where = Literal["device", "host", "nowhere"]


class _Value(NamedTuple):
    """The objective, in lexicographic order: bytes over the limits, time, bytes on the host."""

    excess_bytes: int
    ticks: int
    host_bytes: int


class IteratedSearch:
    """The search over one step's choice inside one budget.

    Args:
        choice: the step's numbers; its graph has a link.
        budget_bytes: most device bytes in use at any position.
        enough_seconds: a step as fast as this need not be improved.
        limits: how often and how far to restart.
        effort: what all of it may cost; once it is spent, the best so far counts.
    """

    def __init__(
        self, choice: RecomputeChoice, budget_bytes: int, enough_seconds: float, limits: Limits, effort: Effort
    ) -> None:
        graph = choice.graph
        assert graph.link is not None  # asked for steps with a link only
        self._choice = choice
        self._link = graph.link
        self._limits = limits
        self._effort = effort
        self._host_limit_bytes = self._link.host_bytes or MAX_BYTES
        self._tick_seconds = max(graph.plain_seconds, 1e-9) / _TICKS
        self._enough = _Value(0, int(enough_seconds / self._tick_seconds), MAX_BYTES)
        self._places_of = places_of(graph, budget_bytes)
        self._schedules: dict[frozenset[int], Places] = {}
        min_bytes = min((graph.storages[s].nbytes for s in choice.candidates), default=0)
        saved = {s for s in graph.saved if graph.storages[s].nbytes >= min_bytes} - graph.never_given_up
        self._only_host = frozenset(saved.difference(choice.candidates))  # what must not be recomputed can still leave
        self._movable = sorted(self._only_host.union(choice.candidates))

    def residences(self, chosen: Chosen) -> dict[str, Residence]:
        """The plan of a choice, with its transfers placed."""
        graph = self._choice.graph
        stays = chosen.kept | chosen.offloaded
        kept = just_in_time(graph, self._choice.kept_for(stays))
        return placed_residences(graph, kept, self._schedule(stays).place(chosen.offloaded))

    def improve(self, starts: Iterable[Chosen]) -> Chosen:
        """The best that is found from any of `starts`, at least one, which are asked for while there is need."""
        near: dict[Chosen, _Value] = {}
        for start in starts:
            wide = Chosen(start.kept | (self._only_host - start.offloaded), start.offloaded)
            found, value = self._to_and_from_host(wide, self._value(wide))
            near[found] = value
            best = min(near, key=near.__getitem__)
            if self._is_over(near[best]):
                return best
        value = near[best]
        for found in sorted(near, key=lambda chosen: self._penalised_seconds(near[chosen]))[
            : self._limits.max_followed_starts
        ]:
            best, value = self._better((best, value), self._to_and_from_recomputation(found, near[found]))
        chance = random.Random(0)
        restarts = min(self._limits.max_restarts, self._limits.restarts_per_storage * len(self._movable))
        for _ in range(restarts):
            if self._is_over(value):
                break
            moved = self._moved_at_random(best, chance)
            found, found_value = self._to_and_from_host(moved, self._value(moved))
            if found_value < value:
                best, value = self._to_and_from_recomputation(found, found_value)
        return best

    @staticmethod
    def _better(one: tuple[Chosen, _Value], other: tuple[Chosen, _Value]) -> tuple[Chosen, _Value]:
        return other if other[1] < one[1] else one

    def _is_over(self, value: _Value) -> bool:
        return value < self._enough or self._effort.is_spent

    def _to_and_from_host(self, best: Chosen, value: _Value) -> tuple[Chosen, _Value]:
        """Move one storage between device and host while that helps."""
        stays = sorted(best.kept | best.offloaded)
        since_better = 0
        for storage in itertools.cycle(stays):
            if since_better == len(stays) or self._is_over(value):
                break
            changed = _moved(best, storage, _other_side(best, storage))
            changed_value = self._value(changed)
            since_better += 1
            if changed_value < value:
                best, value, since_better = changed, changed_value, 0
        return best, value

    def _to_and_from_recomputation(self, best: Chosen, value: _Value) -> tuple[Chosen, _Value]:
        """The same, and give up one storage or take one back while that helps."""
        improved = True
        while improved:
            improved = False
            for storage in self._choice.candidates:
                for where in self._other_ways(best, storage, value):
                    if self._is_over(value):
                        return best, value
                    changed = _moved(best, storage, where)
                    changed_value = self._value(changed)
                    if changed_value < value:
                        best, value, improved = changed, changed_value, True
                        break
            if improved:
                best, value = self._to_and_from_host(best, value)
        return best, value

    def _other_ways(self, chosen: Chosen, storage: int, value: _Value) -> tuple[Where, ...]:
        """Where else the storage may be, less what cannot help."""
        stays = chosen.kept | chosen.offloaded
        if storage not in stays:
            return ("device", "host")
        waits_seconds = value.ticks * self._tick_seconds - self._schedule(stays).seconds
        rerun_seconds = self._choice.graph.ops[self._choice.graph.producer[storage]].second.longer_seconds
        return ("nowhere",) if value.excess_bytes or rerun_seconds < waits_seconds else ()

    def _moved_at_random(self, chosen: Chosen, chance: random.Random) -> Chosen:
        """The perturbation between two local searches: a few storages moved."""
        for storage in chance.choices(self._movable, k=chance.randint(1, self._limits.max_moves_per_restart)):
            give_up = storage not in self._only_host and chance.random() < self._limits.recompute_share
            chosen = _moved(chosen, storage, "nowhere" if give_up else _other_side(chosen, storage))
        return chosen

    def _value(self, chosen: Chosen) -> _Value:
        self._effort.spend(len(self._choice.graph.ops) // _PLACING + 1)
        placed = self._schedule(chosen.kept | chosen.offloaded).place(chosen.offloaded)
        excess_bytes = placed.excess_bytes + max(0, placed.host_bytes - self._host_limit_bytes)
        return _Value(excess_bytes, round(placed.seconds / self._tick_seconds), placed.host_bytes)

    def _penalised_seconds(self, value: _Value) -> float:
        """The time of the step, and for bytes over the limits the time in which the link would carry them."""
        return value.ticks * self._tick_seconds + self._link.to_host_seconds(value.excess_bytes)

    def _schedule(self, stays: frozenset[int]) -> Places:
        if stays not in self._schedules:
            if len(self._schedules) >= self._limits.max_remembered_schedules:
                self._schedules.pop(next(iter(self._schedules)))
            self._effort.spend(len(self._choice.graph.ops))
            self._schedules[stays] = self._places_of(self._choice.kept_for(stays))
        return self._schedules[stays]


def _moved(chosen: Chosen, storage: int, where: Where) -> Chosen:
    kept, offloaded = chosen.kept - {storage}, chosen.offloaded - {storage}
    if where == "device":
        return Chosen(kept | {storage}, offloaded)
    return Chosen(kept, offloaded | {storage} if where == "host" else offloaded)


def _other_side(chosen: Chosen, storage: int) -> Where:
    return "device" if storage in chosen.offloaded else "host"
