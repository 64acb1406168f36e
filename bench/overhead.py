"""What a planned step costs where nothing is given up: `shoal.compile` without a budget beside plain PyTorch.

    python -m bench.overhead           resnet50 on 8 x 224 pixels, and 500 tiny ops in a row; minutes on two cores
    python -m bench.overhead --quick   small inputs, three turns: does it run?

All contenders take turns in one process, on the same weights and batch. `A/A` is plain PyTorch once more, the noise.
The tiny ops are so small that the time is what PyTorch and the generated code take to call them: their row also has the
difference in microseconds for each op of the forward pass. First, gradients are compared with plain PyTorch bit by bit.
"""

from __future__ import annotations

import statistics
import sys
from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F

import shoal
from bench.frame import CPU_TIME, Bench, Run, WrongResult, option
from bench.interleave import median_ratio
from bench.tables import cells, new_table
from bench.workload import Workload, make_workload

TARGET_PERCENT = 2.0
TINY_OPS = 500
COLUMNS = "<network|ops|plain ms|planned ms|added %|added us an op|A/A %"
FORMATS = (
    "{network}|{ops}|{plain_seconds:ms}|{planned_seconds:ms}|{added_percent:+.1f}|{added_us:+.2f}|{noise_percent:+.1f}"
)


class _Tiny(nn.Module):
    """Ops in a row on sixteen values, and a head."""

    def __init__(self, ops: int) -> None:
        super().__init__()
        self.ops = ops
        self.head = nn.Linear(16, 10)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.head.weight[0] + x.flatten(1)[:, :16]
        for place in range(self.ops):
            x = x.sin() if place % 2 else x * 0.99
        return self.head(x)


def _tiny(ops: int) -> Workload:
    return Workload("tiny ops", _Tiny(ops), torch.randn(2, 1, 4, 4), torch.zeros(2, dtype=torch.long))


def _measured(run: Run, workload: Workload, ops: int) -> dict[str, Any]:
    ways: dict[str, nn.Module] = {
        "plain": workload.model,
        "A/A": workload.shared_copy(),
        "planned": shoal.compile(workload.shared_copy(), name=workload.name),
    }
    gradients = {name: _gradients(workload, model) for name, model in ways.items()}
    for ours, theirs in zip(gradients["planned"], gradients["plain"], strict=True):
        if not torch.equal(ours, theirs):
            raise WrongResult(f"{workload.name}: gradients differ from plain PyTorch's")
    seconds = workload.in_turns(ways, run.pick(run.asked.turns, 3), 3)
    plain = statistics.median(seconds["plain"])
    ratio = median_ratio(seconds["planned"], seconds["plain"])
    return {
        "network": workload.name,
        "ops": ops,
        "plain_seconds": plain,
        "planned_seconds": statistics.median(seconds["planned"]),
        "added_percent": 100 * (ratio - 1),
        "added_us": 1e6 * (ratio - 1) * plain / ops,
        "noise_percent": 100 * (median_ratio(seconds["A/A"], seconds["plain"]) - 1),
    }


def _gradients(workload: Workload, model: nn.Module) -> list[torch.Tensor]:
    workload.reset()
    F.cross_entropy(model(workload.images), workload.target).backward()
    found = [p.grad.clone() for p in model.parameters() if p.grad is not None]
    workload.reset()
    return found


def _run(run: Run) -> None:
    made: dict[str, Callable[[], tuple[Workload, int]]] = {
        "resnet50": lambda: (make_workload("resnet50", *run.pick((8, 224), (2, 64))), 174),
        "tiny ops": lambda: (_tiny(TINY_OPS), TINY_OPS),
    }
    rows = []
    for name in run.asked.networks:
        workload, ops = made[name]()
        rows.append(_measured(run, workload, ops))
        run.save(rows=rows)
    table = new_table(f"A planned step that gives nothing up; the target is {TARGET_PERCENT:g} % for resnet50", COLUMNS)
    for row in rows:
        table.add_row(*cells(FORMATS, row))
    run.say(table)


main = Bench(
    _run,
    option("--networks", known=("resnet50", "tiny ops"), default=["resnet50", "tiny ops"]),
    option("--turns", type=int, default=15),
    CPU_TIME,
    seed=True,
)

if __name__ == "__main__":
    sys.exit(main())
