"""Use of the link between device and host in a step: bytes, number of copies, busy time."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from shoal.core.timeline import Timeline, Transfer, TransferWay

WAYS: tuple[TransferWay, ...] = ("to host", "to device")


@dataclass(frozen=True)
class LinkUse:
    """One direction of the link over a step; `busy_share` is the busy part of the step's time, in 0..1."""

    count: int
    nbytes: int
    busy_share: float


def link_use(timeline: Timeline, way: TransferWay) -> LinkUse:
    """The use of one direction of the link."""
    transfers = [transfer for transfer in timeline.transfers if transfer.way == way]
    nbytes = sum(transfer.nbytes for transfer in transfers)
    return LinkUse(len(transfers), nbytes, share_of_step(timeline, busy_seconds(transfers)))


def busy_share(timeline: Timeline) -> float:
    """The part of the step in which at least one direction is busy, in 0..1."""
    return share_of_step(timeline, busy_seconds(timeline.transfers))


def busy_seconds(transfers: Iterable[Transfer]) -> float:
    """How long at least one of the transfers runs."""
    busy, until = 0.0, 0.0
    for transfer in sorted(transfers, key=lambda transfer: transfer.start_seconds):
        end = transfer.start_seconds + transfer.seconds
        busy += max(0.0, end - max(until, transfer.start_seconds))
        until = max(until, end)
    return busy


def share_of_step(timeline: Timeline, seconds: float) -> float:
    """`seconds` as a part of the step, 0 for a step without times."""
    return seconds / timeline.seconds if timeline.seconds else 0.0
