"""Where transfers go: no wait where none is needed, the shortest one where the budget asks for it."""

from __future__ import annotations

import itertools
from collections.abc import Collection, Iterator
from dataclasses import replace

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from shoal.core.hardware import Link
from shoal.core.residence import Offload, Residence
from shoal.core.schedule import schedule
from shoal.core.simulate import peak_and_seconds
from shoal.core.step import StepGraph
from shoal.core.validate import check_runs
from shoal.errors import PlanError
from shoal.planners.just_in_time import just_in_time
from shoal.planners.transfer_places import TransferPlaces, last_forward_reader, placed_residences, with_offloads
from tests.random_steps import SLOW_LINK, Builder, legal_offloads, plain_chain, steps

# A chain's op takes a second forward and two backward; a copy of its 1000 bytes takes as long each way.
EVEN_LINK = Link("even", to_host_bytes_per_second=1000.0, to_device_bytes_per_second=500.0, latency_seconds=0.0)


def chain_of_four(link: Link) -> tuple[StepGraph, dict[str, Residence]]:
    """Ops 0..3 forward, 4 the loss, 5..8 backward: op 7 reads what op 0 wrote, op 6 what op 1 wrote."""
    graph = replace(plain_chain(4), link=link)
    return graph, just_in_time(graph, range(len(graph.storages)))


def storage(graph: StepGraph, name: str) -> int:
    return next(s.id for s in graph.storages if s.name == name)


def played(graph: StepGraph, residences: dict[str, Residence]) -> tuple[int, float]:
    return peak_and_seconds(graph, schedule(graph, residences))


def test_a_copy_as_long_as_an_op_is_released_one_op_later_and_fetched_one_op_before() -> None:
    graph, kept = chain_of_four(EVEN_LINK)
    placed = with_offloads(graph, kept, [storage(graph, "conv_0.out")])
    assert placed["conv_0.out"] == Offload("conv_1", "conv_backward_6")
    assert played(graph, placed)[1] == pytest.approx(played(graph, kept)[1])


def test_half_the_bandwidth_takes_two_ops_each_way() -> None:
    graph, kept = chain_of_four(replace(EVEN_LINK, to_host_bytes_per_second=500.0, to_device_bytes_per_second=250.0))
    placed = with_offloads(graph, kept, [storage(graph, "conv_0.out")])
    assert placed["conv_0.out"] == Offload("conv_2", "conv_backward_5")
    assert played(graph, placed)[1] == pytest.approx(played(graph, kept)[1])


def test_copies_of_one_way_follow_one_another() -> None:
    graph, kept = chain_of_four(EVEN_LINK)
    both = [storage(graph, "conv_0.out"), storage(graph, "conv_1.out")]
    placed = with_offloads(graph, kept, both)
    assert placed["conv_0.out"] == Offload("conv_1", "conv_backward_6")
    assert placed["conv_1.out"] == Offload("conv_2", "conv_backward_5")


def test_a_budget_that_needs_the_bytes_sooner_waits_for_them_and_no_longer() -> None:
    # Four seconds a copy there, and next to nothing back.
    graph, kept = chain_of_four(Link("slow", 250.0, 1e12, latency_seconds=0.0))
    first = storage(graph, "conv_0.out")
    _, plain_seconds = played(graph, kept)
    # While conv_2 runs its operand, its result and conv_0.out are there, and the batch: one must have gone.
    budget_bytes = 3 * 1000
    placed = TransferPlaces(graph, kept, budget_bytes).place([first])
    assert graph.ops[placed.released[first]].name == "conv_1"
    assert placed.seconds == pytest.approx(plain_seconds + 4 - 1)


def test_a_budget_that_has_no_room_earlier_fetches_late_and_waits_for_the_copy() -> None:
    graph, kept = chain_of_four(replace(EVEN_LINK, to_device_bytes_per_second=250.0))  # four seconds a copy
    first = storage(graph, "conv_0.out")
    _, plain_seconds = played(graph, kept)
    roomy = TransferPlaces(graph, kept).place([first])
    assert graph.ops[roomy.fetched[first]].name == "conv_backward_5"
    # conv_backward_6 fills the budget without conv_0.out, which has to wait for its reader.
    budget_bytes, _ = played(graph, {**kept, "conv_0.out": Offload("conv_3", "conv_backward_7")})
    tight = TransferPlaces(graph, kept, budget_bytes).place([first])
    assert graph.ops[tight.fetched[first]].name == "conv_backward_7"
    assert tight.excess_bytes == 0
    assert tight.seconds == pytest.approx(plain_seconds + 4)
    assert played(graph, placed_residences(graph, kept, tight)) == (budget_bytes, pytest.approx(tight.seconds))


def test_without_overlap_every_copy_is_added() -> None:
    graph, kept = chain_of_four(replace(EVEN_LINK, overlaps=False))
    placed = TransferPlaces(graph, kept).place([storage(graph, "conv_0.out"), storage(graph, "conv_1.out")])
    assert placed.seconds == pytest.approx(played(graph, kept)[1] + 2 * (1 + 2))


def test_what_is_read_on_the_way_back_inside_a_recomputation_is_fetched_before_the_op_it_serves() -> None:
    graph = replace(plain_chain(4), link=EVEN_LINK)
    second = storage(graph, "conv_1.out")
    residences = just_in_time(graph, {second, storage(graph, "conv_2.out")})  # conv_0.out is made again for op 7
    placed = with_offloads(graph, residences, [second])
    assert placed["conv_1.out"] == Offload("conv_2", "conv_backward_5")
    assert check_runs(graph, placed, schedule(graph, placed)) == played(graph, placed)[0]


def test_what_the_backward_pass_does_not_read_and_what_the_caller_holds_stay() -> None:
    graph, kept = chain_of_four(EVEN_LINK)
    handed_out = storage(graph, "conv_3.out")
    places = TransferPlaces(graph, kept)
    assert not places.can_leave(handed_out)
    assert not places.can_leave(storage(graph, "batch"))
    assert with_offloads(graph, kept, [handed_out]) == kept
    assert places.place([handed_out]).host_bytes == 0


def test_a_step_without_a_link_has_no_places() -> None:
    graph = plain_chain(3)
    with pytest.raises(PlanError):
        with_offloads(graph, just_in_time(graph, range(len(graph.storages))), [storage(graph, "conv_0.out")])
    assert with_offloads(graph, {}, []) == {}


def test_the_last_forward_reader_is_the_producer_where_no_op_of_the_forward_pass_reads_it() -> None:
    b = Builder()
    x = b.conv(b.input(8), 16)
    y = b.relu(x)
    b.batchnorm(x)
    graph = b.step(b.conv(y, 4))
    assert last_forward_reader(graph, x) == 2
    assert last_forward_reader(graph, storage(graph, "bn_2.mean")) == 2


links = st.builds(
    replace,
    st.just(SLOW_LINK),
    to_host_bytes_per_second=st.sampled_from([2.0, 10.0, 50.0]),
    to_device_bytes_per_second=st.sampled_from([2.0, 10.0, 50.0]),
    overlaps=st.booleans(),
)


@st.composite
def chosen_steps(draw: st.DrawFn) -> tuple[StepGraph, dict[str, Residence], set[int], int]:
    """A step, what it recomputes, what is to be offloaded, and a budget between what that needs and what is plenty."""
    graph = replace(draw(steps()), link=draw(links))
    forward = [s.id for s in graph.storages if s.kind == "activation"]
    assume(forward)
    stays = draw(st.sets(st.sampled_from(forward), min_size=1))
    residences = just_in_time(graph, stays)
    offloaded = draw(st.sets(st.sampled_from(sorted(stays))))
    plain_bytes, _ = played(graph, residences)
    least_bytes, _ = played(graph, with_offloads(graph, residences, offloaded, budget_bytes=1))
    budget_bytes = int(least_bytes + draw(st.floats(-0.1, 1.1)) * (plain_bytes - least_bytes))
    return graph, residences, offloaded, budget_bytes


@given(chosen_steps())
def test_what_it_places_is_legal_and_inside_the_budget_whenever_it_says_so(
    chosen: tuple[StepGraph, dict[str, Residence], set[int], int],
) -> None:
    graph, residences, offloaded, budget_bytes = chosen
    placed = TransferPlaces(graph, residences, budget_bytes).place(offloaded)
    plan = placed_residences(graph, residences, placed)
    limit_bytes = budget_bytes if placed.excess_bytes == 0 else 0
    assert check_runs(graph, plan, schedule(graph, plan), limit_bytes) <= (limit_bytes or 1 << 60)
    away = [s for s in graph.storages if isinstance(plan.get(s.name), Offload)]
    assert {s.id for s in away} <= offloaded
    assert placed.host_bytes == sum(s.host_bytes for s in away)


@given(chosen_steps())
def test_the_seconds_it_foretells_are_never_fewer_than_those_played(
    chosen: tuple[StepGraph, dict[str, Residence], set[int], int],
) -> None:
    graph, residences, offloaded, budget_bytes = chosen
    placed = TransferPlaces(graph, residences, budget_bytes).place(offloaded)
    _, seconds = played(graph, placed_residences(graph, residences, placed))
    assert seconds <= placed.seconds + 1e-9


@given(chosen_steps())
def test_without_a_limit_nothing_takes_longer_than_under_one(
    chosen: tuple[StepGraph, dict[str, Residence], set[int], int],
) -> None:
    graph, residences, offloaded, budget_bytes = chosen
    free = TransferPlaces(graph, residences).place(offloaded)
    assert free.excess_bytes == 0
    assert free.seconds <= TransferPlaces(graph, residences, budget_bytes).place(offloaded).seconds + 1e-9


def every_placement(
    graph: StepGraph, residences: dict[str, Residence], offloaded: Collection[int], fetched: dict[str, str]
) -> Iterator[dict[str, Residence]]:
    """All places to free `offloaded` after, and to fetch it before where `fetched` does not say."""
    each = [
        [(name, Offload(end.name, before)) for end in ends for before in _befores(starts, fetched.get(name))]
        for name, ends, starts in legal_offloads(graph, residences, offloaded)
    ]
    for places in itertools.product(*each):
        found = {**residences, **dict(places)}
        # What one op writes leaves in the order of the residences: the same order for all.
        yield {s.name: found[s.name] for s in graph.storages if s.name in found}


def _befores(starts: Collection[object], only: str | None) -> list[str]:
    return [only] if only is not None else [start.name for start in starts]  # type: ignore[attr-defined]


@given(chosen_steps(), st.data())
def test_one_storage_is_where_no_other_places_would_be_faster(
    chosen: tuple[StepGraph, dict[str, Residence], set[int], int], data: st.DataObject
) -> None:
    graph, residences, offloaded, budget_bytes = chosen
    assume(offloaded)
    one = data.draw(st.sampled_from(sorted(offloaded)))
    ours = TransferPlaces(graph, residences, budget_bytes).place([one])
    _, seconds = played(graph, placed_residences(graph, residences, ours))
    for plan in every_placement(graph, residences, [one], {}):
        peak_bytes, other_seconds = played(graph, plan)
        assert peak_bytes > budget_bytes or ours.excess_bytes or seconds <= other_seconds + 1e-9


@given(chosen_steps())
def test_with_the_fetches_as_they_are_no_other_releases_would_be_faster(
    chosen: tuple[StepGraph, dict[str, Residence], set[int], int],
) -> None:
    graph, residences, offloaded, budget_bytes = chosen
    few = sorted(offloaded)[:3]
    ours = TransferPlaces(graph, residences, budget_bytes).place(few)
    assume(ours.excess_bytes == 0)
    plan = placed_residences(graph, residences, ours)
    _, seconds = played(graph, plan)
    fetched = {name: r.fetch_before for name, r in plan.items() if isinstance(r, Offload)}
    for other in itertools.islice(every_placement(graph, residences, few, fetched), 300):
        peak_bytes, other_seconds = played(graph, other)
        assert peak_bytes > budget_bytes or seconds <= other_seconds + 1e-9
