"""A batch whose loss is never sent back, as one that is not finite: the next call comes while that one waits."""

from __future__ import annotations

import copy
import logging

import pytest
import torch
from torch import nn

import shoal
from tests.engine.session_loops import true_peak
from tests.engine.training_laws import classifier
from tests.float32_rule import too_far

BATCHES = torch.randn(7, 4, 3, 16, 16, generator=torch.Generator().manual_seed(0))
SKIPPED = 3


def loop(model: nn.Module, batches: torch.Tensor = BATCHES) -> list[torch.Tensor]:
    """Train without an optimizer; what the gradients were after each batch that was not skipped."""
    gradients = []
    for place, batch in enumerate(batches):
        loss = model(batch).square().mean()
        if place == SKIPPED:
            continue
        loss.backward()
        gradients.append(torch.cat([p.grad.flatten() for p in model.parameters()]))  # type: ignore[union-attr]
        model.zero_grad()
    return gradients


def beyond_rounding(found: list[torch.Tensor], net: nn.Module) -> object:
    """Of the gradients of a planned loop, those that are further from float64 than plain float32's."""
    exact = loop(copy.deepcopy(net).double(), BATCHES.double())
    return too_far(*(dict(zip("abcdef", one, strict=True)) for one in (found, loop(copy.deepcopy(net)), exact)))


def least_budget(net: nn.Module) -> int:
    refused = shoal.compile(copy.deepcopy(net), "100KiB", allow="bitwise")
    with pytest.raises(shoal.BudgetError) as error:
        refused(BATCHES[0])
    return int(error.value.least_feasible_bytes or 0)


def network() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(*classifier(3, 8, 8, 8))


def test_it_does_not_count_in_later_steps() -> None:
    plain = network()
    ours = shoal.compile(copy.deepcopy(plain), "1GiB")
    assert not beyond_rounding(loop(ours), plain)
    assert ours.shoal.captures == 1
    alone = shoal.compile(copy.deepcopy(plain), "1GiB")
    loop(alone, BATCHES[:SKIPPED])
    assert ours.shoal.predicted_peak_bytes == alone.shoal.predicted_peak_bytes


def test_where_no_plan_has_room_for_it_training_goes_on_and_the_bytes_are_said(
    caplog: pytest.LogCaptureFixture,
) -> None:
    plain = network()
    budget_bytes = int(1.02 * least_budget(plain))
    ours = shoal.compile(copy.deepcopy(plain), budget_bytes, allow="bitwise")
    with caplog.at_level(logging.WARNING, "shoal"):
        found = loop(ours)
    assert all(torch.equal(a, b) for a, b in zip(found, loop(plain), strict=True))
    (warning,) = [record for record in caplog.records if record.funcName == "left_over"]
    assert warning.args is not None and warning.args[1] == 1  # type: ignore[index]
    assert ours.shoal.predicted_peak_bytes <= budget_bytes and ours.shoal.repairs == 0


@pytest.mark.slow
def test_where_a_plan_has_room_for_it_the_step_after_it_stays_inside_the_budget() -> None:
    plain = network()
    roomy = shoal.compile(copy.deepcopy(plain), "1GiB")
    loop(roomy, BATCHES[:SKIPPED])
    budget_bytes = int(0.97 * roomy._compiled_call_impl.session.bytes_beside_calls(1))
    ours = shoal.compile(copy.deepcopy(plain), budget_bytes)
    loop(ours, BATCHES[:SKIPPED])
    predicted_bytes, captures = ours.shoal.predicted_peak_bytes, ours.shoal.captures
    assert true_peak(ours, lambda: loop(ours), [BATCHES]) <= budget_bytes
    assert ours.shoal.captures == captures + 1
    assert ours.shoal.predicted_peak_bytes == predicted_bytes


def test_a_loop_that_comes_to_call_twice_is_planned_for_two() -> None:
    ours = shoal.compile(network(), "1GiB")
    loop(ours, BATCHES[:SKIPPED])
    once_bytes = ours.shoal.predicted_peak_bytes
    for _ in range(3):
        ours.zero_grad()
        (ours(BATCHES[0]).square().mean() + ours(BATCHES[1]).square().mean()).backward()
    assert ours.shoal.predicted_peak_bytes > 1.2 * once_bytes


class Breaking(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body, self.head = nn.Sequential(*classifier(3, 8, 8)), nn.Linear(5, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.body(x)
        torch._dynamo.graph_break()
        return self.head(x)


@pytest.mark.slow
@pytest.mark.parametrize("share", [0.85, 4.0])
def test_in_a_model_of_several_graphs_it_does_not_change_the_plan_either(
    share: float, caplog: pytest.LogCaptureFixture
) -> None:
    torch.manual_seed(0)
    plain = Breaking()
    loop(plain)
    budget_bytes = int(share * true_peak(plain, lambda: loop(plain, BATCHES[:SKIPPED]), [BATCHES]))
    ours = shoal.compile(copy.deepcopy(plain), budget_bytes)
    loop(ours, BATCHES[:SKIPPED])
    plans = ours.shoal.plans
    assert not beyond_rounding(loop(ours), plain)
    assert ours.shoal.plans == plans
    said = [record for record in caplog.records if record.funcName == "left_over"]
    assert len(said) == (share < 1)
