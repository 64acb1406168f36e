"""The paper's three pools hold every block of a planned step once, without overlap."""

from __future__ import annotations

from dataclasses import replace

from hypothesis import given
from hypothesis import strategies as st

from bench.layout_step_blocks import step_blocks, three_pools
from shoal.core.residence import Offload
from shoal.core.step import StepGraph
from shoal.memory.layout.problem import check_layout
from tests.random_steps import SLOW_LINK, offloads, plain_chain, steps


@given(steps(), st.data())
def test_no_addresses_overlap_and_no_block_is_lost(graph: StepGraph, data: st.DataObject) -> None:
    graph = replace(graph, link=SLOW_LINK)
    residences = data.draw(offloads(graph))
    pools = three_pools(graph, residences)
    for layout in (pools.host, pools.parameters, pools.general):
        check_layout(layout)
    gradients = sum(s.kind == "gradient" for s in graph.storages)
    assert len(pools.general.problem.blocks) == len(step_blocks(graph, residences).blocks) - gradients
    offloaded = [s.nbytes for s in graph.storages if isinstance(residences.get(s.name), Offload)]
    assert pools.host.arena_bytes == sum(offloaded), (
        "all that is offloaded is on the host when the backward pass begins"
    )
    resident = ("parameter", "buffer", "gradient")
    assert pools.parameters.arena_bytes == sum(s.nbytes for s in graph.storages if s.kind in resident)


def test_what_leaves_early_makes_room_for_what_comes_later() -> None:
    graph = replace(plain_chain(4, nbytes=1000), link=SLOW_LINK)
    kept = three_pools(graph, {})
    left = three_pools(graph, {"conv_0.out": Offload("conv_1", "conv_backward_7")})
    assert left.host.arena_bytes == 1000
    assert left.general.problem.highest_live_bytes == kept.general.problem.highest_live_bytes - 1000
