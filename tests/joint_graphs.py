"""Joint graphs of small networks, as AOTAutograd hands them over and as Shoal captured them, run on real tensors."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import fx, nn

from shoal.capture import step_reader as capturing
from shoal.capture.capture_step import capture_step
from shoal.capture.captured import Captured
from shoal.capture.lower import lower, offloaded_storages
from shoal.capture.step_reader import capture
from shoal.core.residence import Residence
from shoal.engine.graph_runner import run_kernels
from shoal.lowlevel.torch_internals import eager_kernels
from shoal.offload.links.open_link import open_link
from shoal.offload.transfers import Transfers


class Residual(nn.Module):
    """x + f(x), then a ReLU."""

    def __init__(self, *layers: nn.Module) -> None:
        super().__init__()
        self.path = nn.Sequential(*layers)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.relu(x + self.path(x))


class Concatenated(nn.Module):
    """x in addition to f(x), as in a dense block or a U-Net."""

    def __init__(self, *layers: nn.Module) -> None:
        super().__init__()
        self.path = nn.Sequential(*layers)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.cat([x, self.path(x)], 1)


class Gated(nn.Module):
    """Channels weighed by their means, as in squeeze-and-excitation."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.gate = nn.Sequential(nn.AdaptiveAvgPool2d(1), nn.Conv2d(channels, channels, 1), nn.Sigmoid())

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * self.gate(x)


class Viewed(nn.Module):
    """One view that two ops save."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        rows = x.tanh().flatten(2)
        return rows.sin() + rows.transpose(1, 2).cos().transpose(1, 2)


def _conv(n_in: int, n_out: int, **options: Any) -> nn.Module:
    return nn.Conv2d(n_in, n_out, 3, padding=1, bias=False, **options)


NETWORKS: Mapping[str, Callable[[], nn.Module]] = {
    "plain": lambda: nn.Sequential(
        _conv(3, 4), nn.BatchNorm2d(4), nn.ReLU(inplace=True), nn.MaxPool2d(2), _conv(4, 6), nn.Tanh(), nn.Flatten()
    ),
    "residual": lambda: nn.Sequential(
        _conv(3, 4),
        Residual(_conv(4, 4), nn.BatchNorm2d(4), nn.ReLU(), _conv(4, 4), nn.BatchNorm2d(4)),
        Residual(nn.BatchNorm2d(4), nn.LeakyReLU(0.1), _conv(4, 4)),
        nn.AdaptiveAvgPool2d(1),
        nn.Flatten(),
        nn.Linear(4, 5),
    ),
    "views": lambda: nn.Sequential(_conv(3, 4), nn.BatchNorm2d(4), Viewed(), nn.Linear(64, 3)),
    "dense": lambda: nn.Sequential(
        _conv(3, 4),
        Concatenated(nn.BatchNorm2d(4), nn.ReLU(), _conv(4, 2)),
        Concatenated(nn.BatchNorm2d(6), nn.ReLU(), _conv(6, 2)),
        nn.BatchNorm2d(8),
        nn.AvgPool2d(2),
    ),
    "u": lambda: nn.Sequential(
        _conv(3, 4),
        Concatenated(
            nn.MaxPool2d(2),
            *(layer for _ in range(3) for layer in (_conv(4, 4), nn.BatchNorm2d(4), nn.ReLU())),
            nn.ConvTranspose2d(4, 4, 2, stride=2),
        ),
        _conv(8, 2),
    ),
    "mobile": lambda: nn.Sequential(
        _conv(3, 4, stride=2), nn.BatchNorm2d(4), nn.ReLU6(), _conv(4, 4, groups=4), nn.ReLU6(), Gated(4), nn.SiLU()
    ).to(memory_format=torch.channels_last),
}


def batch(size: int = 8, channels: int = 3) -> torch.Tensor:
    return torch.randn(2, channels, size, size)


def captured_step(model: nn.Module, *inputs: Any) -> Captured:
    """The step of `model`, captured as `shoal.compile` does."""
    with eager_kernels():
        return capture_step(model, inputs or batch(), name="net")[0]


def before_and_after_rewrites(model: nn.Module, *inputs: Any) -> tuple[Captured, Captured]:
    """The same step captured without the lossless rewrites, and with them."""
    steps = []

    def capture_twice(joint: fx.GraphModule, *args: Any, **kwargs: Any) -> Captured:
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(capturing, "save_fewer_bytes", lambda *_, **__: None)
            steps.append(capture(_copy(joint), *args, **kwargs))
        steps.append(capture(_copy(joint), *args, **kwargs))
        return steps[1]

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("shoal.capture.capture_step.capture", capture_twice)
        captured_step(model, *inputs)
    before, after = steps
    return before, after


def _copy(joint: fx.GraphModule) -> fx.GraphModule:
    graph = fx.Graph()
    graph.output(graph.graph_copy(joint.graph, {}))
    graph.output_node().meta = dict(joint.graph.output_node().meta)
    return fx.GraphModule(joint, graph)


def operands(joint: fx.GraphModule, seed: int = 0) -> list[torch.Tensor]:
    """A random tensor for each input of a joint graph, of its layout."""
    generator = torch.Generator().manual_seed(seed)
    made = []
    for node in joint.graph.find_nodes(op="placeholder"):
        value = node.meta["val"]
        block = torch.randn(value.untyped_storage().nbytes() // value.element_size(), generator=generator)
        made.append(block.to(value.dtype).as_strided(value.shape, value.stride()))
    return made


def run_joint(joint: fx.GraphModule, tensors: Sequence[torch.Tensor]) -> list[Any]:
    """What the joint graph gives, node by node as it stands."""
    with torch.no_grad():
        results = fx.Interpreter(joint).run(*(t.clone() for t in tensors), enable_io_processing=False)
    return list(results)


def run_lowered(
    captured: Captured,
    residences: Mapping[str, Residence],
    tensors: Sequence[torch.Tensor],
    *,
    in_place: bool = True,
    prepare: Callable[[fx.GraphModule], None] = lambda module: None,
) -> list[Any]:
    """What the two lowered graphs give, forward outputs first. Only `tensors` and results are held by the caller."""
    with carried(captured, residences) as transfers:
        return _run(captured, *lower(captured, residences, in_place=in_place, transfers=transfers), tensors, prepare)


@contextmanager
def carried(captured: Captured, residences: Mapping[str, Residence]) -> Iterator[Transfers]:
    """What carries the offloaded storages to host memory and back."""
    link = open_link("cpu")
    transfers = Transfers(link, [storage.nbytes for storage in offloaded_storages(captured.graph, residences)])
    try:
        yield transfers
    finally:
        transfers.close()
        link.close()


def _run(
    captured: Captured,
    forward: fx.GraphModule,
    backward: fx.GraphModule,
    tensors: Sequence[torch.Tensor],
    prepare: Callable[[fx.GraphModule], None],
) -> list[Any]:
    prepare(forward)
    prepare(backward)
    run_forward, run_backward = run_kernels(forward, ()), run_kernels(backward, ())
    tangents = len([n for n in captured.joint.graph.find_nodes(op="placeholder") if n.name.startswith("tangents")])
    first_tangent = len(tensors) - tangents
    with torch.no_grad():
        results = list(run_forward(list(tensors[:first_tangent])))
        arguments = [*results[len(captured.forward_outputs) :], *tensors[first_tangent:]]
        del results[len(captured.forward_outputs) :]
        results += run_backward(arguments)
    return results
