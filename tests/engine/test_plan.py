"""`shoal.plan` plans a step without taking it, and its plans run as they are."""

from __future__ import annotations

import copy
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import shoal
from examples import networks as models
from shoal.core import presets
from shoal.core.plan import Plan
from shoal.core.residence import Recompute
from shoal.core.schedule import schedule
from shoal.core.validate import check_runs
from shoal.engine.status import Status
from shoal.errors import BudgetError, CaptureError, InputError, PlanError
from shoal.memory.storage_bytes import distinct_bytes
from tests.engine.keywords import keywords
from tests.engine.training_laws import (
    blocks,
    classifier,
    costs_that_do_not_matter,
    differences,
    images,
    keep_nothing,
    same_bits,
    train,
)
from tests.raising import raising
from tests.scratch import needs_little_scratch

BATCH = images(1, 4, 3, 16, 16)[0]
P100 = "p100-nvlink"


def test_a_bare_sequence_of_layers_can_be_planned() -> None:
    """Worked out by hand, for the loss of a loop of which nothing is known."""
    net = nn.Sequential(nn.Conv2d(3, 8, 3, bias=False), nn.ReLU(), nn.Flatten())
    plan = shoal.plan(net, torch.empty(2, 3, 8, 8), hardware=P100)
    assert (plan.planner, plan.hardware, plan.graph.model, plan.budget_bytes) == ("keep_all", P100, "Sequential", 0)
    weight, batch, output = 4 * 8 * 3 * 3 * 3, 4 * 2 * 3 * 8 * 8, 4 * 2 * 8 * 6 * 6
    mask = output // 4  # of the ReLU
    # Of the loss: what it keeps, its workspace of three gradients, its target, and itself.
    loss = output + 3 * output + output + 512
    # The output, its gradient, the weight and its gradient of the step before are there.
    assert plan.predicted_peak_bytes == batch + 2 * output + mask + 2 * weight + loss


class Joining(nn.Module):
    """A level of a U-Net, which takes even sides."""

    def __init__(self) -> None:
        super().__init__()
        self.conv, self.down = nn.Conv2d(3, 4, 3, padding=1), nn.Conv2d(4, 4, 2, 2)
        self.up = nn.Upsample(scale_factor=2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.conv(x)
        return torch.cat([y, self.up(self.down(y))], 1)


def test_sizes_that_a_network_does_not_take_are_told_in_one_line_with_those_that_would_do(
    capfd: pytest.CaptureFixture[str], caplog: pytest.LogCaptureFixture
) -> None:
    with pytest.raises(CaptureError) as refused:
        shoal.plan(Joining(), torch.empty(2, 3, 15, 32))
    assert "(2, 3, 15, 32)" in refused.value.message and "14x32 or 16x32" in refused.value.message
    assert refused.value.details["error"].startswith("Sizes of tensors must match")  # PyTorch's words
    assert "Traceback" not in capfd.readouterr().err and not caplog.records
    with pytest.raises(CaptureError) as wrong:
        shoal.plan(Joining(), torch.empty(2, 5, 15, 32))
    assert "would do" not in str(wrong.value)  # no size would


def test_planning_runs_nothing_and_changes_nothing() -> None:
    net = nn.Sequential(*blocks(3, 8, 8), nn.Dropout(0.5))
    net[0][1].eval()
    net.register_forward_hook(lambda module, arguments, output: output * 2)
    before = {name: tensor.clone() for name, tensor in net.state_dict().items()}
    modes = [module.training for module in net.modules()]
    generator = torch.get_rng_state()
    shoal.plan(net, BATCH, hardware=P100)
    shoal.plan(net, BATCH, "1GiB")  # profiled here
    assert not differences(net.state_dict(), before)
    assert [module.training for module in net.modules()] == modes
    assert same_bits(torch.get_rng_state(), generator)
    assert all(parameter.grad is None for parameter in net.parameters())
    assert torch.is_grad_enabled()
    assert not hasattr(net, "shoal")


@pytest.mark.parametrize("training", [False, True])
def test_a_model_is_planned_as_in_training_and_left_in_its_mode(training: bool) -> None:
    net = nn.Sequential(*blocks(3, 8, 8)).train(training)
    with torch.no_grad():
        plan = shoal.plan(net, BATCH, hardware=P100)
    assert all(module.training == training for module in net.modules())
    assert any("batch_norm_backward" in op.target for op in plan.graph.ops)
    assert plan.graph.fingerprint == shoal.plan(net.train(), BATCH, hardware=P100).graph.fingerprint


def test_a_frozen_batch_norm_of_a_training_model_is_planned_frozen() -> None:
    net = nn.Sequential(*blocks(3, 8, 8))
    usual = shoal.plan(net, BATCH, hardware=P100)
    net[0][1].eval()
    assert shoal.plan(net, BATCH, hardware=P100).graph.fingerprint != usual.graph.fingerprint


def test_a_plan_for_another_device_is_the_same_wherever_the_model_lies() -> None:
    net = nn.Sequential(*blocks(3, 3, 3, 3), nn.Dropout(0.3), nn.MaxPool2d(2))
    here = shoal.plan(net, BATCH, hardware=P100)
    nowhere = shoal.plan(copy.deepcopy(net).to("meta"), BATCH.to("meta"), hardware=P100)
    assert nowhere.graph.fingerprint == here.graph.fingerprint
    assert nowhere.predicted_peak_bytes == here.predicted_peak_bytes
    assert nowhere.residences == here.residences


@pytest.mark.slow
def test_networks_with_batch_norm_can_be_planned_on_the_meta_device() -> None:
    with torch.device("meta"):
        net, batch = models.build("resnet18"), torch.empty(64, 3, 224, 224)
    budget = 830_000_000  # 70 % of what keeping everything takes
    plan = shoal.plan(net, batch, budget, hardware=P100)
    assert plan.offloaded and plan.predicted_peak_bytes <= budget < 0.8 * plan.plain_peak_bytes


@pytest.mark.parametrize("activation", [nn.PReLU, nn.SELU])
def test_a_gradient_that_pytorch_loses_on_the_meta_device_is_no_smaller_step(activation: type[nn.Module]) -> None:
    def network() -> nn.Module:
        return nn.Sequential(nn.Conv2d(3, 8, 3), activation(), nn.Conv2d(8, 8, 3))

    with torch.device("meta"), pytest.raises(CaptureError):
        shoal.plan(network(), torch.empty(2, 3, 16, 16), hardware=P100)
    backward = [op.name for op in shoal.plan(network(), BATCH, hardware=P100).graph.ops]
    assert sum("convolution_backward" in name for name in backward) >= 2


def test_what_a_model_detaches_on_the_meta_device_needs_no_gradient() -> None:
    class Detached(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.second = nn.Linear(4, 4), nn.Linear(4, 4)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.second(self.first(x).detach())

    with torch.device("meta"):
        assert shoal.plan(Detached(), torch.empty(2, 4), hardware=P100).predicted_peak_bytes


@cache
def most_bytes() -> int:
    """What a step of the classifier takes with everything kept."""
    return shoal.plan(classifier(3, 8, 8, 8, 8), BATCH, hardware=P100).predicted_peak_bytes


@pytest.mark.parametrize(("offload_to", "host_budget"), [(None, None), ("host", "8KiB")])
def test_a_device_that_is_not_here_offloads_only_what_it_may(offload_to: str | None, host_budget: str | None) -> None:
    net, most = classifier(3, 8, 8, 8, 8), most_bytes()
    options = shoal.Options(host_budget=host_budget)
    plan = shoal.plan(
        net, BATCH, int(0.7 * most), hardware=P100, allow="bitwise", offload_to=offload_to, options=options
    )
    assert plan.recomputed
    assert plan.host_bytes <= (8192 if offload_to else 0)


def test_a_network_too_large_for_this_machine_can_be_planned() -> None:
    with torch.device("meta"):
        net = models.build("vgg16")
        batch = torch.empty(4096, 3, 224, 224)
    plan = shoal.plan(net, batch, "147GiB", hardware=P100, options=shoal.Options(planner="examples.planners.sqrt:sqrt"))
    assert plan.plain_peak_bytes > 148 * 2**30
    assert plan.predicted_peak_bytes <= 147 * 2**30
    assert plan.recomputed


@pytest.mark.parametrize("planner", ["joint", "chain", "examples.planners.sqrt:sqrt"])
def test_a_plan_is_inside_its_budget_by_the_independent_check(planner: str) -> None:
    net, most = classifier(3, 8, 8, 8, 8), most_bytes()
    plan = shoal.plan(net, BATCH, int(0.7 * most), hardware=P100, options=shoal.Options(planner=planner))
    assert plan.planner == planner.rpartition(":")[2] and (plan.recomputed or plan.offloaded)
    assert plan.budget_bytes == int(0.7 * most)
    runs = schedule(plan.graph, plan.residences)
    assert check_runs(plan.graph, plan.residences, runs, plan.budget_bytes) == plan.predicted_peak_bytes


def test_the_optimizers_state_is_part_of_the_peak() -> None:
    net = classifier(3, 8, 8)
    alone = shoal.plan(net, BATCH, hardware=P100)
    momentum = shoal.plan(net, BATCH, hardware=P100, optimizer=torch.optim.SGD(net.parameters(), momentum=0.9))
    assert momentum.predicted_peak_bytes - alone.predicted_peak_bytes == distinct_bytes(net.parameters())


def test_hardware_may_be_a_preset_or_ones_own() -> None:
    net = classifier(3, 8, 8)
    by_name, by_hand, here = (shoal.plan(net, BATCH, hardware=hardware) for hardware in (P100, presets.get(P100), None))
    assert by_name.predicted_seconds == by_hand.predicted_seconds > 0
    assert here.hardware != P100 and here.predicted_seconds > 0


def test_several_inputs_are_given_as_a_tuple() -> None:
    class Sum(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.left, self.right = nn.Conv2d(3, 4, 3), nn.Conv2d(2, 4, 3)

        def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
            return self.left(x) + self.right(y)

    plan = shoal.plan(Sum(), (BATCH, BATCH[:, :2]), hardware=P100)
    assert sorted(s.shape for s in plan.graph.storages if s.kind == "input") == [(4, 2, 16, 16), (4, 3, 16, 16)]


def test_a_saved_plan_is_used_as_it_is(tmp_path: Path) -> None:
    net, batches = nn.Sequential(*classifier(3, 8, 8), nn.Dropout(0.3)), images(2, 4, 3, 16, 16)
    saved = shoal.plan(net, BATCH, budget="1GiB", options=shoal.Options(planner=keep_nothing)).save(
        tmp_path / "plan.json"
    )
    plan = Plan.load(saved)
    assert any(isinstance(residence, Recompute) for residence in plan.residences.values())
    planned = shoal.compile(copy.deepcopy(net), options=shoal.Options(plan=plan))
    with costs_that_do_not_matter():
        assert not differences(train(planned, batches), train(net, batches))
    assert planned.shoal.plan.residences == plan.residences
    assert planned.shoal.plan.planner == "keep_nothing"


@pytest.mark.parametrize(
    ("other", "batch"),
    [
        (classifier(3, 8, 8), images(1, 5, 3, 16, 16)[0]),
        (classifier(3, 8, 8), images(1, 4, 3, 8, 8)[0]),
        (classifier(3, 8, 8, 8), BATCH),
        (classifier(3, 8, 9), BATCH),
    ],
    ids=["other batch size", "other image size", "deeper", "wider"],
)
def test_a_plan_for_another_model_or_shape_is_refused(other: nn.Module, batch: torch.Tensor) -> None:
    planned = shoal.compile(other, options=shoal.Options(plan=shoal.plan(classifier(3, 8, 8), BATCH, hardware=P100)))
    with costs_that_do_not_matter(), pytest.raises(PlanError) as caught:
        planned(batch)
    assert str((4, 3, 16, 16)) in str(caught.value) and str(tuple(batch.shape)) in str(caught.value)


def test_a_budget_that_no_plan_fits_is_refused_with_the_least_that_one_does() -> None:
    net = classifier(3, 8, 8)
    with pytest.raises(BudgetError) as caught:
        shoal.plan(net, BATCH, "20KiB", hardware=P100, allow="bitwise")
    least = caught.value.least_feasible_bytes
    assert shoal.plan(net, BATCH, least, hardware=P100, allow="bitwise").predicted_peak_bytes == least
    with pytest.raises(BudgetError):
        shoal.plan(net, BATCH, least - 1, hardware=P100, allow="bitwise")


@pytest.mark.parametrize(
    ("wrong", "complaint"),
    [
        ({"budget": "some"}, "budget='some'"),
        ({"budget": 0}, "budget=0"),
        ({"hardware": "p100-nvlnk"}, "hardware='p100-nvlnk'"),
        ({"hardware": 16}, "'p100-nvlink'"),
        ({"hardware": torch.device("cpu")}, "'p100-nvlink'"),
        ({"planner": "chian"}, "'chian'"),
    ],
)
def test_wrong_arguments_are_refused(wrong: dict[str, Any], complaint: str) -> None:
    with raising(InputError, complaint):
        shoal.plan(nn.Conv2d(3, 4, 3), BATCH, **keywords(wrong))


def test_only_modules_can_be_planned() -> None:
    with raising(InputError, "torch.nn.Module"):
        shoal.plan("resnet18", BATCH)


def test_a_model_without_trainable_parameters_has_no_step_to_plan() -> None:
    with pytest.raises(CaptureError):
        shoal.plan(classifier(3, 8).requires_grad_(False), BATCH, hardware=P100)


def test_a_model_that_is_not_one_graph_is_refused_and_left_in_its_mode() -> None:
    class Branching(nn.Conv2d):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            y = super().forward(x)
            return y if y.sum() > 0 else 2 * y

    net = Branching(3, 4, 3).eval()
    with raising(CaptureError, "test_plan.py", "y.sum()"):
        shoal.plan(net, BATCH, hardware=P100)
    assert not net.training


class OfADict(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(3, 4, 3)

    def forward(self, batch: dict[str, torch.Tensor]) -> torch.Tensor:
        return self.conv(batch["image"])


def test_a_dict_that_is_one_argument_is_given_in_a_tuple() -> None:
    batch = {"image": torch.empty(2, 3, 8, 8)}
    with raising(InputError, "'batch'", "(example,)"):
        shoal.plan(OfADict(), batch, "1GiB")
    assert shoal.plan(OfADict(), (batch,), "1GiB", allow="keep").predicted_peak_bytes > 0


@pytest.mark.parametrize("example", [(), [torch.ones(1, 4)] * 2, b"abc"])
def test_an_example_of_another_number_of_arguments_is_refused_by_name(example: Any) -> None:
    with raising(InputError, "Linear.forward", "argument"):
        shoal.plan(nn.Linear(4, 4), example, hardware="p100-nvlink")


def dense(*channels: int) -> nn.Module:
    """With results as large as its inputs, so that much depends on what the training loop holds of them."""
    return nn.Sequential(*blocks(*channels), nn.Conv2d(channels[-1], 4, 1))


def perceptron(*channels: int) -> nn.Module:
    layers = [nn.Linear(16, 64), nn.GELU(), nn.Linear(64, 64), nn.LayerNorm(64), nn.GELU(), nn.Linear(64, 16)]
    return nn.Sequential(nn.Flatten(0, 2), *layers)


@pytest.mark.slow
@needs_little_scratch
@pytest.mark.parametrize(("make", "allow"), [(classifier, "bitwise"), (dense, "bitwise"), (perceptron, "exact")])
def test_every_way_in_names_the_same_minimum_which_trains(make: Callable[..., nn.Module], allow: str) -> None:
    how: dict[str, Any] = {"optimizer": "sgd", "allow": allow}

    def refused(call: Callable[[], object]) -> int:
        with pytest.raises(BudgetError) as caught:
            call()
        return caught.value.least_feasible_bytes or 0

    def losses(budget_bytes: int) -> tuple[list[float], Status]:
        model = shoal.compile(make(3, 8, 8), budget_bytes, **how)
        optimizer = torch.optim.SGD(model.parameters(), 0.1)
        found = []
        for _ in range(4):
            optimizer.zero_grad()
            loss = model(BATCH).square().mean()
            loss.backward()
            optimizer.step()
            found.append(loss.item())
        return found, model.shoal

    some_bytes = shoal.plan(make(3, 8, 8), BATCH).predicted_peak_bytes // 2
    least_bytes = refused(lambda: shoal.plan(make(3, 8, 8), BATCH, some_bytes, **how))
    least_bytes = refused(lambda: shoal.plan(make(3, 8, 8), BATCH, int(0.6 * least_bytes), **how))
    assert refused(lambda: losses(int(0.6 * least_bytes))) == least_bytes
    assert shoal.frontier(make(3, 8, 8), BATCH, points=2, **how).points[0].budget_bytes == least_bytes
    assert shoal.plan(make(3, 8, 8), BATCH, least_bytes, **how).predicted_peak_bytes <= least_bytes
    found, status = losses(least_bytes)
    assert found[-1] < found[0] and 0 < (status.measured_peak_bytes or 0) <= least_bytes
