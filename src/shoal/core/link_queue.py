"""The link between device and host while a step is played: one queue each way, and how long the device waits."""

from __future__ import annotations

from shoal.core.hardware import Link
from shoal.core.step import StepGraph
from shoal.errors import PlanError


class LinkQueue:
    """Transfers of each direction run one after another, in the order they were begun; the two directions at once.

    Times are seconds since the step began.

    Raises:
        PlanError: the step has no link to the host.
    """

    def __init__(self, graph: StepGraph) -> None:
        if graph.link is None:
            raise PlanError(
                f"the plan offloads, but this step of {graph.model or 'the model'} has no link to the host; give "
                "hardware=, or offload_to= to shoal.compile"
            )
        self._storages = graph.storages
        self._link: Link = graph.link
        self._to_host_until = 0.0
        self._to_device_until = 0.0
        self._done: dict[int, float] = {}

    def offload(self, storage: int, now: float) -> tuple[float, float]:
        """Begin the copy to the host: when it starts and when it ends."""
        start = max(now, self._to_host_until)
        self._to_host_until = start + self._link.to_host_seconds(self._storages[storage].nbytes)
        self._done[storage] = self._to_host_until
        return start, self._to_host_until

    def fetch(self, storage: int, now: float) -> tuple[float, float]:
        """Begin the copy back: when it starts and when it ends."""
        start = max(now, self._to_device_until)
        self._to_device_until = start + self._link.to_device_seconds(self._storages[storage].nbytes)
        self._done[storage] = self._to_device_until
        return start, self._to_device_until

    def stall(self, storage: int, now: float) -> float:
        """How long the device waits at `now` for the storage's latest copy."""
        return max(0.0, self._done[storage] - now)

    def stall_at_once(self, storage: int, now: float) -> float:
        """How long the device waits at `now` for a copy that has just begun: for links that do not overlap."""
        return 0.0 if self._link.overlaps else self.stall(storage, now)
