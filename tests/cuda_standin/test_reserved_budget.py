"""A budget of reserved bytes: the device gives no more, counted by the stand-in itself, from the first step on."""

from __future__ import annotations

import subprocess
import sys

import pytest

from shoal.memory.layout.caching_allocator import PASSES_LIMIT_BYTES
from tests.cuda_standin.training import Case, trained

CASES = [
    Case("chain", image=64, share=0.8, optimizer="adamw", budget_of="reserved"),
    Case("resnet18", batch=32, share=0.8, optimizer="adamw", amp="bf16", budget_of="reserved"),
    Case("resnet18", batch=32, share=0.9, workspace_bytes=64 << 20, beside="ema", budget_of="reserved"),
]


@pytest.mark.parametrize("case", CASES, ids=str)
def test_reserved_is_predicted_and_within_the_budget_in_every_step(case: Case) -> None:
    run = trained(case)
    assert run.warnings == ()
    for step in run.steps:
        assert step.reserved_bytes <= run.budget_bytes
        assert step.reserved_bytes <= step.predicted_reserved_bytes <= run.budget_bytes
    for step in run.steps[1:]:
        assert step.repairs == 0
        assert step.metered_bytes == pytest.approx(step.predicted_bytes, rel=0.02)
    for step in run.steps[3:]:  # at planned addresses
        assert step.reserved_bytes == step.predicted_reserved_bytes
        assert step.synchronizations == 0


REFUSED = """
import os
import torch
import shoal
from torch import nn

head = [nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(32, 10)]
model = nn.Sequential(nn.Conv2d(3, 32, 3), nn.ReLU(), nn.Conv2d(32, 32, 3), *head).cuda()
beside = torch.empty(200 << 20, dtype=torch.uint8, device="cuda")
model = shoal.compile(model, budget="256MiB", options=shoal.Options(budget_of="reserved"))
try:
    model(torch.zeros(32, 3, 128, 128, device="cuda")).sum().backward()
except shoal.errors.BudgetError as error:
    print("refused", " ".join(str(error).split()), flush=True)
del beside
torch.cuda.empty_cache()
model(torch.zeros(16, 3, 128, 128, device="cuda")).sum().backward()
print("ran", flush=True)
other = torch.empty(20 << 20, dtype=torch.uint8, device="cuda")
try:
    torch.empty(1 << 30, dtype=torch.uint8, device="cuda")
except torch.OutOfMemoryError:
    print("limited", flush=True)
del model
import gc
gc.collect()
torch._dynamo.reset()
gc.collect()
torch.empty(1 << 30, dtype=torch.uint8, device="cuda")
print("free again", flush=True)
os._exit(0)
"""


def test_what_else_the_process_holds_counts_and_the_limit_goes_with_the_model() -> None:
    ran = subprocess.run([sys.executable, "-c", REFUSED], capture_output=True, text=True, check=False)
    lines = ran.stdout.splitlines()
    assert [line.split()[0] for line in lines] == ["refused", "ran", "limited", "free"], ran.stderr
    assert "left to the allocator" in lines[0]
    assert PASSES_LIMIT_BYTES == 18 << 20
