"""CUDA's default, `kernels="compiled"`: the contract of a budget, and what a step launches.

Times are of the suite's made-up machine, so which regions stay compiled is the same each time.
"""

from __future__ import annotations

from dataclasses import replace

import pytest

from tests.cuda_standin.test_matrix import ROWS as OP_BY_OP
from tests.cuda_standin.training import Case, Run, plain, trained

RESNET50 = Case("resnet50", 16, 128, share=0.75, amp="bf16", kernels="compiled")
CASES = [
    Case("resnet18", 32, 128, share=0.75, kernels="compiled"),
    RESNET50,
    *(replace(OP_BY_OP[number], kernels="compiled") for number in (0, 1, 3, 8)),  # U-Net, MobileNetV2, ViT, 3D U-Net
]
LARGE = Case("resnet50", 64, 224, amp="bf16", channels_last=True, kernels="compiled", allow="recompute", recorded=False)


def torch_compiled(case: Case) -> Run:
    """The same training in `torch.compile`, without a budget."""
    return trained(replace(case, share=None, kernels="torch.compile", steps=3))


@pytest.mark.parametrize("case", CASES, ids=str)
def test_predicted_is_metered_and_the_device_gives_no_more(case: Case) -> None:
    if case.net.startswith("timm/"):
        pytest.importorskip("timm")
    run, without = trained(case), plain(case)
    assert run.compiled
    assert run.warnings == ()
    assert run.departures == ()
    assert all(step.reserved_bytes - run.beside_bytes <= 1.1 * run.budget_bytes for step in run.steps)
    for step in run.steps[1:]:
        assert step.repairs == 0
        assert step.counted_bytes - run.beside_bytes <= run.budget_bytes
        assert step.metered_bytes <= 1.02 * step.predicted_bytes
        if step.has_state:
            assert step.metered_bytes == pytest.approx(step.predicted_bytes, rel=0.02)
            assert step.counted_bytes - run.beside_bytes == pytest.approx(step.predicted_bytes, rel=0.02)
    for step in run.steps[-2:]:
        assert step.mallocs == 0
        assert step.synchronizations <= without.steps[-1].synchronizations


@pytest.mark.parametrize("case", [RESNET50, replace(CASES[0], amp="bf16")], ids=str)
def test_with_everything_kept_a_step_launches_less_than_torch_compile_has_it(case: Case) -> None:
    kept = trained(replace(case, share=1.2))
    assert kept.steps[-1].launches <= 0.8 * torch_compiled(case).steps[-1].launches


@pytest.mark.parametrize("kernels", ["eager", "compiled"])
def test_a_pooling_launches_one_kernel_each_way(kernels: str) -> None:
    case = replace(next(row for row in OP_BY_OP if row.net == "vgg16_bn"), kernels=kernels)
    assert trained(case).steps[-1].launches <= 1.05 * plain(case).steps[-1].launches


def test_a_planned_resnet50_launches_what_it_recomputes_besides() -> None:
    planned, kept = trained(RESNET50), trained(replace(RESNET50, share=1.2))
    assert planned.steps[-1].launches <= kept.steps[-1].launches + planned.n_recomputed


def test_a_step_launches_no_more_at_any_budget_than_115_percent_of_eager_pytorchs() -> None:
    """Nor, with everything kept, than `torch.compile` and a tenth: in channels_last, where most is launched."""
    eager = plain(LARGE).steps[-1].launches
    kept = trained(replace(LARGE, share=1.2))
    assert kept.n_recomputed == 0
    assert kept.steps[-1].launches <= min(eager, 1.1 * torch_compiled(LARGE).steps[-1].launches)
    for share in (0.6, 0.4):
        planned = trained(replace(LARGE, share=share))
        assert planned.n_recomputed > 0
        assert planned.steps[-1].launches <= 1.15 * eager
        assert all(step.reserved_bytes <= 1.1 * planned.budget_bytes for step in planned.steps)
