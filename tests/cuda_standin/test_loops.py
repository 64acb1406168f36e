"""Kinds of steps and of training loops on CUDA, on a small network: what is predicted is what the allocator counts."""

from __future__ import annotations

from dataclasses import replace

import pytest

from tests.cuda_standin.training import Case, trained

SMALL = Case("chain", image=64, steps=4)
CASES = {
    "fp16 with a GradScaler": replace(SMALL, amp="fp16", optimizer="adamw", share=0.6),
    "channels_last": replace(SMALL, channels_last=True, share=0.6),
    "two passes a step": replace(SMALL, passes=2, share=0.6),
    "offloading only": replace(SMALL, allow="offload", share=0.5),
    "two graphs": replace(SMALL, net="broken", share=0.65),
}


@pytest.mark.parametrize("name", CASES)
def test_predicted_is_counted(name: str) -> None:
    run = trained(CASES[name])
    assert not [line for line in run.warnings if "over the budget" in line or "planning again" in line]
    for step in run.steps[2:]:
        assert step.repairs == 0
        assert step.counted_bytes <= run.budget_bytes
        assert step.metered_bytes <= run.budget_bytes  # of several graphs the first step runs before it is planned
        assert step.counted_bytes == pytest.approx(step.predicted_bytes, rel=0.005)
