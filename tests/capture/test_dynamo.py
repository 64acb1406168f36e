"""What surrounds a capture leaves the process as it was."""

from __future__ import annotations

import gc

import pytest
import torch
from torch import nn

import shoal
from shoal.capture.dynamo import few_collections


@pytest.mark.parametrize("before", [(700, 10, 10), (100_000, 5, 5), (0, 10, 10)])
def test_cycles_are_looked_for_less_often_within_and_as_before_behind(before: tuple[int, int, int]) -> None:
    own = gc.get_threshold()
    gc.set_threshold(*before)
    try:
        with pytest.raises(KeyError), few_collections():
            within = gc.get_threshold()
            raise KeyError
        assert gc.get_threshold() == before
    finally:
        gc.set_threshold(*own)
    assert (within[0] >= before[0]) and (within[0] == 0) == (before[0] == 0), "who switched it off has it off"
    assert before[0] != 700 or within[0] > 10 * before[0]


class Printing(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(4, 4), nn.Linear(4, 2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.first(x)
        print("mean", round(x.mean().item(), 3))
        return self.second(x)


def test_where_a_model_breaks_is_told_in_one_line_and_by_nobody_else(
    caplog: pytest.LogCaptureFixture, capfd: pytest.CaptureFixture[str]
) -> None:
    torch._dynamo.reset()
    model = shoal.compile(Printing(), "1MiB")
    for _ in range(2):
        model(torch.randn(3, 4)).sum().backward()
    told = [record for record in caplog.records if "not one graph" in record.getMessage()]
    assert len(told) == 1 and "\n" not in told[0].getMessage()
    assert "torch/_dynamo" not in capfd.readouterr().err
    assert not [record for record in caplog.records if record.name.startswith("torch")]
