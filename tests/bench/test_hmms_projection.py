"""How long an epoch of distributed training takes: worked by hand, and at its limits."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from bench.hmms import BANDWIDTHS_GBPS, StepTimes, epoch_seconds, speedup, step_of
from examples.planners.layerwise import layerwise
from examples.planners.sqrt import sqrt
from shoal.core.hardware import Link
from shoal.core.plan import Plan
from shoal.core.step import StepGraph
from shoal.planners.keep_all import keep_all
from tests.random_steps import HARDWARE, conv_bn_relu_chain, steps

seconds = st.floats(1e-3, 1e3)
some_steps = st.builds(StepTimes, st.integers(1, 4096), seconds, seconds, st.integers(1, 10**10))
gbps = st.floats(0.01, 1000)


def test_an_epoch_by_hand() -> None:
    # 250 MB of gradients travel twice: 4 Gbit, at 80 % of 10 Gbit/s half a second.
    step = StepTimes(batch=10, forward_seconds=0.2, backward_seconds=0.4, gradient_bytes=250_000_000)
    assert epoch_seconds(step, 100, 10) == pytest.approx(10 * (0.2 + 0.5))
    assert epoch_seconds(step, 100, 20) == pytest.approx(10 * (0.2 + 0.4))  # hidden by the backward pass
    assert epoch_seconds(step, 100, 10, efficiency=1.0) == pytest.approx(10 * (0.2 + 0.4))
    assert epoch_seconds(step, 100, 5, efficiency=0.4) == pytest.approx(10 * (0.2 + 2.0))


def test_the_papers_figure_at_10_gbit_per_second() -> None:
    """VGG-19 at 100 images a second, 6 times the batch at 1.5 % of the throughput: 2.1 times faster."""
    gradient_bytes = 4 * 143_667_240
    baseline = StepTimes(64, 0.64 / 3, 1.28 / 3, gradient_bytes)
    larger = StepTimes(6 * 64, 6 * 0.64 / 3 / 0.985, 6 * 1.28 / 3 / 0.985, gradient_bytes)
    assert speedup(larger, baseline, 10) == pytest.approx(2.1, abs=0.02)


@given(some_steps, gbps, st.floats(1, 100))
def test_more_bandwidth_never_takes_longer(step: StepTimes, bandwidth: float, more: float) -> None:
    assert epoch_seconds(step, 1000, bandwidth * more) <= epoch_seconds(step, 1000, bandwidth)


@given(some_steps, st.integers(1, 10**7))
def test_without_bounds_on_bandwidth_only_computation_is_left(step: StepTimes, samples: int) -> None:
    computing = samples / step.batch * (step.forward_seconds + step.backward_seconds)
    assert epoch_seconds(step, samples, math.inf) == pytest.approx(computing)
    assert epoch_seconds(step, samples, 1.0) >= epoch_seconds(step, samples, math.inf)


@given(some_steps, some_steps)
def test_on_the_slowest_network_the_speedup_is_the_ratio_of_the_batches(larger: StepTimes, baseline: StepTimes) -> None:
    larger = StepTimes(larger.batch, larger.forward_seconds, larger.backward_seconds, baseline.gradient_bytes)
    assert speedup(larger, baseline, 1e-15) == pytest.approx(larger.batch / baseline.batch, rel=1e-3)


@given(some_steps, some_steps, gbps)
def test_a_speedup_is_a_ratio_of_epochs_whatever_the_data(one: StepTimes, other: StepTimes, bandwidth: float) -> None:
    epochs = [epoch_seconds(step, 12345, bandwidth) for step in (one, other)]
    assert speedup(one, other, bandwidth) == pytest.approx(epochs[1] / epochs[0])
    assert speedup(one, one, bandwidth) == 1


def test_the_speedup_falls_from_the_ratio_of_the_batches_to_that_of_the_throughputs() -> None:
    baseline = StepTimes(64, 0.2, 0.4, 10**9)
    larger = StepTimes(256, 0.88, 1.76, 10**9)  # 10 % slower an image
    speedups = [speedup(larger, baseline, gbps) for gbps in BANDWIDTHS_GBPS]
    assert speedups == sorted(speedups, reverse=True) and 3.5 < speedups[0] < 4
    assert speedup(larger, baseline, math.inf) == pytest.approx(1 / 1.1)


@given(steps())
def test_a_plan_that_keeps_everything_has_the_ops_own_times(graph: StepGraph) -> None:
    if not any(s.kind == "gradient" for s in graph.storages) or graph.ops[-1].phase == "forward":
        return
    step = step_of(keep_all(graph, HARDWARE, 0), batch=32)
    assert step.batch == 32
    assert step.forward_seconds == pytest.approx(sum(op.seconds for op in graph.ops if op.phase != "backward"))
    assert step.backward_seconds == pytest.approx(sum(op.seconds for op in graph.ops if op.phase == "backward"))
    assert step.gradient_bytes == sum(s.nbytes for s in graph.storages if s.kind == "gradient")


def test_recomputing_is_part_of_the_backward_pass() -> None:
    graph = conv_bn_relu_chain(8)
    kept = step_of(keep_all(graph, HARDWARE, 0), 1)
    recomputing: Plan = sqrt(graph, HARDWARE, int(0.6 * keep_all(graph, HARDWARE, 0).predicted_peak_bytes))
    again = step_of(recomputing, 1)
    assert again.forward_seconds == pytest.approx(kept.forward_seconds)
    assert recomputing.added_seconds > 0
    assert again.backward_seconds == pytest.approx(kept.backward_seconds + recomputing.added_seconds)


def test_waiting_for_the_host_counts_where_it_happens() -> None:
    graph = replace(conv_bn_relu_chain(8, nbytes=10**9), link=Link("slow", 1e9, 1e8, 1e-5))
    waiting = layerwise(graph, HARDWARE, 0)
    kept, step = step_of(keep_all(graph, HARDWARE, 0), 1), step_of(waiting, 1)
    stalls = [moment for moment in waiting.timeline.moments if moment.phase == "stall"]
    before = sum(moment.seconds for moment in stalls if moment.start_seconds < step.forward_seconds)
    after = sum(moment.seconds for moment in stalls if moment.start_seconds >= step.forward_seconds)
    assert before > 0 and after > 0
    assert step.forward_seconds == pytest.approx(kept.forward_seconds + before)
    assert step.backward_seconds == pytest.approx(kept.backward_seconds + after)
