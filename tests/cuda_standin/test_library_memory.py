"""What cuBLAS keeps is there before the first step that has a matrix product, and counts; else it is not asked for."""

from __future__ import annotations

import subprocess
import sys

COUNT = """
from types import SimpleNamespace
import torch
from shoal.memory.library_memory import library_bytes

def step(*targets):
    return SimpleNamespace(ops=[SimpleNamespace(target=target) for target in targets])

cuda = torch.device("cuda", 0)
found = [library_bytes(step("aten.convolution.default"), cuda), torch.cuda.memory_allocated()]
found += [library_bytes(step("aten.mm.default"), torch.device("cpu"))]
{before}
with torch.autograd.set_multithreading_enabled(False):  # as AOTAutograd has it while it traces
    found += [library_bytes(step("aten.relu.default", "aten.addmm.default"), cuda), torch.cuda.memory_allocated()]
linear = torch.nn.Linear(64, 64).cuda()
x = torch.zeros(8, 64, device="cuda", requires_grad=True)
held = torch.cuda.memory_allocated()
for dtype in (torch.float32, torch.bfloat16):
    with torch.autocast("cuda", dtype=dtype):
        linear(x).sum().backward()
x.grad = linear.weight.grad = linear.bias.grad = None
found += [torch.cuda.memory_allocated() - held]
with torch.cuda.stream(torch.cuda.Stream()):
    found += [library_bytes(step("aten.bmm.default"), cuda)]
print(*found, flush=True)
import os
os._exit(0)
"""
WORKSPACE = 32 << 20  # of a Hopper GPU


def counted(before: str) -> list[int]:
    ran = subprocess.run(
        [sys.executable, "-c", COUNT.format(before=before)], capture_output=True, text=True, check=True
    )
    return list(map(int, ran.stdout.split()))


def test_the_thread_of_the_call_and_that_of_the_backward_pass_have_one_each() -> None:
    of_a_convolution, then, on_the_cpu, of_a_product, there, more_by_products, on_another_stream = counted("")
    assert of_a_convolution == then == on_the_cpu == 0
    assert of_a_product == there == 2 * WORKSPACE
    assert more_by_products == 0
    assert on_another_stream == 2 * WORKSPACE


def test_what_the_process_had_before_counts_as_well() -> None:
    before = "torch.nn.Linear(4, 4).cuda()(torch.zeros(2, 4, device='cuda')).sum().backward()"
    assert counted(before)[3] == 2 * WORKSPACE
