"""The blocks of a planned step are the bytes that its timeline adds up, one lifetime each."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from bench.layout_step_blocks import step_blocks
from shoal.core.residence import Keep, Recompute
from shoal.core.schedule import schedule
from shoal.core.simulate import simulate
from shoal.core.step import StepGraph
from shoal.memory.layout.problem import check_layout
from shoal.memory.layout.search import best_fit
from shoal.planners.just_in_time import just_in_time
from tests.random_steps import SLOW_LINK, conv_bn_relu_chain, densenet_like, offloads, resnet_like, steps, unet_like


@given(steps(), st.data())
def test_the_bytes_in_use_at_each_run_are_those_of_the_timeline(graph: StepGraph, data: st.DataObject) -> None:
    kept = data.draw(st.sets(st.sampled_from([s.id for s in graph.storages])))
    graph = replace(graph, link=SLOW_LINK)
    for residences in ({}, just_in_time(graph, kept), data.draw(offloads(graph))):
        blocks = step_blocks(graph, residences).blocks
        moments = [moment for moment in simulate(graph, residences).moments if moment.phase != "stall"]
        for number, moment in enumerate(moments):
            in_use = sum(b.size_bytes for b in blocks if b.lower <= number < b.upper)
            assert in_use == moment.total_bytes - graph.resident_bytes


def _is_overwriting(graph: StepGraph, storage: int) -> bool:
    return any(run.takes_over >= 0 and storage == run.writes[0] for run in schedule(graph, {}))


def test_what_is_recomputed_has_a_block_each_time_and_what_is_written_over_has_one_with_its_operand() -> None:
    graph = conv_bn_relu_chain(3)
    given_up = next(s for s in graph.saved if graph.ops[graph.producer[s]].target == "bn")
    kept = [s.id for s in graph.storages if s.id != given_up]
    residences = just_in_time(graph, kept)
    name = graph.storages[given_up].name
    again = residences[name]
    assert isinstance(again, Recompute)
    assert all(isinstance(residences[n], Keep) for n in residences if n != name)
    named = [block.name.partition(":")[2] for block in step_blocks(graph, residences).blocks]
    assert named.count(name) == 1 + len(again.before)
    assert not {s.name for s in graph.storages if _is_overwriting(graph, s.id)}.intersection(named)


@pytest.mark.parametrize("build", [lambda: conv_bn_relu_chain(8), resnet_like, densenet_like, unet_like])
@pytest.mark.parametrize("keep", [True, False])
def test_best_fit_wastes_little_of_a_step(build: Callable[[], StepGraph], keep: bool) -> None:
    graph = build()
    layout = best_fit(step_blocks(graph, {} if keep else just_in_time(graph, ())))
    check_layout(layout)
    assert layout.fragmentation <= 1.1
