"""The simulated step: what runs when, and how many device bytes are in use while it does."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from functools import cached_property
from typing import Any, Literal

MomentPhase = Literal["forward", "loss", "recompute", "backward", "stall", "launch"]
WAITS: frozenset[str] = frozenset({"stall", "launch"})
"""The phases in which the device runs no op."""
TransferWay = Literal["to host", "to device"]


@dataclass(frozen=True)
class Moment:
    """One op execution, or a time in which the device waits for a transfer or for the host.

    All byte counts are what is in use meanwhile; they add up to `total_bytes`.

    Attributes:
        op: the op's name; the same name comes again where a forward op is recomputed, or where the host has not yet
            launched it. While the device waits for a transfer: the name of the storage.
        target, layer: of that op, or of the op that waits.
        phase: "recompute" for a forward op that runs again during the backward pass, "stall" for a wait for a transfer,
            "launch" for one until the host has launched the op.
        start_seconds, seconds: when it starts and how long it runs.
        resident_bytes: parameters, buffers, the input batch, optimizer state.
        kept_bytes: forward storages that were never given up since their first computation.
        recomputed_bytes: forward storages that were computed again.
        activation_gradient_bytes: gradients of activations between backward ops, and those of the outputs.
        gradient_bytes: parameter gradients made so far.
        workspace_bytes: the op's scratch.
        fetched_bytes: offloaded storages that are back, or on their way.
    """

    op: str
    target: str
    layer: str
    phase: MomentPhase
    start_seconds: float
    seconds: float
    resident_bytes: int
    kept_bytes: int
    recomputed_bytes: int
    activation_gradient_bytes: int
    gradient_bytes: int
    workspace_bytes: int
    fetched_bytes: int = 0

    @property
    def total_bytes(self) -> int:
        """Device bytes in use while the op runs."""
        return (
            self.resident_bytes
            + self.kept_bytes
            + self.recomputed_bytes
            + self.activation_gradient_bytes
            + self.gradient_bytes
            + self.workspace_bytes
            + self.fetched_bytes
        )


@dataclass(frozen=True)
class Transfer:
    """One copy between device and host.

    Attributes:
        storage, layer: what is copied, and the layer it belongs to.
        way: "to host" or "to device".
        nbytes: how much.
        start_seconds, seconds: when it starts and how long it runs.
    """

    storage: str
    layer: str
    way: TransferWay
    nbytes: int
    start_seconds: float
    seconds: float


@dataclass(frozen=True)
class Timeline:
    """A whole simulated step.

    Attributes:
        model: the model's name.
        moments: in the order they run.
        budget_bytes: the most device bytes in use at once; 0 for no limit.
        transfers: in the order they begin.
    """

    model: str
    moments: tuple[Moment, ...]
    budget_bytes: int = 0
    transfers: tuple[Transfer, ...] = ()

    @cached_property
    def peak(self) -> Moment:
        """The first moment at which most bytes are in use."""
        return max(self.moments, key=lambda moment: (moment.total_bytes, moment.phase != "launch"))

    @property
    def peak_bytes(self) -> int:
        """Device bytes in use at the peak."""
        return self.peak.total_bytes

    @property
    def seconds(self) -> float:
        """How long the step takes."""
        last = self.moments[-1]
        return last.start_seconds + last.seconds

    @property
    def recompute_seconds(self) -> float:
        """How much of that is recomputation."""
        return sum(moment.seconds for moment in self.moments if moment.phase == "recompute")

    @property
    def stall_seconds(self) -> float:
        """How much of that the device waits for transfers."""
        return sum(moment.seconds for moment in self.moments if moment.phase == "stall")

    @property
    def launch_wait_seconds(self) -> float:
        """How much of that the device waits for the host to launch the next op."""
        return sum(moment.seconds for moment in self.moments if moment.phase == "launch")

    def to_json(self) -> dict[str, Any]:
        """Plain lists and dicts, for `json.dump`."""
        return asdict(self)
