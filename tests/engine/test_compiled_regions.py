"""A model compiled with kernels="compiled" trains inside its budget, as far from float64 as eager kernels at most."""

from __future__ import annotations

import copy
import itertools
import logging
import math
from collections.abc import Mapping, Sequence
from typing import Any

import pytest
import torch
from torch import fx, nn

import shoal
from shoal.cost.profile import Costs
from shoal.engine import compiled_regions
from shoal.engine.compiled_regions import in_compiled_regions
from shoal.engine.loop_memory import by_itself
from shoal.errors import BudgetError
from shoal.kernels import compiled_region
from tests.engine.compile.compiled import Residual, compiled
from tests.engine.training_laws import (
    blocks,
    costs_that_do_not_matter,
    images,
    needs_compiler,
    same_bits,
    train,
)
from tests.joint_graphs import captured_step
from tests.uncompiled import interpreted


@pytest.fixture
def all_regions(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every region stays, however long it takes."""
    monkeypatch.setattr(compiled_regions, "_SLOWER", math.inf)


def network() -> nn.Module:
    torch.manual_seed(0)
    body = [*blocks(3, 8), Residual(8), nn.Conv2d(8, 8, 3), nn.GroupNorm(2, 8), nn.SiLU(), nn.Dropout(0.2)]
    return nn.Sequential(*body, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(8, 5))


def error(found: dict[str, torch.Tensor], exact: dict[str, torch.Tensor]) -> float:
    """How far all tensors together are from the exact ones, relative to these."""
    pairs = [(found[name].double(), value.double()) for name, value in exact.items() if value.is_floating_point()]
    off = sum(float((ours - value).square().sum()) for ours, value in pairs)
    return math.sqrt(off / sum(float(value.square().sum()) for _, value in pairs))


@pytest.mark.slow
@needs_compiler
def test_kept_or_recomputed_a_step_gives_the_same_bits(all_regions: None) -> None:
    net, batches = network(), images(2, 4, 3, 12, 12)
    with costs_that_do_not_matter():
        nothing_kept = compiled(net, kernels="compiled")
        torch.manual_seed(3)
        found = train(nothing_kept, batches)
        all_kept = compiled(net, kernels="compiled", planner="keep_all", budget=None)
        torch.manual_seed(3)
        kept = train(all_kept, batches)
    plan = nothing_kept.shoal.plan
    assert any("compiled_region" in plan.graph.ops[plan.graph.producer[s.id]].target for s in plan.recomputed)
    assert "regions of" in plan.explain() and plan.compiled == all_kept.shoal.plan.compiled
    assert all(same_bits(found[name], kept[name]) for name in kept)


class Tokens(nn.Module):
    """Pixels as tokens, once around a block of a transformer with its attention written out."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norms = nn.ModuleList([nn.LayerNorm(width) for _ in range(2)])
        self.qkv, self.up, self.down = (nn.Linear(a * width, b * width) for a, b in ((1, 3), (1, 4), (4, 1)))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        tokens = x.flatten(2).transpose(1, 2)
        q, k, v = self.qkv(self.norms[0](tokens)).chunk(3, dim=-1)
        tokens = tokens + torch.softmax(q @ k.transpose(1, 2) / 4, dim=-1) @ v
        return tokens + self.down(nn.functional.gelu(self.up(self.norms[1](tokens)), approximate="tanh"))


@pytest.mark.slow
@needs_compiler
def test_in_bfloat16_gradients_are_no_further_from_float64_than_eager_ones(all_regions: None) -> None:
    torch.manual_seed(0)
    net, batches = nn.Sequential(nn.Conv2d(3, 16, 3), Tokens(16), nn.Linear(16, 5)), images(1, 4, 3, 12, 12)

    def trained(model: nn.Module) -> dict[str, torch.Tensor]:
        return train(model, batches, around_forward=lambda: torch.autocast("cpu", torch.bfloat16))

    planned = shoal.compile(copy.deepcopy(net), options=shoal.Options(kernels="compiled"))
    found = trained(planned)
    exact = train(copy.deepcopy(net).double(), [batch.double() for batch in batches])
    assert "_softmax" in "".join(region.words for region in compiled_region._compiled.values())
    assert any("compiled_region" in op.target for op in planned.shoal.plan.graph.ops)
    assert error(found, exact) <= 1.1 * error(trained(copy.deepcopy(net)), exact)


def test_a_budget_holds_and_the_prediction_is_exact(monkeypatch: pytest.MonkeyPatch, all_regions: None) -> None:
    interpreted(monkeypatch)
    net, (batch,) = network(), images(1, 16, 3, 24, 24)
    roomy = shoal.plan(net, batch, options=shoal.Options(kernels="compiled"))
    with pytest.raises(BudgetError) as refused:  # what a region takes for itself, op by op, differs by processor
        shoal.plan(net, batch, budget=1, allow="bitwise", options=shoal.Options(kernels="compiled"))
    budget_bytes = (refused.value.least_feasible_bytes + roomy.predicted_peak_bytes) // 2
    planned = shoal.compile(
        copy.deepcopy(net), budget=budget_bytes, allow="bitwise", options=shoal.Options(kernels="compiled")
    )
    for _ in range(2):
        planned(batch).sum().backward()
        planned.zero_grad()
    assert planned.shoal.measured_peak_bytes <= budget_bytes
    assert planned.shoal.measured_peak_bytes == pytest.approx(planned.shoal.predicted_peak_bytes, rel=0.02)
    assert planned.shoal.plan.recomputed and planned.shoal.plan.compiled


def test_a_saved_plan_runs_with_the_regions_that_it_has(
    monkeypatch: pytest.MonkeyPatch, all_regions: None, tmp_path: Any
) -> None:
    interpreted(monkeypatch)
    net, (batch,) = network(), images(1, 4, 3, 12, 12)
    with costs_that_do_not_matter():
        first = compiled(net, kernels="compiled")
        first(batch).sum().backward()
        path = first.shoal.plan.save(tmp_path / "plan.json")
        again = shoal.compile(copy.deepcopy(net), options=shoal.Options(plan=shoal.Plan.load(path), kernels="compiled"))
        again(batch).sum().backward()
    ours, theirs = ([op.name for op in one.shoal.plan.graph.ops] for one in (again, first))
    assert [name for name in theirs if name.startswith("region_")] == [n for n in ours if n.startswith("region_")]
    assert shoal.Plan.load(path).compiled == first.shoal.plan.compiled


def test_a_plan_is_of_the_regions_that_the_step_has_and_runs_as_it_is(
    monkeypatch: pytest.MonkeyPatch, all_regions: None
) -> None:
    interpreted(monkeypatch)
    net, (batch,) = network(), images(1, 4, 3, 12, 12)
    made = shoal.plan(net, batch, options=shoal.Options(kernels="compiled"))
    assert "regions of" in made.explain()
    planned = shoal.compile(copy.deepcopy(net), options=shoal.Options(plan=made, kernels="compiled"))
    planned(batch).sum().backward()
    ran, asked = (by_itself(plan.graph) for plan in (planned.shoal.plan, made))
    assert [op.target for op in ran.ops] == [op.target for op in asked.ops]
    assert planned.shoal.plan.compiled == made.compiled


def test_for_a_machine_that_is_not_here_the_step_is_in_regions_where_that_is_asked_for() -> None:
    net, batch = network().to("meta"), torch.empty(64, 3, 12, 12, device="meta")
    plans = {
        kernels: shoal.plan(net, batch, hardware="a100-pcie4", options=shoal.Options(kernels=kernels))
        for kernels in ("auto", "eager", "compiled")
    }
    assert plans["auto"].graph == plans["eager"].graph and plans["eager"].compiled == ()
    assert len(plans["compiled"].graph.ops) < len(plans["eager"].graph.ops)
    assert plans["compiled"].predicted_seconds < plans["eager"].predicted_seconds
    assert plans["compiled"].compiled[0].startswith("8 regions of 18 ops")


def test_on_the_meta_device_a_plan_says_that_nothing_is_compiled() -> None:
    net, batch = network().to("meta"), torch.empty(4, 3, 12, 12, device="meta")
    assert shoal.plan(net, batch, options=shoal.Options(kernels="compiled")).compiled == (
        "nothing: there is no compiler for meta",
    )


def test_what_cannot_be_compiled_runs_one_by_one_and_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    interpreted(monkeypatch)

    def failing(graphs: Sequence[Any]) -> list[Any]:
        return [RuntimeError("no such instruction") for _ in graphs]

    monkeypatch.setattr("shoal.kernels.compiled_region.compile_each", failing)
    net, (batch,) = network(), images(1, 4, 3, 12, 12)
    with costs_that_do_not_matter():
        planned = compiled(net, kernels="compiled")
        planned(batch).sum().backward()
    assert not any("compiled_region" in op.target for op in planned.shoal.plan.graph.ops)
    assert "compiled        not normalised" in planned.shoal.plan.explain()
    assert "no such instruction; run one by one" in planned.shoal.plan.explain()


def test_without_a_compiler_all_runs_one_by_one_and_that_is_said_once(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(compiled_regions, "missing_compiler", lambda _: "no C++ compiler is found (CXX names one)")
    compiled_regions._say_once.cache_clear()
    net, (batch,) = network(), images(1, 4, 3, 12, 12)
    with costs_that_do_not_matter(), caplog.at_level(logging.WARNING, "shoal"):
        for _ in range(2):
            planned = compiled(net, kernels="compiled")
            planned(batch).sum().backward()
    assert caplog.text.count("no C++ compiler is found") == 1
    assert "compiled        nothing: no C++ compiler is found" in planned.shoal.plan.explain()


def counting(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """How many regions each call of the compiler is given."""
    interpreted(monkeypatch)
    calls: list[int] = []
    each = compiled_region.compile_each

    def counted(graphs: Sequence[Any]) -> list[Any]:
        calls.append(len(graphs))
        return each(graphs)

    monkeypatch.setattr("shoal.kernels.compiled_region.compile_each", counted)
    return calls


def test_equal_blocks_compile_once_in_all_models_of_a_process(
    monkeypatch: pytest.MonkeyPatch, all_regions: None
) -> None:
    calls = counting(monkeypatch)
    torch.manual_seed(0)
    blocks = [nn.Sequential(nn.Conv2d(8, 8, 3, padding=1), nn.BatchNorm2d(8), nn.SiLU()) for _ in range(6)]
    net = nn.Sequential(nn.Conv2d(3, 8, 1), *blocks, nn.AdaptiveAvgPool2d(1), nn.Flatten())
    (batch,) = images(1, 4, 3, 12, 12)
    with costs_that_do_not_matter():
        planned = compiled(net, kernels="compiled")
        planned(batch).sum().backward()
    # Each block's statistics, normalisation and gradient; the pooling joins what is before it, in both passes.
    assert planned.shoal.plan.compiled == ("18 regions of 32 ops, 5 of them different",)
    assert sum(calls) == 5
    with costs_that_do_not_matter():
        compiled(net, kernels="compiled")(batch).sum().backward()
    assert sum(calls) == 5


def widening() -> nn.Module:
    """Four stages that differ only in their sizes."""
    torch.manual_seed(0)
    widths = (3, 8, 12, 16, 20)
    stages = [
        nn.Sequential(nn.Conv2d(narrow, wide, 3), nn.GroupNorm(2, wide), nn.SiLU())
        for narrow, wide in itertools.pairwise(widths)
    ]
    return nn.Sequential(*stages, nn.AdaptiveAvgPool2d(1), nn.Flatten())


def test_of_regions_that_differ_in_sizes_the_largest_speaks_for_all_and_is_measured_once(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(compiled_regions, "_SLOWER", 0.0)
    calls = counting(monkeypatch)
    net, (batch,) = widening(), images(1, 4, 3, 14, 14)
    shoal.compile(copy.deepcopy(net), options=shoal.Options(kernels="compiled"))(batch).sum().backward()
    assert sum(calls) == 4  # both passes of a stage, and of the last one, which the pooling joins; not those of four
    calls = counting(monkeypatch)  # with no region known, as a new process starts
    shoal.compile(copy.deepcopy(net), options=shoal.Options(kernels="compiled"))(batch).sum().backward()
    assert calls == []


def test_a_region_that_takes_longer_than_its_ops_is_taken_apart(monkeypatch: pytest.MonkeyPatch) -> None:
    interpreted(monkeypatch)
    monkeypatch.setattr(compiled_regions, "_SLOWER", 0.0)
    net, (batch,) = network(), images(1, 4, 3, 12, 12)
    planned = shoal.compile(copy.deepcopy(net), options=shoal.Options(kernels="compiled"))
    planned(batch).sum().backward()
    assert not any("compiled_region" in op.target for op in planned.shoal.plan.graph.ops)
    plain = shoal.compile(copy.deepcopy(net), options=shoal.Options(kernels="eager"))
    plain(batch).sum().backward()
    assert planned.shoal.plan.graph.fingerprint == plain.shoal.plan.graph.fingerprint


@pytest.mark.parametrize(("device_microseconds", "n_regions"), [(15, 1), (25, 0)])
def test_a_region_is_held_against_its_ops_by_time_on_the_device_however_long_its_launch_takes(
    monkeypatch: pytest.MonkeyPatch, device_microseconds: int, n_regions: int
) -> None:
    interpreted(monkeypatch)

    def timed(nodes: Mapping[str, fx.Node], **_: Any) -> Costs:
        regions = {key for key, node in nodes.items() if isinstance(node.target, compiled_region.CompiledRegion)}
        seconds = {key: 1e-6 * (device_microseconds if key in regions else 10) for key in nodes}
        launch_seconds = {key: 1e-3 if key in regions else 1e-6 for key in nodes}
        return Costs(seconds, dict.fromkeys(nodes, 0), launch_seconds)

    monkeypatch.setattr(compiled_regions, "profile", timed)
    captured = captured_step(nn.Sequential(nn.Linear(64, 64), nn.Sigmoid(), nn.Tanh()), torch.ones(8, 64))
    forward = [op for op in in_compiled_regions(captured).graph.ops if op.phase == "forward"]
    assert sum("compiled_region" in op.target for op in forward) == n_regions
