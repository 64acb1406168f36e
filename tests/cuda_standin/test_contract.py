"""The contract of a budget on CUDA: what is predicted is what the allocator counts, from the second step on.

Every peak is counted apart from Shoal's meter, from the allocator's own record.
"""

from __future__ import annotations

from dataclasses import replace

import pytest

from tests.cuda_standin.training import Case, trained

CASES = [
    Case("resnet18", share=0.7),
    Case("resnet18", share=0.65, optimizer="adamw", amp="bf16"),
    Case("resnet18", share=0.55, workspace_bytes=64 << 20),
    Case("resnet50", batch=32, share=0.5, optimizer="adamw", amp="bf16"),
    Case("resnet50", batch=32, share=0.4, workspace_bytes=64 << 20),
]


@pytest.mark.parametrize("case", CASES, ids=str)
def test_predicted_is_metered_is_counted(case: Case) -> None:
    run = trained(case)
    assert run.warnings == ()
    for step in run.steps[1:]:  # what fills holes included
        assert step.repairs == 0
        assert step.counted_bytes <= run.budget_bytes
        assert step.metered_bytes == pytest.approx(step.predicted_bytes, rel=0.02)
        assert step.counted_bytes == pytest.approx(step.predicted_bytes, rel=0.02)
        assert step.reserved_bytes <= 1.1 * run.budget_bytes
    for step in run.steps[3:]:  # from here on its blocks lie where they are planned
        assert step.synchronizations == 0


def test_the_last_step_that_nothing_meters_reads_the_same_from_the_allocator() -> None:
    last = trained(CASES[0]).steps[-1]
    assert last.allocated_bytes == last.counted_bytes


def test_a_second_model_beside_changes_nothing() -> None:
    alone, beside = trained(CASES[0]), trained(replace(CASES[0], beside="ema"))
    assert beside.warnings == ()
    assert beside.beside_bytes > 40 << 20
    for one, other in zip(alone.steps, beside.steps, strict=True):
        assert (one.predicted_bytes, one.metered_bytes, one.repairs) == (
            other.predicted_bytes,
            other.metered_bytes,
            other.repairs,
        )
        assert other.counted_bytes - beside.beside_bytes == pytest.approx(one.counted_bytes, rel=0.001)


@pytest.mark.parametrize("amp", ["", "bf16"])
def test_what_is_computed_again_is_launched_once_more(amp: str) -> None:
    """An op that runs again is one launch, or two: a convolution with a bias in bfloat16, cuDNN's batch norm."""
    case = Case("chain", 32, 64, amp=amp, share=1.05, allow="recompute", recorded=False, steps=4)
    kept, planned = trained(case), trained(replace(case, share=0.6))
    assert kept.n_recomputed == 0 < planned.n_recomputed
    more = planned.steps[-1].launches - kept.steps[-1].launches
    assert planned.n_recomputed <= more <= 2 * planned.n_recomputed
