"""How long an epoch of distributed training takes on a network of a given bandwidth, from one device's step.

Jin, Hong, "Split-CNN", ASPLOS'19, section 6.4. Gradients are summed over the learners by an all-reduce that moves at
least 2 |G| bytes over each learner's link (Patarasuk, Yuan, 2009) while the backward pass runs. A larger batch takes
fewer steps for an epoch, so that gradients travel less often: that is what it gains on a slow network.

    T_epoch = |D| / N · (T_forward + max(T_backward, 2 |G| / (α B)))

| symbol | here |
|---|---|
| \\|D\\| | `samples`: of the data set, or of one learner's share of it |
| N | `Step.batch` |
| T_forward, T_backward | `Step.forward_seconds`, `Step.backward_seconds`, computation alone |
| \\|G\\| | `Step.gradient_bytes` |
| B | `bandwidth_gbps`: least bandwidth between any two learners, in Gbit/s = 10⁹ bits a second |
| α | `efficiency`: how much of B the all-reduce reaches |

Not in it: latency, the last layers' gradients, which come when the backward pass has ended, and everything else that
uses the network. The speedup of a larger batch is the paper's lower bound.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass

from shoal.core.plan import Plan
from shoal.errors import InputError

EFFICIENCY = 0.8  # the paper's α
BANDWIDTHS_GBPS = (0.5, 1.0, 2.0, 4.0, 8.0, 10.0, 16.0, 32.0)  # figure 11


@dataclass(frozen=True)
class Step:
    """One training step on one learner, measured or simulated.

    Attributes:
        batch: samples of a step.
        forward_seconds: until the loss is there.
        backward_seconds: the rest of the step, recomputation and waiting included.
        gradient_bytes: of all parameter gradients.

    Raises:
        InputError: a number is out of its range.
    """

    batch: int
    forward_seconds: float
    backward_seconds: float
    gradient_bytes: int

    def __post_init__(self) -> None:
        for what in ("batch", "forward_seconds", "backward_seconds"):
            value = getattr(self, what)
            if not 0 < value < math.inf:
                raise InputError(f"{what}={value!r}: expected a positive number")
        if self.gradient_bytes < 0:
            raise InputError(f"gradient_bytes={self.gradient_bytes!r}: expected bytes, 0 or more")


@dataclass(frozen=True)
class Point:
    """One bandwidth of the curve.

    Attributes:
        bandwidth_gbps: in Gbit/s.
        baseline_seconds, larger_seconds: of an epoch of one sample; times |D| they are those of an epoch.
        speedup: of the larger batch over the baseline.
    """

    bandwidth_gbps: float
    baseline_seconds: float
    larger_seconds: float

    @property
    def speedup(self) -> float:
        """How many times faster the larger batch is."""
        return self.baseline_seconds / self.larger_seconds


def step_of(plan: Plan, batch: int) -> Step:
    """The simulated step of `plan`.

    Args:
        plan: its timeline gives the times: what runs or waits before the loss is there is forward, all else backward.
        batch: samples of that step.
    """
    timeline = plan.timeline
    forward = [moment for moment in timeline.moments if moment.phase in ("forward", "loss")]
    forward_seconds = forward[-1].start_seconds + forward[-1].seconds
    gradient_bytes = sum(storage.nbytes for storage in plan.graph.storages if storage.kind == "gradient")
    return Step(batch, forward_seconds, timeline.seconds - forward_seconds, gradient_bytes)


def epoch_seconds(step: Step, samples: int, bandwidth_gbps: float, *, efficiency: float = EFFICIENCY) -> float:
    """T_epoch.

    Args:
        step: one learner's.
        samples: that one learner sees in an epoch.
        bandwidth_gbps: in Gbit/s; `math.inf` for a network that costs nothing.
        efficiency: in (0, 1].

    Raises:
        InputError: a number is out of its range.

    Example: half a gigabyte of gradients at 10 Gbit/s and an efficiency of 0.8 takes a second to sum, twice as long as
    the backward pass.

        >>> step = Step(batch=50, forward_seconds=0.25, backward_seconds=0.5, gradient_bytes=500_000_000)
        >>> epoch_seconds(step, 1000, 10)
        25.0
    """
    if samples < 1:
        raise InputError(f"samples={samples!r}: expected a positive int")
    if not bandwidth_gbps > 0:
        raise InputError(f"bandwidth_gbps={bandwidth_gbps!r}: expected a positive number of Gbit/s")
    if not 0 < efficiency <= 1:
        raise InputError(f"efficiency={efficiency!r}: expected a share of the bandwidth, above 0 and at most 1")
    network_seconds = 2 * step.gradient_bytes / (efficiency * bandwidth_gbps * 1e9 / 8)
    return samples / step.batch * (step.forward_seconds + max(step.backward_seconds, network_seconds))


def speedup(larger: Step, baseline: Step, bandwidth_gbps: float, *, efficiency: float = EFFICIENCY) -> float:
    """How many times faster an epoch is with the steps of `larger` than with those of `baseline`.

    On an ever slower network it tends to the ratio of the batches, on an ever faster one to that of the images per
    second, which is below 1 where a plan pays for its batch with time.

    Example: VGG-19 at 100 images a second, a batch of 64 against one six times as large that takes 1.5 % longer, a
    third of it forward. The paper's figure is 2.1.

        >>> baseline = Step(64, 0.64 / 3, 2 * 0.64 / 3, gradient_bytes=4 * 143_667_240)
        >>> larger = Step(384, 1.015 * 3.84 / 3, 2 * 1.015 * 3.84 / 3, gradient_bytes=4 * 143_667_240)
        >>> round(speedup(larger, baseline, 10), 2)
        2.1
    """
    return point(larger, baseline, bandwidth_gbps, efficiency=efficiency).speedup


def point(larger: Step, baseline: Step, bandwidth_gbps: float, *, efficiency: float = EFFICIENCY) -> Point:
    """Both batches at one bandwidth."""
    seconds = [epoch_seconds(step, 1, bandwidth_gbps, efficiency=efficiency) for step in (baseline, larger)]
    return Point(bandwidth_gbps, *seconds)


def curve(
    larger: Step,
    baseline: Step,
    bandwidths_gbps: Iterable[float] = BANDWIDTHS_GBPS,
    *,
    efficiency: float = EFFICIENCY,
) -> tuple[Point, ...]:
    """Figure 11: both batches over the bandwidth."""
    return tuple(point(larger, baseline, gbps, efficiency=efficiency) for gbps in bandwidths_gbps)
