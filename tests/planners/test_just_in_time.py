"""Everything that is not kept comes back right before the first op that needs it."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from shoal.core.residence import Keep, Recompute
from shoal.core.schedule import schedule
from shoal.core.simulate import simulate
from shoal.core.step import StepGraph
from shoal.core.validate import check_runs
from shoal.planners.just_in_time import just_in_time
from tests.random_steps import Builder, conv_bn_relu_chain, plain_chain, steps


def test_a_storage_comes_back_where_it_is_first_read() -> None:
    residences = just_in_time(plain_chain(3), [])
    assert residences == {
        "conv_0.out": Recompute(("conv_backward_4",)),  # to compute the next from it
        "conv_1.out": Recompute(("conv_backward_4",)),
    }


def test_a_kept_storage_cuts_the_chain() -> None:
    graph = plain_chain(4)
    (middle,) = [s.id for s in graph.storages if s.name == "conv_1.out"]
    assert just_in_time(graph, [middle]) == {
        "conv_0.out": Recompute(("conv_backward_7",)),
        "conv_1.out": Keep(),
        "conv_2.out": Recompute(("conv_backward_5",)),
    }


def test_again_trades_time_for_bytes() -> None:
    graph = plain_chain(8)
    first = graph.ops[-1].id
    once = simulate(graph, just_in_time(graph, []))
    every = {s.id: range(graph.n_forward, first + 1) for s in graph.storages if s.kind == "activation"}
    afresh = simulate(graph, just_in_time(graph, [], every))
    assert afresh.peak_bytes < once.peak_bytes
    assert afresh.seconds > once.seconds


def test_what_must_not_run_twice_is_kept() -> None:
    b = Builder()
    x = b.dropout(b.conv(b.input(4), 4), recomputable=False)
    graph = b.step(b.conv(x, 4))
    residences = just_in_time(graph, [])
    assert residences["dropout_1.mask"] == residences["dropout_1.out"] == Keep()


def test_an_unsaved_storage_on_the_way_comes_back_too() -> None:
    graph = conv_bn_relu_chain(2)
    kept = [s.id for s in graph.storages if s.name.startswith("conv")]
    residences = just_in_time(graph, kept)
    assert isinstance(residences["bn_1.out"], Recompute)  # no backward op reads it, the ReLU does


@given(steps(), st.data())
def test_any_set_of_kept_storages_makes_a_valid_plan(graph: StepGraph, data: st.DataObject) -> None:
    activations = [s.id for s in graph.storages if s.kind == "activation"]
    kept = data.draw(st.sets(st.sampled_from(activations))) if activations else set()
    residences = just_in_time(graph, kept)
    assert check_runs(graph, residences, schedule(graph, residences)) == simulate(graph, residences).peak_bytes
    assert all(isinstance(residences.get(graph.storages[s].name, Keep()), Keep) for s in kept)
    assert {graph.storages[s].name for s in graph.saved} <= set(residences)


@given(steps())
def test_each_op_runs_again_at_most_once_before_an_op(graph: StepGraph) -> None:
    for residence in just_in_time(graph, ()).values():
        assert isinstance(residence, Keep) or len(residence.before) <= 1
