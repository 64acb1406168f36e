"""Models that are several graphs inside one budget: every step is, or is refused."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import shoal
from shoal.core.plan import Plan
from shoal.core.step import STRETCH
from shoal.errors import BudgetError
from shoal.memory.limit import memory_limit
from tests.engine.several_graphs import (
    Between,
    Chain,
    Looping,
    Prepared,
    breaks,
    computes_eagerly,
    mean_square,
    peaks_of,
    prints,
)
from tests.engine.training_laws import blocks, costs_that_do_not_matter, images, needs_compiler, train


class Padding(nn.Module):
    """How far a map is padded depends on a buffer: graphs that compute numbers lie between those that train.

    Dynamo captures the first of them for its sizes. One of a later map is captured with symbols for them, and runs in
    its place from the second step on.
    """

    def __init__(self) -> None:
        super().__init__()
        self.stages = nn.ModuleList([nn.Conv2d(before, 8, 3, 2, padding=1) for before in (3, 8, 8)])
        self.multiple = nn.Buffer(torch.tensor(5))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for stage in self.stages:
            x = self.padded(stage(x).sigmoid())
        return x

    def padded(self, x: torch.Tensor) -> torch.Tensor:
        missing = self.missing(x)
        return F.pad(x, (0, int(missing))) if missing > 0 else x

    def missing(self, x: torch.Tensor) -> torch.Tensor:
        length = x.shape[-1]
        return torch.ceil(length / self.multiple) * self.multiple - length


@needs_compiler
def test_a_step_is_the_same_whichever_graphs_that_do_not_train_run_within_it() -> None:
    model, (x,) = shoal.compile(Padding(), budget="1GiB"), images(1, 8, 3, 32, 32)
    captures = []
    for _ in range(4):
        mean_square(model, x)
        model.zero_grad()
        captures.append(model.shoal.captures)
    assert captures == captures[:1] * 4
    assert len(model.shoal.plans) == 1


@needs_compiler
def test_a_model_is_refused_with_a_budget_that_is_enough_if_graphs_that_do_not_train_run_within_it() -> None:
    model, (x,) = Padding(), images(1, 8, 3, 32, 32)
    plain_bytes, _ = peaks_of(copy.deepcopy(model))
    with pytest.raises(BudgetError) as refused:
        mean_square(shoal.compile(copy.deepcopy(model), budget=plain_bytes // 2, allow="bitwise"), x)
    budget = refused.value.least_feasible_bytes
    assert budget is not None
    shoal.compile(model, budget=budget, allow="bitwise")
    _, later = peaks_of(model)
    assert later <= budget


class Widening(nn.Module):
    """A batch of bright images goes a way that takes more than the others'."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(*blocks(3, 8, 8, 8))
        self.narrow, self.wide = nn.Linear(8, 5), nn.Sequential(nn.Linear(8, 32), nn.GELU(), nn.Linear(32, 5))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        rows = self.body(x).permute(0, 2, 3, 1)
        return self.wide(rows) if x.mean() > 1 else self.narrow(rows)


@pytest.mark.slow
@needs_compiler
def test_where_a_step_goes_a_way_that_does_not_fit_beside_the_plan_of_its_first_parts_it_begins_anew() -> None:
    plain = Widening()
    wide = copy.deepcopy(plain)
    shoal.compile(wide, budget=None)
    dark, bright = images(1, 2, 3, 32, 32)[0], images(1, 2, 3, 32, 32)[0] + 2
    mean_square(wide, bright)
    ours = shoal.compile(copy.deepcopy(plain), budget=int(0.7 * wide.shoal.measured_peak_bytes), allow="bitwise")
    for x in (dark, dark, bright, dark, bright):
        for model in (plain, ours):
            model.zero_grad()
            mean_square(model, x)
        assert all(
            torch.equal(p.grad, g.grad)
            for p, g in zip(ours.parameters(), plain.parameters(), strict=True)
            if p.grad is not None and g.grad is not None
        )
        assert all(map(torch.equal, ours.buffers(), plain.buffers()))
    assert ours.shoal.measured_peak_bytes <= ours.shoal.budget_bytes


@pytest.mark.slow
@needs_compiler
@pytest.mark.parametrize(
    ("kind", "between", "share"),
    [(Looping, computes_eagerly, 0.8), (Prepared, prints, 0.75)],
    ids=["eager ops", "eager ops first"],
)
def test_one_budget_holds_for_all_parts(kind: type[Looping], between: Between, share: float) -> None:
    """Measured by a counter around whole steps; the plan's prediction is as near as that of one graph."""
    model = kind(between, [nn.Sequential(*blocks(c, 8, 8)) for c in (3, 8)], channels=8)
    plain_bytes, _ = peaks_of(copy.deepcopy(model))
    budget = int(share * plain_bytes)
    shoal.compile(model, budget=budget, allow="recompute")
    first, later = peaks_of(model)
    assert first <= budget
    assert later <= budget
    status = model.shoal
    assert status.repairs == 0
    assert status.plan.recomputed
    assert abs(status.predicted_peak_bytes - status.measured_peak_bytes) <= 0.02 * budget


class Spoken(nn.Module):
    """The loss has sizes that depend on values: the graph breaks before it."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(16, 32), nn.Linear(32, 11)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        found = self.last(torch.relu(self.first(x))).log_softmax(2).transpose(0, 1)
        targets = torch.arange(8 * 6).view(8, 6) % 10 + 1
        return F.ctc_loss(found, targets, torch.full((8,), 24), torch.full((8,), 6)).sqrt()


@pytest.mark.slow
@needs_compiler
def test_what_was_measured_is_of_the_plan_and_the_iteration_before_it_is_said_by_itself() -> None:
    x = torch.randn(8, 24, 16)
    with pytest.raises(BudgetError) as refused:
        mean_square(shoal.compile(Spoken(), budget=40_000, optimizer="sgd"), x)
    budget = refused.value.least_feasible_bytes or 80_000
    model = shoal.compile(Spoken(), budget=budget, optimizer="sgd")
    for _ in range(3):
        mean_square(model, x)
        model.zero_grad()
    status = model.shoal
    assert status.measured_peak_bytes == pytest.approx(status.predicted_peak_bytes, rel=0.02)
    assert status.measured_peak_bytes < status.first_peak_bytes <= budget
    assert "in the first iteration of several graphs" in str(status)


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


@pytest.mark.slow
@needs_compiler
def test_a_batch_that_eager_code_alone_reads_counts_all_step() -> None:
    model = shoal.compile(Stacking(prints, [nn.Sequential(*blocks(c, 8, 8)) for c in (3, 8)], channels=8), "1GiB")
    pictures = list(images(8, 3, 32, 32))
    for _ in range(3):
        model(pictures).square().mean().backward()
        model.zero_grad()
    status = model.shoal
    # What goes with the call, to begin it again: a copy of the buffers, and the generator's state.
    copied_bytes = sum(b.nbytes for b in model.buffers()) + torch.get_rng_state().nbytes
    assert status.plan.graph.storage_called["arguments"].nbytes == sum(x.nbytes for x in pictures) + copied_bytes
    assert 0 <= status.predicted_peak_bytes - status.measured_peak_bytes < pictures[0].nbytes


class WithLoss(nn.Module):
    """Its last graph returns a loss, and what that is computed from, of which nothing else is computed."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.wide, self.last = nn.Linear(16, 16), nn.Linear(16, 256), nn.Linear(256, 64)

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        hidden = self.first(x).tanh()
        breaks(x)
        logits = self.last(self.wide(hidden).tanh())
        return F.cross_entropy(logits, torch.arange(len(x)) % 64), logits


@needs_compiler
def test_the_gradient_of_logits_beside_a_loss_does_not_count_once_it_is_read() -> None:
    model, x = shoal.compile(WithLoss(), "1GiB"), torch.randn(512, 16)
    for _ in range(3):
        model(x)[0].backward()
        model.zero_grad()
    status = model.shoal
    assert 0 <= status.predicted_peak_bytes - status.measured_peak_bytes <= 1024


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
        mean_square(plain, x)
        plain_bytes = meter.peak_bytes - before_bytes
    expected = [p.grad.clone() for p in plain.parameters() if p.grad is not None]
    plain.zero_grad()
    planned = shoal.compile(plain, budget=int(0.5 * plain_bytes), allow="bitwise")
    for _ in range(2):
        planned.zero_grad()
        mean_square(planned, x)
    plan = planned.shoal.plan
    if not plan.variant.pieces:
        pytest.skip("this processor's convolutions of volumes take little scratch, or other bits in pieces")
    assert planned.shoal.measured_peak_bytes <= planned.shoal.budget_bytes
    assert all(torch.equal(p.grad, g) for p, g in zip(planned.parameters(), expected, strict=True))
    assert Plan.load(plan.save(tmp_path / "plan.json")) == plan


@pytest.mark.slow
@needs_compiler
def test_two_calls_before_a_backward_pass_share_the_budget() -> None:
    def step(model: nn.Module, x: torch.Tensor) -> None:
        (model(x).square().mean() + model(x.flip(0)).square().mean()).backward()

    model = Looping(prints, [nn.Sequential(*blocks(c, 8, 8)) for c in (3, 8)], channels=8)
    plain_bytes, _ = peaks_of(copy.deepcopy(model), step)
    budget = int(0.7 * plain_bytes)
    shoal.compile(model, budget=budget, allow="recompute")
    _, later = peaks_of(model, step)
    assert later <= budget


def test_a_budget_in_which_no_step_fits_is_refused_before_anything_is_lost() -> None:
    model = Looping(prints, [nn.Sequential(*blocks(c, 8, 8)) for c in (3, 8)], channels=8)
    before = copy.deepcopy(model.state_dict())
    shoal.compile(model, budget=200_000, allow="bitwise")
    with costs_that_do_not_matter(), pytest.raises(BudgetError):
        model(*images(1, 8, 3, 32, 32))
    assert all(torch.equal(before[name], value) for name, value in model.state_dict().items())


@torch.compiler.disable  # type: ignore[untyped-decorator]
def takes_much(x: torch.Tensor) -> torch.Tensor:
    return x + torch.zeros(1 << 20).sum()


@pytest.mark.slow
@needs_compiler
def test_a_first_step_over_the_budget_says_so_and_what_eager_code_needs_is_refused(
    caplog: pytest.LogCaptureFixture,
) -> None:
    model, (x,) = shoal.compile(Chain(takes_much), budget="3MiB", allow="bitwise"), images(1, 2, 3, 8, 8)
    with pytest.raises(BudgetError) as caught:  # before an optimizer changes a weight
        mean_square(model, x)
    (said,) = [record.getMessage() for record in caplog.records if "over the budget" in record.getMessage()]
    assert "was not planned yet" in said
    with pytest.raises(BudgetError):
        mean_square(model, x)
    least = caught.value.least_feasible_bytes
    assert caught.value.op.startswith("eager") and least is not None and least > 1 << 22
    budget = least + (1 << 15)  # for what capturing allocates in the first step
    model = shoal.compile(Chain(takes_much), budget=budget, allow="bitwise")
    for _ in range(3):
        mean_square(model, x)
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


@pytest.mark.slow
@needs_compiler
def test_graphs_that_run_back_in_between_are_measured_and_what_does_not_fit_is_refused(
    caplog: pytest.LogCaptureFixture,
) -> None:
    (x,) = images(1, 8, 3, 32, 32)
    roomy = shoal.compile(BackwardWithin(breaks), budget="1GiB")
    for _ in range(4):
        mean_square(roomy, x)
    said = [record.getMessage() for record in caplog.records if "backward passes run twice" in record.getMessage()]
    assert said and roomy.shoal.measured_peak_bytes
    tight = shoal.compile(BackwardWithin(breaks), budget=int(0.6 * roomy.shoal.measured_peak_bytes))
    with pytest.raises(BudgetError):
        for _ in range(4):
            mean_square(tight, x)
            for parameter in tight.parameters():
                parameter.grad = None


@pytest.mark.slow
def test_after_a_refusal_the_next_model_is_planned_and_metered() -> None:
    with pytest.raises(BudgetError), costs_that_do_not_matter():
        shoal.compile(Chain(breaks), budget=10_000, allow="bitwise")(*images(1, 8, 3, 32, 32))
    model = shoal.compile(Chain(breaks), budget="1GiB")
    with costs_that_do_not_matter():
        train(model, images(1, 2, 3, 8, 8))
    assert model.shoal.plans
    assert model.shoal.measured_peak_bytes


class Picking(nn.Module):
    """What the head is given differs from step to step, as a detector's anchors do that match an object."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(*blocks(3, 8, 8))
        self.head = nn.Sequential(nn.Linear(8, 8), nn.GELU(), nn.Linear(8, 5))

    def forward(self, x: torch.Tensor, picks: torch.Tensor) -> torch.Tensor:
        rows = self.body(x).permute(0, 2, 3, 1)
        return self.head(rows[picks]).square().mean() + rows.mean()


def _picks(*numbers: int) -> list[torch.Tensor]:
    return [(torch.arange(2 * 16 * 16) < number).reshape(2, 16, 16) for number in numbers]


@pytest.mark.slow
@needs_compiler
def test_sizes_that_vary_within_a_step_are_of_one_graph_and_one_plan_and_every_step_is_inside_the_budget() -> None:
    roomy = Picking()
    shoal.compile(roomy, budget=None)
    roomy(*images(1, 2, 3, 16, 16), *_picks(60)).backward()
    # Less may do: graphs are planned one after the other, and what the first leaves for a later one of another size
    # depends on the scratch of this processor's convolutions.
    ours, captures = _trained_on_picks(int(1.2 * roomy.shoal.measured_peak_bytes))
    assert captures[2:] == captures[2:3] * len(captures[2:])
    assert len(ours.shoal.plans) == 1
    assert ours.shoal.measured_peak_bytes <= ours.shoal.budget_bytes
    assert ours.shoal.repairs == 0


def _trained_on_picks(budget_bytes: int) -> tuple[Any, list[int]]:
    """A model whose gradients were those of plain PyTorch at every step, and what was captured until each."""
    torch.manual_seed(0)
    plain, picks = Picking(), _picks(60, 50, 70, 65, 90, 52, 110, 80)
    ours = shoal.compile(copy.deepcopy(plain), budget=budget_bytes, allow="bitwise")
    captures = []
    for x, mask in zip(images(len(picks), 2, 3, 16, 16), picks, strict=True):
        for model in (plain, ours):
            model.zero_grad()
            model(x, mask).backward()
        captures.append(ours.shoal.captures)
        assert all(torch.equal(p.grad, g.grad) for p, g in zip(ours.parameters(), plain.parameters(), strict=True))
    return ours, captures


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


@pytest.mark.slow
def test_once_a_size_within_a_step_has_varied_all_such_sizes_may_grow() -> None:
    """Else the next that does has the whole step captured again."""
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


@pytest.mark.slow
@needs_compiler
def test_what_eager_code_needs_once_the_graphs_have_gone_back_is_refused_where_it_does_not_fit() -> None:
    class Wide(Prepared):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return super().forward(computes_eagerly(self.gain * x.repeat(1, 8, 1, 1))[:, :3])

    model = Wide(prints)
    plain_bytes, _ = peaks_of(copy.deepcopy(model))
    shoal.compile(model, budget=int(0.7 * plain_bytes), allow="bitwise")
    with pytest.raises(BudgetError):
        peaks_of(model)


@pytest.mark.slow
@needs_compiler
@pytest.mark.usefixtures("real_machine")
def test_what_profiling_a_graph_takes_is_no_part_of_the_step(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("SHOAL_CACHE", str(tmp_path))  # nothing is known of any op
    model: Any = shoal.compile(Chain(lambda x: torch._dynamo.graph_break()), 2**20)
    for batch in images(3, 2, 3, 8, 8):
        model(batch).sum().backward()
        model.zero_grad()
    assert model.shoal.plan is not None


@pytest.mark.slow
@needs_compiler
def test_graphs_offload_no_more_than_the_host_may_hold() -> None:
    """In the first iteration too, in which each is planned before those after it are known."""

    def sigmoids(inputs: int) -> nn.Module:
        layers = [one for n in (inputs, 16, 16) for one in (nn.Conv2d(n, 16, 3, padding=1), nn.Sigmoid())]
        return nn.Sequential(*layers)

    torch.manual_seed(0)
    plain = Chain(breaks, [sigmoids(3), sigmoids(16)], 16)
    options = shoal.Options(host_budget=3 * 2**18)  # of 2 MiB that the two could offload
    model = shoal.compile(copy.deepcopy(plain), 1_900_000, allow="offload", offload_to="host", options=options)
    train(model, images(3, 4, 3, 32, 32))
    assert model.shoal.measured_peak_bytes <= 1_900_000
    assert 0 < model.shoal.plan.host_bytes <= 3 * 2**18
