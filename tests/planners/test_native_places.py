"""The native library places transfers where Python does, in the same bytes and to the last bit of the seconds."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shoal.core.hardware import Link
from shoal.core.schedule import schedule
from shoal.core.simulate import peak_and_seconds
from shoal.core.step import StepGraph
from shoal.errors import PlanError
from shoal.lowlevel.dispatch import allowed
from shoal.planners.just_in_time import just_in_time
from shoal.planners.native_places import NativePlaces, places_of
from shoal.planners.transfer_places import TransferPlaces
from tests.random_steps import SLOW_LINK, plain_chain, steps

pytestmark = pytest.mark.skipif("native" not in allowed().kinds, reason="the native library is not here")

links = st.builds(
    replace,
    st.just(SLOW_LINK),
    to_host_bytes_per_second=st.sampled_from([2.0, 10.0, 50.0]),
    to_device_bytes_per_second=st.sampled_from([3.0, 10.0, 50.0]),
    latency_seconds=st.sampled_from([0.0, 0.1]),
    overlaps=st.booleans(),
)


@st.composite
def linked_steps(draw: st.DrawFn) -> StepGraph:
    """A step with a link, whose ops take uneven times, on the host too."""
    graph = draw(steps())
    seconds, launches = draw(st.tuples(st.floats(0.0, 3.0), st.sampled_from([0.0, 0.7, 2.3])))
    ops = [
        replace(
            op,
            seconds=op.seconds + seconds / (op.id + 1),
            launch_seconds=launches / 3,
            again=op.again and replace(op.again, seconds=seconds / 7, launch_seconds=launches),
        )
        for op in graph.ops
    ]
    return replace(graph, ops=tuple(ops), link=draw(links))


@given(linked_steps(), st.data())
def test_it_is_that_of_python_to_the_last_bit(graph: StepGraph, data: st.DataObject) -> None:
    every = st.sets(st.sampled_from(range(len(graph.storages))))
    kept, offloaded = data.draw(every), data.draw(every)
    residences = just_in_time(graph, kept)
    peak_bytes, _ = peak_and_seconds(graph, schedule(graph, residences))
    budget_bytes = data.draw(st.sampled_from([0, peak_bytes // 2, 3 * peak_bytes // 4, peak_bytes]))
    ours, theirs = places_of(graph, budget_bytes)(kept), TransferPlaces(graph, residences, budget_bytes)
    assert isinstance(ours, NativePlaces)
    assert ours.seconds == theirs.seconds
    assert ours.place(offloaded) == theirs.place(offloaded)
    assert ours.place(kept) == theirs.place(kept)


def test_a_step_without_a_link_has_no_places() -> None:
    with pytest.raises(PlanError):
        places_of(plain_chain(3), 0)


def test_without_the_native_library_the_places_are_made_in_python(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SHOAL_KERNELS", "reference")
    link = Link("even", to_host_bytes_per_second=1000.0, to_device_bytes_per_second=500.0, latency_seconds=0.0)
    graph = replace(plain_chain(4), link=link)
    assert isinstance(places_of(graph, 0)(range(len(graph.storages))), TransferPlaces)
