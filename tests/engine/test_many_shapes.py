"""Inputs of many shapes: few captures, every step inside the budget and bit for bit as in plain PyTorch."""

from __future__ import annotations

import copy
import logging
import sys
from collections.abc import Callable, Sequence

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import shoal
from shoal import planners
from shoal.core.hardware import Hardware
from shoal.core.plan import Plan
from shoal.core.step import StepGraph
from shoal.engine.iteration.metered import Iteration
from shoal.errors import BudgetError
from tests.engine.session_loops import true_peak
from tests.engine.training_laws import (
    blocks,
    classifier,
    costs_that_do_not_matter,
    keep_by_chance,
    keep_nothing,
    offload_by_chance,
)


class Text(nn.Module):
    """Embedding, convolutions over the words, dropout; the largest answer of each."""

    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Embedding(50, 16)
        layers = [[nn.Conv1d(16, 16, 3, padding=1), nn.ReLU(), nn.Dropout(0.2)] for _ in range(3)]
        self.body = nn.Sequential(*(module for layer in layers for module in layer))

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        return self.body(self.words(tokens).transpose(1, 2)).amax(-1)


class Attention(nn.Module):
    """A layer of self-attention over words and their places, of which there are 64."""

    def __init__(self) -> None:
        super().__init__()
        self.words, self.places = nn.Embedding(50, 16), nn.Embedding(64, 16)
        self.layer = nn.TransformerEncoderLayer(16, 2, 32, dropout=0.1, batch_first=True)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.words(tokens) + self.places(torch.arange(tokens.shape[1]))
        return self.layer(x, src_key_padding_mask=tokens == 0).mean(1)


class Halting(nn.Module):
    """Stages in a loop that breaks: each is a graph."""

    def __init__(self) -> None:
        super().__init__()
        self.stages = nn.ModuleList(nn.Sequential(*blocks(inputs, 8, 8)) for inputs in (3, 8))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for stage in self.stages:
            x = stage(x)
            torch._dynamo.graph_break()
        return x.mean((2, 3))


class Recurrent(nn.Module):
    """An LSTM, which Dynamo leaves out, hands a view of what it makes to the graph after it."""

    def __init__(self) -> None:
        super().__init__()
        self.words, self.lstm = nn.Embedding(50, 8), nn.LSTM(8, 8, batch_first=True)
        self.body = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Dropout(0.2), nn.Linear(16, 4))

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        return self.body(self.lstm(self.words(tokens))[0]).amax(1)


class Named(nn.Module):
    """Reads its size as a number, which makes every shape a graph of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv1d(3, 4, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.conv(x) * {8: 1.0, 9: 2.0, 10: 3.0, 11: 4.0}[x.shape[2]]


def batches(*shapes: Sequence[int]) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(1)
    words = [torch.randint(1, 50, tuple(shape), generator=generator) for shape in shapes if len(shape) == 2]
    return words or [torch.randn(tuple(shape), generator=generator) for shape in shapes]


def step(model: nn.Module, batch: torch.Tensor) -> torch.Tensor:
    y = model(batch)
    F.mse_loss(y, torch.zeros_like(y)).backward()
    return y.detach()


def same_training(ours: nn.Module, theirs: nn.Module, every: Sequence[torch.Tensor]) -> None:
    """Train both on these batches and hold each output, gradient and buffer of ours against plain PyTorch's."""
    for number, batch in enumerate(every):
        outputs = []
        for model in (ours, theirs):
            model.zero_grad()
            torch.manual_seed(number)
            outputs.append(step(model, batch))
        assert torch.equal(*outputs)
        pairs = [*zip(ours.parameters(), theirs.parameters(), strict=True)]
        assert all(torch.equal(a.grad, b.grad) for a, b in pairs), batch.shape  # type: ignore[arg-type]
        assert all(torch.equal(a, b) for a, b in zip(ours.buffers(), theirs.buffers(), strict=True))
    ours.zero_grad()


def compiled(net: nn.Module, planner: planners.Planner = keep_nothing, budget: int | str = "1TiB") -> nn.Module:
    return shoal.compile(copy.deepcopy(net), budget, offload_to="host", options=shoal.Options(planner=planner))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("make", "shapes", "planner"),
    [
        (Text, [(3, length) for length in (20, 31, *range(4, 47, 14))], keep_by_chance(1, 0.4, 0.2)),
        (Attention, [(3, length) for length in (20, 31, *range(4, 47, 14))], keep_nothing),
        (
            lambda: nn.Sequential(*classifier(3, 8)),
            [(2, 3, side, side) for side in (16, 20, *range(6, 25, 3))],
            offload_by_chance(2),
        ),
    ],
    ids=["text", "attention", "images"],
)
def test_one_graph_for_every_later_size_trains_bit_for_bit(
    make: Callable[[], nn.Module], shapes: Sequence[Sequence[int]], planner: planners.Planner
) -> None:
    torch.manual_seed(0)
    net = make()
    ours = compiled(net, planner)
    with costs_that_do_not_matter():
        same_training(ours, net, batches(*shapes))
    assert ours.shoal.captures == len(ours.shoal.plans) == 2


@pytest.mark.slow
@pytest.mark.parametrize(
    ("make", "shapes"),
    [
        (Text, [(8, length) for length in (40, 90, *range(30, 180, 50))]),
        (Halting, [(2, 3, side, side) for side in (12, 20, 26, 16)]),
    ],
)
def test_every_step_stays_in_the_budget_by_pytorchs_own_count(
    make: Callable[[], nn.Module], shapes: Sequence[Sequence[int]]
) -> None:
    torch.manual_seed(0)
    net, every = make(), batches(*shapes)
    largest = max(every, key=torch.numel)
    step(net, largest), net.zero_grad()
    budget = int(0.7 * true_peak(net, lambda: step(net, largest), [largest]))
    net.zero_grad()
    ours = shoal.compile(copy.deepcopy(net), budget, allow="bitwise")
    same_training(ours, net, every)
    assert len(ours.shoal.plans) <= 3
    assert ours.shoal.measured_peak_bytes <= ours.shoal.predicted_peak_bytes <= budget
    for batch in every:
        assert true_peak(ours, lambda batch=batch: step(ours, batch), [batch]) <= budget
        ours.zero_grad()


def test_a_larger_batch_than_the_first_is_looked_at_in_all_variants_too() -> None:
    """The first may be a trial, or the last batch of an epoch in a run that is resumed."""
    torch.manual_seed(0)
    ours = shoal.compile(nn.Sequential(*classifier(3, 8)), "1GiB", allow="recompute,fuse")
    for batch in batches(*((n, 3, 16, 16) for n in (2, 4, 3, 4))):
        step(ours, batch)
    assert [_batch_of(plan) for plan in ours.shoal.plans] == [2, 4, 4]  # the third for all sizes up to there
    assert [any(one.variant.fuse for one in plan.candidates) for plan in ours.shoal.plans] == [True, True, False]


def _batch_of(plan: Plan) -> int:
    return next(storage.shape[0] for storage in plan.graph.storages if storage.kind == "input")


def test_what_an_lstm_leaves_of_a_model_has_one_graph_for_every_later_length() -> None:
    torch.manual_seed(0)
    net = Recurrent()
    ours = shoal.compile(copy.deepcopy(net), "1MiB", allow="bitwise")
    same_training(ours, net, batches(*((3, length) for length in (20, 31, *range(4, 40, 6)))))
    assert len(ours.shoal.plans) == 2


def test_where_nothing_fits_at_twice_the_largest_less_is_planned_for() -> None:
    tried = []

    def planner(graph: StepGraph, hardware: Hardware, budget_bytes: int) -> Plan:
        tried.append(next(s.shape[1] for s in graph.storages if s.kind == "input"))
        if tried[-1] > 90:
            raise BudgetError("too long", budget_bytes=budget_bytes)
        return keep_nothing(graph, hardware, budget_bytes)

    net = Text()
    ours = compiled(net, planner)
    with costs_that_do_not_matter():
        same_training(ours, net, batches((3, 40), (3, 90), (3, 60)))
    assert len(ours.shoal.plans) == 2  # none of a try that did not fit
    assert [*dict.fromkeys(tried)] == [40, 180, 110, 90]
    assert ours.shoal.captures == 2


def test_the_largest_size_can_be_declared_and_is_then_all_that_is_planned_for() -> None:
    net, every = Text(), batches((3, 20), (3, 31), (3, 60), (3, 5))
    torch._dynamo.mark_dynamic(every[0], 1, max=60)
    ours = compiled(net)
    with costs_that_do_not_matter():
        same_training(ours, net, every)
    (plan,) = ours.shoal.plans
    assert next(s.shape for s in plan.graph.storages if s.kind == "input") == (3, 60)
    assert ours.shoal.captures == 1


def test_a_declared_size_at_which_no_plan_fits_is_refused() -> None:
    (batch,) = batches((8, 40))
    torch._dynamo.mark_dynamic(batch, 1, max=40000)
    with pytest.raises(BudgetError):
        shoal.compile(Text(), "2MiB", allow="bitwise")(batch)


def test_a_step_that_needs_its_sizes_as_numbers_is_captured_for_each() -> None:
    net = Named()
    ours = compiled(net)
    with costs_that_do_not_matter():
        same_training(ours, net, batches(*((2, 3, length) for length in (8, 9, 10, 11, 9))))
    assert ours.shoal.captures == len(ours.shoal.plans) == 4


def test_where_a_symbolic_step_fails_each_shape_is_captured_and_the_reason_is_said(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def refuse(*args: object) -> dict[object, int]:
        raise shoal.errors.CaptureError("this cannot be told")

    monkeypatch.setattr(sys.modules["shoal.graph.symbolic_sizes"], "largest_at", refuse)
    net = Text()
    ours = compiled(net)
    with costs_that_do_not_matter(), caplog.at_level(logging.WARNING, "shoal"):
        same_training(ours, net, batches(*((3, length) for length in (10, 12, 14))))
    assert ours.shoal.captures == 3
    assert "captured and planned by itself" in caplog.text and "this cannot be told" in caplog.text


def test_a_float_that_dynamo_needs_as_a_number_leaves_the_sizes_symbols(caplog: pytest.LogCaptureFixture) -> None:
    """Dynamo takes the slope for a symbol first, and asks for the graph again once a kernel needs its number."""

    class Sloped(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.body = nn.Linear(8, 8)

        def forward(self, x: torch.Tensor, slope: float) -> torch.Tensor:
            return F.leaky_relu(self.body(x), slope)

    torch.manual_seed(0)
    net = Sloped()
    ours = compiled(net)
    with costs_that_do_not_matter(), caplog.at_level(logging.WARNING, "shoal"):
        for n, slope in ((4, 0.5), (6, 0.7), (5, 0.7), (3, 0.7)):
            x = torch.randn(n, 8)
            results = [model(x, slope) for model in (ours, net)]
            assert torch.equal(*results)
            for result in results:
                result.square().mean().backward()
    assert len(ours.shoal.plans) == 2 and not caplog.text
    assert all(torch.equal(a.grad, b.grad) for a, b in zip(ours.parameters(), net.parameters(), strict=True))


def test_the_first_step_of_each_shape_is_metered(monkeypatch: pytest.MonkeyPatch) -> None:
    net, every = Text(), batches(*((3, length) for length in (10, 30, 12, 14, 12, 40, 14, 9)))
    ours = compiled(net)
    iterations: list[Iteration] = []
    with costs_that_do_not_matter():
        for batch in every[:2] * 3:  # both plans are warm
            step(ours, batch)
        metering = ours._compiled_call_impl.session.metering
        ended = metering._ended
        monkeypatch.setattr(metering, "_ended", lambda iteration: (iterations.append(iteration), ended(iteration)))
        metered = []
        for batch in every[2:]:
            step(ours, batch)
            metered.append(len(iterations))
    assert metered == [1, 2, 2, 3, 3, 4]


def test_an_accumulated_gradient_has_plans_of_its_own_for_many_shapes_too() -> None:
    torch.manual_seed(0)
    net, every = nn.Sequential(*blocks(3, 8)), batches(*((2, 3, side, side) for side in (8, 12, 9, 10, 11, 14, 7, 13)))
    ours = compiled(net)
    with costs_that_do_not_matter():
        for place in range(0, len(every), 2):
            for model in (ours, net):
                model.zero_grad()
                for batch in every[place : place + 2]:
                    step(model, batch)
            pairs = zip(ours.parameters(), net.parameters(), strict=True)
            assert all(torch.equal(a.grad, b.grad) for a, b in pairs)  # type: ignore[arg-type]
    assert ours.shoal.captures <= 4
