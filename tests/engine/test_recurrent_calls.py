"""Calls that are given each other's results before one backward pass: a cell and its state, a rollout."""

from __future__ import annotations

import copy
import gc
from collections.abc import Callable
from itertools import pairwise

import pytest
import torch
from torch import nn

import shoal
from shoal.errors import BudgetError
from shoal.memory import limit
from tests.engine.session_loops import true_peak
from tests.float32_rule import too_far
from tests.scratch import needs_little_scratch

FRAMES = torch.randn(7, 2, 1, 16, 16, generator=torch.Generator().manual_seed(0))
Step = Callable[[nn.Module], None]


class Cell(nn.Module):
    """A convolutional LSTM's cell, and what it says of the next frame."""

    def __init__(self) -> None:
        super().__init__()
        self.gates, self.out = nn.Conv2d(9, 32, 3, padding=1), nn.Conv2d(8, 1, 1)

    def forward(self, x: torch.Tensor, h: torch.Tensor, c: torch.Tensor) -> tuple[torch.Tensor, ...]:
        i, f, o, g = self.gates(torch.cat([x, h], 1)).chunk(4, 1)
        c = torch.sigmoid(f) * c + torch.sigmoid(i) * torch.tanh(g)
        h = torch.sigmoid(o) * torch.tanh(c)
        return self.out(h), h, c


def rolled_out() -> nn.Module:
    layers = [nn.Conv2d(1, 16, 3, padding=1), nn.GELU(), nn.Conv2d(16, 16, 3, padding=1), nn.GELU()]
    return nn.Sequential(*layers, nn.Conv2d(16, 1, 3, padding=1))


def cell_step(cell: nn.Module) -> None:
    cell.zero_grad()
    h = c = torch.zeros(2, 8, 16, 16)
    loss = torch.zeros(())
    for now, after in pairwise(FRAMES):
        y, h, c = cell(now, h, c)
        loss = loss + (y - after).square().mean()
    loss.backward()


def truncated_step(cell: nn.Module) -> None:
    """A backward pass after every three calls; the state goes on without its history."""
    cell.zero_grad()
    h = c = torch.zeros(2, 8, 16, 16)
    for start in (0, 3):
        loss = torch.zeros(())
        for at in range(start, start + 3):
            y, h, c = cell(FRAMES[at], h, c)
            loss = loss + (y - FRAMES[at + 1]).square().mean()
        loss.backward()
        h, c = h.detach(), c.detach()


def rollout_step(net: nn.Module) -> None:
    """Eager code lies between the calls: what one is given is computed from what the one before returned."""
    net.zero_grad()
    x, loss = FRAMES[0], torch.zeros(())
    for after in FRAMES[1:]:
        x = x + 0.1 * net(x)
        loss = loss + (x - after).square().mean()
    loss.backward()


LOOPS = {"cell": (Cell, cell_step), "truncated": (Cell, truncated_step), "rollout": (rolled_out, rollout_step)}


def peak_of(net: nn.Module, step: Step) -> int:
    """Of a step after the first, as in a loop that drops gradients before it."""
    net.zero_grad()
    return true_peak(net, lambda: step(net), [FRAMES])


@pytest.mark.slow
@needs_little_scratch
@pytest.mark.parametrize(("name", "share"), [("cell", 0.7), ("truncated", 0.9), ("rollout", 0.6)])
def test_they_train_in_a_share_of_plain_pytorchs_peak(name: str, share: float) -> None:
    make, step = LOOPS[name]
    torch.manual_seed(0)
    plain = make()
    ours = shoal.compile(copy.deepcopy(plain), int(share * peak_of(plain, step)))
    for _ in range(3):
        step(ours)
        pairs = zip(ours.parameters(), plain.parameters(), strict=True)
        assert all(torch.equal(a.grad, b.grad) for a, b in pairs)  # type: ignore[arg-type]
    assert ours.shoal.repairs == 0
    assert peak_of(ours, step) <= ours.shoal.budget_bytes
    assert ours.shoal.measured_peak_bytes == pytest.approx(ours.shoal.predicted_peak_bytes, rel=0.02)


class NormCell(nn.Module):
    """A cell whose batch norms may be frozen: its first call has another variant under a tight budget than with
    room."""

    def __init__(self, frozen: bool) -> None:
        super().__init__()
        layers = [nn.Conv2d(9, 32, 3, padding=1), nn.BatchNorm2d(32), nn.ReLU()]
        self.body = nn.Sequential(*layers, nn.Conv2d(32, 8, 3, padding=1), nn.BatchNorm2d(8), nn.ReLU())
        self.out = nn.Conv2d(8, 1, 1)
        for layer in self.body if frozen else ():
            if isinstance(layer, nn.BatchNorm2d):
                layer.eval().requires_grad_(False)

    def forward(self, x: torch.Tensor, h: torch.Tensor, c: torch.Tensor) -> tuple[torch.Tensor, ...]:
        h = self.body(torch.cat([x, h], 1))
        return self.out(h), h, c


@pytest.mark.slow
@needs_little_scratch
@pytest.mark.parametrize(
    ("make", "share"),
    [(Cell, 0.4), (lambda: NormCell(False), 0.3), (lambda: NormCell(True), 0.3)],
    ids=["cell", "batch norms", "frozen batch norms"],
)
def test_what_is_refused_names_a_budget_in_which_all_calls_run(make: Callable[[], nn.Module], share: float) -> None:
    torch.manual_seed(0)
    plain = make()
    budget_bytes = int(share * peak_of(copy.deepcopy(plain), cell_step))
    ours = shoal.compile(copy.deepcopy(plain), budget_bytes, allow="exact")
    with pytest.raises(BudgetError) as refused:
        for _ in range(3):
            cell_step(ours)
    named_bytes = refused.value.least_feasible_bytes
    assert named_bytes is not None
    ours = shoal.compile(copy.deepcopy(plain), named_bytes, allow="exact")
    for _ in range(4):
        assert peak_of(ours, cell_step) <= named_bytes


def test_equal_graphs_of_equal_shares_are_compiled_once() -> None:
    torch.manual_seed(0)
    ours = shoal.compile(Cell(), "1GiB")
    for _ in range(3):
        cell_step(ours)
    runtime = ours._compiled_call_impl._iterations
    (known,) = runtime.known.values()
    shares = [(node.part, tuple(sorted(node.share.residences.items()))) for node in known.nodes]
    assert len(shares) == 6 > len(set(shares))
    assert len({id(node.step) for node in known.nodes}) == len(set(shares))


@pytest.mark.slow
@pytest.mark.parametrize("share", [1.0, 0.5])
@pytest.mark.parametrize("encoded", [False, True])
def test_calls_that_do_not_depend_on_each_other_are_one_iteration_too(share: float, encoded: bool) -> None:
    """Also where other compiled code, which trains as well, makes what they are given."""
    torch.manual_seed(0)
    plain = rolled_out()
    encoder = torch.compile(nn.Conv2d(1, 1, 3, padding=1), backend="aot_eager") if encoded else nn.Identity()

    def step(net: nn.Module) -> None:
        net.zero_grad()
        sum(net(encoder(frame)).square().mean() for frame in FRAMES).backward()  # type: ignore[union-attr]

    budget_bytes = int(share * peak_of(plain, step))
    ours = shoal.compile(copy.deepcopy(plain), budget_bytes)
    for _ in range(3):
        step(ours)
        pairs = zip(ours.parameters(), plain.parameters(), strict=True)
        assert all(torch.equal(a.grad, b.grad) for a, b in pairs)  # type: ignore[arg-type]
    assert peak_of(ours, step) <= budget_bytes
    assert ours.shoal.measured_peak_bytes == pytest.approx(ours.shoal.predicted_peak_bytes, rel=0.02)
    assert ours.shoal.repairs == 0 and ours.shoal.plan.breaks == ()


def two_losses_step(net: nn.Module) -> None:
    """A gradient of each of two losses of one call, as for gradient surgery."""
    parameters = list(net.parameters())
    y = net(FRAMES[0].to(parameters[0].dtype))
    losses = y.square().mean(), (y - 1).square().square().mean()
    first = torch.autograd.grad(losses[0], parameters, retain_graph=True)
    second = torch.autograd.grad(losses[1], parameters)
    for parameter, one, other in zip(parameters, first, second, strict=True):
        parameter.grad = one + other


@pytest.mark.slow
@needs_little_scratch
@pytest.mark.parametrize("share", [4.0, 0.75])
def test_a_backward_pass_that_runs_twice_is_of_an_iteration(share: float) -> None:
    torch.manual_seed(0)
    plain = rolled_out()
    ours = shoal.compile(copy.deepcopy(plain), int(share * peak_of(plain, two_losses_step)))
    for _ in range(5):
        ours.zero_grad()
        two_losses_step(ours)
    exact = copy.deepcopy(plain).double()
    two_losses_step(plain), two_losses_step(exact)
    gradients = [{name: p.grad for name, p in net.named_parameters()} for net in (ours, plain, exact)]
    assert not too_far(*gradients)  # type: ignore[arg-type]
    peak_bytes = peak_of(ours, two_losses_step)
    assert peak_bytes <= ours.shoal.budget_bytes
    assert peak_bytes <= 1.01 * ours.shoal.predicted_peak_bytes and ours.shoal.repairs == 0


class Broken(nn.Sequential):
    """Two graphs."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self[1](self[0](x))
        torch._dynamo.graph_break()
        return self[4](self[3](self[2](x)))


@pytest.mark.parametrize("kind", [nn.Sequential, Broken])
def test_a_graph_may_be_kept_in_some_steps_only(kind: type[nn.Sequential]) -> None:
    """AOTAutograd compiles a backward pass for one of the two."""
    torch.manual_seed(0)
    plain = kind(nn.Linear(16, 32), nn.GELU(), nn.Linear(32, 32), nn.GELU(), nn.Linear(32, 4))
    ours = shoal.compile(copy.deepcopy(plain), "1GiB")
    x = torch.randn(8, 16)
    for keeps in (False, False, True, True, False, True):
        for net in (ours, plain):
            net.zero_grad()
            loss = net(x).square().mean()
            if keeps:
                loss.backward(retain_graph=True)
            loss.backward()
        pairs = zip(ours.parameters(), plain.parameters(), strict=True)
        assert all(torch.equal(a.grad, b.grad) for a, b in pairs)  # type: ignore[arg-type]


def test_a_result_that_is_kept_from_before_training_is_no_call_of_an_iteration() -> None:
    torch.manual_seed(0)
    ours = shoal.compile(rolled_out(), "1GiB")
    kept = ours(FRAMES[0])
    for _ in range(4):
        ours.zero_grad()
        ours(FRAMES[1]).square().mean().backward()
    assert len(ours.shoal.plans) == 1 and ours.shoal.repairs == 0
    (known,) = ours._compiled_call_impl._iterations.known.values()
    assert len(known.nodes) == 1 and known.has_run_planned
    assert kept.grad_fn is not None


def test_a_model_that_is_gone_is_metered_no_longer() -> None:
    ours = shoal.compile(rolled_out(), "1GiB")
    for _ in range(2):
        (ours(FRAMES[0]) - ours(FRAMES[1])).square().mean().backward()
    del ours
    gc.collect()
    assert not limit._active


@pytest.mark.slow
def test_a_kept_result_with_which_the_first_iteration_is_over_the_budget_is_said(
    caplog: pytest.LogCaptureFixture,
) -> None:
    torch.manual_seed(0)
    plain = rolled_out()

    def step(net: nn.Module) -> None:
        net(FRAMES[1]).square().mean().backward()

    budget_bytes = int(1.05 * peak_of(plain, step))
    ours = shoal.compile(copy.deepcopy(plain), budget_bytes)
    kept = ours(FRAMES[0])
    try:
        for _ in range(2):
            ours.zero_grad()
            step(ours)
    except BudgetError:
        said = True
    else:
        said = any(record.funcName == "planned_apart_is_over" for record in caplog.records)
    assert said and kept.grad_fn is not None
