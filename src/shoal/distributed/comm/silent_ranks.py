"""Which rank is silent when others report each other lost: each that fails writes to the store whom it waited for.

A backend's connections do not tell: after a timeout gloo closes every connection of its group, so that ranks that still
wait read "closed by peer" from one that runs.
"""

from __future__ import annotations

import json
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from threading import Thread
from typing import TypeVar

import torch.distributed as dist

from shoal.errors import TransferError
from shoal.lowlevel.process_groups import store_has, store_read, store_write

# A rank whose connection was closed fails at once and signs within milliseconds; the rest is for a busy machine.
SIGN_SECONDS = 2.0
_POLL_SECONDS = 0.02
# The store does not answer if the process that keeps it is the silent one.
_STORE_SECONDS = 1.0

_made: Counter[tuple[int, ...]] = Counter()  # exchanges, by their ranks: signs of a former failure are told apart
_signed: set[str] = set()
_T = TypeVar("_T")


@dataclass(frozen=True)
class SilentRanks:
    """
    Attributes:
        silent: the ranks that left no sign.
        reasons: of the failures of the others that were asked.
    """

    silent: tuple[int, ...]
    reasons: dict[int, str]


def count_exchange(members: Sequence[int]) -> None:
    """Call it on every rank when an exchange between these ranks was made: later failures are others."""
    _made[tuple(members)] += 1


def sign(members: Sequence[int], rank: int, waited_for: Sequence[int], reason: str) -> None:
    """Leave a sign that this rank runs and has failed; the first reason stays.

    Args:
        members: the ranks of the group, in the world.
        rank: of this process in the group.
        waited_for: the ranks of the group that it reports lost; none if it failed by itself or cannot tell.
        reason: one line.
    """
    key = _key(members, rank)
    if key not in _signed:
        _signed.add(key)
        _bounded(lambda: store_write(key, json.dumps([list(waited_for), reason])), 0.0)


def follow(members: Sequence[int], rank: int, waited_for: Sequence[int]) -> SilentRanks | None:
    """From the ranks that this one waited for to those that they waited for, as far as there are signs.

    Args:
        members, rank: as of `sign`, which was called.
        waited_for: by this rank.

    Returns:
        None if the store does not answer.
    """
    return _bounded(lambda: _follow(members, rank, waited_for), len(members) * SIGN_SECONDS)


def lost_in(group: dist.ProcessGroup | None, message: str, advice: str) -> TransferError:
    """The error for a collective of torch.distributed, which does not tell whom it waited for: names the silent ranks.

    Args:
        group: that it failed in; None: all ranks.
        message, advice: what failed, and what to do.
    """
    members, rank = dist.get_process_group_ranks(group), dist.get_rank(group)
    sign(members, rank, (), message)
    found = follow(members, rank, range(len(members)))
    silent = () if found is None else found.silent
    who = f"; no sign of life from {ranks_named(silent)}" if silent else ""
    return TransferError(f"{message}{who}; {advice}", silent_ranks=silent)


def ranks_named(ranks: Sequence[int]) -> str:
    """
    >>> ranks_named([1]), ranks_named([0, 2, 3, 4, 5])
    ('rank 1', 'ranks 0, 2, 3 and 2 more')
    """
    if len(ranks) == 1:
        return f"rank {ranks[0]}"
    first, more = ", ".join(map(str, ranks[:3])), len(ranks) - 3
    return f"ranks {first}" + (f" and {more} more" if more > 0 else "")


def _follow(members: Sequence[int], rank: int, waited_for: Sequence[int]) -> SilentRanks:
    reasons: dict[int, str] = {}
    waiting = [r for r in waited_for if r != rank]
    deadline = time.monotonic() + SIGN_SECONDS
    while waiting and time.monotonic() < deadline:
        for r in [r for r in waiting if store_has(_key(members, r))]:
            blamed, reasons[r] = json.loads(store_read(_key(members, r)))
            waiting += [one for one in blamed if one != rank and one not in waiting and one not in reasons]
            waiting.remove(r)
            deadline = time.monotonic() + SIGN_SECONDS
        time.sleep(_POLL_SECONDS)
    return SilentRanks(tuple(sorted(waiting)), reasons)


def _key(members: Sequence[int], rank: int) -> str:
    return f"shoal/failed/{','.join(map(str, members))}/{_made[tuple(members)]}/{rank}"


def _bounded(ask: Callable[[], _T], seconds: float) -> _T | None:
    """What the store says, or None if it does not answer in time or has gone with the process that kept it."""
    answers: list[_T] = []

    def run() -> None:
        try:
            answers.append(ask())
        except RuntimeError:
            return

    thread = Thread(target=run, name="shoal-silent-ranks", daemon=True)
    thread.start()
    thread.join(seconds + _STORE_SECONDS)
    return answers[0] if answers else None
