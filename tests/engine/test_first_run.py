"""Tensors lie as their trace says: gradients are right where fake kernels lie about strides, and the plan knows."""

from __future__ import annotations

import copy
import gc
import itertools
import logging
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import fx, nn
from torch._functorch import config as functorch_config

import shoal
from shoal.core.plan import Plan
from shoal.engine import first_run
from shoal.engine.first_run import run_nodes
from shoal.engine.graph_runner import run_kernels
from shoal.errors import CaptureError, PlanError
from shoal.kernels.memory_format import copied, in_traced_layout, is_writable
from shoal.lowlevel import allocations
from tests.engine.training_laws import (
    assert_same_training,
    costs_that_do_not_matter,
    images,
    keep_nothing,
    needs_compiler,
)
from tests.joint_graphs import NETWORKS
from tests.raising import raising


class Pixels(nn.Module):
    """A linear layer over pixels, [added to the input,] [pixel_unshuffle,] [doubled,] group norm, mean, linear."""

    def __init__(self, added: bool, unshuffled: bool, doubled: bool) -> None:
        super().__init__()
        channels = 32 if unshuffled else 8
        self.added, self.unshuffled, self.doubled = added, unshuffled, doubled
        self.pixels, self.norm, self.last = nn.Linear(8, 8), nn.GroupNorm(2, channels), nn.Linear(channels, 5)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        n, c, h, w = x.shape
        y = self.pixels(x.flatten(2).transpose(1, 2)).transpose(1, 2).view(n, c, h, w)
        y = x + y if self.added else y
        y = F.pixel_unshuffle(y, 2) if self.unshuffled else y
        return self.last(self.norm(y * 2 if self.doubled else y).mean((2, 3)))


def gradients(model: nn.Module, x: torch.Tensor) -> list[torch.Tensor]:
    """Of the input and of each parameter, in float64."""
    model.zero_grad()
    x = x.detach().clone(memory_format=torch.preserve_format).requires_grad_()
    F.cross_entropy(model(x).double(), torch.zeros(len(x), dtype=torch.long)).backward()
    return [t.grad.double() for t in (x, *model.parameters()) if t.grad is not None]


def error(found: list[torch.Tensor], right: list[torch.Tensor]) -> float:
    """The largest error of a tensor, as a share of its largest value."""
    return max(float((a - b).abs().max() / b.abs().max()) for a, b in zip(found, right, strict=True))


FORMATS = {"contiguous": torch.contiguous_format, "channels_last": torch.channels_last}
CASES = [
    *itertools.product(itertools.product((False, True), repeat=3), ["channels_last"], (1,), (torch.float32,)),
    *itertools.product([(True, True, True), (False, False, False)], ["contiguous"], (1,), (torch.float32,)),
    *itertools.product([(True, True, False), (False, False, True)], ["channels_last"], (1, 2), (torch.bfloat16,)),
    ((False, True, False), "contiguous", 2, torch.float32),
]


@pytest.mark.parametrize(("parts", "layout", "batch", "dtype"), CASES)
def test_gradients_are_as_near_to_float64_as_those_of_eager_pytorch(
    parts: tuple[bool, bool, bool], layout: str, batch: int, dtype: torch.dtype
) -> None:
    torch.manual_seed(0)
    plain = Pixels(*parts).to(dtype).to(memory_format=FORMATS[layout])
    exact, planned = copy.deepcopy(plain).double(), copy.deepcopy(plain)
    x = torch.randn(batch, 8, 8, 8).to(dtype).to(memory_format=FORMATS[layout])
    right = gradients(exact, x.double())
    allowed = 3 * error(gradients(plain, x), right) + 1e-5
    with costs_that_do_not_matter():
        shoal.compile(planned, "1TiB", options=shoal.Options(planner=keep_nothing))
        for _ in range(2):  # the first run is not of the code that later ones run
            assert error(gradients(planned, x), right) <= allowed


@pytest.mark.parametrize("network", NETWORKS)
def test_networks_train_bit_for_bit_with_a_batch_of_one(network: str) -> None:
    torch.manual_seed(0)
    assert_same_training(NETWORKS[network](), images(2, 1, 3, 8, 8))


@pytest.mark.parametrize(
    ("activation", "batch"), [(nn.ReLU6, 1), (nn.Hardswish, 2), (nn.Softplus, 1), (nn.LeakyReLU, 2), (nn.LeakyReLU, 1)]
)
def test_an_activation_before_a_global_pool_trains_bit_for_bit_in_channels_last(
    activation: type[nn.Module], batch: int
) -> None:
    """The gradient after the pool is contiguous, what the activation read is not."""
    torch.manual_seed(0)
    convolutions = [nn.Conv2d(n, 8, 3, bias=False) for n in (3, 8)]
    model = nn.Sequential(
        convolutions[0], nn.BatchNorm2d(8), activation(), convolutions[1], nn.BatchNorm2d(8), activation()
    )
    model.extend([nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(8, 5)]).to(memory_format=torch.channels_last)
    inputs = [x.to(memory_format=torch.channels_last) for x in images(3, batch, 3, 9, 9)]
    planned = copy.deepcopy(model)
    with costs_that_do_not_matter():
        shoal.compile(planned, "1TiB", options=shoal.Options(planner=keep_nothing))
        for x in inputs:
            assert all(map(torch.equal, gradients(planned, x), gradients(model, x)))
    assert copies(planned.shoal.plan) == []


_library = torch.library.Library("shoal_first_run", "FRAGMENT")
_library.define("turned(Tensor x) -> Tensor")
_library.define("cut(Tensor x) -> Tensor")
for _name, _kernel, _fake in (
    # Twice the input, laid out as its transpose, where the fake kernel says as the input.
    ("turned", lambda x: (2 * x).mT.contiguous().mT, torch.empty_like),
    ("cut", lambda x: 2 * x[:, 1:], torch.empty_like),
):
    _library.impl(_name, _kernel, "CPU")
    torch.library.register_fake(f"shoal_first_run::{_name}", _fake, lib=_library)
    torch.library.register_autograd(
        f"shoal_first_run::{_name}",
        lambda ctx, grad: 2 * grad,
        setup_context=lambda ctx, inputs, output: None,
        lib=_library,
    )


class Lies(nn.Module):
    """Linear layers, an op whose fake kernel lies and, in the other direction, a kernel that trusts strides."""

    def __init__(self, name: str = "turned") -> None:
        super().__init__()
        self.first, self.last, self.name = nn.Linear(64, 64), nn.Linear(64, 5), name

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = getattr(torch.ops.shoal_first_run, self.name)(self.first(x).tanh())
        return self.last(y.sigmoid() * y).mean(1)


def rows(batch: int = 4) -> torch.Tensor:
    return images(1, batch, 64, 64)[0]


def copies(plan: Plan | None) -> list[Any]:
    assert plan is not None
    return [op for op in plan.graph.ops if op.target == "shoal.memory_format.copied"]


@needs_compiler
@pytest.mark.parametrize("planner", ["keep_all", keep_nothing])
def test_a_layout_that_the_fake_kernel_lied_about_is_restored_by_a_copy_that_the_plan_counts(
    planner: Any, caplog: pytest.LogCaptureFixture
) -> None:
    plain = Lies()
    planned = shoal.compile(copy.deepcopy(plain), "1GiB", options=shoal.Options(planner=planner))
    expected = gradients(plain, rows())
    with caplog.at_level(logging.WARNING, "shoal"):
        for step in range(4):
            found = gradients(planned, rows())
            assert error(found, expected) < 1e-6
            if step == 0:
                assert planned.shoal.plans == ()
    said = [record.getMessage() for record in caplog.records if "shoal_first_run.turned" in record.getMessage()]
    assert len(said) == 1 and "planned from the next step on" in said[0]
    assert planned.shoal.repairs == 0
    (copy_op,) = copies(planned.shoal.plan)
    graph = planned.shoal.plan.graph
    assert [graph.storages[s].nbytes for s in copy_op.writes] == [rows().nbytes]
    assert planned.shoal.measured_peak_bytes <= planned.shoal.predicted_peak_bytes * 1.02
    assert planned.shoal.predicted_peak_bytes <= planned.shoal.measured_peak_bytes * 1.02


def test_where_the_copy_cannot_be_planned_the_step_is_refused() -> None:
    model = torch.compile(Lies(), backend="shoal", options={"budget": "1GiB"})
    with raising(CaptureError, "[4096, 1, 64]", "[4096, 64, 1]", "register_fake"):
        gradients(model, rows())
    planned = Lies()
    with costs_that_do_not_matter():
        made = shoal.plan(planned, rows(), "1GiB", options=shoal.Options(planner="keep_all"))
        with pytest.raises(PlanError):
            shoal.compile(planned, options=shoal.Options(plan=made))(rows()).square().mean().backward()


def test_without_a_budget_a_torch_compile_backend_goes_on_with_the_copy() -> None:
    plain = Lies()
    with costs_that_do_not_matter():
        model = torch.compile(copy.deepcopy(plain), backend="shoal")
        for _ in range(2):
            assert error(gradients(model, rows()), gradients(plain, rows())) < 1e-6


def test_a_shape_that_the_fake_kernel_lied_about_is_refused() -> None:
    with costs_that_do_not_matter(), raising(CaptureError, "[4, 63, 64]"):
        gradients(shoal.compile(Lies("cut"), "1GiB"), rows())


def test_a_first_run_frees_what_the_generated_code_frees() -> None:
    graph = fx.Graph()
    x, y, unread = (graph.placeholder(name) for name in ("x", "y", "unread"))
    total = graph.call_function(torch.add, (x, y))
    graph.call_function(torch.neg, (total,))  # nothing reads it
    last = graph.call_function(torch.mul, (total, y))
    graph.output((last, [unread, None]))
    module = fx.GraphModule({}, graph)

    def events(run: Callable[..., Any]) -> tuple[list[int], Any]:
        arguments = [torch.ones(8), torch.ones(8), torch.ones(8)]
        gc.collect()  # not while it is recorded: other tests have left tensors
        result, changes = allocations.record(lambda: run(arguments))
        assert arguments == []
        return changes, result

    looked, found = events(lambda arguments: run_nodes(module, arguments, lambda node, value: value))
    generated, expected = events(run_kernels(module, ()))
    assert looked == generated
    assert torch.equal(found[0], expected[0]) and found[1][1] is None


@pytest.mark.parametrize("batch", [1, 2])
@pytest.mark.parametrize("layout", ["contiguous", "channels_last", "transposed", "sliced", "one channel"])
def test_results_of_our_own_kernels_lie_as_traced(batch: int, layout: str, monkeypatch: pytest.MonkeyPatch) -> None:
    departed = []
    inspect = first_run._Look.__call__

    def watched(self: Any, node: fx.Node, value: Any) -> Any:
        before = len(self.departed)
        result = inspect(self, node, value)
        if len(self.departed) > before and first_run._source(node).startswith("shoal"):
            departed.append((first_run._source(node), value.shape, value.stride(), self.strides[node]))
        return result

    monkeypatch.setattr(first_run._Look, "__call__", watched)
    (x,) = images(1, batch, 4, 10, 10)
    x = {
        "contiguous": lambda: x,
        "channels_last": lambda: x.to(memory_format=torch.channels_last),
        "transposed": lambda: x.transpose(2, 3),
        "sliced": lambda: x.to(memory_format=torch.channels_last)[:, 1:, 1:, :9],
        "one channel": lambda: x[:, :1].to(memory_format=torch.channels_last),
    }[layout]()
    channels = x.shape[1]
    model = nn.Sequential(
        nn.MaxPool2d(3, 1, 1),
        nn.BatchNorm2d(channels),
        nn.ReLU(),
        nn.Dropout(0.2),
        nn.Conv2d(channels, channels, 3, padding=1),
        nn.BatchNorm2d(channels),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Conv2d(channels, 3, 1),
    )
    with costs_that_do_not_matter():
        shoal.compile(model, "1TiB", options=shoal.Options(planner=keep_nothing))
        model(x.detach().requires_grad_()).square().mean().backward()
    assert departed == []


def test_a_layout_is_restored_by_a_view_where_a_view_can_and_by_a_copy_elsewhere() -> None:
    x = torch.randn(1, 3, 4)
    assert in_traced_layout(x, (12, 4, 1)) is x
    seen = in_traced_layout(x, (7, 4, 1))
    assert seen.stride() == (7, 4, 1) and seen.data_ptr() == x.data_ptr()
    other = in_traced_layout(x, (12, 1, 3))
    assert other.stride() == (12, 1, 3) and torch.equal(other, x) and other.data_ptr() != x.data_ptr()
    assert torch.equal(copied(x[:, 1:], (1, 1, 2)), x[:, 1:])
    assert is_writable((1, 3, 4), (0, 1, 3)) and not is_writable((2, 3), (0, 1)) and not is_writable((3, 3), (2, 1))


class Inverse(nn.Module):
    """A complex `pinv`, whose kernel is wrong under any dispatch mode, after a linear layer."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(48, 48)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        z = torch.view_as_complex(self.linear(x).view(-1, 6, 4, 2)) + torch.eye(6, 4)
        return torch.view_as_real(torch.linalg.pinv(z))


@pytest.mark.parametrize("training", [True, False])
def test_the_first_call_is_right_where_a_dispatch_mode_makes_a_kernel_wrong(training: bool) -> None:
    torch.manual_seed(0)
    plain = Inverse()
    ours = copy.deepcopy(plain)
    compiled = shoal.compile(ours, budget="64MiB", allow="exact")
    for _ in range(2):
        x = torch.randn(3, 48)
        with torch.set_grad_enabled(training):
            expected, found = plain(x), compiled(x)
        torch.testing.assert_close(found, expected)
        if training:
            for y, model in ((expected, plain), (found, ours)):
                model.zero_grad()
                (y * torch.arange(y.numel()).view(y.shape)).mean().backward()
            torch.testing.assert_close(ours.linear.weight.grad, plain.linear.weight.grad)


def test_pytorchs_warning_about_what_a_custom_op_returns_is_kept() -> None:
    with torch.library._scoped_library("shoal_test_aliasing", "FRAGMENT") as library:
        library.define("same(Tensor x) -> Tensor")
        library.impl("same", lambda x: x, "CompositeExplicitAutograd")
        library.impl("same", lambda x: torch.empty_like(x), "Meta")
        same = torch.ops.shoal_test_aliasing.same.default

        class Calls(nn.Module):
            def __init__(self) -> None:
                super().__init__()
                self.linear = nn.Linear(4, 4)

            def forward(self, x: torch.Tensor) -> torch.Tensor:
                return self.linear(x).sum() + same(x.detach()).sum()

        compiled = shoal.compile(Calls(), budget="64MiB")
        # Where the environment has CI set, PyTorch raises what it warns of elsewhere.
        with functorch_config.patch(error_on_custom_op_aliasing=False), pytest.warns(UserWarning, match="alias"):
            compiled(torch.randn(2, 4))
