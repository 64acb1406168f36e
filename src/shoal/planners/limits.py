"""How far a planner searches: counts that are the same on every machine, and a guard of seconds after them.

A search counts its work in *simulated ops*: one op of one schedule played through. So the same step, hardware and
budget give the same plan on a fast machine, a slow one and a loaded one.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Collection
from dataclasses import dataclass
from functools import lru_cache, wraps
from typing import Any, ParamSpec, TypeVar

P = ParamSpec("P")
Found = TypeVar("Found")


@dataclass(frozen=True)
class Limits:
    """The parts of `joint` and how far each searches.

    Every part can be turned off; `bench.ablation` says what each is worth (docs/figures/one-plan.md). The plan is then
    still valid and inside the budget, but it may be slower, or there is none.

    Attributes:
        lower_bound: prove how little time any plan adds. Without it nothing tells when a plan is good enough.
        integer_program: the mixed-integer program that chooses a residence for every storage (Checkmate, MONeT).
        iterated_search: place the copies of offloaded storages and improve by iterated local search (Lourenco et al.).
        later_readers: run ops that need no copy while the device would wait for one; not without `order`.
        chain: the dynamic program (Rotor), which may recompute a storage several times: for networks of equal layers,
            such as transformers, in small budgets.
        local_search: give up once more, or recompute earlier, what fills the peak (in the spirit of DTR).
        recompute_earlier: of `local_search`, its second change.
        fill_slack: keep more where a plan leaves room.
        order: run ops in an order that needs fewer bytes (minimum cuts).
        on_demand: recompute right before each op that reads.
        hold_longer: hold what such a plan recomputes more than once, where there is room.
        smallest_search: look further for the smallest peak than plans on demand; with a link, at what leaves, too.

        max_nodes: nodes of the branch-and-bound tree of each mixed-integer program of a step without a link.
        max_nodes_with_link: the same with a link, where the relaxation is weak and more nodes hardly raise the bound.
        max_simplex_iterations: of each linear program.
        max_peak_entries: of the program for the smallest peak, nodes times non-zero entries: a large program gets fewer
            nodes, and none of the solver's sub-programs, which are limited only by time.
        large_ops: a step of more ops gets no tight lower bound where its plan is further off than `far_off`, and no
            local search where the plan adds no more than `recomputes_little`: both take long there and change little.
        many_ops: a step of more ops is searched by `local_search` before the integer program where recomputing each
            storage once adds more than the bound by `far_off`: the program takes long to find that nothing fits so.
        gap, gap_with_link, gap_of_many_ops: relative gaps at which a mixed-integer program is solved well enough: of a
            step without a link, with one, and of one with more than `many_ops` for the plan itself.
        max_solves: how often the program is solved again with less room, until its exact peak fits.
        set_aside: shares of the largest storage by which the budget of a linear program is reduced, each a start for
            the iterated search: a copy frees nothing until it has ended.
        close_enough, near_enough, far_off: of the plain step's time. Nearer to the lower bound than `close_enough`
            nothing else is tried, and nearer than `near_enough` neither `later_readers` nor `chain`;
            `local_search` is for plans further off than `far_off`. A plan of `chain` that is slower than the plain step
            by more than `far_slower` is not filled bit by bit. One that adds no more than `recomputes_little` computes
            nearly everything once more at most, and is not held against those that recompute on demand.
        more_room: room beyond the budget, as shares of it, that linear programs get; the local search starts from what
            they choose.
        narrow_share: a storage this much smaller than the largest result on the way to it is kept for the smallest
            peak.
        way_shares: a storage this much smaller than all that is in use on the way to it may be kept for the smallest
            peak; each is tried.
        kept_sets: how many of these ways to choose what is kept, those with the lowest peaks, have their ops ordered.
            With more, none of seven networks had a lower smallest peak.
        lower_peak_share: the peak that the search for the smallest peak asks for next, as a share of the last.

        iterated_search_ops, local_search_ops, fill_slack_ops, smallest_peak_ops, order_ops, hold_longer_ops: simulated
            ops of one search each; `smallest_peak_ops` is for the smallest peak. With four times the `order_ops` the
            plans on demand of five networks had the same peaks, and with half of them one had a peak 0.5 % higher.
        max_restarts, restarts_per_storage: random restarts of the iterated search, at most.
        max_moves_per_restart: storages that a restart moves at most.
        recompute_share: of these, those that are recomputed instead of moved between device and host.
        max_followed_starts: starts of the iterated search that are followed further than to and from the host.
        max_remembered_schedules: schedules that the iterated search holds ready.
        max_drops: changes that the local search makes at most.
        max_dropped_candidates, max_earlier_ops: changes that it compares each time: storages to give up at the peak,
            and ops earlier at which to recompute.

        guard_seconds: time limit of the search for a plan, and of the search for the smallest peak where there is none.
            The counts end a search long before it does; where it strikes, `Plan.stopped_early` says so.

    Example:
        >>> Limits(chain=False).max_drops
        60
    """

    lower_bound: bool = True
    integer_program: bool = True
    iterated_search: bool = True
    later_readers: bool = True
    chain: bool = True
    local_search: bool = True
    recompute_earlier: bool = True
    fill_slack: bool = True
    order: bool = True
    on_demand: bool = True
    hold_longer: bool = True
    smallest_search: bool = True

    max_nodes: int = 200
    max_nodes_with_link: int = 1
    max_simplex_iterations: int = 30_000
    max_peak_entries: int = 10_000_000
    gap: float = 0.002
    gap_with_link: float = 0.005
    gap_of_many_ops: float = 0.02
    max_solves: int = 5
    set_aside: tuple[float, ...] = (0.5, 1.0, 0.25, 0.0)
    close_enough: float = 0.002
    near_enough: float = 0.01
    far_off: float = 0.03
    far_slower: float = 1.0
    recomputes_little: float = 0.3
    large_ops: int = 2_000
    many_ops: int = 1_000
    more_room: tuple[float, ...] = (0.0, 0.01, 0.02, 0.04, 0.08)
    narrow_share: float = 1 / 3
    way_shares: tuple[float, ...] = (1 / 8, 1 / 16, 1 / 24, 1 / 40)
    kept_sets: int = 2
    lower_peak_share: float = 0.98

    iterated_search_ops: int = 2_000_000
    local_search_ops: int = 1_500_000
    fill_slack_ops: int = 300_000
    smallest_peak_ops: int = 1_500_000
    order_ops: int = 100_000
    hold_longer_ops: int = 1_000_000
    max_restarts: int = 300
    restarts_per_storage: int = 4
    max_moves_per_restart: int = 4
    recompute_share: float = 0.3
    max_followed_starts: int = 3
    max_remembered_schedules: int = 64
    max_drops: int = 60
    max_dropped_candidates: int = 12
    max_earlier_ops: int = 8

    guard_seconds: float = 600.0


DEFAULT = Limits()

log = logging.getLogger(__name__)


class Guard:
    """A time limit after all counts, and the parts of the search that it stopped.

    Args:
        seconds: from now on.
    """

    def __init__(self, seconds: float) -> None:
        self._seconds = seconds
        self._until = time.perf_counter() + seconds
        self.stopped: dict[str, None] = {}  # an ordered set

    @property
    def left_seconds(self) -> float:
        """What is left; 0 where nothing is."""
        return max(0.0, self._until - time.perf_counter())

    def stops(self, part: str) -> bool:
        """Whether no time is left for `part` of the search, which is noted."""
        over = time.perf_counter() > self._until
        if over:
            self.note(part)
        return over

    def note(self, *parts: str) -> None:
        """Note that these parts were stopped."""
        self.stopped.update(dict.fromkeys(parts))

    def warn(self, model: str) -> None:
        """Say in the log that parts were stopped, where any was."""
        if self.stopped:
            log.warning(
                "%s: the time limit of planning, %g s for all of its parts, ended %s early; planned again, the plan "
                "may be another one",
                model or "model",
                self._seconds,
                ", ".join(self.stopped),
            )


_forget: list[Callable[[], None]] = []  # clear the caches of searches


def forget_searches() -> None:
    """Drop what `cached_unless_stopped` keeps: the steps among the arguments take megabytes of the host each."""
    for cache_clear in _forget:
        cache_clear()


def cached_unless_stopped(
    maxsize: int, stopped: Callable[[Any], Collection[str]]
) -> Callable[[Callable[P, Found]], Callable[P, Found]]:
    """`lru_cache` of a search, for what no time limit ended: searched again, another answer may be found.

    Args:
        maxsize: as of `lru_cache`.
        stopped: the parts that were ended, of what was found.
    """

    def decorate(search: Callable[P, Found]) -> Callable[P, Found]:
        known = lru_cache(maxsize)(search)
        _forget.append(known.cache_clear)

        @wraps(search)
        def cached(*args: P.args, **kwargs: P.kwargs) -> Found:
            found = known(*args, **kwargs)  # type: ignore[arg-type]
            if stopped(found):
                known.cache_clear()  # all of it: a search hardly ever ends so
            return found

        cached.cache_clear = known.cache_clear  # type: ignore[attr-defined]
        return cached

    return decorate


class Effort:
    """The simulated ops that one search may still spend.

    Args:
        part: its name in `Plan.stopped_early`.
        max_ops: how many it may spend.
        guard: the time limit after them.
    """

    def __init__(self, part: str, max_ops: int, guard: Guard) -> None:
        self._part = part
        self._left_ops = max_ops
        self._guard = guard

    def spend(self, ops: int) -> None:
        """Count what has been simulated."""
        self._left_ops -= ops

    @property
    def left_ops(self) -> int:
        """What is left to spend; 0 where nothing is."""
        return max(0, self._left_ops)

    @property
    def is_spent(self) -> bool:
        """Whether the search must end."""
        return self._left_ops <= 0 or self._guard.stops(self._part)
