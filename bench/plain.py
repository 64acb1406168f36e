"""Plain PyTorch's step: what contenders are held against, whose peak budgets are shares of, and who takes turns."""

from __future__ import annotations

import statistics
import time
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from bench.interleave import Clock, median_ratio
from bench.reference import take_reference
from bench.workload import Forward, Workload
from shoal.core.plan import Plan
from shoal.core.sizes import format_bytes

PLAIN = "plain"


class Plain:
    """A workload, as plain PyTorch runs it: one step for the reference and one for the peak are taken here.

    Attributes:
        workload: the step.
        forward: a model that shares its tensors.
        reference: what the step leaves behind.
        peak_bytes: measured.
    """

    def __init__(self, workload: Workload) -> None:
        self.workload = workload
        self.forward = workload.shared_copy()
        self.reference = take_reference(workload, self.forward)
        self.peak_bytes = workload.peak_bytes(self.forward)

    def budget_bytes(self, share: float) -> int:
        """A share of the peak, in percent."""
        return int(self.peak_bytes * share / 100)

    def share_percent(self, peak_bytes: float) -> float:
        """What a peak is of plain PyTorch's."""
        return 100 * peak_bytes / self.peak_bytes

    def metered(self, forward: Forward) -> int:
        """The peak of a contender's step that starts where the reference started."""
        self.reference.start()
        return self.workload.peak_bytes(forward)

    def in_turns(
        self,
        forwards: Mapping[Any, Forward],
        repeats: int,
        warm_ups: int = 1,
        clock: Clock = time.perf_counter,
    ) -> Times:
        """Plain PyTorch and the contenders, timed in turns."""
        return Times(self.workload.in_turns({PLAIN: self.forward, **forwards}, repeats, warm_ups, clock))

    def columns(self, times: Times) -> dict[str, Any]:
        """Plain PyTorch's part of a result."""
        return {
            "peak_bytes": self.peak_bytes,
            "seconds": times.seconds[PLAIN],
            "parameter_bytes": self.workload.parameter_bytes,
            "parameters_and_gradients_percent": 200 * self.workload.parameter_bytes / self.peak_bytes,
            "repeatable": self.reference.repeatable,
        }


@dataclass(frozen=True)
class Times:
    """Seconds of each contender in each turn; plain PyTorch is `PLAIN`."""

    seconds: Mapping[Hashable, Sequence[float]]

    def columns(self, key: Hashable) -> dict[str, Any]:
        """A contender's seconds, and what they add to plain PyTorch's: the median over the turns, in percent.

        >>> Times({"plain": [1.0, 2.0], "ours": [1.5, 3.0]}).columns("ours")
        {'seconds': [1.5, 3.0], 'added_percent': 50.0}
        """
        added = median_ratio(self.seconds[key], self.seconds[PLAIN]) - 1
        return {"seconds": list(self.seconds[key]), "added_percent": 100 * added}


def plan_columns(plan: Plan) -> dict[str, Any]:
    """What a plan says of itself; times in percent of plain PyTorch's step, by its own cost model."""

    def percent(seconds: float) -> float:
        return 100 * seconds / plan.plain_seconds if plan.plain_seconds else 0.0

    return {
        "predicted_peak_bytes": plan.predicted_peak_bytes,
        "predicted_added_percent": percent(plan.added_seconds),
        "lower_bound_percent": percent(plan.least_added_seconds),
        "codec_percent": percent(plan.codec_seconds),
        "stall_percent": percent(plan.timeline.stall_seconds),
        "copies_percent": percent(sum(transfer.seconds for transfer in plan.timeline.transfers)),
        "planning_seconds": plan.planning_seconds,
        "host_bytes": plan.host_bytes,
        "payload_bytes": plan.payload_bytes,
        "encoded_bytes": sum(storage.nbytes for storage in plan.encoded),
        "encoded_storages": len(plan.encoded),
        "recomputed_storages": len(plan.recomputed),
    }


def heading(result: Mapping[str, Any]) -> str:
    """What a table of one network says above it: the step, and what it takes in plain PyTorch."""
    plain, setting = result["plain"], result["setting"]
    return (
        f"{result['network']}, {setting['batch']} x {setting['image']} pixels: plain PyTorch "
        f"{format_bytes(plain['peak_bytes'])}, {statistics.median(plain['seconds']):.2f} s a step; parameters and "
        f"gradients {plain['parameters_and_gradients_percent']:.1f} %"
    )
