"""One rank of `bench.allreduce`: each contender averages the same gradients through DDP, in turns.

A step is DDP's forward and backward of a module that has its gradients ready, so what is timed is DDP's own copy into
buckets and the exchange, nothing else. `shapes_of` gives the sizes of a network's parameters.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from bench import lab_rank
from bench.gradient_contenders import NOTHING, Runner, bucket_mib, install, step_in_turns
from examples import networks as models
from shoal.errors import InputError


def main() -> None:
    """Every model of the config, one after the other."""
    config = lab_rank.config()
    with lab_rank.joined():
        lab_rank.report([_model(name, config["contenders"], config["rounds"]) for name in config["models"]])


def _model(name: str, contenders: Sequence[str], rounds: int) -> dict[str, Any]:
    shapes = shapes_of(name)
    gradients = drawn(shapes, seed=1 + dist.get_rank())
    exact = _exact_mean(shapes)
    models: list[DistributedDataParallel] = []
    runners: list[Runner] = []
    for contender in contenders:
        model = DistributedDataParallel(
            ReadyGradients(shapes, gradients),
            gradient_as_bucket_view=True,
            init_sync=False,
            bucket_cap_mb=bucket_mib(contender),
        )
        installed = install(contender, model)
        runner = Runner(contender, partial(model.zero_grad, set_to_none=True), partial(_step, model), installed)
        runner.warm_up()
        models.append(model)
        runners.append(runner)
    step_in_turns(runners, rounds)
    rows = {}
    for model, runner in zip(models, runners, strict=True):
        found = torch.cat([weight.grad.flatten() for weight in model.parameters() if weight.grad is not None])
        error_percent = None if runner.name == NOTHING else 100 * float((found - exact).norm() / exact.norm())
        rows[runner.name] = {**runner.row([found]), "error_percent": error_percent}
        runner.installed.close()
    return {"model": name, "elems": elems_of(shapes), "rows": rows}


def _step(model: DistributedDataParallel) -> None:
    model().backward()


def _exact_mean(shapes: Sequence[Shape]) -> torch.Tensor:
    ranks = dist.get_world_size()
    total = torch.zeros(elems_of(shapes), dtype=torch.float64)
    for rank in range(ranks):
        total += torch.cat([gradient.flatten() for gradient in drawn(shapes, seed=1 + rank)])
    return (total / ranks).float()


Shape = tuple[int, ...]
_COLUMNS = 64


def shapes_of(name: str) -> list[Shape]:
    """The parameters of a network of `examples.networks`, in its order.

    `vgg11/2` is the network at half its widths: all sizes of all parameters but the pixels of kernels, the colours
    and the classes are divided by 2. A number is one matrix of about so many elements.

    Raises:
        InputError: no such network.

    >>> shapes_of("alexnet")[0], shapes_of("alexnet/2")[0], shapes_of("alexnet/2")[-2:], shapes_of("10000")
    ((64, 3, 11, 11), (32, 3, 11, 11), [(1000, 2048), (1000,)], [(156, 64)])
    """
    if name.isdigit():
        return [(max(1, int(name) // _COLUMNS), _COLUMNS)]
    network, _, by = name.partition("/")
    if by and not (by.isdigit() and int(by) >= 1):
        raise InputError(f"{name!r}: expected a whole number after the stroke, as in vgg11/2")
    with torch.device("meta"):
        model = models.build(network)
        shapes = [tuple(parameter.shape) for parameter in model.parameters()]
    return [_narrow(shape, int(by or 1), classes=shapes[-1][0]) for shape in shapes]


def _narrow(shape: Shape, by: int, classes: int) -> Shape:
    kept = (3, classes)
    channels, pixels = shape[:2], shape[2:]
    return (*(size if size in kept else max(1, size // by) for size in channels), *pixels)


def elems_of(shapes: Sequence[Shape]) -> int:
    """Of all together.

    >>> elems_of(shapes_of("resnet18"))
    11689512
    """
    return sum(math.prod(shape) for shape in shapes)


class ReadyGradients(nn.Module):
    """Parameters of some shapes; the backward pass of what `forward` returns hands their gradients over, ready made.

    Nobody reads the parameters' values, so they take no memory: the pages are never touched.
    """

    def __init__(self, shapes: Sequence[Shape], gradients: Sequence[torch.Tensor]) -> None:
        super().__init__()
        self.weights = nn.ParameterList(nn.Parameter(torch.empty(shape)) for shape in shapes)
        self._gradients = list(gradients)

    def forward(self) -> torch.Tensor:
        """A zero with a history."""
        return _Hand.apply(self._gradients, *self.weights)


class _Hand(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, gradients: list[torch.Tensor], *weights: torch.Tensor) -> torch.Tensor:
        ctx.gradients = gradients
        return torch.zeros(())

    @staticmethod
    def backward(ctx: Any, *_: torch.Tensor) -> Any:
        return None, *(gradient.detach() for gradient in ctx.gradients)


def drawn(shapes: Sequence[Shape], seed: int) -> list[torch.Tensor]:
    """Normal numbers, of another deviation for each parameter, as gradients have."""
    generator = torch.Generator().manual_seed(seed)
    scales = torch.rand(len(shapes), generator=torch.Generator().manual_seed(0)).mul_(3).neg_().exp_().tolist()
    return [torch.randn(shape, generator=generator).mul_(scale) for shape, scale in zip(shapes, scales, strict=True)]


if __name__ == "__main__":
    main()
