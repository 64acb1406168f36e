"""In a wall of the budget plain PyTorch runs out of memory, and Shoal trains on: a step that ran out is run again."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

STEPS = """
import os, sys
import torch
from torch import nn
import shoal
from shoal.engine.repair import run_again_where_repaired
from tests import made_up_machine

made_up_machine.put_in_place()
MIB = 2**20

def block(channels):
    return [nn.Conv2d(channels, 32, 3, padding=1), nn.BatchNorm2d(32), nn.ReLU()]

model = nn.Sequential(*block(3), *(layer for _ in range(7) for layer in block(32)), nn.AdaptiveAvgPool2d(1),
    nn.Flatten(), nn.Linear(32, 10)).cuda()
images, labels = torch.empty(64, 3, 64, 64, device="cuda"), torch.zeros(64, dtype=torch.long, device="cuda")
optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
budget_bytes, wall_bytes, n_calls = 360 * MIB, int(sys.argv[1]) * MIB, 0
model = shoal.compile(model, budget=budget_bytes, optimizer=optimizer, offload_to=None)
torch.cuda.set_per_process_memory_fraction(wall_bytes / torch.cuda.get_device_properties(0).total_memory)

def forward_and_backward():
    global n_calls
    n_calls += 1
    optimizer.zero_grad()
    nn.functional.cross_entropy(model(images), labels).backward()

left = []
for _ in range(4):
    run_again_where_repaired(model, model.shoal, forward_and_backward)
    optimizer.step()
    optimizer.zero_grad()
    left.append(torch.cuda.memory_allocated())
print(model.shoal.repairs, n_calls, left[1], left[3], torch.cuda.max_memory_reserved() // MIB, flush=True)
os._exit(0)
"""


@pytest.mark.parametrize("wall_mib", [300, 350])
def test_a_step_that_runs_out_is_planned_and_run_again(wall_mib: int) -> None:
    command = [sys.executable, "-c", STEPS, str(wall_mib)]
    ran = subprocess.run(command, capture_output=True, text=True, check=True)
    repairs, n_calls, left_after_two, left_after_four, reserved_mib = map(int, ran.stdout.split())
    said = [line for line in ran.stderr.splitlines() if "out of memory in a step" in line]
    assert 1 <= repairs <= 4  # each lowers the peak by a sixteenth
    assert len(said) == repairs
    assert 4 <= n_calls <= 4 + repairs  # one that ran out in its forward pass is run again within the call
    assert left_after_two == left_after_four  # what failed left nothing after
    assert reserved_mib <= wall_mib


def train(out: Path, *options: str) -> subprocess.CompletedProcess[str]:
    command = (
        "-m shoal train --model resnet18_cifar --data examples.data.synthetic:open_synthetic --batch 256 --epochs 1 "
        "--enforce --device cuda"
    )
    return subprocess.run(
        [sys.executable, *command.split(), "--out", str(out), *options], capture_output=True, text=True, check=False
    )


def test_shoal_train_goes_on_in_a_wall_in_which_plain_pytorch_ends(tmp_path: Path) -> None:
    wall = ("--budget", "680MiB")
    plain = train(tmp_path / "plain", "--planner", "none", *wall)
    assert plain.returncode == 3, plain.stderr
    planned = train(tmp_path / "planned", *wall)
    assert planned.returncode == 0, planned.stderr
