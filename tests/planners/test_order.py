"""Orders of ops by peak: against brute force over all orders, over all sets of ops, and on steps of networks."""

from __future__ import annotations

import itertools
import random
from dataclasses import replace

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from bench.order import least_peak_bytes, random_tasks
from shoal.core.order import reordered
from shoal.core.residence import Offload, Recompute
from shoal.core.schedule import schedule
from shoal.core.simulate import peak_and_seconds
from shoal.core.step import Op, StepGraph
from shoal.core.validate_plan import check_order, check_plan
from shoal.errors import BudgetError
from shoal.planners.joint import joint
from shoal.planners.just_in_time import just_in_time
from shoal.planners.keep_all import keep_all
from shoal.planners.limits import DEFAULT, Effort, Guard, Limits
from shoal.planners.order import best_order, least_prefix, lower_peak
from shoal.planners.pass_tasks import bytes_during, least_peak, pass_tasks
from tests.random_steps import HARDWARE, SLOW_LINK, Builder, inception_like, joined_steps, resnet_like, steps

seeds = st.integers(0, 10_000)


def effort(ops: int = DEFAULT.order_ops) -> Effort:
    return Effort("order of ops", ops, Guard(1e9))


def peak_bytes(graph: StepGraph, kept: bool = True) -> int:
    return peak_and_seconds(graph, schedule(graph, just_in_time(graph, range(len(graph.storages)) if kept else ())))[0]


@given(seeds, st.integers(1, 9))
def test_a_task_is_given_the_prefix_with_the_fewest_bytes_of_all_there_are(seed: int, n: int) -> None:
    tasks = random_tasks(seed, n)
    task = random.Random(seed).randrange(n)
    least = None
    for size in range(n):
        for prefix in itertools.combinations([t for t in range(n) if t != task], size):
            if all(tasks.after[t] <= set(prefix) for t in (*prefix, task)):
                during = bytes_during(tasks, [*prefix, task])[-1]
                least = during if least is None else min(least, during)
    for largest in (False, True):
        chosen = least_prefix(tasks, range(n), 0, n, task, largest=largest)
        assert all(tasks.after[t] <= chosen for t in (*chosen, task))
        assert bytes_during(tasks, [*sorted(chosen), task])[-1] == least


@given(seeds, st.integers(1, 9))
def test_an_order_can_run_and_is_between_the_best_and_the_given_one(seed: int, n: int) -> None:
    tasks = random_tasks(seed, n)
    order = best_order(tasks, effort())
    assert sorted(order) == list(range(n))
    assert all(order.index(earlier) < order.index(task) for task in order for earlier in tasks.after[task])
    found = max(bytes_during(tasks, order))
    assert least_peak_bytes(tasks) <= found <= max(bytes_during(tasks, range(n)))


@given(seeds, st.integers(1, 8))
def test_no_order_is_below_the_bound_that_ends_the_search(seed: int, n: int) -> None:
    tasks = random_tasks(seed, n)
    assert least_peak(tasks) <= least_peak_bytes(tasks)


def test_orders_of_small_graphs_are_within_a_percent_of_the_best_on_average() -> None:
    ratios = [
        max(bytes_during(tasks, best_order(tasks, effort()))) / least_peak_bytes(tasks)
        for tasks in (random_tasks(seed, 8) for seed in range(60))
    ]
    assert sum(ratios) / len(ratios) < 1.01


@given(steps() | joined_steps(), st.booleans())
def test_tasks_in_the_given_order_have_the_bytes_of_the_schedule(graph: StepGraph, kept: bool) -> None:
    runs = schedule(graph, just_in_time(graph, range(len(graph.storages)) if kept else ()))
    loss = next((n for n, run in enumerate(runs) if graph.ops[run.op].phase == "loss"), graph.n_forward - 1)
    highest = 0
    for begin, end in ((0, graph.n_forward), (loss + 1, len(runs))):
        tasks = pass_tasks(graph, runs, begin, end)
        highest = max([highest, *bytes_during(tasks, range(len(tasks)))])
    in_loss = peak_and_seconds(graph, runs)[0] if loss >= graph.n_forward else 0
    assert highest <= peak_and_seconds(graph, runs)[0] <= max(highest, in_loss, graph.resident_bytes)


def pool_between() -> StepGraph:
    """Read by two backward ops, each of which can have the pool run before it, or both once."""
    b = Builder()
    return b.step(b.batchnorm(b.pool(b.conv(b.input(1), 2, 1.0, weight_bytes=0), 1, 1.0)), with_loss=False)


@given(steps() | joined_steps(), st.floats(0, 1), seeds)
@example(pool_between(), 0.0, 0)
def test_a_lower_order_keeps_the_same_and_recomputes_no_more(graph: StepGraph, share: float, seed: int) -> None:
    chance = random.Random(seed)
    residences = just_in_time(graph, {s.id for s in graph.storages if chance.random() < share})
    before_bytes, seconds = peak_and_seconds(graph, schedule(graph, residences))
    found = lower_peak(graph, residences, effort())
    if found is None:
        return
    check_order(graph, found.graph)
    check_plan(found.graph, found.residences, found.peak_bytes)
    after = peak_and_seconds(found.graph, schedule(found.graph, found.residences))
    assert after[0] == found.peak_bytes < before_bytes
    assert after[1] <= seconds * (1 + 1e-12)
    for name, residence in residences.items():
        now = found.residences[name]
        assert type(now) is type(residence)
        if isinstance(residence, Recompute) and isinstance(now, Recompute):
            assert len(now.before) == len(residence.before)


@given(joined_steps(3), seeds)
def test_any_order_that_the_search_may_find_for_a_joined_step_leaves_its_passes_whole(
    graph: StepGraph, seed: int
) -> None:
    chance, runs = random.Random(seed), schedule(graph, {})
    loss = next(op.id for op in graph.ops if op.phase == "loss")
    names = []
    for begin, end in ((0, loss), (loss + 1, len(runs))):
        tasks = pass_tasks(graph, runs, begin, end)
        waiting, order = set(range(len(tasks))), list[int]()
        while waiting:
            order.append(chance.choice([task for task in sorted(waiting) if tasks.after[task].isdisjoint(waiting)]))
            waiting.remove(order[-1])
        names.append([graph.ops[begin + task].name for task in order])
        best = max(bytes_during(tasks, best_order(tasks, effort())))
        assert best <= max(bytes_during(tasks, range(len(tasks))))
        if len(tasks) <= 12:
            assert least_peak_bytes(tasks) <= best
    check_order(graph, reordered(graph, [*names[0], graph.ops[loss].name, *names[1]]))


def test_branches_run_one_after_another_instead_of_all_at_once() -> None:
    b = Builder()
    x = b.input(8)
    wide = [b.op("conv", "forward", [x], [("out", 100, "activation")], 1.0)[0] for _ in range(3)]
    narrow = [b.op("pool", "forward", [y], [("out", 1, "activation")], 1.0)[0] for y in wide]
    b.op("cat", "forward", narrow, [("out", 3, "output")], 1.0)
    graph = StepGraph("branches", tuple(b.ops), tuple(b.storages))
    assert peak_and_seconds(graph, schedule(graph, {}))[0] == 8 + 3 * 100 + 1
    found = lower_peak(graph, {}, effort())
    assert found is not None and found.peak_bytes == 8 + 2 * 1 + 100 + 1


def test_a_large_weight_gradient_waits_until_activations_are_freed() -> None:
    b = Builder(gradients_apart=True)
    x = b.input(8)
    for _ in range(4):
        x = b.conv(x, 100, weight_bytes=0)
    graph = b.step(b.conv(x, 4, weight_bytes=200))
    found = lower_peak(graph, just_in_time(graph, range(len(graph.storages))), effort())
    assert found is not None and graph.ops[graph.n_forward + 1].target == "weight_gradient"
    assert found.graph.ops[-1].name == graph.ops[graph.n_forward + 1].name


@pytest.mark.parametrize("build", [inception_like, resnet_like])
def test_the_same_step_has_the_same_order_every_time(build: object) -> None:
    graph: StepGraph = build()  # type: ignore[operator]
    residences = just_in_time(graph, range(len(graph.storages)))
    one, other = (lower_peak(graph, residences, effort()) for _ in range(2))
    assert one == other and (one is None or one.peak_bytes < peak_bytes(graph))


def test_no_effort_moves_nothing() -> None:
    assert lower_peak(inception_like(), {}, effort(0)) is None


def test_what_is_offloaded_is_not_moved() -> None:
    graph = replace(inception_like(), link=SLOW_LINK)
    storage = graph.storages[graph.saved[0]]
    reader = next(graph.ops[r] for r in graph.readers[storage.id] if graph.ops[r].phase == "backward")
    leaves = [graph.ops[r] for r in graph.readers[storage.id] if r < graph.n_forward][-1]
    assert lower_peak(graph, {storage.name: Offload(leaves.name, reader.name)}, effort()) is None


def test_memory_that_the_loop_holds_stays_in_use_through_the_forward_pass() -> None:
    graph = inception_like()
    held = replace(graph.storages[0], id=len(graph.storages), name="held", kind="activation", nbytes=1 << 12)
    first = Op(0, "held", "held", "forward", "", (), (held.id,), recomputable=False)
    last = graph.n_forward - 1
    later = [replace(op, id=op.id + 1, reads=(*op.reads, held.id) if op.id == last else op.reads) for op in graph.ops]
    graph = replace(graph, ops=(first, *later), storages=(*graph.storages, held))
    found = lower_peak(graph, just_in_time(graph, range(len(graph.storages))), effort())
    assert found is not None
    assert found.graph.ops[0].name == "held" and found.graph.ops[last + 1].name == graph.ops[last + 1].name


@pytest.mark.parametrize("share", [0.95, 0.8, 0.65])
def test_joint_is_never_slower_for_being_free_to_order(share: float) -> None:
    graph = inception_like(1)
    budget_bytes = int(share * keep_all(graph, HARDWARE, 0).predicted_peak_bytes)
    as_captured, ordered = (_added_seconds(graph, budget_bytes, Limits(order=order)) for order in (False, True))
    assert ordered <= as_captured + 1e-9


def test_joint_finds_a_smaller_least_budget_and_reaches_it() -> None:
    graph = inception_like(1)
    least = {}
    for order in (False, True):
        with pytest.raises(BudgetError) as refused:
            joint(graph, HARDWARE, graph.resident_bytes, limits=Limits(order=order))
        least[order] = refused.value.least_feasible_bytes or 0
    assert least[True] < least[False]
    plan = joint(graph, HARDWARE, least[True])
    check_order(graph, plan.graph)
    check_plan(plan.graph, plan.residences, least[True])
    assert plan.captured_graph == graph


def _added_seconds(graph: StepGraph, budget_bytes: int, limits: Limits) -> float:
    try:
        return joint(graph, HARDWARE, budget_bytes, limits=limits).added_seconds
    except BudgetError:
        return float("inf")
