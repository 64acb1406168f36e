"""A step that ran out of memory is run again from its beginning, as often as it was planned again for that."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from shoal.engine.repair import run_again_where_repaired
from shoal.engine.status import Status


def failing(status: Status, model: nn.BatchNorm1d, *, times: int, repaired: bool) -> list[torch.Tensor]:
    """Runs a step that moves statistics, draws a number, and then runs out of memory that many times."""
    drawn: list[torch.Tensor] = []

    def run() -> None:
        model(torch.randn(4, 3))
        drawn.append(torch.rand(5))
        if len(drawn) <= times:
            status.repairs += repaired
            raise torch.OutOfMemoryError("out of memory")

    run_again_where_repaired(model, status, run)
    return drawn


def test_each_attempt_begins_as_the_first() -> None:
    model, reference = nn.BatchNorm1d(3), nn.BatchNorm1d(3)
    before = torch.get_rng_state()
    drawn = failing(Status(0), model, times=2, repaired=True)
    torch.set_rng_state(before)
    reference(torch.randn(4, 3))
    assert len(drawn) == 3
    assert all(torch.equal(one, torch.rand(5)) for one in drawn[:1])
    assert torch.equal(drawn[0], drawn[1]) and torch.equal(drawn[1], drawn[2])
    assert model.num_batches_tracked == 1
    assert torch.equal(model.running_mean, reference.running_mean)


def test_what_no_plan_caused_is_raised() -> None:
    with pytest.raises(torch.OutOfMemoryError):
        failing(Status(0), nn.BatchNorm1d(3), times=1, repaired=False)


def test_a_step_on_the_cpu_is_not_run_again() -> None:
    assert not Status(0).runs_again
