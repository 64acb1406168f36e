"""The fastest variant of a step: chosen by its plan, the same function, and all that training does to it."""

from __future__ import annotations

import re
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import shoal
from shoal.core.plan import Plan
from shoal.core.variant import WHOLE, Variant
from shoal.engine.backend import backend
from shoal.errors import BudgetError, CaptureError, InputError, PlanError
from shoal.transforms.fuse.fuse_graph import fuse_graph
from shoal.transforms.split.split import split
from tests.engine.keywords import keywords
from tests.engine.training_laws import blocks
from tests.raising import raising
from tests.scratch import needs_little_scratch

IMAGES = (2, 3, 64, 64)
FUSED = Variant(fuse="bnff")


@pytest.fixture(autouse=True)
def few_candidates(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("shoal.engine.search.split_variants._DEPTHS", (0.5,))
    monkeypatch.setattr("shoal.engine.search.split_variants._PARTS", (2,))
    monkeypatch.setattr("shoal.engine.search.split_variants._SLICES", ())


def wide_at_first() -> nn.Module:
    """What fills its peak are two tensors of the first layers, which recomputation cannot make smaller."""
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Conv2d(3, 32, 3, padding=1),
        nn.ReLU(),
        nn.Conv2d(32, 32, 3, padding=1),
        nn.ReLU(),
        nn.MaxPool2d(8),
        *blocks(32, 8),
        nn.AdaptiveAvgPool2d(1),
        nn.Flatten(),
    )


class Normalised(nn.Module):
    """Residual blocks, dropout and a head: what is fused saves half of its bytes."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Sequential(*blocks(3, 16, 16)), nn.Sequential(*blocks(16, 16))
        self.norm, self.drop, self.head = nn.BatchNorm2d(16), nn.Dropout(0.2), nn.Linear(16, 5)

    def forward(self, x: torch.Tensor, scale: torch.Tensor | None = None) -> torch.Tensor:
        x = self.first(x)
        x = torch.relu(self.norm(self.second(x)) + x)
        x = self.drop(x.mean((2, 3)))
        return self.head(x if scale is None else x * scale)


def normalised() -> nn.Module:
    torch.manual_seed(0)
    return Normalised()


def batches(n: int, *shape: int) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(1)
    return [torch.randn(shape or IMAGES, generator=generator) for _ in range(n)]


@cache
def plain_peak_bytes(network: Callable[[], nn.Module]) -> int:
    return shoal.plan(network(), torch.empty(IMAGES)).rewritten_peak_bytes


def share_of_plain(network: Callable[[], nn.Module], share: float) -> int:
    return int(share * plain_peak_bytes(network))


def compiled(network: Callable[[], nn.Module]) -> nn.Module:
    return shoal.compile(network(), share_of_plain(network, 0.9), allow="exact")


def step(model: nn.Module, *inputs: torch.Tensor, seed: int = 0) -> torch.Tensor:
    torch.manual_seed(seed)  # of dropout
    y = model(*inputs)
    y.square().mean().backward()
    return y.detach()


def assert_trains_as(ours: nn.Module, theirs: nn.Module, exact: nn.Module) -> None:
    """Gradients are as near to those in float64 as plain PyTorch's, and buffers are the same."""
    total = 0.01 * torch.stack([p.grad.norm() for p in exact.parameters() if p.grad is not None]).norm()
    named = zip(ours.named_parameters(), theirs.parameters(), exact.parameters(), strict=True)
    for (name, mine), plain, reference in named:
        assert mine.grad is not None and plain.grad is not None and reference.grad is not None
        scale = max(reference.grad.norm(), total)  # what a batch norm follows has a bias without a gradient
        off, plain_off = (float((p.grad.double() - reference.grad).norm() / scale) for p in (mine, plain))  # type: ignore[union-attr]
        assert off <= plain_off + 2e-5, name
    for mine_b, plain_b in zip(ours.buffers(), theirs.buffers(), strict=True):
        torch.testing.assert_close(mine_b, plain_b, rtol=1e-5, atol=1e-6)


def chosen(model: nn.Module) -> Variant:
    plan: Plan = model.shoal.plan  # type: ignore[union-attr,assignment]
    return plan.variant


@needs_little_scratch
def test_where_a_fused_step_is_faster_it_is_taken_and_trains_as_the_model_does() -> None:
    model, plain, exact = normalised(), normalised(), normalised().double()
    for one in (model, plain, exact):
        one.drop.p = 0.0  # type: ignore[union-attr]
    names = list(model.state_dict())
    model = shoal.compile(model, share_of_plain(normalised, 0.9), allow="exact")
    for x in batches(3):
        for one in (model, plain, exact):
            one.zero_grad()
            step(one, x.to(next(one.parameters()).dtype))
    assert chosen(model) == FUSED
    assert_trains_as(model, plain, exact)
    status: Any = model.shoal
    assert status.measured_peak_bytes <= status.predicted_peak_bytes <= status.budget_bytes
    assert list(model.state_dict()) == names
    plain.load_state_dict(model.state_dict())
    assert torch.equal(model.eval()(x), plain.eval()(x))  # in eval mode it is the model


def norms_on_large_maps_at_first() -> nn.Module:
    """Fused, the first batch norms need three large tensors at once; the others are fused with a profit."""
    torch.manual_seed(0)
    later = [nn.MaxPool2d(2), *blocks(8, 16, 16, 16, 16), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(16, 5)]
    return nn.Sequential(*blocks(3, 16, 8), *later)


@pytest.mark.slow
def test_where_all_batch_norms_fused_do_not_fit_those_of_large_maps_are_left_and_it_trains_as_the_model() -> None:
    network = norms_on_large_maps_at_first
    model, plain, exact = network(), network(), network().double()
    model = shoal.compile(model, share_of_plain(network, 0.9), allow="bitwise, fuse")
    for x in batches(2):
        for one in (model, plain, exact):
            one.zero_grad()
            step(one, x.to(next(one.parameters()).dtype))
    assert chosen(model) == Variant(fuse="bnff", up_to=0.25)
    assert_trains_as(model, plain, exact)
    status: Any = model.shoal
    assert status.measured_peak_bytes <= status.predicted_peak_bytes <= status.budget_bytes
    outcomes = {str(one.variant): one.outcome for one in status.plan.candidates}
    assert outcomes["batch norm fused (bnff)"] == "does not fit, by its bound"
    assert outcomes["unmodified"] in ("cannot be faster, by its bound", "slower")


@needs_little_scratch
def test_the_table_says_what_was_considered_and_why_it_lost() -> None:
    model = normalised()
    plan = shoal.plan(model, torch.empty(IMAGES), share_of_plain(normalised, 0.9), allow="exact")
    by_variant = {one.variant: one for one in plan.candidates}
    fused, whole = by_variant[FUSED], by_variant[WHOLE]
    assert plan.variant == FUSED and (fused.outcome, whole.outcome) == ("chosen", "cannot be faster, by its bound")
    assert fused.seconds == plan.predicted_seconds < whole.plain_seconds
    assert fused.peak_bytes == plan.predicted_peak_bytes <= plan.budget_bytes
    assert "computed        batch norm fused (bnff); considered were" in plan.explain()


def of_no_such_shape(x: torch.Tensor) -> torch.Tensor:
    return x.view(-1, 7)


def untraceable(*arguments: Any) -> Any:
    fused, summary = fuse_graph(*arguments)
    images = next(iter(fused.graph.nodes))
    with fused.graph.inserting_after(images):
        fused.graph.call_function(of_no_such_shape, (images,))
    return fused, summary


@pytest.mark.parametrize("points", [False, True], ids=["of a budget", "of a frontier"])
def test_a_variant_that_cannot_be_traced_is_left_out_and_the_step_trains(
    points: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("shoal.engine.search.variants.fuse_graph", untraceable)
    said = "cannot be captured .*invalid for input of size"
    if points:
        found = shoal.frontier(normalised(), torch.empty(IMAGES), points=2, allow="recompute, fuse")
        assert {point.variant for point in found.points} == {WHOLE}
        assert re.search(said, dict(found.left_out)[str(FUSED)])
        return
    model, plain = normalised(), normalised()
    model = shoal.compile(model, share_of_plain(normalised, 0.9), allow="recompute, fuse")
    x = batches(1)[0]
    assert torch.equal(step(model, x), step(plain, x)) and chosen(model) == WHOLE
    outcomes = {one.variant: one.outcome for one in model.shoal.plan.candidates}  # type: ignore[union-attr]
    assert re.search(said, outcomes[FUSED])


@pytest.mark.parametrize("allow", ["bitwise", "recompute"])
def test_what_is_not_allowed_is_not_done(allow: str) -> None:
    model, plain = normalised(), normalised()
    model = shoal.compile(model, share_of_plain(normalised, 0.75), allow=allow)
    x = batches(1)[0]
    assert torch.equal(step(model, x), step(plain, x))
    assert all(torch.equal(a.grad, b.grad) for a, b in zip(model.parameters(), plain.parameters(), strict=True))  # type: ignore[arg-type]
    assert chosen(model) == WHOLE and not model.shoal.plan.candidates  # type: ignore[union-attr]


def test_keep_alone_keeps_everything_or_refuses() -> None:
    model = normalised()
    with pytest.raises(BudgetError) as refused:
        shoal.plan(model, torch.empty(IMAGES), share_of_plain(normalised, 0.9), allow="keep")
    least_bytes = refused.value.least_feasible_bytes
    assert least_bytes is not None
    plan = shoal.plan(model, torch.empty(IMAGES), least_bytes, allow="keep")
    assert not plan.recomputed and not plan.offloaded and plan.predicted_peak_bytes == least_bytes


def test_what_fits_as_it_is_and_has_nothing_to_fuse_stays_whole() -> None:
    plan = shoal.plan(wide_at_first()[:5], torch.empty(IMAGES), 2**30, allow="exact")  # type: ignore[index]
    assert plan.variant == WHOLE


def least_bytes(model: nn.Module, **options: Any) -> int:
    with pytest.raises(BudgetError) as refused:
        shoal.plan(model, torch.empty(IMAGES), 100_000, **options)
    assert refused.value.least_feasible_bytes is not None
    return refused.value.least_feasible_bytes


@cache
def least_bytes_of_the_whole() -> int:
    return least_bytes(wide_at_first(), allow="bitwise")


def test_below_what_the_whole_needs_it_runs_on_patches_without_changing_its_function() -> None:
    model, plain, exact = wide_at_first(), wide_at_first(), wide_at_first().double()
    budget_bytes = int(0.8 * least_bytes_of_the_whole())
    model = shoal.compile(model, budget_bytes, allow="bitwise, exact_split")
    for x in batches(2):
        for one in (model, plain, exact):
            one.zero_grad()
            step(one, x.to(next(one.parameters()).dtype))
    assert chosen(model) == Variant(depth=0.5, grid=(2, 2))
    assert_trains_as(model, plain, exact)
    assert model.shoal.measured_peak_bytes <= budget_bytes  # type: ignore[union-attr,operator]


def trained_in_less(
    network: Callable[[], nn.Module], x: torch.Tensor, share: float, before: torch.Tensor | None = None
) -> Variant:
    """The variant of a network that trains as it does inside a share of what it needs as it is; after a batch
    `before`."""
    model, plain, exact = network(), network(), network().double()
    with pytest.raises(BudgetError) as whole:
        shoal.plan(model, x, 100_000, allow="bitwise")
    budget_bytes = int(share * whole.value.least_feasible_bytes)  # type: ignore[operator]
    model = shoal.compile(model, budget_bytes, allow="bitwise, exact_split")
    if before is not None:
        for one in (model, plain):  # their running statistics stay the same
            step(one, before)
        assert chosen(model) == WHOLE
    for _ in range(2):  # the first shows what the loop leaves
        for one in (model, plain, exact):
            one.zero_grad()
            step(one, x.to(next(one.parameters()).dtype))
    assert_trains_as(model, plain, exact)
    assert model.shoal.measured_peak_bytes <= budget_bytes  # type: ignore[union-attr,operator]
    return chosen(model)


@pytest.mark.slow
@needs_little_scratch
def test_below_what_the_whole_needs_it_runs_on_slices_of_the_batch(monkeypatch: pytest.MonkeyPatch) -> None:
    """After a smaller batch: Dynamo has a symbol for the size of this one."""
    monkeypatch.setattr("shoal.engine.search.split_variants._SLICES", (4,))
    few, x = batches(1, 2, 3, 16, 16)[0], batches(1, 6, 3, 16, 16)[0]

    def network() -> nn.Module:
        torch.manual_seed(0)
        return nn.Sequential(*blocks(3, 24, 24, 24), nn.MaxPool2d(8), nn.Flatten(), nn.Linear(24 * 4, 5))

    assert trained_in_less(network, x, 0.8, before=few).slices == 3


@pytest.mark.slow
def test_instance_norms_run_on_slices_to_the_end(monkeypatch: pytest.MonkeyPatch) -> None:
    """As in nnU-Net's networks for volumes."""
    monkeypatch.setattr("shoal.engine.search.split_variants._SLICES", (2,))
    x = batches(1, 2, 1, 16, 16, 16)[0]

    def network() -> nn.Module:
        torch.manual_seed(0)
        widths = ((1, 8), (8, 8), (8, 8))
        layers = [(nn.Conv3d(a, b, 1), nn.InstanceNorm3d(b), nn.Dropout(0.0), nn.LeakyReLU()) for a, b in widths]
        return nn.Sequential(*(one for block in layers for one in block), nn.Conv3d(8, 1, 1))

    assert trained_in_less(network, x, 0.75) == Variant(depth=1.0, slices=2)


class ChannelsBehind(nn.Module):
    """A block of ConvNeXt, whose linear layers work on the channels of each pixel."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.deep = nn.Conv2d(channels, channels, 3, padding=1, groups=channels)
        self.norm, self.wide = nn.LayerNorm(channels), nn.Linear(channels, 4 * channels)
        self.narrow, self.scale = nn.Linear(4 * channels, channels), nn.Parameter(torch.full((channels,), 0.5))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.narrow(torch.nn.functional.gelu(self.wide(self.norm(self.deep(x).permute(0, 2, 3, 1)))))
        return x + y.permute(0, 3, 1, 2) * self.scale.reshape(1, -1, 1, 1)


@pytest.mark.slow
def test_a_block_of_convnext_runs_on_slices(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("shoal.engine.search.split_variants._SLICES", (2,))
    x = batches(1, 4, 3, 32, 32)[0]

    def network() -> nn.Module:
        torch.manual_seed(0)
        head = nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(8, 5)
        return nn.Sequential(nn.Conv2d(3, 8, 2, 2), ChannelsBehind(8), *head)

    assert trained_in_less(network, x, 0.6) == Variant(depth=0.75, slices=2)


class Gumbel(nn.Module):
    """Multiplies by what two functions draw."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return nn.functional.gumbel_softmax(x, dim=1) * torch.bernoulli(torch.full_like(x, 0.5))


@pytest.mark.slow
@pytest.mark.parametrize("allow", ["bitwise, exact_split", "exact"])
@pytest.mark.parametrize("drawing", [nn.Dropout(0.2), nn.RReLU(), nn.FeatureAlphaDropout(0.2), Gumbel()])
def test_at_the_minimum_what_stands_between_convolutions_draws_as_it_does_in_plain_pytorch(
    drawing: nn.Module, allow: str
) -> None:
    """On overlapping patches it would draw more numbers, and others for the pixels that two patches share."""

    def network() -> nn.Module:
        first, relu, *rest = wide_at_first()  # type: ignore[misc]
        return nn.Sequential(first, relu, drawing, *rest)

    model, plain = network(), network()
    outputs_bytes = 1024  # and what the loss takes
    shoal.compile(model, least_bytes(network(), allow=allow) + outputs_bytes, allow=allow)
    states = []
    for one in (model, plain):
        step(one, batches(1)[0])
        states.append(torch.get_rng_state())
    assert states[0].equal(states[1])
    for ours, theirs in zip(model.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(ours.grad, theirs.grad, rtol=1e-4, atol=1e-6)


def test_independent_patches_are_those_of_split() -> None:
    model, by_hand = wide_at_first(), split(wide_at_first(), 0.5, (2, 2), join="auto")
    model = shoal.compile(model, int(0.8 * least_bytes_of_the_whole()), allow="bitwise, split")
    x = batches(1)[0]
    torch.testing.assert_close(step(model, x), step(by_hand, x))
    assert chosen(model) == Variant(depth=0.5, grid=(2, 2), exact=False)
    for ours, theirs in zip(model.parameters(), by_hand.parameters(), strict=True):
        torch.testing.assert_close(ours.grad, theirs.grad, rtol=1e-4, atol=1e-6)


def test_where_nothing_fits_the_least_of_all_variants_is_told_and_works() -> None:
    model = wide_at_first()
    least = least_bytes(model, allow="bitwise, exact_split")
    assert 200_000 < least < least_bytes_of_the_whole()
    assert shoal.plan(model, torch.empty(IMAGES), least, allow="bitwise, exact_split").predicted_peak_bytes <= least


def test_more_means_never_need_more() -> None:
    model = nn.Sequential(*blocks(3, 16, 16), nn.AdaptiveAvgPool2d(1), nn.Flatten())  # fused, it needs more
    assert least_bytes(model, allow="recompute, fuse") <= least_bytes(model, allow="recompute")


def doubled(module: nn.Module, given: Any, result: torch.Tensor) -> torch.Tensor:
    return 2 * result


def frozen(model: nn.Module) -> None:
    model.norm.eval()  # type: ignore[union-attr,operator]


def hooked(model: nn.Module) -> None:
    model.first[0][0].register_forward_hook(doubled)  # type: ignore[index,union-attr]


def replaced(model: nn.Module) -> None:
    torch.manual_seed(3)
    model.second[0][0] = nn.Conv2d(16, 16, 1).to(torch.float64)  # type: ignore[index,operator]


def without_gradient(model: nn.Module) -> None:
    model.norm.weight.requires_grad_(False)  # type: ignore[union-attr]


@pytest.mark.slow
def test_what_changes_between_steps_is_seen() -> None:
    """In float64, in which no rounding changes which elements a ReLU lets through."""
    model, plain = normalised().double(), normalised().double()
    shoal.compile(model, 2 * share_of_plain(normalised, 0.9), allow="exact")
    x, *later = (batch.double() for batch in batches(5))
    step(model, x), step(plain, x)
    assert model.shoal.plan.variant != WHOLE  # type: ignore[union-attr]
    for y, change in zip(later, (hooked, replaced, without_gradient, frozen), strict=True):
        for one in (model, plain):
            change(one)
            one.zero_grad()
        torch.testing.assert_close(step(model, y, seed=1), step(plain, y, seed=1), rtol=1e-9, atol=1e-10)
        for ours, theirs in zip(model.parameters(), plain.parameters(), strict=True):
            assert (ours.grad is None) == (theirs.grad is None), change.__name__
            if ours.grad is not None and theirs.grad is not None:
                torch.testing.assert_close(ours.grad, theirs.grad, rtol=1e-9, atol=1e-10)


@pytest.mark.slow
@needs_little_scratch
def test_a_last_short_batch_accumulation_and_keywords() -> None:
    model, plain = normalised().double(), normalised().double()
    shoal.compile(model, 2 * share_of_plain(normalised, 0.9), allow="exact")
    scale = torch.tensor(0.5, dtype=torch.float64)
    for x in (*batches(2), *batches(1, 1, 3, 64, 64)):
        for one in (model, plain):
            torch.manual_seed(2)
            one(x.double(), scale=scale).square().mean().backward()
    assert FUSED in {plan.variant for plan in model.shoal.plans}  # type: ignore[union-attr]
    for ours, theirs in zip(model.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(ours.grad, theirs.grad, rtol=1e-9, atol=1e-10)


def test_channels_last_and_the_backend() -> None:
    def channels_last() -> nn.Module:
        return normalised().to(memory_format=torch.channels_last)  # type: ignore[call-overload,no-any-return]

    model, plain = channels_last(), channels_last()
    x = batches(1)[0].to(memory_format=torch.channels_last)
    options = {"budget": share_of_plain(normalised, 0.9), "allow": "exact"}
    ours = step(torch.compile(model, backend=backend, options=options), x)  # type: ignore[arg-type]
    torch.testing.assert_close(ours, step(plain, x), rtol=1e-4, atol=1e-5)
    for one, other in zip(model.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(one.grad, other.grad, rtol=1e-3, atol=1e-5)


class HeadInHalf(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner, self.head = normalised(), nn.Linear(5, 5)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.inner(x)
        with torch.autocast("cpu", torch.bfloat16):
            return self.head(x).float()


@needs_little_scratch
def test_a_model_that_enters_autocast_is_fused_and_trains_as_it_does() -> None:
    model, plain = HeadInHalf(), HeadInHalf()
    model = shoal.compile(model, share_of_plain(normalised, 0.9), allow="exact")
    x = batches(1)[0]
    ours, theirs = step(model, x), step(plain, x)
    assert chosen(model) == FUSED
    torch.testing.assert_close(ours, theirs, rtol=1e-2, atol=1e-2)
    for one, other in zip(model.parameters(), plain.parameters(), strict=True):
        assert one.grad is not None and other.grad is not None
        assert (one.grad - other.grad).norm() <= 2e-2 * other.grad.norm() + 1e-4


def test_a_plan_that_was_saved_runs_in_its_variant(tmp_path: Path) -> None:
    model = normalised()
    made = shoal.plan(model, torch.empty(IMAGES), share_of_plain(normalised, 0.9), allow="exact")
    read = Plan.load(made.save(tmp_path / "plan.json"))
    assert (read.variant, read.candidates) == (made.variant, made.candidates)
    model = shoal.compile(model, options=shoal.Options(plan=read))
    step(model, batches(1)[0])
    # The loss and its gradient are not counted in a plan that was given: 8 bytes, if the peak is in the loss.
    assert model.shoal.measured_peak_bytes <= made.predicted_peak_bytes + 8  # type: ignore[union-attr,operator]
    other = shoal.compile(nn.Sequential(nn.Conv2d(3, 8, 3), nn.ReLU()), options=shoal.Options(plan=read))
    with pytest.raises(PlanError):
        step(other, batches(1)[0])


@needs_little_scratch
def test_a_resumed_run_takes_the_variant_it_had() -> None:
    model, again = compiled(normalised), compiled(normalised)
    step(model, batches(1)[0])
    again.shoal.variants.update(dict.fromkeys(model.shoal.variants, WHOLE))  # type: ignore[union-attr,arg-type]
    step(again, batches(1)[0])
    assert (chosen(model), chosen(again)) == (FUSED, WHOLE)


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ({"allow": "exact"}, "budget="),
        ({"budget": "1GiB", "allow": "exact", "codec": "linear"}, "allow='exact"),
        ({"budget": "1GiB", "allow": "recompute", "offload_to": "host"}, "offload_to='host'"),
    ],
)
def test_a_mistake_is_told(arguments: dict[str, Any], said: str) -> None:
    with raising(InputError, said):
        shoal.compile(wide_at_first(), **keywords(arguments))


def test_a_mistake_in_the_environment_is_told_by_its_name(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SHOAL_ALLOW", "exact, fast")
    with raising(InputError, "SHOAL_ALLOW", "'fast'"):
        shoal.compile(wide_at_first(), "1GiB")


def test_what_cannot_be_captured_says_so_as_before() -> None:
    class Branches(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = normalised()

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.inner(x) if x.sum() > 0 else self.inner(-x)

    with pytest.raises(CaptureError):
        shoal.plan(Branches(), torch.ones(IMAGES), 2**30, allow="exact")
