"""What the widths of A2DTWP do to learning: error over steps, of narrow networks on CIFAR-10.

`NETWORKS` are the three of the paper's table I, at full size and an eighth as wide for small images. Both sizes have
the same layers under the same names, so that the widths which AWP gives to one's layers can be given to the other's.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F

from bench.split_accuracy import batches, error_percent
from examples.awp_threshold import NormMonitor, threshold_from
from shoal.app.models import BasicBlock, ResNet
from shoal.distributed.weights.host_weights import HostWeights
from shoal.distributed.weights.precision import AdaptivePrecision


@dataclass(frozen=True)
class Way:
    """How weights travel.

    Attributes:
        precision: of all of them; None: AWP decides.
        rounding, one_byte: as of `HostWeights`.
        interval_share: AWP's INTERVAL as a share of all steps; None: the pace's.
    """

    precision: int | str | None
    rounding: str = "cut"
    one_byte: str | None = None
    interval_share: float | None = None


BASELINE = "32 bits"
AWP, AWP_NEAREST = "AWP", "AWP, rounded"
AWP_TREE, AWP_TREE_LATE, TREE = "AWP, dynamic tree first", "AWP, dynamic tree for longer", "8 bits, dynamic tree"
WAYS: Mapping[str, Way] = {
    BASELINE: Way(32),
    AWP: Way(None),
    AWP_NEAREST: Way(None, "nearest"),
    "8 bits": Way(8),
    "16 bits": Way(16),
    "bf16 cast": Way("bf16"),
    AWP_TREE: Way(None, "nearest", "dynamic_tree"),
    AWP_TREE_LATE: Way(None, "nearest", "dynamic_tree", 2 / 3),
    TREE: Way(8, one_byte="dynamic_tree"),
}
CONTENDERS = (BASELINE, AWP, AWP_NEAREST, "8 bits", "16 bits", "bf16 cast")
_DROP_POINTS = 1.0  # of validation error, that ends the while in which T is found

Split = tuple[torch.Tensor, torch.Tensor]


@dataclass(frozen=True)
class Pace:
    """How long is trained.

    Attributes:
        images, batch, epochs: as they are called.
        looks: evaluations an epoch.
        tests: images of the test split.
        interval_epochs: AWP's INTERVAL.
        settled_epochs: T is the mean change of the norms after so many epochs of the 32-bit run; 0: of its beginning.
    """

    images: int
    batch: int
    epochs: int
    looks: int
    tests: int
    interval_epochs: float
    settled_epochs: int = 0


# The paper's 2.94 times faster transfer says that its weights travelled in 1.36 bytes in the mean. An INTERVAL of two
# thirds of the steps gives that where every batch counts: 1 byte for two thirds of them, then 2.
QUICK = Pace(200, 50, 1, 2, 100, 2 / 3)
SHORT = Pace(3_000, 50, 4, 4, 500, 8 / 3)
# As the paper chooses them: INTERVAL is one epoch, T the mean change over several. In the first one norms still grow.
LONG = Pace(10_000, 50, 6, 8, 1_000, 1, 1)


def run_of(
    network: Network, contender: str, pace: Pace, data: Mapping[str, Split], seed: int, threshold: float | None
) -> dict[str, Any]:
    """Train one narrow network with its weights on the host.

    Returns:
        steps and errors_percent of each look; of the baseline its norms' `threshold`; of AWP the `widths`: the step
        from which on they hold, and the bytes of each weight.
    """
    torch.manual_seed(seed)
    model = network.narrow()
    optimizer = torch.optim.SGD(model.parameters(), lr=network.rate, momentum=0.9, weight_decay=5e-4)
    steps_an_epoch = pace.images // pace.batch
    way = WAYS[contender]
    monitor = NormMonitor(model) if contender == BASELINE else None
    if way.precision is None:
        assert threshold is not None
        share = way.interval_share
        epochs = pace.interval_epochs if share is None else share * pace.epochs
        interval = max(1, round(epochs * steps_an_epoch))
        precision: int | str | AdaptivePrecision = AdaptivePrecision(model, threshold, interval, by=network.by)
    else:
        precision = way.precision
    weights = HostWeights(model, optimizer, precision=precision, rounding=way.rounding, one_byte=way.one_byte)
    x, y = (tensor[: pace.images] for tensor in data["train"])
    test = tuple(tensor[: pace.tests] for tensor in data["test"])
    draw = torch.Generator().manual_seed(seed)
    found: dict[str, Any] = {"steps": [], "errors_percent": [], "widths": []}
    step, began = 0, time.perf_counter()
    for _ in range(pace.epochs):
        for images, labels in batches(x, y, pace.batch, draw):
            if isinstance(precision, AdaptivePrecision):
                widths = {name: precision.bytes_of(name) for name in precision.groups}
                if not found["widths"] or found["widths"][-1][1] != widths:
                    found["widths"].append((step, widths))
            model.train()
            optimizer.zero_grad()
            F.cross_entropy(model(images), labels).backward()
            optimizer.step()
            if monitor is not None:
                monitor.history.append(_norms(weights, monitor))
            step += 1
            if step % max(1, steps_an_epoch // pace.looks) == 0:
                found["steps"].append(step)
                found["errors_percent"].append(error_percent(model, test))  # type: ignore[arg-type]
    weights.close()
    found["seconds"] = time.perf_counter() - began
    if monitor is not None:
        settled = pace.settled_epochs * steps_an_epoch
        watched = monitor.history[settled:] if settled else monitor.history[: _while(found, steps_an_epoch)]
        found["threshold"] = threshold_from(watched)
    return found


def smoothed(run: Mapping[str, Any], looks: int) -> list[tuple[int, float]]:
    """Step and mean error of the last so many looks, from when there are as many.

    >>> smoothed({"steps": [10, 20, 30], "errors_percent": [90.0, 80.0, 60.0]}, 2)
    [(20, 85.0), (30, 70.0)]
    """
    taken, errors = run["steps"], run["errors_percent"]
    return [(taken[at], statistics.fmean(errors[at + 1 - looks : at + 1])) for at in range(looks - 1, len(errors))]


def steps_to(run: Mapping[str, Any], error_percent: float, looks: int = 1) -> int | None:
    """The step at which a run's smoothed error first was at this one or below; None if it never was.

    >>> steps_to({"steps": [10, 20, 30], "errors_percent": [80.0, 60.0, 61.0]}, 60.0)
    20
    """
    return next((step for step, error in smoothed(run, looks) if error <= error_percent), None)


def _norms(weights: HostWeights, monitor: NormMonitor) -> list[float]:
    weights.wait()
    monitor.update()
    return monitor.history.pop()


def _while(found: Mapping[str, Any], at_least: int) -> int:
    """The steps until the error has dropped, an epoch or more."""
    errors = found["errors_percent"]
    for step, error in zip(found["steps"], errors, strict=True):
        if step >= at_least and error <= errors[0] - _DROP_POINTS:
            return step
    return found["steps"][-1]


CLASSES = 200  # of the paper's ImageNet200
Convolution = tuple[int, int, int, bool]  # channels, kernel, stride, whether a 2x2 pool follows

_ALEXNET: Sequence[Convolution] = (
    (64, 11, 4, True),
    (192, 5, 1, True),
    (384, 3, 1, False),
    (384, 3, 1, False),
    (256, 3, 1, True),
)
_SMALL_ALEXNET: Sequence[Convolution] = (
    (8, 5, 1, True),
    (24, 5, 1, True),
    (48, 3, 1, False),
    (48, 3, 1, False),
    (32, 3, 1, True),
)
_VGG_A = ((64, True), (128, True), (256, False), (256, True), (512, False), (512, True), (512, False), (512, True))


@dataclass(frozen=True)
class Network:
    """One of the paper's.

    Attributes:
        full, narrow: make it, for images of 224 and 32 pixels.
        batch: the paper's, of its fastest 32-bit training.
        by: what AWP gives bits to.
        rate: learning rate of the narrow one.
    """

    full: Callable[[], nn.Module]
    narrow: Callable[[], nn.Module]
    batch: int
    by: str
    rate: float


def plain(convolutions: Sequence[Convolution], dense: Sequence[int], classes: int, image: int) -> nn.Module:
    """Convolutions, pools and dense layers in a row, ReLU between them; no batch norm, no dropout."""
    layers: list[nn.Module] = []
    channels = 3
    for width, kernel, stride, pools in convolutions:
        layers += [nn.Conv2d(channels, width, kernel, stride, kernel // 2), nn.ReLU(inplace=True)]
        if pools:
            layers.append(nn.MaxPool2d(2))
        channels = width
    model = nn.Sequential(*layers, nn.Flatten())
    with torch.no_grad():
        features = model(torch.zeros(1, 3, image, image)).shape[1]
    for width in dense:
        model.extend([nn.Linear(features, width), nn.ReLU(inplace=True)])
        features = width
    model.append(nn.Linear(features, classes))
    for module in model:
        if isinstance(module, nn.Conv2d | nn.Linear):
            nn.init.kaiming_normal_(module.weight, nonlinearity="relu")
            nn.init.zeros_(module.bias)  # type: ignore[arg-type]
    return model


def _narrow_resnet() -> nn.Module:
    """ResNet-34 an eighth as wide, with the paper's stem."""
    torch_model = ResNet(BasicBlock, (3, 4, 6, 3), num_classes=10)
    for name, module in list(torch_model.named_modules()):
        parent, _, last = name.rpartition(".")
        holder = torch_model.get_submodule(parent)
        if isinstance(module, nn.Conv2d):
            inputs = 3 if module.in_channels == 3 else module.in_channels // 8
            narrow = nn.Conv2d(
                inputs, module.out_channels // 8, module.kernel_size, module.stride, module.padding, bias=False
            )
            nn.init.kaiming_normal_(narrow.weight, mode="fan_out", nonlinearity="relu")
            setattr(holder, last, narrow)
        elif isinstance(module, nn.BatchNorm2d):
            setattr(holder, last, nn.BatchNorm2d(module.num_features // 8))
    torch_model.fc = nn.Linear(64, 10)
    return torch_model


def _vgg(divisor: int) -> list[Convolution]:
    return [(width // divisor, 3, 1, pools) for width, pools in _VGG_A]


NETWORKS = {
    "alexnet": Network(
        lambda: plain(_ALEXNET, (4096, 4096, 4096), CLASSES, 224),
        lambda: plain(_SMALL_ALEXNET, (128, 128, 128), 10, 32),
        64,
        "layer",
        0.02,
    ),
    "vgg_a": Network(
        lambda: plain(_vgg(1), (4096, 4096), CLASSES, 224),
        lambda: plain(_vgg(8), (128, 128), 10, 32),
        64,
        "layer",
        0.02,
    ),
    "resnet34": Network(
        lambda: ResNet(BasicBlock, (3, 4, 6, 3), num_classes=CLASSES), _narrow_resnet, 128, "block", 0.1
    ),
}
