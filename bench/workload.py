"""One training step that every contender takes on the same tensors, and how its peak and its time are measured.

Memory and time are measured in separate steps: no profiler runs while the clock does.
"""

from __future__ import annotations

import copy
import gc
import importlib
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from itertools import chain
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F

from bench.frame import Unavailable
from bench.interleave import Clock, K, in_turns, no_collection, synchronize
from examples import networks as models
from shoal.lowlevel import allocations
from shoal.memory.storage_bytes import distinct_bytes

_TIMM = "timm/"

Forward = Callable[[torch.Tensor], torch.Tensor]


@dataclass
class Workload:
    """A model, one batch and its targets. All contenders share these tensors, so they start from the same weights.

    Attributes:
        name: of the network.
        model: in training mode, float32, channels_last.
        images: the batch.
        target: classes, one per image or, for a dense output, one per pixel.
        seed: of the dropout masks; set before every step.
    """

    name: str
    model: nn.Module
    images: torch.Tensor
    target: torch.Tensor
    seed: int = 0

    @property
    def device(self) -> torch.device:
        return self.images.device

    def shared_copy(self) -> nn.Module:
        """The same model again: modules of its own, the same parameters and buffers."""
        shared = {id(tensor): tensor for tensor in chain(self.model.parameters(), self.model.buffers())}
        return copy.deepcopy(self.model, shared)

    @property
    def parameter_bytes(self) -> int:
        return distinct_bytes(self.model.parameters())

    @property
    def resident_bytes(self) -> int:
        """What is there before the step: parameters, buffers, the batch and its targets."""
        return distinct_bytes([*self.model.parameters(), *self.model.buffers(), self.images, self.target])

    def gradients(self) -> dict[str, torch.Tensor]:
        """Copies, by name of the parameter."""
        return {name: p.grad.detach().clone() for name, p in self.model.named_parameters() if p.grad is not None}

    def buffers(self) -> dict[str, torch.Tensor]:
        """Copies, by name."""
        return {name: buffer.detach().clone() for name, buffer in self.model.named_buffers()}

    @torch.no_grad()
    def restore(self, buffers: Mapping[str, torch.Tensor]) -> None:
        """Put buffers back to copies taken before."""
        for name, buffer in self.model.named_buffers():
            buffer.copy_(buffers[name])

    def reset(self) -> None:
        """Where every step starts: no gradients, the same random numbers."""
        for parameter in self.model.parameters():
            parameter.grad = None
        torch.manual_seed(self.seed)

    def loss(self, outputs: Any) -> torch.Tensor:
        """Of what the model returned."""
        return F.cross_entropy(outputs, self.target)

    def step(self, forward: Forward) -> torch.Tensor:
        """Forward pass, loss, backward pass; the loss."""
        loss = self.loss(forward(self.images))
        loss.backward()
        return loss.detach()

    def peak_bytes(self, forward: Forward) -> int:
        """The highest device use of one step: the allocator's events on the CPU, the allocator's own peak on CUDA."""
        self.reset()
        gc.collect()
        if self.device.type == "cuda":
            torch.cuda.synchronize()
            torch.cuda.reset_peak_memory_stats()
            self.step(forward)
            torch.cuda.synchronize()
            return torch.cuda.max_memory_allocated()
        _, changes = allocations.record(lambda: self.step(forward))
        return self.resident_bytes + allocations.peak_bytes(changes)

    def seconds(self, forward: Forward, clock: Clock = time.perf_counter) -> float:
        """One step by the clock."""
        self.reset()
        synchronize(self.device)
        with no_collection():
            started = clock()
            self.step(forward)
            synchronize(self.device)
            return clock() - started

    def in_turns(
        self, forwards: Mapping[K, Forward], rounds: int, warm_ups: int = 1, clock: Clock = time.perf_counter
    ) -> dict[K, list[float]]:
        """Seconds of `rounds` steps of each contender, in turns."""
        return in_turns(
            {key: partial(self.seconds, forward, clock) for key, forward in forwards.items()}, rounds, warm_ups
        )


def _from_timm(name: str, seed: int) -> nn.Module:
    try:
        timm = importlib.import_module("timm")
    except (ImportError, RuntimeError) as error:  # a torchvision for another build of PyTorch raises the second
        reason = str(error).splitlines()[0]
        raise Unavailable(f"timm/{name} needs timm and torchvision, which do not import here ({reason})") from error
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model: nn.Module = timm.create_model(name)
    return model


def make_workload(
    name: str, batch: int, image: int, *, seed: int = 0, device: str = "cpu", model: nn.Module | None = None
) -> Workload:
    """The step of a network of `examples.networks` on random images.

    Args:
        name: one of `examples.networks.names()`, or `timm/` and one of timm's.
        batch, image: images in the batch, pixels along each side.
        seed: of weights, images, targets and dropout.
        device: "cpu" or "cuda".
        model: a model of that name made earlier, to share its parameters between batch sizes.

    Raises:
        Unavailable: it is timm's, and timm does not import here.
    """
    of_timm = name.startswith(_TIMM)
    shape = (batch, 3, image, image) if of_timm else models.example_shape(name, batch, image)
    layout = torch.channels_last_3d if len(shape) == 5 else torch.channels_last
    if model is None:
        model = _from_timm(name.removeprefix(_TIMM), seed) if of_timm else models.build(name, seed=seed)
        model.to(device=device, memory_format=layout)  # type: ignore[call-overload]
    draw = torch.Generator().manual_seed(seed)
    images = torch.randn(shape, generator=draw).to(device=device, memory_format=layout)
    with torch.no_grad(), torch.random.fork_rng(devices=[]):
        outputs = copy.deepcopy(model).to("meta")(images.to("meta")).shape
    target = torch.randint(outputs[1], (batch, *outputs[2:]), generator=draw).to(device)
    return Workload(name, model.train(), images, target, seed)
