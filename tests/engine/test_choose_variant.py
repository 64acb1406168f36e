"""A step that has one graph is traced once: its variant is chosen while it is being compiled."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import shoal
from shoal.core.variant import WHOLE
from shoal.engine import backend, variant_of_step
from shoal.engine.search.search_state import Best
from shoal.errors import BudgetError
from tests.engine.search.test_best_variant import FUSED, batches, normalised, share_of_plain, step
from tests.engine.training_laws import differences, train


@pytest.fixture
def traces(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> list[str]:
    """What was traced: to be priced, or to be compiled. Nothing was chosen in an earlier run."""
    monkeypatch.setenv("SHOAL_CACHE", str(tmp_path))
    found: list[str] = []
    joint_step, capture = backend.joint_step, backend.capture

    def priced(*given: Any, **how: Any) -> Any:
        found.append("priced")
        return joint_step(*given, **how)

    def compiled(*given: Any, **how: Any) -> Any:
        found.append("compiled")
        return capture(*given, **how)

    monkeypatch.setattr(backend, "joint_step", priced)
    monkeypatch.setattr(backend, "capture", compiled)
    return found


def volumes() -> nn.Module:
    torch.manual_seed(0)
    layers = [nn.Sequential(nn.Conv3d(n, 16, 3, padding=1), nn.ReLU()) for n in (1, 16, 16)]
    return nn.Sequential(*layers, nn.Conv3d(16, 1, 1))


@pytest.mark.slow
def test_where_convolutions_may_be_in_pieces_it_is_traced_once(traces: list[str]) -> None:
    batch = [torch.randn(1, 1, 32, 32, 32, generator=torch.Generator().manual_seed(1))]
    # Which pieces have the same bits, and so how little is enough, differs by processor. With more, one variant is
    # enough.
    with pytest.raises(BudgetError) as refused:
        shoal.plan(volumes(), *batch, budget=1, allow="bitwise")
    traces.clear()
    model = shoal.compile(volumes(), budget=refused.value.least_feasible_bytes, allow="bitwise")
    found = train(model, batch)
    assert traces == ["compiled"]
    assert model.shoal.plan.candidates and not differences(found, train(volumes(), batch))


def test_variants_that_have_graphs_of_their_own_are_traced_each_once(traces: list[str]) -> None:
    budget_bytes = share_of_plain(
        normalised, 1.2
    )  # the fused variant takes up to 1.1 of it, by the convolutions' scratch
    model = shoal.compile(normalised(), budget=budget_bytes, allow="recompute, fuse")
    step(model, *batches(1))
    plan = model.shoal.plan
    assert plan.variant == FUSED and {one.variant for one in plan.candidates} == {WHOLE, FUSED}
    assert traces == ["compiled", "priced"]


def test_a_budget_that_is_refused_whatever_the_loop_holds_has_each_variant_traced_once(traces: list[str]) -> None:
    model = shoal.compile(normalised(), budget=share_of_plain(normalised, 0.3), allow="recompute, fuse")
    with pytest.raises(BudgetError):
        step(model, *batches(1))
    assert traces == ["compiled", "priced"]


def test_where_its_own_variant_is_chosen_that_is_traced_once(
    traces: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def own(variants: Any, price: Any, budget_bytes: int, name: str) -> Best[Any, Any]:
        price(variants.graph(FUSED))
        return Best(WHOLE, variants.own, *price(variants.own).plan(budget_bytes))

    monkeypatch.setattr(variant_of_step, "fitting_variant", own)
    budget_bytes = share_of_plain(normalised, 0.9)
    model = shoal.compile(normalised(), budget=budget_bytes, allow="recompute, fuse")
    found = train(model, batches(1))
    assert traces == ["compiled", "priced"]
    assert model.shoal.plan.variant == WHOLE and model.shoal.measured_peak_bytes <= budget_bytes
    assert not differences(found, train(normalised(), batches(1)))


class Aliasing(nn.Module):
    """Returns its result, views of it, its input, and a buffer that it writes."""

    def __init__(self) -> None:
        super().__init__()
        self.net = normalised()
        self.register_buffer("total", torch.zeros(()))

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        self.total += x.detach().mean()
        y = self.net(x)
        return y, y.flatten(), x, y[:1], self.total


def test_the_graphs_of_another_form_are_given_to_autograd_with_aliases_and_written_buffers(traces: list[str]) -> None:
    def trained(model: nn.Module, dtype: torch.dtype = torch.float32) -> list[torch.Tensor]:
        optimizer = torch.optim.SGD(model.parameters(), 1e-3)
        for x in batches(3):
            y, flat, given, first, total = model(given_x := x.to(dtype))
            assert torch.equal(given, given_x)
            (y.square().mean() + flat.mean() + first.sum() * total).backward()
            optimizer.step()
            optimizer.zero_grad()
        return [one.detach().double() for one in model.state_dict().values()]

    model, plain, exact = Aliasing(), Aliasing(), Aliasing().double()
    shoal.compile(model, budget=2 * share_of_plain(normalised, 1.2), allow="recompute, fuse")
    found = trained(model)
    assert model.shoal.plan.variant == FUSED and traces == ["compiled", "priced"]
    for ours, theirs, true in zip(found, trained(plain), trained(exact, torch.float64), strict=True):
        assert (ours - true).abs().max() <= (theirs - true).abs().max() + 1e-5 * (1 + true.abs().max())
