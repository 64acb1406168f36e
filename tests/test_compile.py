"""A compiled model trains as the plain one does, bit for bit, whatever it recomputes; what it cannot do it says."""

from __future__ import annotations

import copy
import gc
import inspect
import re
import sys
import weakref
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import Phase, given, settings
from hypothesis import strategies as st
from torch import nn

import shoal
from shoal import models
from shoal.errors import BudgetError, CaptureError, InputError
from shoal.hardware import Hardware
from shoal.plan import Plan
from shoal.runtime.wall import wall
from shoal.step import StepGraph
from tests.training_laws import (
    assert_same_training,
    blocks,
    classifier,
    conv_bn_relu,
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

ROOMY = "1TiB"


class Residual(nn.Module):
    """Adds its input in place, as ResNets may."""

    def __init__(self, channels: int, dims: int = 2) -> None:
        super().__init__()
        self.body = conv_bn_relu(channels, channels, dims)[:2]

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.body(x)
        y += x
        return y.relu_()


class Dense(nn.Module):
    """Its input beside what a block makes of it."""

    def __init__(self, channels: int, dims: int = 2) -> None:
        super().__init__()
        self.body = conv_bn_relu(channels, 2, dims)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.cat([x, self.body(x)], 1)


@st.composite
def networks(draw: st.DrawFn) -> tuple[nn.Module, list[torch.Tensor]]:
    """A small network of one to three dimensions, and batches for it."""
    dims = draw(st.integers(1, 3))
    max_pool = {1: nn.MaxPool1d, 2: nn.MaxPool2d, 3: nn.MaxPool3d}[dims]
    layers: dict[str, Callable[[int], nn.Module]] = {
        "block": lambda channels: conv_bn_relu(channels, 5, dims),
        "dense": lambda channels: Dense(channels, dims),
        "residual": lambda channels: Residual(channels, dims),
        "dropout": lambda channels: nn.Dropout(0.3),
        "max pool": lambda channels: max_pool(3, 2, 1),
        "silu": lambda channels: nn.SiLU(),
        # In-place activations may not follow what saves its output, so each comes after a convolution.
        "leaky relu": lambda channels: nn.Sequential(conv_bn_relu(channels, 5, dims)[0], nn.LeakyReLU(0.1, True)),
        "relu6": lambda channels: nn.Sequential(conv_bn_relu(channels, 5, dims)[0], nn.ReLU6(inplace=True)),
    }
    torch.manual_seed(draw(st.integers(0, 99)))
    net, channels = nn.Sequential(conv_bn_relu(2, 4, dims)), 4
    for kind in draw(st.lists(st.sampled_from(sorted(layers)), min_size=1, max_size=5)):
        net.append(layers[kind](channels))
        channels = {"block": 5, "leaky relu": 5, "relu6": 5, "dense": channels + 2}.get(kind, channels)
    return net, images(2, 3, 2, *(6,) * dims)


# Every example is compiled: to make a failing one smaller would take longer than a test may.
@settings(deadline=None, max_examples=20, phases=set(Phase) - {Phase.shrink})
@given(networks(), st.integers(0, 999), st.floats(0, 1), st.floats(0, 1))
def test_any_choice_of_what_to_keep_and_how_often_to_recompute_trains_like_plain_pytorch(
    drawn: tuple[nn.Module, list[torch.Tensor]], seed: int, kept_share: float, again_share: float
) -> None:
    torch._dynamo.reset()
    net, batches = drawn
    assert_same_training(net, batches, keep_by_chance(seed, kept_share, again_share))


@pytest.mark.parametrize("dims", [1, 2, 3])
def test_recomputed_batch_norms_move_their_statistics_once_a_step(dims: int) -> None:
    net = nn.Sequential(*blocks(3, 8, 8, 8, dims=dims))
    trained = assert_same_training(net, images(3, 4, 3, *(8,) * dims))
    assert {s.layer for s in trained.shoal.plan.recomputed} >= {"0.1", "1.1"}
    assert trained[0][1].num_batches_tracked == 3


@pytest.mark.parametrize(("dtype", "scaled"), [(torch.bfloat16, False), (torch.float16, False), (torch.float16, True)])
def test_mixed_precision_trains_like_plain_pytorch(dtype: torch.dtype, scaled: bool) -> None:
    net = nn.Sequential(*blocks(3, 8, 8), nn.Flatten(), nn.Dropout(0.2), nn.Linear(8 * 64, 4))
    assert_same_training(
        net, images(3, 4, 3, 8, 8), around_forward=partial(torch.autocast, "cpu", dtype), scaled=scaled
    )


@pytest.mark.parametrize(("dims", "layout"), [(2, torch.channels_last), (3, torch.channels_last_3d)])
def test_channels_last_trains_like_plain_pytorch(dims: int, layout: torch.memory_format) -> None:
    pool = {2: nn.MaxPool2d, 3: nn.MaxPool3d}[dims](2)
    net = nn.Sequential(*blocks(3, 8, dims=dims), Residual(8, dims), pool, nn.Dropout(0.3)).to(memory_format=layout)
    batches = [batch.to(memory_format=layout) for batch in images(3, 4, 3, *(8,) * dims)]
    assert_same_training(net, batches)


def test_recomputed_dropouts_of_different_rates_replay_their_masks_and_leave_the_generator_where_it_belongs() -> None:
    drops = [nn.Dropout(0.1), nn.Dropout2d(0.5), nn.Dropout(0.9), nn.AlphaDropout(0.3), nn.Dropout(0.0)]
    convolutions = blocks(3, 8, 8, 8, 8, 8)
    net = nn.Sequential(*(module for pair in zip(convolutions, drops, strict=True) for module in pair))
    assert_same_training(net, images(3, 4, 3, 8, 8))


class Twice(nn.Module):
    """One block used two times, and a classifier whose weight is that of another layer."""

    def __init__(self) -> None:
        super().__init__()
        self.first = conv_bn_relu(3, 6)
        self.block = conv_bn_relu(6, 6)
        self.one = nn.Conv2d(6, 6, 1)
        self.other = nn.Conv2d(6, 6, 1, bias=False)
        self.other.weight = self.one.weight

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.other(self.one(self.block(self.block(self.first(x)))).relu())


def test_layers_used_twice_and_shared_weights_train_like_plain_pytorch() -> None:
    assert_same_training(Twice(), images(3, 4, 3, 8, 8))


@pytest.mark.parametrize("frozen", [(), (0,), (1,), (0, 1)])
def test_frozen_layers_train_like_plain_pytorch(frozen: Sequence[int]) -> None:
    """Their parameters get no gradient and their batch norms, in eval mode, normalise by the running statistics."""
    net = nn.Sequential(*blocks(3, 8, 8), nn.Conv2d(8, 8, 3))
    for place in frozen:
        net[place].requires_grad_(False).eval()
    trained = assert_same_training(net, images(3, 4, 3, 8, 8), keep_by_chance(1, 0.3))
    for place in (0, 1):
        assert trained[place][1].num_batches_tracked == (0 if place in frozen else 3)


def test_a_batch_norm_in_eval_mode_inside_a_training_model_still_learns_its_scale() -> None:
    net = nn.Sequential(*blocks(3, 8, 8))
    net[0][1].eval()
    assert_same_training(net, images(3, 4, 3, 8, 8))


def test_batch_norms_without_scale_or_without_statistics_train_like_plain_pytorch() -> None:
    norms = [nn.BatchNorm2d(8, affine=False), nn.BatchNorm2d(8, track_running_stats=False)]
    norms += [nn.InstanceNorm2d(8, affine=True), nn.GroupNorm(2, 8)]
    convolutions = [nn.Conv2d(3 if place == 0 else 8, 8, 3, padding=1) for place in range(len(norms))]
    net = nn.Sequential(*(module for pair in zip(convolutions, norms, strict=True) for module in (*pair, nn.ReLU())))
    assert_same_training(net, images(3, 4, 3, 8, 8))


def test_a_batch_norm_with_a_cumulative_average_is_refused_as_not_one_graph() -> None:
    planned = shoal.compile(nn.Sequential(nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8, momentum=None)), budget=ROOMY)
    with pytest.raises(CaptureError, match=r"batchnorm.py:\d+"):
        planned(torch.randn(2, 3, 8, 8))


def test_residual_additions_and_activations_in_place_train_like_plain_pytorch() -> None:
    net = nn.Sequential(*blocks(3, 8), Residual(8), nn.MaxPool2d(2), Residual(8), Residual(8))
    assert_same_training(net, images(3, 4, 3, 8, 8))


def test_a_tensor_read_in_two_layouts_at_once_and_the_batch_itself_are_not_overwritten() -> None:
    class Symmetric(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.conv, self.norm = nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            y = self.conv(x.relu() * 2)
            return self.norm(y + y.transpose(2, 3))

    batches = images(2, 4, 3, 8, 8)
    assert_same_training(Symmetric(), batches)
    assert all(same_bits(used, fresh) for used, fresh in zip(batches, images(2, 4, 3, 8, 8), strict=True))


def test_a_model_that_writes_into_its_own_buffers_trains_like_plain_pytorch() -> None:
    class Counting(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = nn.Sequential(*blocks(3, 8, 8))
            self.register_buffer("mean", torch.zeros(8))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            y = self.layers[0](x) * (1 + self.mean).view(1, -1, 1, 1)
            self.mean.mul_(0.9).add_(y.detach().mean((0, 2, 3)))
            return self.layers[1](y)

    assert_same_training(Counting(), images(3, 4, 3, 8, 8))


def test_gradients_accumulate_as_in_plain_pytorch() -> None:
    assert_same_training(nn.Sequential(*blocks(3, 8, 8)), images(6, 4, 3, 8, 8), batches_a_step=2)


def test_a_short_batch_gets_a_plan_of_its_own_and_the_full_ones_keep_theirs() -> None:
    def batch_size(graph: StepGraph) -> int:
        return next(s.shape[0] for s in graph.storages if s.kind == "input")

    def planner(graph: StepGraph, hardware: Hardware, budget_bytes: int) -> Plan:
        planned.append(batch_size(graph))
        return keep_nothing(graph, hardware, budget_bytes)

    planned: list[int] = []
    full, short = images(3, 4, 3, 8, 8), images(1, 3, 3, 8, 8)
    trained = assert_same_training(nn.Sequential(*blocks(3, 8, 8)), [*full, *short, *full, *short], planner)
    assert planned == [4, 3]
    assert [batch_size(plan.graph) for plan in trained.shoal.plans] == [4, 3]
    assert batch_size(trained.shoal.plan.graph) == 4


def test_images_of_other_sizes_get_plans_of_their_own() -> None:
    batches = [batch for side in (8, 6, 8, 12) for batch in images(1, 2, 3, side, side)]
    trained = assert_same_training(nn.Sequential(*blocks(3, 8, 8)), batches)
    assert len(trained.shoal.plans) == 3


def compiled(net: nn.Module, **options: Any) -> nn.Module:
    return shoal.compile(copy.deepcopy(net), **{"budget": ROOMY, "planner": keep_nothing, **options})


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


@pytest.mark.parametrize("planner", [keep_nothing, keep_by_chance(0, 0.5), keep_by_chance(1, 0.7, 0.5), "keep_all"])
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
        with wall(1), pytest.raises(torch.OutOfMemoryError):
            planned(batch)
        loss = mean_square(planned(batch))
        with wall(1), pytest.raises(torch.OutOfMemoryError):
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


class ManyEnds(nn.Module):
    """Several inputs, one of them no tensor and one with a default, and a nest of outputs."""

    def __init__(self) -> None:
        super().__init__()
        self.left, self.right = conv_bn_relu(3, 6), conv_bn_relu(2, 6)

    def forward(self, x: torch.Tensor, y: torch.Tensor, factor: float, *, bias: torch.Tensor | None = None) -> Any:
        a, b = self.left(x), self.right(y) * factor
        if bias is not None:
            b = b + bias
        return {"sum": a + b, "parts": (a, b.mean((2, 3))), "nothing": None, "input": [x]}


def test_several_inputs_and_nested_outputs_train_like_plain_pytorch() -> None:
    batches = [(x, x[:, :2].clone(), factor) for x, factor in zip(images(3, 4, 3, 8, 8), (1.0, 2.0, 2.0), strict=True)]
    trained = assert_same_training(ManyEnds(), batches)
    outputs = trained(*batches[0], bias=torch.ones(1))
    assert list(outputs) == ["sum", "parts", "nothing", "input"]
    assert isinstance(outputs["parts"], tuple) and outputs["nothing"] is None
    assert outputs["input"][0] is batches[0][0]


def test_inputs_that_want_a_gradient_get_the_one_of_plain_pytorch() -> None:
    net, (batch,) = nn.Sequential(*blocks(3, 8, 8)), images(1, 4, 3, 8, 8)
    wanted = []
    with costs_that_do_not_matter():
        for model in (net, compiled(net)):
            x = batch.clone().requires_grad_()
            mean_square(model(x)).backward()
            wanted.append(x.grad)
    assert same_bits(*wanted)


def test_hooks_run_as_in_the_plain_model() -> None:
    net = nn.Sequential(*blocks(3, 8, 8), nn.Dropout(0.3))
    net[0].register_forward_hook(lambda module, arguments, output: output * 2)
    net[1].register_forward_pre_hook(lambda module, arguments: (arguments[0] + 1,))
    net.register_forward_hook(lambda module, arguments, output: output.clamp(max=3))
    net[0][0].weight.register_hook(lambda gradient: 3 * gradient)
    without = copy.deepcopy(net)
    without._forward_hooks.clear()
    batches = images(3, 4, 3, 8, 8)
    trained = assert_same_training(net, batches)
    assert not same_bits(trained[1][0].weight, without[1][0].weight)


def test_parameter_hooks_see_every_gradient() -> None:
    def sums(model: nn.Module) -> list[float]:
        seen: list[float] = []
        for parameter in model.parameters():
            parameter.register_post_accumulate_grad_hook(lambda p: seen.append(p.grad.sum().item()))
        train(model, images(2, 4, 3, 8, 8))
        return sorted(seen)

    net = nn.Sequential(*blocks(3, 8, 8))
    planned = compiled(net)
    with costs_that_do_not_matter():
        assert sums(planned) == sums(net)


def test_the_model_comes_back_with_the_names_it_had() -> None:
    net = nn.Sequential(*blocks(3, 8, 8))
    names, parameters = list(net.state_dict()), list(net.parameters())
    same = shoal.compile(net, budget=ROOMY)
    assert same is net
    assert type(net) is nn.Sequential
    assert list(net.state_dict()) == names
    assert all(a is b for a, b in zip(net.parameters(), parameters, strict=True))


def test_weights_loaded_after_compiling_are_those_that_train() -> None:
    net, other, batches = nn.Sequential(*blocks(3, 8, 8)), nn.Sequential(*blocks(3, 8, 8)), images(3, 4, 3, 8, 8)
    planned = compiled(net)
    with costs_that_do_not_matter():
        train(planned, batches)
        planned.load_state_dict(other.state_dict(), strict=True)
        assert not differences(train(planned, batches), train(other, batches))


def test_a_deep_copy_trains_alike_and_leaves_its_original_alone() -> None:
    net, batches = nn.Sequential(*blocks(3, 8, 8), nn.Dropout(0.3)), images(2, 4, 3, 8, 8)
    planned = compiled(net)
    with costs_that_do_not_matter():
        train(planned, batches)
        train(net, batches)
        weights = {name: tensor.clone() for name, tensor in planned.state_dict().items()}
        twin = copy.deepcopy(planned)
        expected = train(net, batches)
        assert not differences(train(twin, batches), expected)
        assert not differences(planned.state_dict(), weights)
        assert not differences(train(planned, batches), expected)


def test_saved_and_resumed_midway_ends_where_an_uninterrupted_plain_run_ends(tmp_path: Path) -> None:
    def steps(model: nn.Module, optimizer: torch.optim.Optimizer, batches: Sequence[torch.Tensor]) -> None:
        for batch in batches:
            optimizer.zero_grad()
            mean_square(model(batch)).backward()
            optimizer.step()

    def adam(model: nn.Module) -> torch.optim.Optimizer:
        return torch.optim.Adam(model.parameters())

    net, batches = nn.Sequential(*blocks(3, 8, 8), nn.Dropout(0.3)), images(4, 4, 3, 8, 8)
    first, second, path = (
        compiled(net),
        compiled(nn.Sequential(*blocks(3, 8, 8), nn.Dropout(0.3))),
        tmp_path / "half.pt",
    )
    torch.manual_seed(5)
    steps(net, adam(net), batches)
    with costs_that_do_not_matter():
        torch.manual_seed(5)
        optimizer = adam(first)
        steps(first, optimizer, batches[:2])
        torch.save((first.state_dict(), optimizer.state_dict(), torch.get_rng_state()), path)
        weights, state, generator = torch.load(path)
        second.load_state_dict(weights)
        optimizer = adam(second)
        optimizer.load_state_dict(state)
        torch.set_rng_state(generator)
        steps(second, optimizer, batches[2:])
    assert not differences(second.state_dict(), net.state_dict())


def test_compiling_again_replaces_the_budget() -> None:
    net, batches = nn.Sequential(*blocks(3, 8, 8)), images(2, 4, 3, 8, 8)
    planned = compiled(net)
    with costs_that_do_not_matter():
        train(planned, batches)
        train(net, batches)
        shoal.compile(planned, budget="2TiB", planner="keep_all")
        assert planned.shoal.plans == ()
        assert not differences(train(planned, batches), train(net, batches))
    assert planned.shoal.budget_bytes == 2 * 2**40
    assert not planned.shoal.plan.recomputed


def test_a_compiled_model_is_freed_with_its_last_reference() -> None:
    net = compiled(nn.Sequential(*blocks(3, 8, 8)))
    with costs_that_do_not_matter():
        train(net, images(2, 4, 3, 8, 8))
    gone = weakref.ref(net)
    del net
    gc.collect()
    assert gone() is None


def test_more_shapes_than_can_have_plans_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys.modules["shoal.compile"], "_MOST_SHAPES", 2)
    planned = compiled(nn.Sequential(*blocks(3, 8)))
    with costs_that_do_not_matter():
        train(planned, [*images(1, 2, 3, 4, 4), *images(1, 3, 3, 4, 4)])
        with pytest.raises(CaptureError, match="more than 2 different shapes.*pad or crop the batches"):
            train(planned, images(1, 4, 3, 4, 4))


class Branching(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(3, 4, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.conv(x)
        if y.sum() > 0:
            return y
        return 2 * y


class Printing(Branching):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.conv(x)
        torch._dynamo.graph_break()
        return 2 * y


@pytest.mark.parametrize(
    ("model", "line", "text"), [(Branching, 2, "if y.sum() > 0:"), (Printing, 2, "torch._dynamo.graph_break()")]
)
def test_a_model_that_is_not_one_graph_is_refused_with_the_line_that_breaks_it(
    model: type[nn.Module], line: int, text: str
) -> None:
    number = inspect.getsourcelines(model.forward)[1] + line
    planned = shoal.compile(model(), budget=ROOMY)
    with pytest.raises(CaptureError, match=re.escape(f"{Path(__file__).name}:{number} ({text})")) as caught:
        planned(torch.randn(2, 3, 8, 8))
    assert "\n" not in str(caught.value)
    with torch.no_grad():
        assert planned(torch.randn(2, 3, 8, 8)).shape == (2, 4, 6, 6)


@pytest.mark.parametrize("budget", ["lots", "", "12 parsecs", "-1GiB", 0, -5, "0 MiB", 1.5, True, [1]])
def test_a_budget_that_is_no_number_of_bytes_is_refused(budget: Any) -> None:
    with pytest.raises(InputError, match=re.escape(f"budget={budget!r}")) as caught:
        shoal.compile(nn.Conv2d(3, 4, 3), budget=budget)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("wrong", "complaint"),
    [
        ({"planner": "joined"}, "no planner is called 'joined'; did you mean 'joint'"),
        ({"inner": "tvm"}, "inner='tvm' is unknown"),
        ({"inner": None}, "inner=None is unknown"),
        ({"planner": 3}, "planner"),
        ({"optimizer": "adam"}, "optimizer"),
        ({"plan": "plan.json"}, "plan"),
    ],
)
def test_an_argument_that_is_none_of_those_listed_is_refused(wrong: dict[str, Any], complaint: str) -> None:
    with pytest.raises(InputError, match=complaint) as caught:
        shoal.compile(nn.Conv2d(3, 4, 3), budget=ROOMY, **wrong)
    assert "\n" not in str(caught.value)


def test_only_modules_can_be_compiled() -> None:
    with pytest.raises(InputError, match="model is a function; expected a torch.nn.Module"):
        shoal.compile(mean_square, budget=ROOMY)


def test_a_budget_below_parameters_gradients_and_optimizer_state_is_refused_at_once() -> None:
    net = nn.Linear(100, 100, bias=False)
    optimizer = torch.optim.SGD(net.parameters(), momentum=0.9)
    need = 3 * 40_000  # weight, gradient, momentum
    with pytest.raises(BudgetError, match="before any activation") as caught:
        shoal.compile(net, budget=need - 1, optimizer=optimizer)
    assert (caught.value.budget_bytes, caught.value.least_feasible_bytes) == (need - 1, need)
    assert "\n" not in str(caught.value)
    assert not hasattr(net, "shoal")
    assert shoal.compile(net, budget=need, optimizer=optimizer) is net


def test_an_infeasible_budget_names_what_would_do_and_nothing_is_run() -> None:
    net, batches = classifier(3, 8, 8), images(2, 4, 3, 8, 8)
    before = {name: tensor.clone() for name, tensor in net.state_dict().items()}
    generator = torch.get_rng_state()
    planned = shoal.compile(copy.deepcopy(net), budget="30KiB", name="small net")
    with pytest.raises(BudgetError, match="no plan of small net fits in 30.00 KiB") as caught:
        planned(batches[0])
    error = caught.value
    assert not differences(planned.state_dict(), before)
    assert same_bits(torch.get_rng_state(), generator)
    assert "\n" not in str(error)
    assert error.budget_bytes == 30 * 1024
    assert error.op and error.layer in dict(net.named_modules())
    assert len(error.largest) == 3
    assert all(layer in dict(net.named_modules()) and nbytes > 0 for _, layer, nbytes in error.largest)

    enough = shoal.compile(copy.deepcopy(net), budget=error.least_feasible_bytes)
    assert not differences(train(enough, batches), train(net, batches))
    assert enough.shoal.repairs == 0
    assert enough.shoal.measured_peak_bytes <= error.least_feasible_bytes
    less = shoal.compile(copy.deepcopy(net), budget=error.least_feasible_bytes - 1)
    with pytest.raises(BudgetError):
        less(batches[0])


def test_a_batch_too_large_for_the_budget_is_refused_and_the_others_go_on() -> None:
    net, batches, (large,) = nn.Sequential(*blocks(3, 8, 8)), images(3, 4, 3, 8, 8), images(1, 64, 3, 8, 8)
    planned = compiled(net, budget="200KiB", planner="joint")
    with costs_that_do_not_matter():
        train(planned, batches)
        with pytest.raises(BudgetError):
            planned(large)
        train(net, batches)
        assert not differences(train(planned, batches), train(net, batches))


SIDES = {"alexnet": 67, "unet3d": 8, "densenet121": 32, "unet": 16, "resnet18_cifar": 8}


@pytest.mark.slow
@pytest.mark.parametrize("name", models.names())
def test_every_network_trains_like_plain_pytorch(name: str) -> None:
    with torch.device("meta"):
        net = models.build(name, num_classes=5)
    for module in net.modules():
        if isinstance(module, nn.Linear):  # 32 hidden features instead of 4096: 100 million weights take their time
            rows, columns = (32 if size == 4096 else size for size in (module.out_features, module.in_features))
            module.__init__(columns, rows, device="meta")
    net.to_empty(device="cpu")
    for module in net.modules():
        if hasattr(module, "reset_parameters"):
            module.reset_parameters()
    batches = images(2, *models.example_shape(name, 2, SIDES.get(name, 32)))
    trained = assert_same_training(net, batches, keep_by_chance(1, 0.6, 0.2))
    assert len(trained.shoal.plan.recomputed) > 3


@needs_compiler
@pytest.mark.slow
@pytest.mark.parametrize(
    "layer",
    [
        nn.BatchNorm2d(8),
        nn.SiLU(),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Dropout(0.3),
    ],
    ids=lambda layer: type(layer).__name__,
)
def test_inductor_trains_the_same_up_to_rounding(layer: nn.Module) -> None:
    net = nn.Sequential(nn.Conv2d(3, 8, 3), layer, nn.SiLU(), nn.Conv2d(8, 8, 2))
    batches = images(2, 4, 3, 8, 8)
    planned = compiled(net, inner="inductor")
    with costs_that_do_not_matter():
        torch.testing.assert_close(train(planned, batches), train(net, batches), rtol=1e-4, atol=1e-5)
    assert planned.shoal.plan.recomputed


def train_one_rank(rank: int, folder: str) -> None:
    """Trains a plain and a planned model, each wrapped in distributed data parallel, on this rank's half."""
    torch.set_num_threads(1)
    store = torch.distributed.FileStore(f"{folder}/store", 2)
    torch.distributed.init_process_group("gloo", store=store, rank=rank, world_size=2)
    torch.manual_seed(0)
    net = nn.Sequential(*blocks(3, 8, 8), nn.Dropout(0.3))
    batches = [batch.chunk(2)[rank] for batch in images(3, 8, 3, 8, 8)]
    with costs_that_do_not_matter():
        planned = compiled(net)
        found = train(nn.parallel.DistributedDataParallel(planned), batches)
    expected = train(nn.parallel.DistributedDataParallel(net), batches)
    gradient = found["0: gradient of module.0.0.weight"]
    torch.save((differences(found, expected), len(planned.shoal.plan.recomputed), gradient), f"{folder}/{rank}.pt")
    torch.distributed.destroy_process_group()


@pytest.mark.skipif(not torch.distributed.is_available(), reason="this PyTorch has no torch.distributed")
def test_in_distributed_data_parallel_every_rank_trains_like_plain_pytorch(tmp_path: Path) -> None:
    torch.multiprocessing.spawn(train_one_rank, (str(tmp_path),), nprocs=2)
    (wrong, recomputed, gradient), (also_wrong, _, same_gradient) = (torch.load(tmp_path / f"{r}.pt") for r in (0, 1))
    assert (wrong, also_wrong) == ([], [])
    assert recomputed > 0
    assert same_bits(gradient, same_gradient)
