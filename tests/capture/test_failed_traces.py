"""Where PyTorch cannot trace a model's gradients, one line tells where in the model."""

from __future__ import annotations

import inspect
import warnings

import pytest
import torch
from torch import nn

import shoal
from shoal.errors import CaptureError
from tests.raising import raising


class Overwriting(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.one = nn.Linear(4, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.one(x).tanh()
        return y.mul_(2)


@pytest.mark.parametrize("allow", ["bitwise", "exact"])
def test_an_error_in_the_gradients_names_the_line_and_nothing_else_is_printed(allow: str) -> None:
    model = shoal.compile(Overwriting(), budget="1GiB", allow=allow)
    number = inspect.getsourcelines(Overwriting.forward)[1] + 1
    line = f"test_failed_traces.py:{number} (y = self.one(x).tanh())"
    with warnings.catch_warnings(record=True) as warned:
        warnings.simplefilter("always")
        with raising(CaptureError, line) as raised:
            model(torch.randn(2, 4))
    assert not [one for one in warned if "Error detected" in str(one.message)]
    assert raised.value.__cause__ is None
