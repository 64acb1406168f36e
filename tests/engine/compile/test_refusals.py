"""What cannot be compiled is refused in one line that says what would do."""

from __future__ import annotations

import copy
import inspect
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import shoal
from shoal.errors import BudgetError, CaptureError, InputError
from tests.engine.compile.compiled import ROOMY, compiled
from tests.engine.keywords import keywords
from tests.engine.training_laws import (
    assert_same_training,
    blocks,
    classifier,
    costs_that_do_not_matter,
    differences,
    images,
    mean_square,
    same_bits,
    train,
)
from tests.raising import raising


class _Rounded(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        ctx.mark_non_differentiable()  # of nothing: Dynamo of torch 2.13 fails on it, with an AssertionError
        return x.round()

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:  # type: ignore[override]
        return gradient


class Rounding(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.one, self.two = nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Tanh()), nn.Linear(8, 8)

    def rounded(self, x: torch.Tensor) -> torch.Tensor:
        return _Rounded.apply(x)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.two(self.rounded(self.one(x)))


class RoundingEagerly(Rounding):
    @torch.compiler.disable  # type: ignore[untyped-decorator]
    def rounded(self, x: torch.Tensor) -> torch.Tensor:
        return super().rounded(x)


def test_what_dynamo_itself_fails_on_is_refused_with_its_line_and_what_helps_does() -> None:
    with raising(CaptureError, "AssertionError", "test_refusals.py", "torch.compiler.disable"):
        shoal.compile(Rounding(), budget=ROOMY)(torch.randn(2, 8))
    assert_same_training(RoundingEagerly(), images(2, 4, 8))


def test_what_fails_in_dynamo_alone_is_refused_with_its_line_and_changes_nothing() -> None:
    @torch.library.custom_op("shoal_tests::misdescribed", mutates_args=())
    def misdescribed(x: torch.Tensor) -> torch.Tensor:
        return x + torch.rand_like(x)

    @misdescribed.register_fake
    def _(x: torch.Tensor) -> torch.Tensor:
        raise RuntimeError("no such shape")

    class Misdescribed(TwoInputs):
        def forward(self, x: torch.Tensor, shift: torch.Tensor) -> torch.Tensor:
            return misdescribed(super().forward(x, shift))

    model = shoal.compile(Misdescribed(), budget=ROOMY)
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    generator = torch.get_rng_state()
    with raising(CaptureError, "test_refusals.py"):
        model(torch.randn(4, 8, generator=torch.Generator()), torch.ones(8))
    assert not differences(model.state_dict(), before) and same_bits(torch.get_rng_state(), generator)


def test_a_gradient_that_is_sparse_is_refused_with_its_layer() -> None:
    model = shoal.compile(nn.Sequential(nn.EmbeddingBag(9, 4, sparse=True), nn.Linear(4, 2)), budget=ROOMY)
    with raising(CaptureError) as caught:
        model(torch.tensor([[1, 2]]))
    assert caught.value.message.startswith("the gradient of layer 0 is torch.sparse_coo")
    assert "sparse=False" in caught.value.message and "budget=None" in caught.value.message


@pytest.mark.parametrize(
    "ask",
    [
        lambda model: shoal.compile(model, budget=ROOMY),
        lambda model: shoal.compile(model, budget=shoal.Budget(ROOMY)),
        lambda model: shoal.fit(model, lambda images: torch.empty(images, 3, 8, 8), ROOMY),
        lambda model: shoal.fit(model, lambda sides: torch.empty(2, 3, *sides), ROOMY, patch=(8, 8)),
        lambda model: shoal.frontier(model, lambda images: torch.empty(images, 3, 8, 8), budget=ROOMY),
    ],
)
def test_a_lazy_layer_that_has_no_shape_yet_is_named(ask: Callable[[nn.Module], object]) -> None:
    model = nn.Sequential(nn.Conv2d(3, 8, 3), nn.Flatten(), nn.LazyLinear(5))
    with raising(InputError, "2.weight", "LazyLinear"):
        ask(model)
    model(torch.empty(2, 3, 8, 8))
    assert isinstance(shoal.compile(model, budget=ROOMY), nn.Module)


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


class Choosing(Branching):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.conv(x)
        scale = (1.0, 2.0)[int(torch.empty(1).uniform_(0.0, 2.0).item())]
        return scale * y


@pytest.mark.parametrize(
    ("model", "line", "text"),
    [
        (Branching, 2, "if y.sum() > 0:"),
        (Printing, 2, "torch._dynamo.graph_break()"),
        (Choosing, 2, "scale = (1.0, 2.0)[int(torch.empty(1).uniform_(0.0, 2.0).item())]"),
    ],
)
def test_a_model_that_has_to_be_one_graph_and_is_not_is_refused_with_the_line_that_breaks_it(
    model: type[nn.Module], line: int, text: str
) -> None:
    number = inspect.getsourcelines(model.forward)[1] + line
    planned = shoal.compile(model(), budget=ROOMY, options=shoal.Options(strict=True))
    with raising(CaptureError, f"{Path(__file__).name}:{number}", f"({text})"):
        planned(torch.randn(2, 3, 8, 8))
    with torch.no_grad():
        assert planned(torch.randn(2, 3, 8, 8)).shape == (2, 4, 6, 6)


@pytest.mark.slow
def test_a_budget_below_parameters_and_their_gradients_is_refused_with_one_that_works() -> None:
    net = classifier(3, *[8] * 9)
    held_bytes = sum(tensor.nbytes for tensor in (*net.parameters(), *net.buffers()))
    gradient_bytes = sum(parameter.nbytes for parameter in net.parameters())
    x = torch.randn(2, 3, 16, 16)
    with pytest.raises(BudgetError) as refused:
        shoal.compile(copy.deepcopy(net), budget=held_bytes + gradient_bytes, allow="bitwise")(x)
    enough_bytes = refused.value.least_feasible_bytes
    assert refused.value.persistent_bytes > held_bytes + gradient_bytes and "searched" in refused.value.details
    assert enough_bytes is not None and enough_bytes > held_bytes + gradient_bytes + x.nbytes
    model: Any = shoal.compile(net, budget=enough_bytes, allow="bitwise")
    for _ in range(2):
        mean_square(model(x)).backward()
        model.zero_grad()
    assert model.shoal.measured_peak_bytes <= enough_bytes and not model.shoal.repairs


@pytest.mark.parametrize("budget", ["lots", "", "12 parsecs", "-1GiB", 0, -5, "0 MiB", 1.5, True, [1]])
def test_a_budget_that_is_no_number_of_bytes_is_refused(budget: Any) -> None:
    with raising(InputError, f"budget={budget!r}"):
        shoal.compile(nn.Conv2d(3, 4, 3), budget=budget)


@pytest.mark.parametrize(
    ("wrong", "complaint"),
    [
        ({"planner": "joined"}, "'joined'"),
        ({"kernels": "tvm"}, "kernels='tvm'"),
        ({"kernels": None}, "kernels=None"),
        ({"planner": 3}, ""),
        ({"optimizer": "adamix"}, ""),
        ({"plan": "plan.json"}, ""),
    ],
)
def test_an_argument_that_is_none_of_those_listed_is_refused(wrong: dict[str, Any], complaint: str) -> None:
    with raising(InputError, complaint):
        shoal.compile(nn.Conv2d(3, 4, 3), budget=ROOMY, **keywords(wrong))


def test_only_modules_can_be_compiled() -> None:
    with raising(InputError, "torch.nn.Module"):
        shoal.compile(mean_square, budget=ROOMY)


def test_a_budget_below_parameters_and_optimizer_state_is_refused_at_once() -> None:
    net = nn.Linear(100, 100, bias=False)
    optimizer = torch.optim.SGD(net.parameters(), momentum=0.9)
    need = 2 * 40_000  # weight, momentum
    with pytest.raises(BudgetError) as caught:
        shoal.compile(net, budget=need - 1, optimizer=optimizer)
    assert (caught.value.budget_bytes, caught.value.least_feasible_bytes) == (need - 1, None)
    assert caught.value.persistent_bytes == need
    assert not hasattr(net, "shoal")
    assert shoal.compile(net, budget=need, optimizer=optimizer) is net


def test_a_head_that_the_step_does_not_use_needs_no_gradient() -> None:
    class TwoHeads(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.used, self.unused = nn.Linear(16, 4), nn.Linear(512, 512)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.used(x)

    torch.manual_seed(5)
    net = TwoHeads()
    held = sum(p.nbytes for p in net.parameters())
    planned = shoal.compile(net, budget=int(1.1 * held))
    planned(torch.randn(3, 16)).square().mean().backward()
    assert net.unused.weight.grad is None and net.used.weight.grad is not None
    assert planned.shoal.measured_peak_bytes <= int(1.1 * held)


def test_an_infeasible_budget_names_what_would_do_and_nothing_is_run() -> None:
    net, batches = classifier(3, 8, 8), images(2, 4, 3, 8, 8)
    before = {name: tensor.clone() for name, tensor in net.state_dict().items()}
    generator = torch.get_rng_state()
    planned = shoal.compile(copy.deepcopy(net), budget="30KiB", allow="bitwise", name="small net")
    with raising(BudgetError, "small net", "30.00 KiB") as caught:
        planned(batches[0])
    error = caught.value
    assert not differences(planned.state_dict(), before)
    assert same_bits(torch.get_rng_state(), generator)
    assert error.budget_bytes == 30 * 1024
    assert error.op and error.layer in dict(net.named_modules())
    assert len(error.largest) == 3
    assert all(layer in dict(net.named_modules()) and nbytes > 0 for _, layer, nbytes in error.largest)

    enough = shoal.compile(copy.deepcopy(net), budget=error.least_feasible_bytes, allow="bitwise")
    enough(batches[0]).square().mean().backward()
    assert enough.shoal.repairs == 0
    assert enough.shoal.measured_peak_bytes <= error.least_feasible_bytes
    less = shoal.compile(copy.deepcopy(net), budget=int(0.9 * error.least_feasible_bytes), allow="bitwise")
    with pytest.raises(BudgetError):
        less(batches[0])


def test_a_batch_too_large_for_the_budget_is_refused_and_the_others_go_on() -> None:
    net, batches, (large,) = nn.Sequential(*blocks(3, 8, 8)), images(3, 4, 3, 8, 8), images(1, 64, 3, 8, 8)
    planned = compiled(net, budget="200KiB", allow="bitwise", planner="joint")
    with costs_that_do_not_matter():
        train(planned, batches)
        with pytest.raises(BudgetError):
            planned(large)
        train(net, batches)
        assert not differences(train(planned, batches), train(net, batches))


class TwoInputs(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.linear = nn.BatchNorm1d(8), nn.Linear(8, 8)

    def forward(self, x: torch.Tensor, shift: torch.Tensor) -> torch.Tensor:
        assert shift is None or shift.size(-1) == x.size(-1)
        torch._assert(x.dim() == 2, "expected a batch of rows")
        return self.linear(self.norm(x) + shift)


MISTAKES = {
    "no arguments": ((), {}),
    "one too many": ((torch.ones(4, 8),), {"shift": torch.ones(8), "mask": None}),
    "no tensor": ((torch.ones(4, 8), None), {}),
    "the batch as it is": (({"x": torch.ones(4, 8), "shift": torch.ones(8)},), {"shift": torch.ones(8)}),
    "no batch": ((torch.ones(8), torch.ones(8)), {}),
    "another size": ((torch.ones(4, 7), torch.ones(7)), {}),
}


@pytest.mark.parametrize("mistake", MISTAKES)
@pytest.mark.parametrize("planned_before", [False, True])
@pytest.mark.parametrize("strict", [False, True])
def test_a_mistaken_call_raises_as_the_plain_model_does_and_the_model_is_one_graph_as_before(
    mistake: str, strict: bool, planned_before: bool, caplog: pytest.LogCaptureFixture
) -> None:
    args, kwargs = MISTAKES[mistake]
    plain = TwoInputs()
    with pytest.raises((TypeError, AttributeError, RuntimeError, AssertionError)) as expected:
        plain(*args, **kwargs)
    model = shoal.compile(TwoInputs(), budget=ROOMY, allow="recompute", options=shoal.Options(strict=strict))
    batch = torch.randn(4, 8), torch.randn(8)
    if planned_before:
        model(*batch).sum().backward()
        model.zero_grad()
    if strict and mistake == "the batch as it is":  # its line is named
        with raising(CaptureError, "x.size"):
            model(*args, **kwargs)
        return
    with pytest.raises(type(expected.value)) as raised:
        model(*args, **kwargs)
    assert str(raised.value) == str(expected.value)
    assert raised.value.__context__ is None, "nothing of the capture is told"
    model(*batch).sum().backward()
    assert model.shoal.plan.breaks == () and model.shoal.measured_peak_bytes and model.shoal.repairs == 0
    assert not caplog.messages, "it is not several graphs"
    assert model.shoal.captures == 1 or mistake == "the batch as it is"
