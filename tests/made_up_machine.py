"""A machine that is as fast wherever the tests run, however busy the real one is.

Plans depend on the times of ops and on the rates of links. Measured ones would make every run of the suite another one.
Workspaces are bytes, and are measured as ever.
"""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import fx

from shoal.core.hardware import Device, Hardware, Link, MeasuredLink
from shoal.cost import measure, measure_links, profile
from shoal.cost.in_turns import Timing
from shoal.cost.random_operands import OperandFactory
from shoal.graph.op_counts import flops, moved_bytes
from shoal.offload import policy

SLAB = MeasuredLink("host slab", 4e9, 3e9, 1e-5, 1e-5, 1e-4)
HERE = Hardware(
    "a made-up machine",
    Device("a made-up processor", 2**36, 5e10, 1e10, 2e-6),
    Link("host slab", 4e9, 3e9, 1e-5),
    "tests",
)
HOST_BYTES = 2**36  # free, and on disk


def _timing(node: fx.Node, operands: OperandFactory, hurry: bool) -> Timing:
    target: Any = node.target
    args, kwargs = operands.arguments(node)
    workspace = profile._cuda_workspace if operands.device.type == "cuda" else profile._cpu_workspace
    device = HERE.device
    seconds = max(flops(node) / device.flops_per_second, moved_bytes(node) / device.bytes_per_second)
    seconds += device.launch_seconds
    return Timing(lambda: seconds, [seconds], workspace(lambda: target(*args, **kwargs)), once=True)


def _here(device: torch.device) -> Hardware:
    return HERE


_MADE_UP: list[tuple[Any, str, Any]] = [
    (profile, "_begin", _timing),
    (measure, "_measure", _here),
    (measure_links, "_slab_copies", lambda: SLAB),
    (measure_links, "file_link", lambda folder: MeasuredLink(f"file in {folder}", 1e9, 2e9, 1e-4, 1e-4, 1e-3 / 64)),
    (policy, "_available_bytes", lambda: HOST_BYTES),
    (policy, "shutil", SimpleNamespace(disk_usage=lambda folder: SimpleNamespace(free=HOST_BYTES))),
]
_REAL = [(module, name, getattr(module, name)) for module, name, _ in _MADE_UP]


def put_in_place() -> None:
    """From now on, this process takes every time from the made-up machine."""
    for module, name, made_up in _MADE_UP:
        setattr(module, name, made_up)


@pytest.fixture
def real_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    """For tests of what measures: this machine, as it is now."""
    for module, name, real in _REAL:
        monkeypatch.setattr(module, name, real)
