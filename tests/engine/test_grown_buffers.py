"""Buffers that get their sizes in the first iteration, as those of observers do: what an error names is enough."""

from __future__ import annotations

import copy
from collections.abc import Callable

import pytest
import torch
from torch import nn
from torch.ao.quantization import get_default_qat_qconfig

import shoal
from shoal.errors import BudgetError
from tests.capture.test_fake_quantization import Net, prepared
from tests.engine.several_graphs import Chain, mean_square, peaks_of
from tests.engine.training_laws import blocks, differences, images, needs_compiler

pytestmark = pytest.mark.filterwarnings("ignore")  # torch.ao is deprecated


class Observer(nn.Module):
    def __init__(self, *, replaces: bool) -> None:
        super().__init__()
        self.replaces = replaces
        self.register_buffer("most", torch.zeros(0))
        self.most: torch.Tensor

    @torch.compiler.disable  # type: ignore[untyped-decorator]
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if not self.most.numel():
            sized = torch.zeros(30_000) if self.replaces else self.most.resize_(30_000).zero_()
            self.most = sized
        self.most.clamp_(min=x.detach().max())
        return x / self.most[0].clone()


class Observed(Chain):
    def __init__(self, *, replaces: bool) -> None:
        super().__init__(Observer(replaces=replaces), blocks(3, 16, 16), 16)


def quantized() -> nn.Module:
    """Its observers branch on values: several graphs."""
    return prepared(Net(n_layers=2, channels=16), get_default_qat_qconfig("x86", version=0))


@pytest.mark.slow
@needs_compiler
@pytest.mark.parametrize(
    "made",
    [lambda: Observed(replaces=False), lambda: Observed(replaces=True), quantized],
    ids=["resized", "replaced", "quantized"],
)
def test_the_budget_that_an_error_names_is_enough(made: Callable[[], nn.Module]) -> None:
    plain = made()
    refused, planned = copy.deepcopy(plain), copy.deepcopy(plain)
    _, peak_bytes = peaks_of(copy.deepcopy(plain))
    batches = images(3, 8, 3, 32, 32)
    with pytest.raises(BudgetError) as error:
        mean_square(shoal.compile(refused, budget=int(0.6 * peak_bytes), allow="bitwise"), batches[0])
    named_bytes = error.value.least_feasible_bytes
    assert named_bytes is not None
    shoal.compile(planned, budget=named_bytes, allow="bitwise")
    for x in batches:
        for model in (plain, planned):
            model.zero_grad()
            mean_square(model, x)
        ours, theirs = (
            {name: p.grad for name, p in model.named_parameters() if p.grad is not None} for model in (planned, plain)
        )
        assert not differences(ours, theirs)
    status = planned.shoal
    assert status.captures > 1 and status.repairs == 0
    assert 0.95 * named_bytes <= status.measured_peak_bytes <= named_bytes
