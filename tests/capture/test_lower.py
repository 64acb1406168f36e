"""Lowered graphs run the schedule they were made from: the same bits, and each block freed when the schedule says."""

from __future__ import annotations

import gc
import operator
from collections.abc import Callable
from dataclasses import replace
from functools import cache
from typing import Any

import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from torch import fx, nn

from shoal.capture.accumulation import ACCUMULATE
from shoal.capture.captured import Captured
from shoal.capture.lower import lower, offloaded_storages
from shoal.core.order import reordered
from shoal.core.residence import Keep, Recompute, Residence
from shoal.core.schedule import schedule
from shoal.core.shares import NO_OTHERS, OtherTransfers
from shoal.core.simulate import simulate
from shoal.cost.profile import profile
from shoal.errors import PlanError
from shoal.graph.fx_nodes import is_view
from shoal.lowlevel import allocations
from shoal.offload.transfers import Transfers
from shoal.planners.just_in_time import just_in_time
from tests.engine.training_laws import keep_by_chance, offload_by_chance, same_bits
from tests.joint_graphs import NETWORKS, captured_step, carried, operands, run_joint, run_lowered
from tests.random_steps import HARDWARE, SLOW_LINK, any_order

networks = st.sampled_from(list(NETWORKS))


def step_of(network: str) -> tuple[Captured, list[torch.Tensor], list[Any]]:
    """The step with workspaces, what to run it on, and what its joint graph gives; a run changes buffers in place."""
    captured, expected = _step_of(network)
    return captured, operands(captured.joint), expected


@cache
def _step_of(network: str) -> tuple[Captured, list[Any]]:
    captured = captured_step(NETWORKS[network]())
    costs = profile(captured.distinct_nodes(), cache=False, budget_seconds=0)
    workspaces = {**costs.workspace_bytes, "": 0}  # the loss, which these tests do not run
    graph = replace(captured.graph.with_costs(costs.seconds, workspaces), link=SLOW_LINK)
    captured = replace(captured, graph=graph)
    return captured, run_joint(captured.joint, operands(captured.joint))


@cache
def step_with_dropout() -> tuple[Captured, list[torch.Tensor]]:
    model = nn.Sequential(
        nn.Conv2d(3, 4, 3),
        nn.Dropout(0.3),
        nn.ReLU(),
        nn.Conv2d(4, 4, 3),
        nn.Dropout2d(0.5),
        nn.Tanh(),
        nn.Dropout(0.9),
    )
    captured = captured_step(model)
    return captured, operands(captured.joint)


@st.composite
def planned(draw: st.DrawFn) -> tuple[str, dict[str, Residence]]:
    """A network and random residences for it, some storages computed again more than once, or some on the host."""
    network = draw(networks)
    graph = step_of(network)[0].graph
    if draw(st.booleans()):
        return network, dict(offload_by_chance(draw(st.integers(0, 999)))(graph, HARDWARE, 0).residences)
    planner = keep_by_chance(draw(st.integers(0, 999)), draw(st.sampled_from([0.0, 0.3, 0.7])), draw(st.floats(0, 0.3)))
    residences = dict(planner(graph, HARDWARE, 0).residences)
    try:
        schedule(graph, residences)
    except PlanError:  # a second recomputation may read what is gone
        assume(False)
    return network, residences


@settings(max_examples=25)
@given(planned(), st.booleans())
def test_every_schedule_gives_the_bits_of_the_joint_graph(
    plan: tuple[str, dict[str, Residence]], in_place: bool
) -> None:
    network, residences = plan
    captured, tensors, expected = step_of(network)
    before = [tensor.clone() for tensor in tensors]
    found = run_lowered(captured, residences, tensors, in_place=in_place)
    assert len(found) == len(expected)
    for ours, theirs in zip(found, expected, strict=True):
        assert (ours is None) == (theirs is None)
        assert theirs is None or same_bits(ours, theirs)
    left_alone = [place for place, tensor in enumerate(tensors) if not any(tensor is one for one in found)]
    assert all(torch.equal(tensors[place], before[place]) for place in left_alone)


@settings(max_examples=25)
@given(planned(), st.booleans())
def test_before_each_run_exactly_the_storages_of_the_schedule_are_in_use(
    plan: tuple[str, dict[str, Residence]], in_place: bool
) -> None:
    network, residences = plan
    captured, tensors, _ = step_of(network)
    storages = captured.graph.storages
    expected, in_use = [], 0
    for run in schedule(captured.graph, residences):
        op = captured.graph.ops[run.op]
        if op.phase == "loss" or op.name == ACCUMULATE:
            continue  # the tangents were made before the recording, and autograd's copies come after it
        in_use += sum(storages[s].nbytes for s in run.fetches)
        expected.append(in_use)
        in_use += sum(storages[s].nbytes for s in run.writes) - sum(storages[s].nbytes for s in run.frees)
        in_use -= sum(storages[s].nbytes for s in run.releases)
    found, _ = _watched(captured, residences, tensors, in_place)
    assert found == expected


@settings(max_examples=25)
@given(planned())
def test_the_measured_peak_is_the_simulated_one(plan: tuple[str, dict[str, Residence]]) -> None:
    network, residences = plan
    captured, tensors, _ = step_of(network)
    tangents = sum(s.nbytes for s in captured.graph.storages if s.kind == "tangent")
    moments = simulate(captured.graph, residences).moments
    in_use = [
        m.total_bytes - m.resident_bytes - (0 if m.phase == "forward" else tangents)
        for m in moments
        if m.phase not in ("loss", "stall") and m.op != ACCUMULATE
    ]
    _, changes = _watched(captured, residences, tensors, True)
    assert allocations.peak_bytes(changes) == max(in_use)


@settings(max_examples=15)
@given(networks, st.integers(0, 999), st.sampled_from([0.3, 1.0]))
def test_ops_in_any_order_that_can_run_give_the_same_bits_at_the_simulated_peak(
    network: str, seed: int, kept: float
) -> None:
    captured, tensors, expected = step_of(network)
    captured = replace(captured, graph=reordered(captured.graph, any_order(captured.graph, seed)))
    residences = keep_by_chance(seed, kept)(captured.graph, HARDWARE, 0).residences
    found = run_lowered(captured, residences, tensors)
    assert all(o is t is None or same_bits(o, t) for o, t in zip(found, expected, strict=True))
    tangents = sum(s.nbytes for s in captured.graph.storages if s.kind == "tangent")
    in_use = [
        m.total_bytes - m.resident_bytes - (0 if m.phase == "forward" else tangents)
        for m in simulate(captured.graph, residences).moments
        if m.phase != "loss" and m.op != ACCUMULATE
    ]
    _, changes = _watched(captured, residences, tensors, True)
    assert allocations.peak_bytes(changes) == max(in_use)


@settings(max_examples=10)
@given(st.integers(0, 999))
def test_random_ops_draw_the_same_numbers_in_any_order(seed: int) -> None:
    captured, tensors = step_with_dropout()
    torch.manual_seed(seed)
    expected = run_lowered(captured, {}, tensors)
    graph = reordered(captured.graph, any_order(captured.graph, seed))
    residences = keep_by_chance(seed, 0.5)(graph, HARDWARE, 0).residences
    torch.manual_seed(seed)
    found = run_lowered(replace(captured, graph=graph), residences, tensors)
    assert all(one is two is None or torch.equal(one, two) for one, two in zip(found, expected, strict=True))


@settings(max_examples=25)
@given(planned())
def test_the_backward_graph_overwrites_none_of_its_saved_tensors(plan: tuple[str, dict[str, Residence]]) -> None:
    network, residences = plan
    captured, tensors, _ = step_of(network)
    n_tangents = sum(s.kind == "tangent" for s in captured.graph.storages)
    with torch.no_grad(), carried(captured, residences) as transfers:
        forward, backward = lower(captured, residences, transfers=transfers)
        results = forward(*tensors[:-n_tangents])
        saved = [*results[len(captured.forward_outputs) :], *tensors[-n_tangents:]]
        before = [tensor.clone() for tensor in saved]
        first, second = backward(*saved), backward(*saved)
    assert all(map(torch.equal, saved, before))
    assert all(one is two is None or torch.equal(one, two) for one, two in zip(first, second, strict=True))


@settings(max_examples=10)
@given(seed=st.integers(0, 99), kept=st.sampled_from([0.0, 0.5, 1.0]))
def test_recomputed_dropout_draws_its_mask_again_and_leaves_the_generator_where_the_plain_step_does(
    seed: int, kept: float
) -> None:
    captured, tensors = step_with_dropout()
    residences = keep_by_chance(seed, kept)(captured.graph, HARDWARE, 0).residences
    torch.manual_seed(seed)
    expected = run_lowered(captured, {}, tensors)
    state = torch.get_rng_state()
    torch.manual_seed(seed)
    found = run_lowered(captured, residences, tensors)
    assert all(one is two is None or torch.equal(one, two) for one, two in zip(found, expected, strict=True))
    assert torch.equal(torch.get_rng_state(), state)


def test_a_mask_and_the_result_it_belongs_to_come_from_one_draw() -> None:
    # Of dropout's two storages one is kept and the other drawn again: the gradient must be zero where the result is.
    captured = captured_step(nn.Sequential(nn.Conv2d(3, 4, 1), nn.Dropout(0.5), nn.Tanh()))
    (dropout,) = [op for op in captured.graph.ops if op.random and op.phase == "forward"]
    of_mask = [captured.graph.storages[s] for s in dropout.writes][1]
    readers = [captured.graph.ops[reader].name for reader in captured.graph.readers[of_mask.id]]
    kept = {s.id for s in captured.graph.storages} - {of_mask.id}
    residences = just_in_time(captured.graph, kept)
    assert residences[of_mask.name] == Recompute(tuple(readers))
    tensors = operands(captured.joint)
    torch.manual_seed(1)
    expected = run_lowered(captured, {}, tensors)
    torch.manual_seed(1)
    found = run_lowered(captured, residences, tensors)
    assert all(one is two is None or torch.equal(one, two) for one, two in zip(found, expected, strict=True))


def test_the_forward_graph_hands_over_only_what_the_backward_graph_reads() -> None:
    captured, tensors, _ = step_of("residual")
    for kept in ((), captured.graph.saved):
        residences = just_in_time(captured.graph, kept)
        forward, _ = lower(captured, residences)
        n_outputs = len(captured.forward_outputs)
        handed = forward(*tensors[: -sum(s.kind == "tangent" for s in captured.graph.storages)])[n_outputs:]
        own = {t.untyped_storage()._cdata for t in tensors}
        handed_bytes = {t.untyped_storage()._cdata: t.untyped_storage().nbytes() for t in handed}
        crossing = [
            s.nbytes
            for s in captured.graph.storages
            if s.kind == "activation" and s.id in captured.graph.saved and residences[s.name] == Keep()
        ]
        assert sum(nbytes for block, nbytes in handed_bytes.items() if block not in own) == sum(crossing)


def test_a_plan_that_offloads_needs_something_to_carry_it() -> None:
    captured = step_of("plain")[0]
    residences = offload_by_chance(0)(captured.graph, HARDWARE, 0).residences
    with pytest.raises(PlanError):
        lower(captured, residences)


@settings(max_examples=10)
@given(planned(), st.data())
def test_transfers_for_other_graphs_are_where_the_plan_says(
    plan: tuple[str, dict[str, Residence]], data: st.DataObject
) -> None:
    network, residences = plan
    captured, _, _ = step_of(network)
    graph = captured.graph
    forward = [op.name for op in graph.ops if op.phase == "forward"]
    backward = [op.name for op in graph.ops if op.phase == "backward"]
    after = data.draw(st.sampled_from([*forward, "forward.returns"]))
    before = data.draw(st.sampled_from([*backward, "backward.returns"]))
    others = OtherTransfers({after: ((-1, "x"),)}, {before: ((-1, "y"), (-2, "z"))})
    with carried(captured, residences) as carrier:
        one, two = lower(captured, residences, transfers=carrier, others=others)
    ops = [node.name if node.name in captured.node_of else node.target for node in one.graph.nodes]
    assert ops.count(carrier.finish_offload_of) == 1
    place = ops.index(carrier.finish_offload_of)
    done = [name for name in forward if name in ops[:place]]
    assert done == (forward if after == "forward.returns" else forward[: forward.index(after) + 1])
    ops = [node.name if node.name in captured.node_of else node.target for node in two.graph.nodes]
    assert ops.count(carrier.start_fetch_of) == 2
    place = ops.index(carrier.start_fetch_of)
    assert [name for name in backward if name in ops[:place]] == (
        backward if before == "backward.returns" else backward[: backward.index(before)]
    )
    calls = [node.args[1:] for node in two.graph.nodes if node.target == carrier.start_fetch_of]
    assert calls == [(-1, "y"), (-2, "z")]


def test_a_storage_that_another_graph_releases_is_not_released_here() -> None:
    captured = step_of("plain")[0]
    graph = captured.graph
    residences = offload_by_chance(0)(graph, HARDWARE, 0).residences
    name = offloaded_storages(graph, residences)[0].name
    found = []
    for others in (NO_OTHERS, OtherTransfers(released_by_others=frozenset({name}))):
        with carried(captured, residences) as transfers:
            forward, _ = lower(captured, residences, transfers=transfers, others=others)
            slots = [n.args[1] for n in forward.graph.nodes if n.target == transfers.finish_offload]
        found.append(sorted(slots))
    assert found[0] == [0, *found[1]]


def test_residences_of_another_step_are_refused() -> None:
    with pytest.raises(PlanError):
        lower(step_of("plain")[0], {"no such tensor": Recompute()})


def _is_transfer(node: fx.Node) -> bool:
    return isinstance(getattr(node.target, "__self__", None), Transfers)


def _watched(
    captured: Captured, residences: dict[str, Residence], tensors: list[torch.Tensor], in_place: bool
) -> tuple[list[int], list[int]]:
    """Bytes in use in addition to the inputs at the start of every op, and every change of them."""
    changes: list[int] = []
    at_start: list[int] = []

    def watch(target: Callable[..., Any]) -> Callable[..., Any]:
        def watched(*args: Any, **kwargs: Any) -> Any:
            changes.extend(allocations.stop())
            at_start.append(sum(changes))
            allocations.start()
            return target(*args, **kwargs)

        return watched

    def prepare(module: fx.GraphModule) -> None:
        for node in module.graph.nodes:
            is_op = node.op == "call_function" and node.target is not operator.getitem and not _is_transfer(node)
            if is_op and not is_view(node):
                node.target = watch(node.target)

    gc.collect()  # tensors of other examples are not freed in this one
    allocations.start()
    try:
        results = run_lowered(captured, residences, tensors, in_place=in_place, prepare=prepare)
    finally:
        changes.extend(allocations.stop())
    del results
    return at_start, changes
