"""Steps of every kind train as in plain PyTorch: other batches, evaluation between, two backward passes, errors."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

import pytest
import torch
from torch import nn

from shoal.core.hardware import Hardware
from shoal.core.plan import Plan
from shoal.core.step import StepGraph
from shoal.memory.limit import memory_limit
from tests.engine.compile.compiled import Residual, compiled
from tests.engine.training_laws import (
    assert_same_training,
    blocks,
    costs_that_do_not_matter,
    differences,
    images,
    keep_by_chance,
    keep_nothing,
    mean_square,
    needs_compiler,
    same_bits,
    train,
)


def test_gradients_accumulate_as_in_plain_pytorch() -> None:
    assert_same_training(nn.Sequential(*blocks(3, 8, 8)), images(6, 4, 3, 8, 8), batches_a_step=2)


def test_a_short_batch_runs_by_a_plan_for_batches_up_to_the_full_one_and_the_full_ones_keep_theirs() -> None:
    def batch_size(graph: StepGraph) -> int:
        return next(s.shape[0] for s in graph.storages if s.kind == "input")

    def planner(graph: StepGraph, hardware: Hardware, budget_bytes: int) -> Plan:
        planned.append(batch_size(graph))
        return keep_nothing(graph, hardware, budget_bytes)

    planned: list[int] = []
    full, short = images(3, 4, 3, 8, 8), images(1, 3, 3, 8, 8)
    trained = assert_same_training(nn.Sequential(*blocks(3, 8, 8)), [*full, *short, *full, *short], planner)
    assert planned == [4, 4]
    assert [batch_size(plan.graph) for plan in trained.shoal.plans] == [4, 4]


@pytest.mark.slow
def test_images_of_other_sizes_get_plans_of_their_own() -> None:
    batches = [batch for side in (8, 6, 8, 12) for batch in images(1, 2, 3, side, side)]
    trained = assert_same_training(nn.Sequential(*blocks(3, 8, 8)), batches)
    assert len(trained.shoal.plans) == 3


def test_eval_mode_and_no_grad_run_the_model_as_it_is() -> None:
    net = nn.Sequential(*blocks(3, 8, 8), nn.Dropout(0.5))
    planned, (batch,) = compiled(net), images(1, 4, 3, 8, 8)
    with torch.no_grad():
        torch.manual_seed(3)
        expected = net(batch)
        torch.manual_seed(3)
        assert same_bits(planned(batch), expected)
    net.eval(), planned.eval()
    expected, found = net(batch), planned(batch)
    assert same_bits(found, expected)
    mean_square(expected).backward()
    mean_square(found).backward()
    assert all(same_bits(a.grad, b.grad) for a, b in zip(planned.parameters(), net.parameters(), strict=True))
    assert all(same_bits(a, b) for a, b in zip(planned.buffers(), net.buffers(), strict=True))
    assert planned.shoal.plans == ()


def test_evaluation_between_training_steps_changes_nothing() -> None:
    def evaluating(outputs: torch.Tensor) -> torch.Tensor:
        planned.eval()
        with torch.no_grad():
            planned(batches[0])
        planned.train()
        return mean_square(outputs)

    net, batches = nn.Sequential(*blocks(3, 8, 8), nn.Dropout(0.5)), images(3, 4, 3, 8, 8)
    planned = compiled(net)
    with costs_that_do_not_matter():
        found = train(planned, batches, loss_of=evaluating)
    assert not differences(found, train(net, batches))


@pytest.mark.parametrize("planner", [keep_nothing, keep_by_chance(1, 0.7, 0.5), "keep_all"])
def test_a_loss_can_be_sent_back_twice(planner: Any) -> None:
    net = nn.Sequential(*blocks(3, 8, 8), Residual(8), nn.MaxPool2d(2), nn.Dropout(0.3), *blocks(8, 8))
    assert_same_training(net, images(2, 4, 3, 8, 8), planner, backwards=2)


@pytest.mark.parametrize("share", [0.0, 1.0])
def test_a_second_forward_pass_may_come_before_the_backward_pass_sent_back_or_not(share: float) -> None:
    def loss_with_second_pass(model: nn.Module, outputs: torch.Tensor) -> torch.Tensor:
        second = mean_square(model(batches[0]))
        return mean_square(outputs) + share * second if share else mean_square(outputs)

    net, batches = nn.Sequential(*blocks(3, 8, 8), nn.Dropout(0.3)), images(4, 4, 3, 8, 8)
    planned = compiled(net)
    with costs_that_do_not_matter():
        found = train(planned, batches, loss_of=partial(loss_with_second_pass, planned))
    assert not differences(found, train(net, batches, loss_of=partial(loss_with_second_pass, net)))


def test_an_error_in_the_loss_harms_no_later_step() -> None:
    net, batches = nn.Sequential(*blocks(3, 8, 8), nn.Dropout(0.3)), images(3, 4, 3, 8, 8)
    planned = compiled(net)

    def failing(outputs: torch.Tensor) -> torch.Tensor:
        raise ArithmeticError("no loss")

    with costs_that_do_not_matter():
        for model in (net, planned):
            with pytest.raises(ArithmeticError, match="no loss"):
                train(model, batches, loss_of=failing)
        assert not differences(train(planned, batches), train(net, batches))


@needs_compiler
def test_a_step_that_runs_out_of_memory_harms_no_later_one() -> None:
    net, (batch, *batches) = nn.Sequential(*blocks(3, 8, 8), nn.Dropout(0.3)), images(4, 4, 3, 8, 8)
    planned = compiled(net)
    with costs_that_do_not_matter():
        train(planned, [batch])
        train(net, [batch])
        planned.zero_grad()  # gradients that are there ask for another plan, and making one takes memory
        with memory_limit(1), pytest.raises(torch.OutOfMemoryError):
            planned(batch)
        loss = mean_square(planned(batch))
        with memory_limit(1), pytest.raises(torch.OutOfMemoryError):
            loss.backward()
        del loss
        net(batch)  # the failed forward pass moved no statistics, the one whose backward pass failed did
        assert not differences(train(planned, batches), train(net, batches))


def test_two_compiled_models_may_take_turns() -> None:
    nets = [nn.Sequential(*blocks(3, 8, 8)), nn.Sequential(*blocks(3, 4, 4, 4))]
    planned = nn.ModuleList(compiled(net) for net in nets)

    class Both(nn.Module):
        """Not compiled itself: calls both, so that their steps overlap."""

        def __init__(self, models: Sequence[nn.Module]) -> None:
            super().__init__()
            self.models = nn.ModuleList(models)

        def forward(self, x: torch.Tensor) -> list[torch.Tensor]:
            return [model(x) for model in self.models]

    batches = images(3, 4, 3, 8, 8)
    with costs_that_do_not_matter():
        found = train(Both(planned), batches)
    assert not differences(found, train(Both(nets), batches))
    assert [len(model.shoal.plans) for model in planned] == [1, 1]
