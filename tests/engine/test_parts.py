"""Models that are several graphs: the same training as plain PyTorch, inside one budget over all of them."""

from __future__ import annotations

import copy
import gc
import logging
import weakref
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy
import pytest
import torch
from torch import nn
from torch.multiprocessing.reductions import StorageWeakRef
from torch.nn import functional as F

import shoal
from shoal.core.joined_step import STRETCH
from shoal.core.plan import Plan
from shoal.core.step import StepGraph
from shoal.errors import BudgetError, CaptureError
from shoal.memory.limit import memory_limit
from tests.engine.training_laws import (
    assert_same_training,
    blocks,
    costs_that_do_not_matter,
    differences,
    images,
    needs_compiler,
    train,
)

Between = Callable[[torch.Tensor], torch.Tensor | None]


class Chain(nn.Module):
    """Stages and a head, and something between them that Dynamo may not capture."""

    n_stages = 2

    def __init__(self, between: Between, stages: list[nn.Module] | None = None, channels: int = 4) -> None:
        super().__init__()
        self.stages = nn.ModuleList(stages or blocks(3, *[channels] * self.n_stages))
        self.between = between
        self.head = nn.Linear(channels, 5)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.then(self.stages[0](x))
        return self.head(self.then(self.stages[1](x)).mean((2, 3)))

    def then(self, x: torch.Tensor) -> torch.Tensor:
        made = self.between(x)
        return x if made is None else made


class Looping(Chain):
    """Dynamo gives a function up whose loop breaks, and captures what that calls."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for stage in self.stages:
            x = self.then(stage(x))
        return self.head(x.mean((2, 3)))


class Prepared(Looping):
    """Eager code before the first graph saves tensors, and goes back after it."""

    def __init__(self, between: Between, stages: list[nn.Module] | None = None, channels: int = 4) -> None:
        super().__init__(between, stages, channels)
        self.gain = nn.Parameter(torch.ones(8, 1, 1, 1))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(computes_eagerly(computes_eagerly(self.gain * x)))


class Tied(Chain):
    """Two graphs with the same weights."""

    n_stages = 3

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.then(self.stages[0](x))
        x = self.then(self.stages[1](x))
        x = self.then(self.stages[1](x))
        return self.head(self.stages[2](x).mean((2, 3)))


class Skipping(Chain):
    """What one graph makes is read by all later ones, and returned."""

    n_stages = 3

    def forward(self, x: torch.Tensor) -> Any:
        first = self.then(self.stages[0](x))
        second = self.then(self.stages[1](first))
        third = self.then(self.stages[2](first + second))
        return {"classes": self.head((first + third).mean((2, 3))), "first": first}


class Recurrent(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.before, self.lstm = nn.Conv1d(3, 8, 3, padding=1), nn.LSTM(8, 8, batch_first=True)
        self.after = nn.Sequential(nn.Conv1d(8, 8, 3), nn.ReLU(), nn.Conv1d(8, 5, 3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.before(x.flatten(2)).sigmoid()
        torch._dynamo.graph_break()
        y, _ = self.lstm(y.transpose(1, 2))
        torch._dynamo.graph_break()
        return self.after(y.transpose(1, 2))


class Normalized(Chain):
    """A function with a number that PyTorch takes as a constant alone, called with the same one twice."""

    n_stages = 3

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for stage, eps in zip(self.stages, (0.1, 0.2, 0.2), strict=True):
            x = normalized(stage(x), eps)
            self.between(x)
        return self.head(breaks_within(x).mean((2, 3)))


def normalized(x: torch.Tensor, eps: float) -> torch.Tensor:
    return F.group_norm(x, 2, eps=eps)


def breaks_within(x: torch.Tensor) -> torch.Tensor:
    x = x.exp()
    torch._dynamo.graph_break()
    return x.sin()


def breaks(x: torch.Tensor) -> None:
    torch._dynamo.graph_break()


def prints(x: torch.Tensor) -> None:
    print(end="")


def scales_by_its_mean(x: torch.Tensor) -> torch.Tensor:
    return x * (1 + x.mean().item())


def branches(x: torch.Tensor) -> torch.Tensor:
    return 2 * x if x.sum() > 0 else 3 * x


@torch.compiler.disable  # type: ignore[untyped-decorator]
def computes_eagerly(x: torch.Tensor) -> torch.Tensor:
    return (x.sigmoid() * x).tanh()


@torch.compiler.disable  # type: ignore[untyped-decorator]
def changes_in_place(x: torch.Tensor) -> torch.Tensor:
    return (x + 1).mul_(1.5)


def dropping(inputs: int, channels: int) -> nn.Module:
    return nn.Sequential(nn.Conv2d(inputs, channels, 3, padding=1), nn.Dropout(0.3), nn.Sigmoid())


NETWORKS: dict[str, Callable[[], nn.Module]] = {
    "branch": lambda: Chain(branches),
    "eager ops": lambda: Chain(computes_eagerly),
    "in place": lambda: Chain(changes_in_place),
    "loop": lambda: Looping(prints),
    "tied": lambda: Tied(breaks),
    "skip": lambda: Skipping(breaks),
    "dropout": lambda: Chain(breaks, [dropping(3, 4), dropping(4, 4)]),
    "lstm": Recurrent,
}


@pytest.mark.parametrize("network", NETWORKS)
def test_the_parts_of_a_model_train_as_plain_pytorch(network: str) -> None:
    planned = assert_same_training(NETWORKS[network](), images(3, 2, 3, 8, 8))
    assert planned.shoal.plan.breaks
    assert _parts(planned.shoal.plan.graph) >= 2


@pytest.mark.parametrize(
    "how",
    [
        {"batches_a_step": 2},
        {"backwards": 2},
        {"around_forward": lambda: torch.autocast("cpu", torch.bfloat16)},
    ],
    ids=["accumulation", "backward twice", "autocast"],
)
def test_they_do_in_every_loop(how: dict[str, Any]) -> None:
    assert_same_training(Chain(prints), images(4, 2, 3, 8, 8), **how)


def test_a_last_short_batch_has_parts_of_its_own_and_a_plan_for_all_up_to_the_largest() -> None:
    planned = assert_same_training(
        Chain(breaks), [*images(2, 3, 3, 8, 8), *images(1, 2, 3, 8, 8), *images(1, 3, 3, 8, 8)]
    )
    assert [_batch(plan.graph) for plan in planned.shoal.plans] == [3, 3]


def test_a_number_that_changes_between_graphs_is_no_new_graph() -> None:
    """The mean is another number in every step."""
    assert_same_training(Chain(scales_by_its_mean), images(5, 2, 3, 8, 8))


def test_evaluation_runs_as_without_shoal() -> None:
    plain, planned = Chain(breaks), Chain(breaks)
    planned.load_state_dict(plain.state_dict())
    shoal.compile(planned, budget="1GiB")
    (x,) = images(1, 2, 3, 8, 8)
    assert torch.equal(plain.eval()(x), planned.eval()(x))
    assert not planned.shoal.plans


def test_steps_that_go_different_ways_have_plans_of_their_own() -> None:
    class Choosing(Chain):
        n_stages = 3

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            x = self.stages[0](x)
            if self.between(x):
                return self.head(self.stages[1](x).mean((2, 3)))
            return self.head(self.stages[2](x).mean((2, 3)))

    turns = iter([True, True, False, False, True, False, True, False] * 2)
    chosen = torch.compiler.disable(lambda x: next(turns))
    planned = assert_same_training(Choosing(chosen), images(8, 2, 3, 8, 8))
    assert len(planned.shoal.plans) == 2


class Widening(nn.Module):
    """A batch of bright images goes a way that takes more than the others'."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(*[nn.Sequential(*blocks(c, 8, 8, 8)) for c in (3, 8)])
        self.narrow, self.wide = nn.Linear(8, 5), nn.Sequential(nn.Linear(8, 32), nn.GELU(), nn.Linear(32, 5))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        rows = self.body(x).permute(0, 2, 3, 1)
        return self.wide(rows) if x.mean() > 1 else self.narrow(rows)


@needs_compiler
def test_where_a_step_goes_a_way_that_does_not_fit_beside_the_plan_of_its_first_parts_it_begins_anew() -> None:
    plain = Widening()
    wide = copy.deepcopy(plain)
    shoal.compile(wide, budget=None)
    dark, bright = images(1, 2, 3, 32, 32)[0], images(1, 2, 3, 32, 32)[0] + 2
    _mean_square(wide, bright)
    ours = shoal.compile(copy.deepcopy(plain), budget=int(0.7 * wide.shoal.measured_peak_bytes), allow="bitwise")
    for x in (dark, dark, bright, dark, bright):
        for model in (plain, ours):
            model.zero_grad()
            _mean_square(model, x)
        assert all(
            torch.equal(p.grad, g.grad)
            for p, g in zip(ours.parameters(), plain.parameters(), strict=True)
            if p.grad is not None and g.grad is not None
        )
        assert all(map(torch.equal, ours.buffers(), plain.buffers()))
    assert ours.shoal.measured_peak_bytes <= ours.shoal.budget_bytes


@needs_compiler
@pytest.mark.parametrize(
    ("kind", "between", "share"),
    [(Looping, computes_eagerly, 0.8), (Prepared, prints, 0.75)],
    ids=["eager ops", "eager ops first"],
)
def test_one_budget_holds_for_all_parts(kind: type[Looping], between: Between, share: float) -> None:
    """Measured by a counter around whole steps; the plan's prediction is as near as that of one graph."""
    model = kind(between, [nn.Sequential(*blocks(c, 8, 8)) for c in (3, 8)], channels=8)
    plain_bytes, _ = _peaks(copy.deepcopy(model))
    budget = int(share * plain_bytes)
    shoal.compile(model, budget=budget, allow="recompute")
    first, later = _peaks(model)
    assert first <= budget
    assert later <= budget
    status = model.shoal
    assert status.repairs == 0
    assert status.plan.recomputed
    assert abs(status.predicted_peak_bytes - status.measured_peak_bytes) <= 0.02 * budget


@needs_compiler
def test_what_eager_code_uses_is_counted_where_a_part_saves_its_inputs_alone() -> None:
    model = shoal.compile(Chain(computes_eagerly, [*blocks(3, 4), nn.GELU()]), budget="2MiB")
    train(model, images(2, 4, 3, 16, 16))
    used_bytes = [op.workspace_bytes for op in model.shoal.plan.graph.ops if op.target == STRETCH]
    assert max(used_bytes) >= 4 * 4 * 16 * 16 * 4  # one result of eager code


class Stacking(Chain):
    """Eager code makes the batch that the graphs are given, as a detector's transform does."""

    def forward(self, pictures: list[torch.Tensor]) -> torch.Tensor:
        return super().forward(stacked(pictures))


@torch.compiler.disable  # type: ignore[untyped-decorator]
def stacked(pictures: list[torch.Tensor]) -> torch.Tensor:
    return torch.stack(pictures) / 255


@needs_compiler
def test_a_batch_that_eager_code_alone_reads_counts_all_step() -> None:
    model = shoal.compile(Stacking(prints, [nn.Sequential(*blocks(c, 8, 8)) for c in (3, 8)], channels=8), "1GiB")
    pictures = list(images(8, 3, 32, 32))
    for _ in range(3):
        model(pictures).square().mean().backward()
        model.zero_grad()
    status = model.shoal
    buffer_bytes = sum(b.nbytes for b in model.buffers())  # a copy of them goes with the call, to begin it anew
    assert status.plan.graph.storage_called["arguments"].nbytes == sum(x.nbytes for x in pictures) + buffer_bytes
    assert 0 <= status.predicted_peak_bytes - status.measured_peak_bytes < pictures[0].nbytes


class Skip(nn.Module):
    """A ReLU whose result is read by a convolution that is done with it long before the ReLU is."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Conv2d(4, 4, 3, padding=1), nn.Conv2d(4, 4, 3, padding=1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.first(x).relu()
        longer = self.first((x + 1).tanh())
        return self.last(x) + longer


@needs_compiler
@pytest.mark.parametrize(("last", "form"), [(nn.GELU, "as it is"), (Skip, "as it is, shrunk in the backward pass")])
def test_it_is_said_that_a_part_is_shrunk_where_a_budget_has_it_so(last: Callable[[], nn.Module], form: str) -> None:
    for budget, expected in (("64MiB", form), (None, "as it is")):
        model = shoal.compile(Chain(prints, [*blocks(3, 4), last()]), budget=budget)
        train(model, images(2, 1, 3, 256, 256))
        assert f"computed        {expected}\n" in str(model.shoal)


class Masking(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(8, 8), nn.Linear(8, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.last(self.first(x) * torch.from_numpy(numpy.random.rand(4, 8) > 0.5))


def test_what_numpy_draws_comes_from_numpys_generator() -> None:
    model = Masking()
    models = model, shoal.compile(copy.deepcopy(model), budget="1MiB")
    for one in models:
        numpy.random.seed(0)
        one(torch.ones(4, 8)).square().mean().backward()
    plain, ours = ([parameter.grad for parameter in one.parameters()] for one in models)
    assert all(map(torch.equal, ours, plain))


class Volumes(nn.Module):
    """On the CPU a convolution of a volume takes 27 times its result as scratch, where it is not computed in pieces."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([nn.Conv3d(before, 8, 3, padding=1) for before in (1, 8, 8)])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = self.part(layer, x)
        return x

    def part(self, layer: nn.Module, x: torch.Tensor) -> torch.Tensor:
        y = layer(x).sigmoid()
        torch._dynamo.graph_break()
        return y


@needs_compiler
def test_convolutions_of_a_part_are_computed_in_pieces_where_their_scratch_does_not_fit(tmp_path: Path) -> None:
    plain, (x,) = Volumes(), images(1, 1, 1, 32, 32, 32)
    with memory_limit(None) as meter:
        before_bytes = meter.live_bytes
        meter.reset_peak()
        _mean_square(plain, x)
        plain_bytes = meter.peak_bytes - before_bytes
    expected = [p.grad.clone() for p in plain.parameters() if p.grad is not None]
    plain.zero_grad()
    planned = shoal.compile(plain, budget=int(0.5 * plain_bytes), allow="bitwise")
    for _ in range(2):
        planned.zero_grad()
        _mean_square(planned, x)
    plan = planned.shoal.plan
    if not plan.variant.pieces:
        pytest.skip("this processor's convolutions of volumes take little scratch, or other bits in pieces")
    assert planned.shoal.measured_peak_bytes <= planned.shoal.budget_bytes
    assert all(torch.equal(p.grad, g) for p, g in zip(planned.parameters(), expected, strict=True))
    assert Plan.load(plan.save(tmp_path / "plan.json")) == plan


@needs_compiler
def test_two_calls_before_a_backward_pass_share_the_budget() -> None:
    def step(model: nn.Module, x: torch.Tensor) -> None:
        (model(x).square().mean() + model(x.flip(0)).square().mean()).backward()

    model = Looping(prints, [nn.Sequential(*blocks(c, 8, 8)) for c in (3, 8)], channels=8)
    plain_bytes, _ = _peaks(copy.deepcopy(model), step)
    budget = int(0.7 * plain_bytes)
    shoal.compile(model, budget=budget, allow="recompute")
    _, later = _peaks(model, step)
    assert later <= budget


def test_a_budget_in_which_no_step_fits_is_refused_before_anything_is_lost() -> None:
    model = Looping(prints, [nn.Sequential(*blocks(c, 8, 8)) for c in (3, 8)], channels=8)
    before = copy.deepcopy(model.state_dict())
    shoal.compile(model, budget=200_000)
    with costs_that_do_not_matter(), pytest.raises(BudgetError, match="one of its graphs needs") as caught:
        model(*images(1, 8, 3, 32, 32))
    assert "\n" not in str(caught.value)
    assert all(torch.equal(before[name], value) for name, value in model.state_dict().items())


@torch.compiler.disable  # type: ignore[untyped-decorator]
def takes_much(x: torch.Tensor) -> torch.Tensor:
    return x + torch.zeros(1 << 20).sum()


@needs_compiler
def test_a_first_step_over_the_budget_says_so_and_what_eager_code_needs_is_refused(
    caplog: pytest.LogCaptureFixture,
) -> None:
    model, (x,) = shoal.compile(Chain(takes_much), budget="3MiB"), images(1, 2, 3, 8, 8)
    _mean_square(model, x)
    (said,) = [record.getMessage() for record in caplog.records if "over the budget" in record.getMessage()]
    assert "the step was not planned yet" in said
    with pytest.raises(BudgetError, match="its peak is at eager") as caught:
        _mean_square(model, x)
    least = caught.value.least_feasible_bytes
    assert least is not None and least > 1 << 22
    budget = least + (1 << 15)  # for what capturing allocates in the first step
    model = shoal.compile(Chain(takes_much), budget=budget)
    for _ in range(3):
        _mean_square(model, x)
        model.zero_grad()
    assert model.shoal.measured_peak_bytes <= budget


class BackwardWithin(Chain):
    """Sends something back before its forward pass is over, as a penalty may."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.stages[0](x)
        self.penalise(x)
        return self.head(self.stages[1](x).mean((2, 3)))

    @torch.compiler.disable  # type: ignore[untyped-decorator]
    def penalise(self, x: torch.Tensor) -> None:
        x.square().mean().backward(retain_graph=True)


@needs_compiler
def test_graphs_that_run_back_in_between_are_measured_and_what_does_not_fit_is_refused(
    caplog: pytest.LogCaptureFixture,
) -> None:
    (x,) = images(1, 8, 3, 32, 32)
    roomy = shoal.compile(BackwardWithin(breaks), budget="1GiB")
    for _ in range(4):
        _mean_square(roomy, x)
    said = [record.getMessage() for record in caplog.records if "cannot be planned as one step" in record.getMessage()]
    assert said and roomy.shoal.measured_peak_bytes
    tight = shoal.compile(BackwardWithin(breaks), budget=int(0.9 * roomy.shoal.measured_peak_bytes))
    with pytest.raises(BudgetError, match="do not all run forward before they run backward|one of its graphs needs"):
        for _ in range(4):
            _mean_square(tight, x)
            for parameter in tight.parameters():
                parameter.grad = None


def test_after_a_refusal_the_next_model_is_planned_and_metered() -> None:
    with pytest.raises(BudgetError), costs_that_do_not_matter():
        shoal.compile(Chain(breaks), budget=10_000)(*images(1, 8, 3, 32, 32))
    model = shoal.compile(Chain(breaks), budget="1GiB")
    with costs_that_do_not_matter():
        train(model, images(1, 2, 3, 8, 8))
    assert model.shoal.plans
    assert model.shoal.measured_peak_bytes


def test_where_nothing_can_be_captured_nothing_is_promised() -> None:
    class Opaque(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.one = nn.Conv2d(3, 4, 3)

        @torch.compiler.disable  # type: ignore[untyped-decorator]
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.one(x)

    with pytest.raises(CaptureError, match="no graph of Opaque that trains can be captured"):
        shoal.compile(Opaque(), budget="1GiB")(*images(1, 2, 3, 8, 8))


class InALoop(nn.Sequential):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self:
            x = layer(x)
        return x


class InAnObject(nn.Sequential):
    def forward(self, x: torch.Tensor) -> Any:
        return SimpleNamespace(y=super().forward(x))


@pytest.mark.parametrize("kind", [InALoop, InAnObject])
def test_graphs_that_do_not_train_promise_nothing_for_a_step_that_does(kind: type[nn.Sequential]) -> None:
    model = kind(nn.Conv2d(3, 4, 3), nn.GELU(), nn.Conv2d(4, 4, 3), nn.GELU(), nn.Conv2d(4, 4, 3))
    seen: list[float] = []
    model[2].register_forward_hook(lambda _, __, y: seen.append(y.detach().mean().item()))
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    with pytest.raises(CaptureError, match="no graph of .* that trains can be captured"):
        shoal.compile(model, budget="1GiB")(*images(1, 2, 3, 12, 12))
    assert not differences(model.state_dict(), before)


def test_where_it_breaks_is_said_once_and_explained(caplog: pytest.LogCaptureFixture) -> None:
    model = shoal.compile(Chain(prints), budget="1GiB")
    with caplog.at_level(logging.WARNING, "shoal"), costs_that_do_not_matter():
        train(model, images(3, 2, 3, 8, 8))
    (said,) = [record.getMessage() for record in caplog.records if "is not one graph" in record.getMessage()]
    assert "test_parts.py" in said
    explained = model.shoal.plan.explain()
    assert "eager code between them" in explained
    assert "test_parts.py" in explained


def test_nothing_of_a_batch_is_kept_and_the_model_is_freed_with_its_last_reference() -> None:
    model = shoal.compile(Looping(prints), budget="1GiB")
    with costs_that_do_not_matter():
        for (x,) in (images(1, 2, 3, 8, 8), images(1, 2, 3, 8, 8)):
            F.relu(model(x)).sum().backward()
    held = x.untyped_storage()
    reference = StorageWeakRef(held)
    del x, held
    gc.collect()
    assert reference.expired()
    left = weakref.ref(model)
    del model
    gc.collect()
    assert left() is None


class ByImage(Chain):
    """Dynamo gives the loop up, in whose midst it is, with what that was called with."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.each({"maps": self.stages[0](x)}).mean((2, 3)))

    def each(self, given: dict[str, torch.Tensor]) -> torch.Tensor:
        self.between(given["maps"])
        return torch.stack([self.stages[1](one[None])[0] if one.max() > -9 else one for one in given["maps"]])


def test_what_functions_were_given_while_they_were_captured_goes_with_the_step() -> None:
    """Without waiting for Python to look for cycles: it is there beside what the backward pass needs."""
    held: list[StorageWeakRef] = []

    @torch.compiler.disable  # type: ignore[untyped-decorator]
    def note(x: torch.Tensor) -> None:
        held.append(StorageWeakRef(x.untyped_storage()))

    model, (x,) = shoal.compile(ByImage(note), budget="1GiB"), images(1, 2, 3, 8, 8)
    gc.collect()
    gc.disable()
    try:
        with costs_that_do_not_matter():
            _mean_square(model, x)
        assert held and all(storage.expired() for storage in held)
    finally:
        gc.enable()


def test_a_function_whose_number_is_a_constant_to_pytorch_is_a_graph_for_each_and_not_left_to_eager_code() -> None:
    planned = assert_same_training(Normalized(breaks), images(3, 2, 3, 8, 8))
    ops = [op.target for op in planned.shoal.plan.graph.ops if op.phase == "forward"]
    assert sum("group_norm" in op for op in ops) == 3


class Picking(nn.Module):
    """What the head is given differs from step to step, as a detector's anchors do that match an object."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(*[nn.Sequential(*blocks(c, 8, 8)) for c in (3, 8)])
        self.head = nn.Sequential(nn.Linear(8, 8), nn.GELU(), nn.Linear(8, 5))

    def forward(self, x: torch.Tensor, picks: torch.Tensor) -> torch.Tensor:
        rows = self.body(x).permute(0, 2, 3, 1)
        return self.head(rows[picks]).square().mean() + rows.mean()


def _picks(*numbers: int) -> list[torch.Tensor]:
    return [(torch.arange(2 * 16 * 16) < number).reshape(2, 16, 16) for number in numbers]


@needs_compiler
def test_sizes_that_vary_within_a_step_are_of_one_graph_and_one_plan_and_every_step_is_inside_the_budget() -> None:
    plain, picks = Picking(), _picks(60, 50, 70, 65, 90, 52, 110, 80)
    batches = images(len(picks), 2, 3, 16, 16)
    ours = copy.deepcopy(plain)
    roomy = copy.deepcopy(plain)
    shoal.compile(roomy, budget=None)
    roomy(batches[0], picks[0]).backward()
    shoal.compile(ours, budget=int(0.7 * roomy.shoal.measured_peak_bytes), allow="bitwise")
    captures = []
    for x, mask in zip(batches, picks, strict=True):
        for model in (plain, ours):
            model.zero_grad()
            model(x, mask).backward()
        captures.append(ours.shoal.captures)
        assert all(torch.equal(p.grad, g.grad) for p, g in zip(ours.parameters(), plain.parameters(), strict=True))
    assert captures[2:] == captures[2:3] * len(captures[2:])
    assert len(ours.shoal.plans) == 1 and ours.shoal.plan.recomputed
    assert ours.shoal.measured_peak_bytes <= ours.shoal.budget_bytes
    assert ours.shoal.repairs == 0


class PickingTwice(Picking):
    """The same head for few rows and for many, each in its own graph."""

    def __init__(self) -> None:
        super().__init__()
        self.head = Head()

    def forward(self, x: torch.Tensor, few: torch.Tensor, many: torch.Tensor) -> torch.Tensor:
        rows, total = self.body(x).permute(0, 2, 3, 1), x.new_zeros(())
        for picks in (few, many):
            total = total + self.head(rows[picks]).square().mean()
        return total


class Head(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(8, 8), nn.Linear(8, 5)

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        return self.last(self.first(rows).sigmoid())


def test_once_a_size_within_a_step_has_varied_all_such_sizes_may_grow() -> None:
    """Else the next that does has the whole step captured anew."""
    plain = PickingTwice()
    ours = shoal.compile(copy.deepcopy(plain), budget="1GiB", allow="bitwise")
    captures = []
    with costs_that_do_not_matter():
        for few, many in ((4, 20), (5, 20), (5, 20), (5, 22), (5, 25), (6, 30), (5, 28)):
            (x,) = images(1, 2, 3, 16, 16)
            for model in (plain, ours):
                model.zero_grad()
                model(x, *_picks(few, many)).backward()
            captures.append(ours.shoal.captures)
            assert all(torch.equal(p.grad, g.grad) for p, g in zip(ours.parameters(), plain.parameters(), strict=True))
    assert captures[2:] == captures[2:3] * len(captures[2:])


def _parts(graph: StepGraph) -> int:
    return len({op.name.split(".")[0] for op in graph.ops if op.name.startswith("part")})


def _batch(graph: StepGraph) -> int:
    return next(s.shape[0] for s in graph.storages if s.kind == "input")


def _mean_square(model: nn.Module, x: torch.Tensor) -> None:
    model(x).square().mean().backward()


def _peaks(model: nn.Module, step: Callable[[nn.Module, torch.Tensor], None] = _mean_square) -> tuple[int, int]:
    """Device bytes of the first step and of later ones: what the step allocates, the batch, and what the model has."""
    (x,) = images(1, 8, 3, 32, 32)
    own_bytes = sum(t.nbytes for t in [x, *model.parameters(), *model.buffers()])
    peaks = []
    gc.collect()
    gc.freeze()  # so that the next ones are quick
    for _ in range(4):
        gc.collect()
        with memory_limit(None) as meter:
            before_bytes = meter.live_bytes
            meter.reset_peak()
            step(model, x)
            peaks.append(meter.peak_bytes - before_bytes + own_bytes)
        for parameter in model.parameters():
            parameter.grad = None
    return peaks[0], max(peaks[1:])


@needs_compiler
def test_what_eager_code_needs_once_the_graphs_have_gone_back_is_refused_where_it_does_not_fit() -> None:
    class Wide(Prepared):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return super().forward(computes_eagerly(self.gain * x.repeat(1, 8, 1, 1))[:, :3])

    model = Wide(prints)
    plain_bytes, _ = _peaks(copy.deepcopy(model))
    shoal.compile(model, budget=int(0.7 * plain_bytes))
    with pytest.raises(BudgetError, match=r"at eager\d \(backward|one of its graphs needs"):
        _peaks(model)


@needs_compiler
@pytest.mark.usefixtures("real_machine")
def test_what_profiling_a_graph_takes_is_no_part_of_the_step(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("SHOAL_CACHE", str(tmp_path))  # nothing is known of any op
    model: Any = shoal.compile(Chain(lambda x: torch._dynamo.graph_break()), 2**20)
    for batch in images(3, 2, 3, 8, 8):
        model(batch).sum().backward()
        model.zero_grad()
    assert model.shoal.plan is not None
