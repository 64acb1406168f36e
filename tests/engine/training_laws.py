"""What the engine's tests share: a plain model and a planned one, trained alike and compared bit by bit."""

from __future__ import annotations

import copy
import random
import shutil
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import shoal
from shoal.core.hardware import Hardware
from shoal.core.order import op_names, reordered
from shoal.core.plan import Plan
from shoal.core.residence import Offload, Residence
from shoal.core.step import StepGraph
from shoal.cost.profile import Costs
from shoal.planners import Planner
from shoal.planners.just_in_time import just_in_time
from tests.float32_rule import too_far
from tests.random_steps import any_order, legal_offloads

needs_compiler = pytest.mark.skipif(
    not any(map(shutil.which, ("c++", "g++", "clang++"))), reason="this needs a C++ compiler"
)
_CONVOLUTIONS = {1: nn.Conv1d, 2: nn.Conv2d, 3: nn.Conv3d}
_BATCH_NORMS = {1: nn.BatchNorm1d, 2: nn.BatchNorm2d, 3: nn.BatchNorm3d}


def conv_bn_relu(inputs: int, channels: int, dims: int = 2) -> nn.Sequential:
    """The block that most of a convolutional network is made of."""
    return nn.Sequential(
        _CONVOLUTIONS[dims](inputs, channels, 3, padding=1), _BATCH_NORMS[dims](channels), nn.ReLU(inplace=True)
    )


def blocks(*widths: int, dims: int = 2) -> list[nn.Module]:
    """One block after another, from each width to the next."""
    return [conv_bn_relu(a, b, dims) for a, b in pairwise(widths)]


def classifier(*widths: int) -> nn.Sequential:
    """Blocks and a head whose output is so small that the loss, which is not planned, takes no room."""
    return nn.Sequential(*blocks(*widths), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(widths[-1], 5))


def images(steps: int, *shape: int) -> list[torch.Tensor]:
    """The same batches every time, one a step."""
    generator = torch.Generator().manual_seed(1)
    return [torch.randn(shape, generator=generator) for _ in range(steps)]


def keep_nothing(graph: StepGraph, hardware: Hardware, budget_bytes: int) -> Plan:
    """A planner that recomputes, just in time, all that may run twice."""
    return Plan(graph, just_in_time(graph, ()), "keep_nothing", hardware.name, budget_bytes)


def keep_by_chance(seed: int, kept_share: float, again_share: float = 0.0) -> Planner:
    """A planner that keeps each storage with one probability and, with another, recomputes it for each reader."""

    def planner(graph: StepGraph, hardware: Hardware, budget_bytes: int) -> Plan:
        chance = random.Random(seed)
        kept = {s.id for s in graph.storages if chance.random() < kept_share}
        backward = range(graph.n_forward, len(graph.ops))
        again = {s.id: backward for s in graph.storages if chance.random() < again_share}
        return Plan(graph, just_in_time(graph, kept, again), "keep_by_chance", hardware.name, budget_bytes)

    return planner


def offload_by_chance(seed: int, recomputed_share: float = 0.2, kept_share: float = 0.2) -> Planner:
    """A planner that offloads most storages, each from and to a random place."""

    def planner(graph: StepGraph, hardware: Hardware, budget_bytes: int) -> Plan:
        chance = random.Random(seed)
        stays = {s.id for s in graph.storages if chance.random() >= recomputed_share}
        residences: dict[str, Residence] = dict(just_in_time(graph, stays))
        for name, ends, starts in list(legal_offloads(graph, residences, sorted(stays))):
            if chance.random() >= kept_share:
                residences[name] = Offload(chance.choice(ends).name, chance.choice(starts).name)
        return Plan(graph, residences, "offload_by_chance", hardware.name, budget_bytes)

    return planner


def ordered_by_chance(seed: int) -> Planner:
    """A planner that runs ops in a random order and keeps each storage with a probability of a half."""

    def planner(graph: StepGraph, hardware: Hardware, budget_bytes: int) -> Plan:
        plan = keep_by_chance(seed, 0.5)(reordered(graph, any_order(graph, seed)), hardware, budget_bytes)
        return replace(plan, captured_order=op_names(graph))

    return planner


@contextmanager
def costs_that_do_not_matter() -> Iterator[None]:
    """No profiling: plans are made with times and workspaces of 0. For tests that measure no peak."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(
            "shoal.cost.profile.profile", lambda nodes, **_: Costs(dict.fromkeys(nodes, 0.0), dict.fromkeys(nodes, 0))
        )
        yield


def mean_square(outputs: Any) -> torch.Tensor:
    """A loss of a tensor or a nest of them, with a gradient that differs from element to element."""
    if isinstance(outputs, torch.Tensor):
        if outputs.requires_grad:
            outputs.register_hook(_LikeOutput(outputs))
        return outputs.float().square().mean()
    parts = outputs.values() if isinstance(outputs, dict) else outputs
    return sum((mean_square(part) for part in parts if part is not None), start=torch.zeros(()))


class _LikeOutput:
    """Gives the output's gradient the output's memory format, as AOTAutograd does before every backward pass: kernels
    may add up in another order in another format."""

    def __init__(self, output: torch.Tensor) -> None:
        formats = [torch.contiguous_format]
        formats += {4: [torch.channels_last], 5: [torch.channels_last_3d]}.get(output.dim(), [])
        self.format = next((f for f in formats if output.is_contiguous(memory_format=f)), torch.contiguous_format)

    def __call__(self, gradient: torch.Tensor) -> torch.Tensor:
        return gradient.contiguous(memory_format=self.format)


def train(
    model: nn.Module,
    batches: Sequence[Any],
    *,
    loss_of: Callable[[Any], torch.Tensor] = mean_square,
    around_forward: Callable[[], AbstractContextManager[Any]] = nullcontext,
    scaled: bool = False,
    batches_a_step: int = 1,
    backwards: int = 1,
) -> dict[str, torch.Tensor]:
    """Train with SGD and momentum; everything that the steps leave, by name.

    Args:
        model: the network; called with a batch, or with all of a batch that is a tuple.
        batches: what to call it with.
        loss_of: the loss of its output.
        around_forward: entered around each forward pass and loss.
        scaled: scale the loss for half precision.
        batches_a_step: gradients of how many batches add up before the optimizer steps.
        backwards: how often each loss is sent back.
    """
    optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.05, momentum=0.9)
    scaler = torch.amp.GradScaler("cpu", init_scale=256.0, enabled=scaled)
    torch.manual_seed(7)
    trace: dict[str, torch.Tensor] = {}
    for place, batch in enumerate(batches):
        if place % batches_a_step == 0:
            optimizer.zero_grad()
        with around_forward():
            loss = loss_of(model(*batch) if isinstance(batch, tuple) else model(batch))
        for left in reversed(range(backwards)):
            scaler.scale(loss).backward(retain_graph=left > 0)
        trace[f"{place}: loss"] = loss.detach().clone()
        for name, parameter in model.named_parameters():
            if parameter.grad is not None:
                trace[f"{place}: gradient of {name}"] = parameter.grad.clone()
        if (place + 1) % batches_a_step == 0:
            scaler.step(optimizer)
            scaler.update()
        for name, buffer in model.named_buffers():
            trace[f"{place}: buffer {name}"] = buffer.clone()
        trace[f"{place}: generator"] = torch.get_rng_state()
    return trace | {f"parameter {name}": parameter.detach().clone() for name, parameter in model.named_parameters()}


def differences(ours: dict[str, torch.Tensor], theirs: dict[str, torch.Tensor]) -> list[str]:
    """Names of what is not bit for bit the same, in order."""
    names = list(dict.fromkeys([*theirs, *ours]))
    return [name for name in names if name not in ours or name not in theirs or not same_bits(ours[name], theirs[name])]


def same_bits(ours: torch.Tensor, theirs: torch.Tensor) -> bool:
    """Same dtype, shape and bits: 0 is not −0."""
    if ours.dtype != theirs.dtype or ours.shape != theirs.shape:
        return False
    mine, other = (tensor.detach().contiguous().reshape(-1).view(torch.uint8) for tensor in (ours, theirs))
    return torch.equal(mine, other)


def beyond_rounding(
    ours: dict[str, torch.Tensor], model: nn.Module, batches: Sequence[torch.Tensor], **how: Any
) -> dict[str, tuple[float, float]]:
    """What a training left that breaks the float32 rule: what `allow="exact"`, the default, has to keep.

    Args:
        ours: as `train` returned it for a planned copy of `model`.
        model: as it was before; it is not changed.
        batches: as given to `train`.
        how: as given to `train`.
    """
    exact = train(copy.deepcopy(model).double(), [batch.double() for batch in batches], **how)
    return too_far(ours, train(copy.deepcopy(model), batches, **how), exact)


def assert_same_training(
    model: nn.Module,
    batches: Collection[Any],
    planner: Planner = keep_nothing,
    offload_to: str | Path | None = None,
    **how: Any,
) -> nn.Module:
    """Train a plain copy of `model` and a planned one on the same batches; nothing may differ. The planned one."""
    plain, planned = copy.deepcopy(model), copy.deepcopy(model)
    expected = train(plain, batches, **how)
    with costs_that_do_not_matter():
        shoal.compile(planned, budget="1TiB", offload_to=offload_to, options=shoal.Options(planner=planner))
        found = train(planned, batches, **how)
    wrong = differences(found, expected)
    assert not wrong, f"differs from plain PyTorch: {wrong[:6]}"
    if planner is keep_nothing:
        assert planned.shoal.plan.recomputed, "the test shows nothing: there was nothing to recompute"
    if offload_to is not None:
        assert planned.shoal.plan.offloaded, "the test shows nothing: there was nothing to offload"
    return planned
