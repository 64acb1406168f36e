"""Bytes put on the wire by this rank, by kind, compared with what plain float32 collectives would have sent."""

from __future__ import annotations

from dataclasses import dataclass
from threading import Lock
from typing import Any, Literal

Kind = Literal["gradients", "weights", "activations"]


def ring_all_reduce_bytes(payload_bytes: int, ranks: int) -> int:
    """What one rank sends in a ring all-reduce of that many bytes: 2 (W - 1) / W of them, rounded down.

    >>> ring_all_reduce_bytes(4_000, 4), ring_all_reduce_bytes(4_000, 1)
    (6000, 0)
    """
    return 2 * (ranks - 1) * payload_bytes // ranks


def ring_all_gather_bytes(whole_bytes: int, ranks: int) -> int:
    """What one rank sends in a ring all-gather whose result has that many bytes, or in a ring reduce-scatter of them.

    >>> ring_all_gather_bytes(4_000, 4)
    3000
    """
    return (ranks - 1) * whole_bytes // ranks


@dataclass(frozen=True)
class Sent:
    """What one rank sent.

    Attributes:
        sent_bytes: on the wire, with everything that checks and orders messages.
        raw_bytes: what plain PyTorch would have sent instead.
    """

    sent_bytes: int = 0
    raw_bytes: int = 0

    @property
    def share(self) -> float:
        """Of the raw bytes that were sent; 1 where nothing was to be sent.

        >>> Sent(250, 1000).share
        0.25
        """
        return self.sent_bytes / self.raw_bytes if self.raw_bytes else 1.0

    def __add__(self, other: Sent) -> Sent:
        return Sent(self.sent_bytes + other.sent_bytes, self.raw_bytes + other.raw_bytes)

    def __sub__(self, other: Sent) -> Sent:
        return Sent(self.sent_bytes - other.sent_bytes, self.raw_bytes - other.raw_bytes)


class Traffic:
    """Counts, by `Kind`, what one rank put on the wire; any thread may add.

    >>> traffic = Traffic()
    >>> traffic.add("gradients", sent_bytes=250, raw_bytes=1000)
    >>> traffic.end_step()
    >>> traffic.add("gradients", sent_bytes=260, raw_bytes=1000)
    >>> traffic.end_step()
    >>> traffic.total("gradients"), traffic.last_step("gradients").share, traffic.steps
    (Sent(sent_bytes=510, raw_bytes=2000), 0.26, 2)
    """

    def __init__(self) -> None:
        self.steps = 0
        self._lock = Lock()
        self._total: dict[Kind, Sent] = {}
        self._before: dict[Kind, Sent] = {}  # the totals when the last step began
        self._last: dict[Kind, Sent] = {}

    def add(self, kind: Kind, sent_bytes: int, raw_bytes: int) -> None:
        """Count bytes of one kind."""
        with self._lock:
            self._total[kind] = self._total.get(kind, Sent()) + Sent(sent_bytes, raw_bytes)

    def end_step(self) -> None:
        """What was added since the last call is the last step's."""
        with self._lock:
            self.steps += 1
            self._last = {kind: sent - self._before.get(kind, Sent()) for kind, sent in self._total.items()}
            self._before = dict(self._total)

    @property
    def kinds(self) -> tuple[Kind, ...]:
        """What was counted, in the order it was first."""
        return tuple(self._total)

    def total(self, kind: Kind | None = None) -> Sent:
        """Since the beginning, of one kind or of all."""
        with self._lock:
            return _of(self._total, kind)

    def last_step(self, kind: Kind | None = None) -> Sent:
        """In the last step that ended, of one kind or of all."""
        with self._lock:
            return _of(self._last, kind)

    def to_json(self) -> dict[str, Any]:
        """For a report: steps, and for each kind the bytes sent and raw, in all and in the last step.

        >>> traffic = Traffic()
        >>> traffic.add("weights", 1, 4)
        >>> traffic.to_json()["total"]
        {'weights': {'sent_bytes': 1, 'raw_bytes': 4}}
        """
        with self._lock:
            return {"steps": self.steps, "total": _as_json(self._total), "last_step": _as_json(self._last)}


def _of(counts: dict[Kind, Sent], kind: Kind | None) -> Sent:
    if kind is not None:
        return counts.get(kind, Sent())
    return sum(counts.values(), Sent())


def _as_json(counts: dict[Kind, Sent]) -> dict[str, dict[str, int]]:
    return {kind: {"sent_bytes": sent.sent_bytes, "raw_bytes": sent.raw_bytes} for kind, sent in counts.items()}
