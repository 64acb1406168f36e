"""A residual network's step, made up but whole, with a plan that recomputes inside its blocks."""

from __future__ import annotations

import math
import random
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

from shoal.core.hardware import Link
from shoal.core.plan import Plan
from shoal.core.residence import Offload, Recompute, Residence
from shoal.core.step import Op, StepGraph, Storage
from shoal.planners.just_in_time import just_in_time
from shoal.report.data import Report
from tests.random_steps import legal_offloads

MIB = 2**20


class _Builder:
    """Appends ops and storages, and remembers what the backward pass must do."""

    def __init__(self) -> None:
        self.ops: list[Op] = []
        self.storages: list[Storage] = []

    def storage(self, name: str, nbytes: int, kind: Any, layer: str, shape: tuple[int, ...]) -> int:
        self.storages.append(Storage(len(self.storages), name, nbytes, kind, layer, shape, "float32"))
        return len(self.storages) - 1

    def op(self, target: str, phase: Any, layer: str, reads: list[int], writes: list[int], **more: Any) -> str:
        name = f"{target}_{len(self.ops)}"
        moved = sum(self.storages[s].nbytes for s in reads + writes)
        seconds = 8e-6 + moved / 6e9 * (4 if "convolution" in target else 1)
        reads, writes = list(dict.fromkeys(reads)), list(dict.fromkeys(writes))
        self.ops.append(
            Op(
                len(self.ops),
                name,
                f"aten.{target}.default",
                phase,
                layer,
                tuple(reads),
                tuple(writes),
                seconds=seconds,
                **more,
            )
        )
        return name


def residual_step(blocks: int = 8, activation_bytes: int = 32 * MIB, model: str = "ResNet-18") -> StepGraph:
    """Stem, `blocks` residual blocks whose resolution falls and width grows, a classifier, and the backward pass."""
    b = _Builder()
    tape: list[tuple[str, str, int, int, int]] = []  # target, layer, input, output, weight
    weights: dict[int, int] = {}

    def forward(target: str, layer: str, source: int, nbytes: int, weight_bytes: int = 0, extra: int = -1) -> int:
        shape = (128, max(1, nbytes // (128 * 32 * 32 * 4)), 32, 32)
        weight = (
            b.storage(f"{layer}.weight", weight_bytes, "parameter", layer, (weight_bytes // 4,)) if weight_bytes else -1
        )
        output = b.storage(f"{target}_{len(b.ops)}", nbytes, "activation", layer, shape)
        reads = [s for s in (source, weight, extra) if s >= 0]
        workspace = nbytes // 4 if target == "convolution" else 0
        in_place = source if target == "relu" else -1
        b.op(target, "forward", layer, reads, [output], workspace_bytes=workspace, overwrites=in_place)
        tape.append((target, layer, source, output, weight))
        weights[output] = weight
        return output

    x = b.storage("images", 128 * 3 * 32 * 32 * 4, "input", "", (128, 3, 32, 32))
    x = forward("convolution", "conv1", x, activation_bytes, 64 * 1024)
    x = forward("relu", "relu", x, activation_bytes)
    for block in range(blocks):
        stage = 4 * block // blocks
        size, weight = max(512, activation_bytes >> stage), 147456 << (2 * stage)
        at, skip = f"layer{stage + 1}.{block % max(1, blocks // 4)}", x
        for part in ("1", "2"):
            x = forward("convolution", f"{at}.conv{part}", x, size, weight)
            x = forward("native_batch_norm", f"{at}.bn{part}", x, size, 512 << stage)
            if part == "2":
                x = forward("add", at, x, size, extra=skip)
            x = forward("relu", f"{at}.relu", x, size)
    pooled = forward("mean", "avgpool", x, 128 * 512 * 4)
    logits = b.storage("logits", 128 * 10 * 4, "output", "fc", (128, 10))
    head = b.storage("fc.weight", 512 * 10 * 4, "parameter", "fc", (10, 512))
    b.op("addmm", "forward", "fc", [pooled, head], [logits])
    tangent = b.storage("tangent", 128 * 10 * 4, "tangent", "", (128, 10))
    b.op("cross_entropy", "loss", "", [logits], [tangent])
    error = b.storage("error_pooled", 128 * 512 * 4, "activation_gradient", "fc", (128, 512))
    gradient = b.storage("fc.weight.gradient", 512 * 10 * 4, "gradient", "fc", (10, 512))
    b.op("addmm_backward", "backward", "fc", [tangent, pooled, head], [error, gradient])
    for target, layer, source, output, weight in reversed(tape):
        reads = [error, {"relu": output}.get(target, source)]
        writes: list[int] = []
        if b.storages[source].kind != "input":
            writes.append(
                b.storage(
                    f"error_{len(b.ops)}",
                    b.storages[source].nbytes,
                    "activation_gradient",
                    layer,
                    b.storages[source].shape,
                )
            )
        if weight >= 0:
            reads.append(weight)
            w = b.storages[weight]
            writes.append(b.storage(f"{w.name}.gradient", w.nbytes, "gradient", layer, w.shape))
        if writes:
            b.op(f"{target}_backward", "backward", layer, reads, writes, workspace_bytes=b.storages[output].nbytes // 4)
            if b.storages[writes[0]].kind == "activation_gradient":
                error = writes[0]
    return StepGraph(model, tuple(b.ops), tuple(b.storages))


def recompute_blocks(graph: StepGraph) -> dict[str, Residence]:
    """Give up what lies inside a block, keep the blocks' own outputs; compute it again before its first reader."""
    chosen: dict[str, Residence] = {}
    for storage_id in graph.saved:
        storage = graph.storages[storage_id]
        if storage.kind != "activation" or not storage.layer.startswith("layer"):
            continue
        producer = graph.ops[graph.producer[storage_id]]
        closes_block = (
            producer.target == "aten.relu.default" and graph.ops[producer.id - 1].target == "aten.add.default"
        )
        if not closes_block:
            chosen[storage.name] = Recompute()
    for storage_id in reversed([graph.storages[i].id for i in graph.saved if graph.storages[i].name in chosen]):
        first = min(_needed_at(graph, storage_id, chosen))
        chosen[graph.storages[storage_id].name] = Recompute((graph.ops[first].name,))
    return chosen


def _needed_at(graph: StepGraph, storage_id: int, chosen: dict[str, Residence]) -> list[int]:
    """Ids of the backward ops before which the storage must be there: its readers, and recomputations that read it."""
    names = {op.name: op.id for op in graph.ops}
    needed = []
    for reader in graph.readers[storage_id]:
        if graph.ops[reader].phase == "backward":
            needed.append(reader)
        for written in graph.ops[reader].writes:
            residence = chosen.get(graph.storages[written].name)
            if isinstance(residence, Recompute):
                needed += [names[name] for name in residence.before]
    return needed


def sample_plan(blocks: int = 8, model: str = "ResNet-18") -> Plan:
    """A plan of `residual_step` just inside its budget."""
    graph = residual_step(blocks, model=model)
    residences = recompute_blocks(graph)
    peak = Plan(graph, residences, "joint").predicted_peak_bytes
    return Plan(graph, residences, "joint", "AMD Zen 4, 2 cores", peak + peak // 50, 0.004, 1.84)


def sample_offload_plan() -> Plan:
    """Offloads from the first half of the network, recomputes in the second, over a link that makes the device wait."""
    graph = replace(residual_step(), link=Link("PCIe 3.0", 4e9, 3e9, 1e-5, host_bytes=2**30))
    late = ("layer3", "layer4")
    stays = {s.id for s in graph.storages if s.kind == "activation" and not s.layer.startswith(late)}
    residences: dict[str, Residence] = dict(just_in_time(graph, stays))
    for name, ends, starts in list(legal_offloads(graph, residences, sorted(stays & set(graph.saved)))):
        residences[name] = Offload(ends[:4][-1].name, starts[-3:][0].name)
    peak = Plan(graph, residences, "joint").predicted_peak_bytes
    return Plan(graph, residences, "joint", "a small card", peak + peak // 50, 0.004, 1.84)


def sample_report(plan: Plan | None = None, **more: Any) -> Report:
    """A finished training run under `sample_plan`."""
    plan = plan or sample_plan()
    noise = random.Random(7)
    losses = tuple(2.3 * math.exp(-i / 14) + 0.08 + 0.1 * noise.random() * math.exp(-i / 30) for i in range(90))
    known: dict[str, Any] = {
        "plan": plan,
        "measured_peak_bytes": round(plan.predicted_peak_bytes * 0.997),
        "losses": losses,
        "accuracies": (0.812, 0.934, 0.961),
        "settings": {
            "model": plan.graph.model,
            "data": "digits, 1,437 training images",
            "batch": "128",
            "optimizer": "SGD, momentum 0.9",
            "seed": "0",
            "threads": "2",
            "torch": "2.13.0",
            "python": "3.11.9",
        },
        "outcome": {"test_accuracy": "96.1 %", "images_per_second": "412", "steps": "90", "wall_time": "94 s"},
        **more,
    }
    return Report(plan.timeline, **known)


@pytest.fixture(scope="session")
def plan() -> Plan:
    """Recomputes inside eight residual blocks."""
    return sample_plan()


@pytest.fixture(scope="session")
def offload_plan() -> Plan:
    """Offloads, recomputes, and makes the device wait."""
    return sample_offload_plan()


@pytest.fixture(scope="session")
def report(plan: Plan) -> Report:
    """Of a finished run within its budget."""
    return sample_report(plan)


@pytest.fixture(scope="session")
def make_plan() -> Callable[..., Plan]:
    """`sample_plan`, for other sizes and names."""
    return sample_plan


@pytest.fixture(scope="session")
def make_report() -> Callable[..., Report]:
    """`sample_report`, with fields replaced."""
    return sample_report
