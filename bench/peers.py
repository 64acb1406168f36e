"""What else fits a step in memory: PyTorch's `activation_memory_budget` and checkpointing by hand, each at its best.

Neither takes bytes, so each is swept over its settings; for a byte budget the fastest setting whose measured peak fits
stands for it. Every candidate is scouted once, on smaller batches where a step is slow; only what a budget would choose
is confirmed on the whole batch.

`checkpointed` cuts networks as their users would by hand: into natural blocks, one way a network family. A block never
begins with an in-place op, since that would change the tensor the checkpoint saved as its input.
"""

from __future__ import annotations

import functools
import importlib
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from types import FunctionType
from typing import Any

import torch
from torch import nn
from torch._dynamo.backends.common import aot_autograd
from torch._dynamo.backends.debugging import boxed_nop
from torch._dynamo.exc import BackendCompilerFailed
from torch._functorch import config as functorch_config
from torch._functorch.partitioners import min_cut_rematerialization_partition
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint, checkpoint_sequential

from bench.interleave import Clock
from bench.workload import Forward, Workload
from examples.networks.densenet import DenseNet
from examples.networks.googlenet import GoogLeNet
from examples.networks.mobilenet import MobileNetV2
from examples.networks.unet import UNet
from examples.networks.vgg import VGG
from shoal.app.models import ResNet

ACTIVATION_MEMORY_BUDGET = "activation_memory_budget"
CHECKPOINT = "checkpoint"
PEERS = (ACTIVATION_MEMORY_BUDGET, CHECKPOINT)

_SLACK = 0.03  # a candidate that is predicted to be that much over a budget is still tried


@dataclass(frozen=True)
class Candidate:
    """One setting of a peer, on the workload's model."""

    peer: str
    setting: str
    forward: Forward = field(compare=False)


@dataclass(frozen=True)
class Scouted:
    """What a candidate is expected to take on the whole batch.

    Attributes:
        peak_bytes: measured, or drawn through two smaller batches.
        seconds: of one step on the largest batch it was scouted on.
        exact: whether that was the whole batch.
    """

    candidate: Candidate
    peak_bytes: float
    seconds: float
    exact: bool


def candidates(
    workload: Workload, values: Sequence[float], by_hand: Iterable[tuple[str, Forward]] | None = None
) -> Iterator[Candidate]:
    """Every setting of every peer.

    Args:
        workload: the step.
        values: of `activation_memory_budget`.
        by_hand: ways to checkpoint, as of `checkpointed`, which is taken without it.
    """
    sweep = _Sweep()
    for value in values:
        yield Candidate(ACTIVATION_MEMORY_BUDGET, f"{value:g}", sweep.forward(workload, value))
    for setting, forward in checkpointed(workload.shared_copy()) if by_hand is None else by_hand:
        yield Candidate(CHECKPOINT, setting, forward)


class SamePartition(Exception):
    """This value of `activation_memory_budget` saves what an earlier one saves."""


class _Sweep:
    """`torch.compile` with the min-cut partitioner at several values of `activation_memory_budget`, without Inductor.

    It is the backend "aot_eager_decomp_partition". With "aot_eager" a recomputed batch norm fails in the backward pass:
    its running statistics moved in between.
    """

    def __init__(self) -> None:
        self._shapes: tuple[tuple[int, ...], ...] | None = None
        self._saved: dict[tuple[str, ...], float] = {}

    def forward(self, workload: Workload, value: float) -> Forward:
        model = workload.shared_copy()

        def call(x: torch.Tensor) -> torch.Tensor:
            return model(x)

        # Dynamo keeps its graphs by code object: one of its own for every value.
        own = FunctionType(call.__code__.replace(), call.__globals__, call.__name__, None, call.__closure__)
        return torch.compile(own, backend=functools.partial(self._backend, value), fullgraph=True, dynamic=False)

    def _backend(self, value: float, gm: torch.fx.GraphModule, inputs: Sequence[Any]) -> Callable[..., Any]:
        inductor = importlib.import_module("torch._inductor.compile_fx")  # slow, and only this peer needs it

        def partition(joint: torch.fx.GraphModule, joint_inputs: Any, **how: Any) -> Any:
            with functorch_config.patch(activation_memory_budget=value):
                graphs = min_cut_rematerialization_partition(joint, joint_inputs, compiler="inductor", **how)
            outputs = graphs[0].graph.find_nodes(op="output")[0].args[0]
            shapes = tuple(tuple(i.shape) for i in inputs if isinstance(i, torch.Tensor))
            self._shapes = self._shapes or shapes
            # On the first batch size only: what is distinct there is run on the others too.
            if shapes == self._shapes and self._saved.setdefault(tuple(map(str, outputs)), value) != value:
                raise SamePartition
            return graphs

        with functorch_config.patch(unlift_effect_tokens=True):
            return aot_autograd(
                fw_compiler=boxed_nop,
                bw_compiler=boxed_nop,
                decompositions=inductor.select_decomp_table,
                partition_fn=partition,
            )(gm, inputs)


def scout(
    found: Iterable[Candidate],
    whole: Workload,
    smaller: Sequence[Workload] = (),
    most_bytes: float = float("inf"),
    advance: Callable[[str], None] = print,
    clock: Clock = time.perf_counter,
) -> tuple[list[Scouted], dict[str, str]]:
    """Expected peak and time of every candidate.

    Args:
        found: the candidates.
        whole: the step all this is about.
        smaller: two steps of the same model with fewer images, in ascending order, to scout on instead.
        most_bytes: a candidate that is expected to take more is not timed: no budget will choose it.
        advance: called with the name of each candidate before it runs.
        clock: what times a step.

    Returns:
        What was scouted; and why the other candidates were not, by name.
    """
    scouted, failed = [], {}
    for candidate in found:
        name = f"{candidate.peer} {candidate.setting}"
        advance(name)
        try:
            # The first step compiles; it is metered, and the one after is timed.
            peaks = [workload.peak_bytes(candidate.forward) for workload in smaller or (whole,)]
            peak_bytes = extrapolate(peaks, [w.images.shape[0] for w in smaller], whole) if smaller else peaks[0]
            worth_timing = peak_bytes <= most_bytes * (1 + _SLACK)
            seconds = (smaller or (whole,))[-1].seconds(candidate.forward, clock) if worth_timing else float("inf")
        except (SamePartition, BackendCompilerFailed) as error:
            if not isinstance(getattr(error, "inner_exception", error), SamePartition):
                failed[name] = _first_line(error)
            continue
        except (RuntimeError, TypeError) as error:
            failed[name] = _first_line(error)
            continue
        scouted.append(Scouted(candidate, peak_bytes, seconds, not smaller))
    return scouted, failed


def extrapolate(peaks: Sequence[float], batches: Sequence[int], whole: Workload) -> float:
    """The line through the peaks of two batch sizes, at the whole batch. A peak is the largest of many lines in the
    batch size, so the peak is never below this line."""
    slope = (peaks[1] - peaks[0]) / (batches[1] - batches[0])
    return peaks[1] + slope * (whole.images.shape[0] - batches[1])


def _first_line(error: BaseException) -> str:
    return (str(error).strip().splitlines() or [type(error).__name__])[0][:200]


@dataclass
class Confirmed:
    """Peaks of candidates on the whole batch, each measured at most once."""

    workload: Workload
    advance: Callable[[str], None]
    known: dict[Candidate, int] = field(default_factory=dict)

    def peak_bytes(self, scouted: Scouted) -> int:
        candidate = scouted.candidate
        if candidate not in self.known:
            if scouted.exact:
                self.known[candidate] = int(scouted.peak_bytes)
            else:
                self.advance(f"{candidate.peer} {candidate.setting}")
                self.known[candidate] = self.workload.peak_bytes(candidate.forward)
        return self.known[candidate]


def fastest_within(
    scouted: Iterable[Scouted], budget_bytes: float, confirm: Callable[[Scouted], float]
) -> Scouted | None:
    """The fastest candidate whose confirmed peak is inside the budget; None where there is none."""
    hopeful = (one for one in scouted if one.peak_bytes <= budget_bytes * (1 + (0 if one.exact else _SLACK)))
    for one in sorted(hopeful, key=lambda one: one.seconds):
        if confirm(one) <= budget_bytes:
            return one
    return None


def least(scouted: Iterable[Scouted], confirm: Callable[[Scouted], float]) -> Scouted | None:
    """The candidate with the smallest peak, the two most promising ones confirmed."""
    promising = sorted(scouted, key=lambda one: one.peak_bytes)[:2]
    return min(promising, key=confirm, default=None)


_SEGMENTS = (2, 3, 4, 5, 6, 8, 12)
_GROUPS = (1, 2, 3, 6)

_checkpoint = partial(checkpoint, use_reentrant=False)


def checkpointed(model: nn.Module) -> Iterator[tuple[str, Forward]]:
    """Every way to checkpoint `model` that is tried, as (setting, forward).

    Networks that are a sequence of blocks: `checkpoint_sequential` with each number of segments. DenseNet: also its
    dense layers in groups. U-Nets: blocks or single convolutions of the first levels, the largest ones.
    """
    if isinstance(model, UNet):
        for levels in range(1, model.levels + 2):
            yield f"blocks of {levels} levels", partial(_unet, model, levels, False)
            yield f"convolutions of {levels} levels", partial(_unet, model, levels, True)
        return
    blocks = sequence(model)
    for segments in sorted({min(k, len(blocks)) for k in (*_SEGMENTS, len(blocks))}):
        yield f"{segments} segments", partial(_segments, blocks, segments)
    if isinstance(model, DenseNet):
        for group in _GROUPS:
            yield f"dense layers by {group}", partial(_dense_layers, model, group)


def sequence(model: nn.Module) -> list[nn.Module]:
    """The model as blocks that run one after the other.

    Raises:
        TypeError: it is of a family that nobody has cut yet.
    """
    match model:
        case ResNet():
            stem = nn.Sequential(model.conv1, model.bn1, model.relu, model.maxpool)
            stages = (block for stage in (model.layer1, model.layer2, model.layer3, model.layer4) for block in stage)
            return [stem, *stages, nn.Sequential(model.avgpool, nn.Flatten(), model.fc)]
        case MobileNetV2():
            return [*model.features, nn.Sequential(nn.AdaptiveAvgPool2d(1), nn.Flatten(), model.classifier)]
        case GoogLeNet():
            names = [name for name, _ in model.named_children() if name not in ("avgpool", "dropout", "fc")]
            head = nn.Sequential(model.avgpool, nn.Flatten(), model.dropout, model.fc)
            return [*(getattr(model, name) for name in names), head]
        case VGG():
            convolutions = _from_each(nn.Conv2d, model.features)
            return [*convolutions, nn.Sequential(model.avgpool, nn.Flatten(), model.classifier)]
        case DenseNet():
            features = dict(model.features.named_children())
            stem = nn.Sequential(*(features.pop(name) for name in ("conv0", "norm0", "relu0", "pool0")))
            head = nn.Sequential(
                features.pop("norm5"), nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten(), model.classifier
            )
            return [stem, *features.values(), head]
        case nn.Module(layers=nn.Sequential() as layers):
            return _from_each(nn.Conv2d, layers)
    raise TypeError(f"{type(model).__name__} has no blocks to checkpoint yet; cut it in bench.peers.sequence")


def _from_each(first: type[nn.Module], layers: nn.Sequential) -> list[nn.Module]:
    """Blocks that each begin at a layer of type `first`."""
    blocks: list[list[nn.Module]] = []
    for layer in layers:
        if isinstance(layer, first) or not blocks:
            blocks.append([])
        blocks[-1].append(layer)
    return [nn.Sequential(*block) for block in blocks]


def _segments(blocks: Sequence[nn.Module], segments: int, x: torch.Tensor) -> torch.Tensor:
    return checkpoint_sequential(nn.Sequential(*blocks), segments, x, use_reentrant=False)


def _dense_layers(model: DenseNet, group: int, x: torch.Tensor) -> torch.Tensor:
    """Checkpoint `group` dense layers at a time, and each concatenation with the transition that reads it."""
    children = dict(model.features.named_children())
    for name, child in children.items():
        if name.startswith("transition"):
            continue  # it ran with the block before it
        if not name.startswith("denseblock"):
            x = child(x)
            continue
        features = [x]
        layers: list[Any] = list(child.children())
        for start in range(0, len(layers), group):
            features += _checkpoint(partial(_some_layers, layers[start : start + group]), *features)
        after = children.get(name.replace("denseblock", "transition"))
        x = torch.cat(features, 1) if after is None else _checkpoint(partial(_transition, after), *features)
    x = F.relu(x, inplace=True)
    return model.classifier(torch.flatten(F.adaptive_avg_pool2d(x, 1), 1))


def _some_layers(layers: Sequence[Callable[..., torch.Tensor]], *features: torch.Tensor) -> tuple[torch.Tensor, ...]:
    new: list[torch.Tensor] = []
    for layer in layers:
        new.append(layer([*features, *new]))
    return tuple(new)


def _transition(transition: nn.Module, *features: torch.Tensor) -> torch.Tensor:
    return transition(torch.cat(features, 1))


def _unet(model: UNet, levels: int, singly: bool, x: torch.Tensor) -> torch.Tensor:
    """Checkpoint the first `levels` levels (the bottom is the last), both convolutions at once or singly."""

    def run(block: Any, level: int, x: torch.Tensor) -> torch.Tensor:
        if level >= levels:
            return block(x)
        return _checkpoint(block[3:], _checkpoint(block[:3], x)) if singly else _checkpoint(block, x)

    def run_joined(up: nn.Module, block: Any, level: int, skip: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
        if level >= levels:
            return block(torch.cat([skip, up(x)], 1))
        first = block[:3] if singly else block
        x = _checkpoint(lambda skip, x: first(torch.cat([skip, up(x)], 1)), skip, x)
        return _checkpoint(block[3:], x) if singly else x

    skips = []
    for level, encoder in enumerate(model.encoders):
        x = run(encoder, level, x)
        skips.append(x)
        x = model.pool(x)
    x = run(model.bottom, model.levels, x)
    for level, up, decoder in zip(reversed(range(model.levels)), model.ups, model.decoders, strict=True):
        x = run_joined(up, decoder, level, skips.pop(), x)
    return model.head(x)
