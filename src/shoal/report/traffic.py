"""What the link between device and host carries in a step: how much, how often, and how long it is busy."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from shoal.core.timeline import Timeline, Transfer, TransferWay

WAYS: tuple[TransferWay, ...] = ("to host", "to device")


@dataclass(frozen=True)
class Traffic:
    """One direction of the link over a step. `busy_share` of the step's time, in 0..1."""

    way: TransferWay
    count: int
    nbytes: int
    busy_seconds: float
    busy_share: float


def traffic(timeline: Timeline, way: TransferWay) -> Traffic:
    """What one direction of the link carries."""
    transfers = [transfer for transfer in timeline.transfers if transfer.way == way]
    busy = busy_seconds(transfers)
    nbytes = sum(transfer.nbytes for transfer in transfers)
    return Traffic(way, len(transfers), nbytes, busy, share_of_step(timeline, busy))


def busy_share(timeline: Timeline) -> float:
    """For which share of the step at least one direction carries something, in 0..1."""
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
    """`seconds` as a share of the step, 0 for a step without times."""
    return seconds / timeline.seconds if timeline.seconds else 0.0
