"""Transfers of a graph's storages that begin and end in the passes of other graphs of the iteration."""

from __future__ import annotations

import copy
import gc
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from itertools import cycle
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import shoal
from shoal.core.hardware import Hardware, Link
from shoal.core.plan import Plan
from shoal.core.residence import Offload, Residence
from shoal.core.step import StepGraph
from shoal.cost.measure import measure
from shoal.offload.transfers import Transfers
from tests.engine.several_graphs import Chain, breaks
from tests.engine.training_laws import costs_that_do_not_matter, images, needs_compiler
from tests.random_steps import legal_offloads

Loop = Callable[[Sequence[nn.Module], int], None]


def sigmoids(inputs: int, channels: int = 8) -> nn.Module:
    layers = [one for n in (inputs, channels) for one in (nn.Conv2d(n, channels, 3, padding=1), nn.Sigmoid())]
    return nn.Sequential(*layers)


def three_graphs() -> nn.Module:
    return Chain(breaks, [sigmoids(3), sigmoids(8)], 8)


def batch(number: int) -> torch.Tensor:
    return images(number + 1, 4, 3, 16, 16)[number]


def one_loss(models: Sequence[nn.Module], number: int) -> None:
    sum(model(batch(number)).square().mean() for model in models).backward()


def irregular(models: Sequence[nn.Module], number: int) -> None:
    """Skipped batches, one of which goes back late, and an exception in the midst of a forward pass."""
    (model,) = models
    if number == 3:
        model(batch(0))
        stops = model.stages[1].register_forward_pre_hook(lambda *_: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            model(batch(1))
        stops.remove()
    waits = model(batch(1)).sum() if number >= 4 else None
    one_loss(models, number)
    if number == 5:
        waits.backward()


def twice(models: Sequence[nn.Module], number: int) -> None:
    loss = models[0](batch(number)).square().mean()
    loss.backward(retain_graph=True)
    loss.backward()


def rolled_out(models: Sequence[nn.Module], number: int) -> None:
    x = images(1, 4, 8, 16, 16)[0]
    for _ in range(4):
        x = models[0](x)
    x.square().mean().backward()


def of_two_lengths(models: Sequence[nn.Module], number: int) -> None:
    x = images(1, 4, 8, 16, 16)[0]
    for _ in range(2 if number % 2 and number > 2 else 4):
        x = models[0](x)
    x.square().mean().backward()


def far_and_near(graph: StepGraph, hardware: Hardware, budget_bytes: int) -> Plan:
    """Offloads all that can be: copies end and begin in other graphs, early and late there, or in their own."""
    residences: dict[str, Residence] = {}
    for number, (name, ends, starts) in enumerate(legal_offloads(graph, {}, [s.id for s in graph.storages])):
        end, start = ((-1, 0), (len(ends) // 2, len(starts) // 3), (0, -1))[number % 3]
        residences[name] = Offload(ends[end].name, starts[start].name)
    return Plan(graph, residences, "far_and_near", hardware.name, budget_bytes)


class Done:
    """What graphs have done for each other's storages."""

    def __init__(self, patch: pytest.MonkeyPatch) -> None:
        self.started = self.used = self.ended = 0
        own = Transfers._found, Transfers.start_fetch, Transfers.finish_offload_of

        def start_fetch(transfers: Transfers, receipt: torch.Tensor, slot: int) -> torch.Tensor:
            self.used += slot in transfers._step(receipt).early
            return own[1](transfers, receipt, slot)

        def finish_offload_of(transfers: Transfers, *which: Any) -> None:
            self.ended += own[0](transfers, *which) is not None
            own[2](transfers, *which)

        patch.setattr(Transfers, "start_fetch", start_fetch)
        patch.setattr(Transfers, "finish_offload_of", finish_offload_of)


@pytest.fixture
def done(monkeypatch: pytest.MonkeyPatch) -> Iterator[Done]:
    yield Done(monkeypatch)


def across(plan: Plan) -> list[str]:
    """Storages that another graph's op is named for."""
    offloads = {name: one for name, one in plan.residences.items() if isinstance(one, Offload)}
    parts = {
        name: {op.partition(".")[0] for op in (one.free_after, one.fetch_before)} for name, one in offloads.items()
    }
    return [name for name, ops in parts.items() if ops != {name.partition(".")[0]}]


def assert_same_gradients(ours: Sequence[nn.Module], theirs: Sequence[nn.Module], loop: Loop, steps: int) -> None:
    for number in range(steps):
        for models in (ours, theirs):
            for model in models:
                model.zero_grad()
            loop(models, number)
        for one, other in zip(ours, theirs, strict=True):
            for mine, plain in zip(one.parameters(), other.parameters(), strict=True):
                assert mine.grad is not None and plain.grad is not None
                assert torch.equal(mine.grad, plain.grad)


LOOPS: dict[str, tuple[Callable[[], nn.Module], Loop, bool]] = {
    "one loss": (three_graphs, one_loss, True),
    "irregular": (three_graphs, irregular, True),
    "twice": (three_graphs, twice, False),
    "rolled out": (lambda: sigmoids(8), rolled_out, True),
    "of two lengths": (lambda: sigmoids(8), of_two_lengths, True),
}


@pytest.mark.slow
@pytest.mark.parametrize(("loop", "place"), zip(LOOPS, cycle(("host", "file")), strict=False))
def test_any_choice_of_what_to_offload_and_when_trains_like_plain_pytorch(
    loop: str, place: str, tmp_path: Path, done: Done
) -> None:
    make, step, helps = LOOPS[loop]
    torch.manual_seed(0)
    plain = make()
    model = copy.deepcopy(plain)
    options = shoal.Options(planner=far_and_near)
    with costs_that_do_not_matter():
        shoal.compile(
            model, "1GiB", allow="bitwise", offload_to="host" if place == "host" else tmp_path, options=options
        )
        assert_same_gradients([model], [plain], step, 6)
    assert bool(across(model.shoal.plan)) == helps or step is of_two_lengths
    assert bool(done.used and done.ended) == helps


def test_graphs_of_which_not_all_run_in_an_iteration_move_their_storages_themselves() -> None:
    torch.manual_seed(0)
    model = sigmoids(8)
    crossed = []
    with costs_that_do_not_matter():
        shoal.compile(model, "1GiB", allow="offload", offload_to="host", options=shoal.Options(planner=far_and_near))
        for number in range(9):
            model.zero_grad()
            of_two_lengths([model], number)
            crossed.append([bool(across(plan)) for plan in model.shoal.plans])
    assert [True] in crossed
    assert crossed[-1] == [False, False]
    assert all(plan.offloaded for plan in model.shoal.plans)


@needs_compiler
def test_models_that_share_a_budget_do_so_and_take_what_is_predicted(done: Done) -> None:
    torch.manual_seed(0)
    plain = [three_graphs(), three_graphs()]
    models, shared = copy.deepcopy(plain), shoal.Budget("1GiB")
    options = shoal.Options(planner=far_and_near)
    for model, name in zip(models, ("one", "other"), strict=True):
        shoal.compile(model, budget=shared, offload_to="host", options=options, name=name)
    assert_same_gradients(models, plain, one_loss, 3)
    assert shared.status is not None
    assert across(shared.status.plans[-1])
    assert done.used and done.ended
    assert shared.peak_bytes == shared.predicted_peak_bytes


@pytest.mark.slow
@needs_compiler
def test_a_slow_link_stalls_less_in_the_memory_that_is_predicted(tmp_path: Path) -> None:
    torch.manual_seed(0)
    plain = Chain(breaks, [nn.Sequential(sigmoids(3, 16), sigmoids(16, 16)), sigmoids(16, 16)], 16)
    x = images(1, 8, 3, 32, 32)

    def step(models: Sequence[nn.Module], number: int) -> None:
        models[0](x[0]).square().mean().backward()

    here = measure(torch.device("cpu"))
    slow = replace(here, link=Link("slow", 2e8, 2e8, 1e-5))

    def planned(**options: Any) -> nn.Module:
        model = copy.deepcopy(plain)
        given = {} if "plan" in options else {"budget": 3_200_000, "allow": "offload"}
        shoal.compile(model, offload_to="host", options=shoal.Options(**options), **given)
        assert_same_gradients([model], [plain], step, 3)
        return model

    model = planned(rehearse=slow)
    plan = model.shoal.plan
    assert across(plan)
    assert model.shoal.measured_peak_bytes == model.shoal.predicted_peak_bytes <= 3_200_000
    again = planned(plan=Plan.load(plan.save(tmp_path / "plan.json")))
    assert again.shoal.plan.residences == plan.residences
    assert again.shoal.measured_peak_bytes == again.shoal.predicted_peak_bytes <= plan.predicted_peak_bytes
    gc.collect()
