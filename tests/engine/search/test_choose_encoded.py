"""Which storages are encoded: by made-up times, so that the answer is known."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import cache, partial
from itertools import chain as joined
from itertools import combinations

import pytest

from shoal.capture.captured import Captured
from shoal.capture.encode_activations import encoded, offers
from shoal.core.hardware import Link
from shoal.core.lossy import LossyOptions
from shoal.core.plan import Plan
from shoal.core.step import Op, StepGraph
from shoal.engine.search import choose_encoded as choosing
from shoal.engine.search.choose_encoded import bounding_step, choose_encoded, encoded_by, error_on_normal_numbers
from shoal.engine.search.encoded_steps import EncodedSteps
from shoal.engine.search.encoding import IF_FASTER, EncodeBelow, NotFaster
from shoal.errors import BudgetError
from shoal.planners.estimates import estimate, least_seconds
from shoal.planners.infeasible import fewest_bytes
from shoal.planners.joint import joint
from shoal.planners.keep_all import keep_all
from tests.engine.lossy_steps import CODEC_OP, chain
from tests.joint_graphs import batch, captured_step
from tests.random_steps import HARDWARE

LOSSY = LossyOptions("linear", 4096)


@cache
def step() -> Captured:
    return captured_step(chain(3, 8, 8, 8, 8, 8), batch(32))


def costs(codec_seconds: float) -> Callable[[Captured], StepGraph]:
    """A second for each convolution, next to nothing for other ops, and that many seconds to encode or decode."""

    def timed(op: Op) -> Op:
        seconds = codec_seconds if CODEC_OP in op.target and "relu_backward" not in op.target else 0.01
        return replace(op, seconds=1.0 if "conv" in op.target else seconds)

    def costed(captured: Captured) -> StepGraph:
        return replace(captured.graph, ops=tuple(map(timed, captured.graph.ops)))

    return costed


def steps(costed: Callable[[Captured], StepGraph]) -> EncodedSteps:
    return EncodedSteps({"": step()}, LOSSY, lambda graphs: costed(graphs[""]))


def chosen_at(share: float, codec_seconds: float, link: Link | None = None, before: list[str] | None = None) -> Plan:
    costed = costs(codec_seconds)
    budget = int(share * plain_bytes())

    def with_link(captured: Captured) -> StepGraph:
        return replace(costed(captured), link=link)

    graphs, plan = choose_encoded(steps(with_link), budget, lambda graph: joint(graph, HARDWARE, budget), before)
    assert graphs[""].graph.fingerprint == plan.captured_graph.fingerprint
    assert plan.predicted_peak_bytes <= budget
    return plan


def plain_bytes() -> int:
    return keep_all(step().graph, HARDWARE, 0).predicted_peak_bytes


def test_where_everything_fits_nothing_is_encoded() -> None:
    assert not chosen_at(1.0, codec_seconds=0.0).encoded


def test_codecs_slower_than_a_convolution_are_not_used() -> None:
    plan = chosen_at(0.6, codec_seconds=10.0)
    assert not plan.encoded and plan.recomputed and plan.exact_graph is None


@pytest.mark.parametrize("share", [0.6, 0.7, 0.85])
def test_quick_codecs_are_used_no_more_than_the_budget_asks_for(share: float) -> None:
    plan = chosen_at(share, codec_seconds=0.1)
    exact = joint(costs(0.1)(step()), HARDWARE, plan.budget_bytes)
    assert plan.encoded and plan.predicted_seconds < exact.predicted_seconds
    assert plan.plain_seconds == pytest.approx(exact.plain_seconds)
    assert plan.added_seconds == pytest.approx(plan.predicted_seconds - exact.plain_seconds)
    assert 0.1 * 2 * len(plan.encoded) - 1e-9 <= plan.lower_bound_seconds <= plan.added_seconds + 1e-9
    assert plan.codec_seconds == pytest.approx(0.1 * 2 * len(plan.encoded))


@pytest.mark.slow
def test_no_other_set_is_faster() -> None:
    """Against every subset, planned in full."""
    budget = int(0.6 * plain_bytes())
    found = chosen_at(0.6, codec_seconds=0.1)
    names = [offer.storage for offer in offers(step(), LOSSY)]
    every = joined.from_iterable(combinations(names, size) for size in range(len(names) + 1))
    times = []
    for subset in every:
        try:
            times.append(joint(costs(0.1)(encoded(step(), subset, LOSSY)), HARDWARE, budget).predicted_seconds)
        except BudgetError:
            continue
    assert found.predicted_seconds == pytest.approx(min(times))


@pytest.mark.slow
def test_beside_a_step_that_fits_only_what_is_faster_is_planned_and_nothing_exact() -> None:
    fastest, planned = chosen_at(0.6, codec_seconds=0.1), list[StepGraph]()

    def plan(graph: StepGraph) -> Plan:
        planned.append(graph)
        return joint(graph, HARDWARE, fastest.budget_bytes)

    def below(seconds: float) -> Plan:
        return choose_encoded(steps(costs(0.1)), fastest.budget_bytes, plan, encoding=EncodeBelow(seconds))[1]

    found = below(1.1 * fastest.predicted_seconds)
    assert found.predicted_seconds == pytest.approx(fastest.predicted_seconds)
    assert costs(0.1)(step()).fingerprint not in {graph.fingerprint for graph in planned}
    planned.clear()
    with pytest.raises(NotFaster):
        below(fastest.predicted_seconds)
    with pytest.raises(NotFaster):
        below(0.5 * fastest.predicted_seconds)
    assert len(planned) <= choosing._PLANNED * 2


@pytest.mark.parametrize("share", [0.0, 1.0])
def test_a_set_of_an_earlier_run_is_not_taken_beside_a_step_that_is_faster(share: float) -> None:
    names = [offer.storage for offer in offers(step(), LOSSY)]
    before, budget = names[: int(share * len(names))], plain_bytes()

    def below(seconds: float) -> Plan:
        plan = partial(joint, hardware=HARDWARE, budget_bytes=budget)
        return choose_encoded(steps(costs(0.1)), budget, plan, before, EncodeBelow(seconds))[1]

    plan = partial(joint, hardware=HARDWARE, budget_bytes=budget)
    _, taken = choose_encoded(steps(costs(0.1)), budget, plan, before, IF_FASTER)
    assert {storage.name for storage in taken.encoded} == set(before)
    assert below(1.01 * taken.predicted_seconds).predicted_seconds == taken.predicted_seconds
    with pytest.raises(NotFaster):
        below(taken.predicted_seconds)


def test_over_a_link_what_travels_is_a_quarter() -> None:
    """The link takes twice a convolution's time for the exact values: too much, and half of it for the encoded ones."""
    nbytes = offers(step(), LOSSY)[0].nbytes
    link = Link("slow", nbytes / 2, nbytes / 2, 0.0)
    plan = chosen_at(0.6, codec_seconds=0.01, link=link)
    payloads = {s.name for s in plan.offloaded if s.name.endswith("_encoded")}
    exact = joint(replace(costs(0.01)(step()), link=link), HARDWARE, plan.budget_bytes)
    assert plan.encoded and plan.predicted_seconds < exact.predicted_seconds
    assert all(plan.graph.storage_called[name].host_bytes < nbytes / 3 for name in payloads)


def test_a_set_of_an_earlier_run_is_taken_again_if_it_fits() -> None:
    names = [offer.storage for offer in offers(step(), LOSSY)]
    assert [s.name for s in chosen_at(0.85, 0.1, before=names).encoded] == names
    assert not chosen_at(0.85, 0.1, before=[]).encoded
    assert chosen_at(0.6, 0.1, before=["nowhere"]).encoded, "chosen again"


@pytest.mark.slow
def test_where_nothing_fits_one_set_is_searched_and_no_set_needs_less() -> None:
    """Against every subset, each searched."""
    budget, made = int(0.3 * plain_bytes()), list[StepGraph]()

    def plan(graph: StepGraph) -> Plan:
        made.append(graph)
        return joint(graph, HARDWARE, budget)

    with pytest.raises(BudgetError) as refused:
        choose_encoded(steps(costs(0.01)), budget, plan)
    assert len(made) == 1
    least = refused.value.least_feasible_bytes
    names = [offer.storage for offer in offers(step(), LOSSY)]
    for subset in joined.from_iterable(combinations(names, size) for size in range(len(names) + 1)):
        with pytest.raises(BudgetError) as of_it:
            joint(costs(0.01)(encoded(step(), subset, LOSSY)), HARDWARE, budget)
        assert least is not None and least <= (of_it.value.least_feasible_bytes or 0)


@pytest.mark.slow
def test_with_all_encoded_by_free_codecs_a_step_is_bounded_whatever_is_encoded() -> None:
    names = [offer.storage for offer in offers(step(), LOSSY)]
    free = bounding_step(steps(costs(0.3)), 1.0)
    assert free.plain_seconds == pytest.approx(costs(0.0)(encoded(step(), names, LOSSY)).plain_seconds)
    sets = [names[:size] for size in range(len(names) + 1)] + [names[size:] for size in range(1, len(names))]
    for chosen in sets:
        graph = costs(0.3)(encoded(step(), chosen, LOSSY))
        assert fewest_bytes(free) <= fewest_bytes(graph)
        for share in (0.4, 0.45, 0.5, 0.6, 0.8, 1.0):
            budget = int(share * plain_bytes())
            assert least_seconds(free, budget) <= least_seconds(graph, budget) + 1e-9


def test_the_search_ends_where_its_effort_does(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(choosing, "_ESTIMATING_EFFORT", 0)
    monkeypatch.setattr(choosing, "_PLANNING_OPS", 0)
    planned: list[StepGraph] = []

    def plan(graph: StepGraph) -> Plan:
        planned.append(graph)
        return joint(graph, HARDWARE, budget)

    budget = int(0.6 * plain_bytes())
    _, made = choose_encoded(steps(costs(0.1)), budget, plan)
    assert len(planned) <= 1 + choosing._PLANNED and made.encoded


def test_an_estimate_is_near_the_plan_and_tells_what_is_missing() -> None:
    graph = costs(0.1)(step())
    for share in (0.8, 1.0):
        budget = int(share * plain_bytes())
        over_bytes, seconds = estimate(graph, budget)
        assert over_bytes == 0
        assert seconds <= joint(graph, HARDWARE, budget).predicted_seconds + 1e-6
    over_bytes, seconds = estimate(graph, 1000)
    assert seconds == float("inf") and over_bytes > 0


def test_a_plan_tells_how_it_encodes() -> None:
    plan = chosen_at(0.6, 0.1)
    assert encoded_by(plan.residences) == (LOSSY, frozenset(storage.name for storage in plan.encoded))
    assert encoded_by(chosen_at(1.0, 0.1).residences) is None
    assert set(plan.errors) == {storage.name for storage in plan.encoded} and not plan.errors_measured
    assert set(plan.errors.values()) == {error_on_normal_numbers(LOSSY)}
    assert 0 < error_on_normal_numbers(LOSSY) < error_on_normal_numbers(LossyOptions("linear", 0)) < 0.05
