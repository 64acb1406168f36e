"""Convolutions in pieces under a budget: taken where it is tight, with the bits of plain PyTorch."""

from __future__ import annotations

import json
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import shoal
from shoal.core.plan import Plan
from shoal.core.records import read_record
from shoal.core.variant import WHOLE, Pieces, Variant
from shoal.errors import BudgetError, PlanError

VOLUME = (1, 4, 20, 20, 20)
WITHOUT = "recompute, offload, order"


def network() -> nn.Module:
    """3-D convolutions on a batch of one, which PyTorch unfolds: each takes a scratch of 27 times its input."""
    torch.manual_seed(0)
    blocks = [layer for _ in range(3) for layer in (nn.Conv3d(8, 8, 3, padding=1), nn.ReLU())]
    return nn.Sequential(nn.Conv3d(4, 8, 3, padding=1), nn.ReLU(), *blocks, nn.AdaptiveAvgPool3d(1), nn.Flatten())


def volume() -> torch.Tensor:
    return torch.randn(VOLUME, generator=torch.Generator().manual_seed(1))


def least_bytes(allow: str) -> int:
    with pytest.raises(BudgetError) as refused:
        shoal.plan(network(), volume(), 1, allow=allow)
    assert refused.value.least_feasible_bytes is not None
    return refused.value.least_feasible_bytes


@pytest.fixture(scope="module")
def tight_bytes() -> int:
    """Less than the step needs without pieces."""
    tight = least_bytes("bitwise")
    assert tight < 0.6 * least_bytes(WITHOUT)
    return tight + 2048  # what a training loop holds besides


def trained(model: nn.Module, steps: int = 2) -> nn.Module:
    for _ in range(steps):
        model.zero_grad()
        model(volume()).square().sum().backward()
    return model


def test_a_step_trains_in_a_budget_that_nothing_else_meets_with_the_same_bits(tight_bytes: int) -> None:
    model, plain = trained(shoal.compile(network(), tight_bytes, allow="bitwise")), trained(network())
    status: Any = model.shoal
    assert status.plan.variant.pieces and status.repairs == 0
    assert status.measured_peak_bytes <= status.predicted_peak_bytes <= tight_bytes
    assert status.predicted_peak_bytes - status.measured_peak_bytes < 4096
    for mine, theirs in zip(model.parameters(), plain.parameters(), strict=True):
        assert mine.grad is not None and theirs.grad is not None and torch.equal(mine.grad, theirs.grad)


def test_a_loose_budget_tries_no_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("shoal.engine.search.priced.choose_pieces", lambda *_: pytest.fail("tried"))
    plan = shoal.plan(network(), volume(), "1GiB", allow="bitwise")
    assert plan.variant == WHOLE


@pytest.mark.parametrize("how", [{"allow": WITHOUT}, {"allow": "bitwise", "hardware": "p100-nvlink"}])
def test_they_are_left_out_where_they_are_not_allowed_or_it_runs_elsewhere(how: dict[str, str]) -> None:
    with pytest.raises(BudgetError) as refused:
        shoal.plan(network(), volume(), 1, **how)  # type: ignore[arg-type]
    assert "variant with the minimum" not in refused.value.details


def test_the_plan_says_so_and_runs_as_it_was_saved(tight_bytes: int, tmp_path: Path) -> None:
    plan = shoal.plan(network(), volume(), tight_bytes, allow="bitwise")
    assert f"{len(plan.variant.pieces)} convolutions in pieces" in plan.explain()
    assert {one.variant for one in plan.candidates} == {WHOLE, plan.variant}
    saved = plan.save(tmp_path / "plan.json")
    loaded = Plan.load(saved)
    assert loaded == plan
    model, plain = trained(shoal.compile(network(), options=shoal.Options(plan=loaded)), 1), trained(network(), 1)
    assert model.shoal.plan.variant == plan.variant  # type: ignore[union-attr]
    for mine, theirs in zip(model.parameters(), plain.parameters(), strict=True):
        assert mine.grad is not None and theirs.grad is not None and torch.equal(mine.grad, theirs.grad)
    fields = json.loads(saved.read_text())
    fields["variant"]["pieces"].pop()
    saved.write_text(json.dumps(fields))
    with pytest.raises(PlanError):
        Plan.load(saved)
    fields["variant"]["pieces"][0]["dim"] = 7
    saved.write_text(json.dumps(fields))
    with pytest.raises(PlanError):
        Plan.load(saved)


def test_a_frontier_starts_where_pieces_let_it(tight_bytes: int) -> None:
    frontier = shoal.frontier(network(), volume(), allow="bitwise", points=2)
    first = frontier.points[0]
    assert first.budget_bytes <= tight_bytes and first.variant.pieces


def test_a_resumed_run_cuts_the_same_convolutions_and_chooses_anew_where_they_are_not_there(tight_bytes: int) -> None:
    first = trained(shoal.compile(network(), tight_bytes, allow="bitwise"), 1)
    variants: dict[str, Any] = first.shoal.variants  # type: ignore[union-attr,assignment]
    ((inputs, variant),) = variants.items()
    some = replace(variant, pieces=tuple(cut for cut in variant.pieces if "gradient" not in cut.op))
    assert WHOLE != some != variant
    for kept, expected in ((some, some), (replace(variant, pieces=(Pieces("nothing", 0, 2),)), variant)):
        again = shoal.compile(network(), 2 * least_bytes(WITHOUT) if kept == some else tight_bytes, allow="bitwise")
        again.shoal.variants[inputs] = read_record(Variant, asdict(kept), "variant")  # type: ignore[union-attr,index]
        trained(again, 1)
        assert again.shoal.plan.variant == expected  # type: ignore[union-attr]


def test_for_a_gpu_that_is_not_here_gradients_of_norms_are_cut_where_that_needs_least() -> None:
    with torch.device("meta"):
        blocks = [layer for _ in range(2) for layer in (nn.GroupNorm(8, 16), nn.ReLU(), nn.Conv3d(16, 16, 1))]
        model, x = nn.Sequential(nn.Conv3d(1, 16, 1), *blocks, nn.AvgPool3d(8)), torch.empty(1, 1, 48, 48, 48)
        model = nn.Sequential(model, nn.Conv3d(16, 1, 1))

    def planned(budget_bytes: int, allow: str) -> Plan:
        return shoal.plan(model, x, budget_bytes, hardware="rtx-4090-24gb", allow=allow)

    needed = []
    for allow in ("recompute", "recompute, pieces"):
        with pytest.raises(BudgetError) as refused:
            planned(4 << 20, allow)
        needed.append(refused.value.least_feasible_bytes)
    assert needed[1] is not None and needed[0] is not None and needed[1] < needed[0]
    plan = planned(needed[1], "recompute, pieces")
    assert plan.predicted_peak_bytes <= needed[1]
    assert str(plan.variant).endswith("2 norms in pieces") and {one.dim for one in plan.variant.pieces} == {1}


def test_gradients_of_prelus_in_pieces_train_in_less_and_are_no_further_from_float64() -> None:
    def rectified(dtype: torch.dtype = torch.float32) -> tuple[nn.Module, torch.Tensor]:
        torch.manual_seed(0)
        layers = [layer for n in (1, 16) for layer in (nn.Conv3d(n, 16, 1), nn.PReLU(), nn.Sigmoid())]
        x = torch.randn(1, 1, 48, 48, 48, generator=torch.Generator().manual_seed(1))
        return nn.Sequential(*layers, nn.AvgPool3d(8)).to(dtype), x.to(dtype)

    def gradients(model: nn.Module, x: torch.Tensor) -> list[torch.Tensor]:
        model(x).square().sum().backward()
        return [parameter.grad.double() for parameter in model.parameters() if parameter.grad is not None]

    needed = []
    for allow in ("recompute, pieces", "recompute, pieces, direct"):
        with pytest.raises(BudgetError) as refused:
            shoal.plan(*rectified(), 1, allow=allow)
        assert refused.value.least_feasible_bytes is not None
        needed.append(refused.value.least_feasible_bytes)
    assert needed[1] < 0.85 * needed[0]
    model, x = rectified()
    model = shoal.compile(model, needed[1] + 4096, allow="recompute, pieces, direct")
    mine, theirs, exact = gradients(model, x), gradients(*rectified()), gradients(*rectified(torch.float64))
    status: Any = model.shoal
    assert any(one.reordered for one in status.plan.variant.pieces) and "PReLUs in pieces" in str(status.plan.variant)
    assert status.measured_peak_bytes <= needed[1] + 4096
    for ours, plain, right in zip(mine, theirs, exact, strict=True):
        assert (ours - right).abs().max() <= (plain - right).abs().max() + 1e-6 * right.abs().max()


class Attending(nn.Module):
    """Two blocks of attention in windows, with scores of 16 MiB each."""

    def __init__(self) -> None:
        super().__init__()
        self.qkv = nn.ModuleList(nn.Linear(8, 24) for _ in range(2))
        self.bias = nn.ParameterList(nn.Parameter(torch.randn(2, 128, 128)) for _ in range(2))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for qkv, bias in zip(self.qkv, self.bias, strict=True):
            windows, n, c = x.shape
            q, k, v = qkv(x).reshape(windows, n, 3, 2, c // 2).permute(2, 0, 3, 1, 4)
            weights = ((q * 0.5) @ k.transpose(-2, -1) + bias).softmax(-1)
            x = x + (weights @ v).transpose(1, 2).reshape(windows, n, c)
        return x


@pytest.mark.slow
def test_attention_in_pieces_trains_in_less_with_the_same_bits_but_for_its_biases() -> None:
    def made(dtype: torch.dtype = torch.float32) -> tuple[nn.Module, torch.Tensor]:
        torch.manual_seed(0)
        return Attending().to(dtype), torch.randn(128, 128, 8).to(dtype)

    def gradients(model: nn.Module, x: torch.Tensor) -> dict[str, torch.Tensor]:
        model(x).square().sum().backward()
        return {name: one.grad for name, one in model.named_parameters() if one.grad is not None}

    needed = []
    for allow in ("recompute, pieces", "recompute, pieces, direct"):
        with pytest.raises(BudgetError) as refused:
            shoal.plan(*made(), 1, allow=allow)
        assert refused.value.least_feasible_bytes is not None
        needed.append(refused.value.least_feasible_bytes)
    assert needed[1] < 0.5 * needed[0]
    model, x = made()
    model = shoal.compile(model, needed[1] + 4096, allow="recompute, pieces, direct")
    mine = {name.removeprefix("_orig_mod."): grad for name, grad in gradients(model, x).items()}
    theirs, exact = gradients(*made()), gradients(*made(torch.float64))
    status: Any = model.shoal
    assert str(status.plan.variant) == "2 attentions in pieces" and status.measured_peak_bytes <= needed[1] + 4096
    assert mine.keys() == theirs.keys()
    for name, ours in mine.items():
        if name.startswith("bias"):
            off, theirs_off = ((one.double() - exact[name]).abs().max() for one in (ours, theirs[name]))
            assert off <= theirs_off + 1e-6 * exact[name].abs().max()
        else:
            assert torch.equal(ours, theirs[name]), name
