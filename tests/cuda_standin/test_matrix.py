"""The contract of a budget on CUDA over kinds of networks, numbers, loops and memory.

Twenty rows: the seven networks of `bench.budgets` and three of timm's, each in two budgets. Of precision, layout,
optimizer, loop (alone, two passes a step, a second model beside, DDP), cuDNN's workspace, allowed means and budget,
every two values come together in some row.
"""

from __future__ import annotations

from dataclasses import fields
from itertools import combinations

import pytest

from tests.cuda_standin.training import Case, trained

CASES = [
    Case(
        "mobilenet_v2",
        64,
        128,
        share=0.8,
        amp="bf16",
        channels_last=True,
        beside="ema",
        workspace_bytes=64 << 20,
        allow="exact",
    ),
    Case("mobilenet_v2", 64, 128, share=0.6, optimizer="adamw", beside="ema", allow="offload"),
    Case("googlenet", 64, 128, share=0.8, amp="fp16", optimizer="adamw", channels_last=True, passes=2),
    Case("googlenet", 64, 128, share=0.6, amp="bf16", passes=2, workspace_bytes=64 << 20),
    Case("unet3d", 2, 64, share=0.8, channels_last=True, workspace_bytes=64 << 20, allow="offload"),
    Case(
        "unet3d",
        2,
        64,
        share=0.6,
        amp="fp16",
        optimizer="adamw",
        channels_last=True,
        ddp=True,
        workspace_bytes=64 << 20,
        allow="exact",
    ),
    Case("densenet121", 32, 128, share=0.8, amp="bf16", ddp=True, allow="exact"),
    Case("densenet121", 32, 128, share=0.6, amp="fp16", workspace_bytes=64 << 20, allow="offload"),
    Case("resnet50", 48, 160, share=0.8, amp="bf16", optimizer="adamw"),
    Case("resnet50", 48, 160, share=0.6, ddp=True, workspace_bytes=64 << 20),
    Case("unet", 5, 160, share=0.8, passes=2, workspace_bytes=64 << 20, allow="exact"),
    Case("unet", 5, 160, share=0.6, amp="fp16", optimizer="adamw", channels_last=True, beside="ema"),
    Case("vgg16_bn", 64, 128, share=0.8, amp="bf16", ddp=True, workspace_bytes=64 << 20, allow="offload"),
    Case("vgg16_bn", 64, 128, share=0.6, amp="fp16", channels_last=True, workspace_bytes=64 << 20, allow="exact"),
    Case("timm/efficientnet_lite0", 64, 128, share=0.8, amp="bf16", optimizer="adamw", passes=2, allow="offload"),
    Case("timm/efficientnet_lite0", 64, 128, share=0.6, amp="bf16", channels_last=True, passes=2, allow="exact"),
    Case(
        "timm/convnext_atto",
        64,
        128,
        share=0.8,
        amp="bf16",
        optimizer="adamw",
        channels_last=True,
        passes=2,
        workspace_bytes=64 << 20,
        allow="exact",
    ),
    Case("timm/convnext_atto", 64, 128, share=0.6, amp="bf16", ddp=True, allow="exact"),
    Case(
        "timm/vit_tiny_patch16_224",
        32,
        224,
        share=0.8,
        amp="fp16",
        optimizer="adamw",
        beside="ema",
        workspace_bytes=64 << 20,
    ),
    Case("timm/vit_tiny_patch16_224", 32, 224, share=0.6, optimizer="adamw", beside="ema", allow="exact"),
]
FACTORS = {
    "share": (0.8, 0.6),
    "amp": ("", "bf16", "fp16"),
    "optimizer": ("sgd", "adamw"),
    "channels_last": (False, True),
    "loop": ("alone", "two passes", "beside", "ddp"),
    "workspace_bytes": (0, 64 << 20),
    "allow": ("bitwise", "exact", "offload"),
}


def value(case: Case, factor: str) -> object:
    if factor != "loop":
        return getattr(case, factor)
    return "two passes" if case.passes == 2 else "beside" if case.beside else "ddp" if case.ddp else "alone"


def test_every_two_values_come_together() -> None:
    for one, other in combinations(FACTORS, 2):
        found = {(value(case, one), value(case, other)) for case in CASES}
        assert found == {(a, b) for a in FACTORS[one] for b in FACTORS[other]}
    assert {field.name for field in fields(Case)} >= FACTORS.keys() - {"loop"}


@pytest.mark.parametrize("case", CASES, ids=str)
def test_predicted_is_metered_and_the_device_gives_no_more(case: Case) -> None:
    run = trained(case)
    assert run.warnings == ()
    for step in run.steps[1:]:
        assert step.repairs == 0
        assert step.counted_bytes - run.beside_bytes <= run.budget_bytes
        assert step.metered_bytes == pytest.approx(step.predicted_bytes, rel=0.02)
    assert run.steps[1].synchronizations == 0
    for step in run.steps[3:]:  # its blocks lie where they are planned
        assert (step.synchronizations, step.mallocs) == (0, 0)
        assert step.reserved_bytes - run.beside_bytes <= 1.1 * run.budget_bytes
