"""What cuBLAS keeps is there before the first step that has a matrix product, and counts; else it is not asked for."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

COUNT = """
from types import SimpleNamespace
import torch
from shoal.memory.library_memory import library_bytes

def step(*targets):
    return SimpleNamespace(ops=[SimpleNamespace(target=target) for target in targets])

cuda = torch.device("cuda", 0)
def bytes_of(*given):
    return sum(library_bytes(*given).values())

found = [bytes_of(step("aten.convolution.default"), cuda), torch.cuda.memory_allocated()]
found += [bytes_of(step("aten.mm.default"), torch.device("cpu"))]
{before}
with torch.autograd.set_multithreading_enabled(False):  # as AOTAutograd has it while it traces
    found += [bytes_of(step("aten.relu.default", "aten.addmm.default"), cuda), torch.cuda.memory_allocated()]
linear = torch.nn.Linear(64, 64).cuda()
x = torch.zeros(8, 64, device="cuda", requires_grad=True)
held = torch.cuda.memory_allocated()
for dtype in (torch.float32, torch.bfloat16):
    with torch.autocast("cuda", dtype=dtype):
        linear(x).sum().backward()
x.grad = linear.weight.grad = linear.bias.grad = None
found += [torch.cuda.memory_allocated() - held]
with torch.cuda.stream(torch.cuda.Stream()):
    found += [bytes_of(step("aten.bmm.default"), cuda)]
print(*found, flush=True)
import os
os._exit(0)
"""
WORKSPACE = 32 << 20  # of a Hopper GPU


BUDGET = 1 << 30


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


ELSEWHERE = """
import os, threading
import torch
from torch import nn
import shoal
from tests import made_up_machine

made_up_machine.put_in_place()
layers = [nn.Flatten(), nn.Linear(3072, 4096), nn.ReLU(), nn.Linear(4096, 4096), nn.ReLU(), nn.Linear(4096, 10)]
model = nn.Sequential(*layers).cuda()
x = torch.zeros(2048, 3, 32, 32, device="cuda")
model = shoal.compile(model, budget=int(os.environ["BUDGET"]))

def step():
    torch.cuda.reset_peak_memory_stats()
    for p in model.parameters():
        p.grad = None
    model(x).sum().backward()
    print(model.shoal.predicted_peak_bytes, torch.cuda.max_memory_allocated(), model.shoal.captures, flush=True)

def elsewhere(run):
    thread = threading.Thread(target=run)
    thread.start()
    thread.join()

step(), step(), step()
elsewhere(lambda: [step(), step()])
def on_a_stream():
    with torch.cuda.stream(torch.cuda.Stream()):
        step()
on_a_stream()
os._exit(0)
"""


def test_a_step_called_from_another_thread_or_stream_counts_their_workspaces() -> None:
    environment = {**os.environ, "BUDGET": str(BUDGET)}
    ran = subprocess.run([sys.executable, "-c", ELSEWHERE], capture_output=True, text=True, check=True, env=environment)
    predicted, peaks, captures = zip(*(map(int, line.split()) for line in ran.stdout.splitlines()), strict=True)
    assert [later - predicted[2] for later in predicted[3:]] == [WORKSPACE, WORKSPACE, 3 * WORKSPACE]
    for one, other in zip(predicted[2:], peaks[2:], strict=True):
        assert other == pytest.approx(one, abs=BUDGET // 100)  # what fillers of placed blocks may take
    assert captures[-1] == captures[0]  # the budget has room
