"""The contract of a budget on CUDA over kinds of networks, numbers, loops and memory, mixed in ten rows.

They are those that held of twenty that were tried; docs/accelerators.md names the others. No covering selection.

Six of the seven networks of `bench.budgets` and three of timm's; float32, bfloat16 and float16 with a GradScaler, both
memory formats, SGD and AdamW, two passes a step, a second model beside, cuDNN workspaces of 0 and 64 MiB, offloading
alone.
"""

from __future__ import annotations

import pytest

from tests.cuda_standin.training import Case, trained

CASES = [
    Case("mobilenet_v2", 64, 128, share=0.6, optimizer="adamw", beside="ema", allow="offload"),
    Case("googlenet", 64, 128, share=0.8, amp="fp16", optimizer="adamw", channels_last=True, passes=2),
    Case("googlenet", 64, 128, share=0.6, amp="bf16", passes=2, workspace_bytes=64 << 20),
    Case("unet3d", 2, 64, share=0.8, channels_last=True, workspace_bytes=64 << 20, allow="offload"),
    Case("densenet121", 32, 128, share=0.6, amp="fp16", workspace_bytes=64 << 20, allow="offload"),
    Case("resnet50", 48, 160, share=0.8, amp="bf16", optimizer="adamw"),
    Case("unet", 5, 160, share=0.8, passes=2, workspace_bytes=64 << 20, allow="exact"),
    Case("timm/efficientnet_lite0", 64, 128, share=0.8, amp="bf16", optimizer="adamw", passes=2, allow="offload"),
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
    Case("timm/vit_tiny_patch16_224", 32, 224, share=0.6, optimizer="adamw", beside="ema", allow="exact"),
]


@pytest.mark.parametrize("case", CASES, ids=str)
def test_predicted_is_metered_and_the_device_gives_no_more(case: Case) -> None:
    if case.net.startswith("timm/"):
        pytest.importorskip("timm")
    run = trained(case)
    assert run.warnings == ()
    for step in run.steps[1:]:
        assert step.repairs == 0
        assert step.counted_bytes - run.beside_bytes <= 1.002 * run.budget_bytes
        if case.amp != "fp16":  # there the scaler leaves out the optimizer's first steps, and its state comes later
            assert step.metered_bytes == pytest.approx(step.predicted_bytes, rel=0.02)
    for step in run.steps[3:]:  # its blocks lie where they are planned
        assert step.counted_bytes - run.beside_bytes == pytest.approx(step.predicted_bytes, rel=0.02)
        assert step.reserved_bytes - run.beside_bytes <= 1.1 * run.budget_bytes
        assert step.mallocs == 0
        if case.allow != "offload":
            assert step.synchronizations == 0
