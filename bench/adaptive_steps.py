"""What a step of A2DTWP takes at full layer shapes, over a link as slow beside this CPU as the paper's beside its GPUs.

The paper's table II (x86, VGG-A, batch 64) has 153.93 ms for the weights in 32 bits and 162.23 ms for convolutions and
dense layers: 0.949 of the computation; and 68.51 ms for the gradients' way back, 0.422 of it. VGG-A's computation is
measured here on some images of a batch of 64, and the link gets the speed at which its 32-bit weights take 0.949 of 64
images' computation. AlexNet and ResNet-34 have the same link. A step here has fewer images than the paper's, so its
link is faster by that ratio; packing, norms and the optimizer do not shrink with the images, so they weigh more here.
"""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F

from bench.frame import WrongResult
from bench.interleave import in_turns, timed, turns
from shoal import codecs
from shoal.codecs.codec import Encoded
from shoal.core.hardware import Link
from shoal.core.sizes import in_pages
from shoal.distributed.weights.host_weights import HostWeights, StepSeconds
from shoal.distributed.weights.precision import AdaptivePrecision, packable, square_sums
from shoal.offload.links.open_link import OpenLink, open_link

# Milliseconds of tables II (x86) and III (POWER): 32-bit, A2DTWP.
PAPER_MS: Mapping[str, tuple[tuple[float, float | None], tuple[float, float | None]]] = {
    "weights to device": ((153.93, 52.27), (39.12, 12.21)),
    "gradients to host": ((68.51, 73.55), (17.34, 17.87)),
    "convolution": ((128.72, 126.13), (69.78, 71.21)),
    "fully connected": ((33.51, 34.17), (12.66, 13.51)),
    "update": ((54.39, 52.86), (41.29, 42.98)),
    "norm": ((0.0, 3.88), (0.0, 0.93)),
    "pack": ((0.0, 19.71), (0.0, 10.51)),
    "unpack": ((0.0, 4.51), (0.0, 1.11)),
}
_COMPUTATION_MS = 128.72 + 33.51
TO_DEVICE_SHARE = 153.93 / _COMPUTATION_MS
TO_HOST_SHARE = 68.51 / _COMPUTATION_MS

WIDTHS_BYTES = {"32 bits": 4, "8 bits": 1, "16 bits": 2, "24 bits": 3}
Widths = Mapping[str, int]


@dataclass(frozen=True)
class Size:
    """What is run of a network: so many of its batch's images, of so many pixels."""

    images: int
    pixels: int


def computation_seconds(model: nn.Module, size: Size, repeats: int) -> float:
    """Forward and backward pass alone, the median."""
    images, labels = _batch(size)
    step = timed(lambda: F.cross_entropy(model(images), labels).backward())
    found = in_turns({"step": lambda: (model.zero_grad(), step())[1]}, repeats)["step"]
    model.zero_grad()
    return statistics.median(found)


def weight_bytes(model: nn.Module) -> int:
    return sum(4 * parameter.numel() for parameter in model.parameters())


def paper_link(vgg: nn.Module, seconds: float, size: Size) -> Link:
    """The link for whole batches of 64: VGG-A's raw weights take the paper's share of its computation."""
    whole_seconds = seconds * 64 / size.images
    nbytes = weight_bytes(vgg)
    return Link(
        "the paper's ratio", nbytes / (TO_HOST_SHARE * whole_seconds), nbytes / (TO_DEVICE_SHARE * whole_seconds), 0.0
    )


def faster(link: Link, times: float) -> Link:
    """The link for a step of so many times fewer images."""
    return Link(link.name, link.to_host_bytes_per_second * times, link.to_device_bytes_per_second * times, 0.0)


def profile(
    model: nn.Module, size: Size, link: Link, plans: Mapping[str, Widths], rounds: int, one_byte: str | None = None
) -> dict[str, Any]:
    """Steps with each of several widths in turns, and each part of them by itself.

    Args:
        model: the network; its weights change a little.
        size: of the step.
        link: for this size.
        plans: by contender, bytes of each weight.
        rounds: measured steps of each.
        one_byte: the codec of weights that travel in one byte; None: the top byte, cut.

    Returns:
        By contender: `step_seconds`, the parts' seconds, the bytes over the link.

    Raises:
        WrongResult: the bytes are not those of the widths, or 32 bits give other weights on the device.
    """
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-4, momentum=0.9, weight_decay=5e-4)
    precision = AdaptivePrecision(model, threshold=-1e30, interval=1)  # never fires: widths are set below
    weights = HostWeights(model, optimizer, precision=precision, one_byte=one_byte, rehearse=link)
    images, labels = _batch(size)
    names = [name for name, _ in turns(list(plans), rounds)]
    order = [names[-1], *names, names[0]]  # the first warms up, the last one's packing is asked of the one before
    taken: list[tuple[float, float, StepSeconds]] = []
    sent = {}

    def widen(name: str) -> None:
        precision.bits.update({layer: 8 * width for layer, width in plans[name].items()})

    widen(order[0])
    for name, following in zip(order, [*order[1:], order[-1]], strict=True):
        began = time.perf_counter()
        optimizer.zero_grad()
        F.cross_entropy(model(images), labels).backward()
        widen(following)
        update_began = time.perf_counter()
        optimizer.step()  # packs and sends what `following` computes with
        ended = time.perf_counter()
        taken.append((ended - began, ended - update_began, weights.seconds))
        sent[name] = weights.traffic.last_step("weights")
    for name, widths in plans.items():
        expected = sum(
            _sent_bytes(parameter.numel(), widths.get(layer, 4), one_byte)
            for layer, parameter in model.named_parameters()
        )
        if sent[name].sent_bytes != expected:
            raise WrongResult(f"{name}: sent {sent[name].sent_bytes} bytes of weights, expected {expected}")
    seconds: dict[str, list[float]] = {name: [] for name in plans}
    parts: dict[str, dict[str, list[float]]] = {name: {} for name in plans}
    for turn in range(1, len(order) - 1):
        whole, update, step = taken[turn]
        name, pack_next = order[turn], taken[turn + 1][2].pack
        adapts = name.startswith("AWP")  # the others need no norms
        seconds[name].append(whole + step.pack - pack_next - (0.0 if adapts else step.norm))
        found = {
            "norm": step.norm if adapts else 0.0,
            "pack": step.pack,
            "unpack": step.unpack,
            "waited for weights": step.waited,
            "waited for gradients": step.gradients_waited,
            "update": update - step.norm - pack_next,
        }
        for part, value in found.items():
            parts[name].setdefault(part, []).append(value)
    weights.close()
    result = {
        name: {
            "step_seconds": statistics.median(seconds[name]),
            "all_step_seconds": seconds[name],
            "parts": {part: statistics.median(values) for part, values in parts[name].items()},
            "sent_bytes": sent[name].sent_bytes,
            "raw_bytes": sent[name].raw_bytes,
        }
        for name in plans
    }
    transfers = transfer_seconds(model, link, plans)
    for name, taken in transfers.items():
        result[name]["parts"]["weights to device"] = taken
    return result


def _sent_bytes(elems: int, width: int, one_byte: str | None) -> int:
    return codecs.get(one_byte).payload_bytes(elems) if one_byte and width == 1 else width * elems


def transfer_seconds(model: nn.Module, link: Link, plans: Mapping[str, Widths]) -> dict[str, float]:
    """By contender: the weights' way over the link by itself, nothing computed beside it."""
    opened: OpenLink = open_link("cpu", to_device_bytes_per_second=link.to_device_bytes_per_second)
    lease = opened.pool.lease(in_pages(weight_bytes(model)))
    found = {}
    for name, widths in plans.items():
        began = time.perf_counter()
        copies = []
        for layer, parameter in model.named_parameters():
            nbytes = widths.get(layer, 4) * parameter.numel()
            storage = torch.empty(nbytes, dtype=torch.uint8).untyped_storage()
            copies.append(opened.fetch(storage, lease.slab, 0))
        for copy in copies:
            copy.wait()
        found[name] = time.perf_counter() - began
    del lease
    opened.close()
    return found


def codec_seconds(model: nn.Module, names: Sequence[str], repeats: int) -> dict[str, tuple[float, float]]:
    """Packing and unpacking all weights of a network with each codec, in turns: the medians."""
    weights = [parameter.detach() for name, parameter in model.named_parameters() if name in set(packable(model))]
    out = [torch.empty_like(weight) for weight in weights]
    packed: dict[str, list[torch.Tensor]] = {
        name: [torch.empty(codecs.get(name).bytes_for(w.shape), dtype=torch.uint8) for w in weights] for name in names
    }

    def both_ways(name: str) -> tuple[float, float]:
        codec = codecs.get(name)
        began = time.perf_counter()
        encoded: list[Encoded] = [codec.encode(w, out=p) for w, p in zip(weights, packed[name], strict=True)]
        between = time.perf_counter()
        for each, to in zip(encoded, out, strict=True):
            each.decode(out=to)
        return between - began, time.perf_counter() - between

    taken = in_turns({name: partial(both_ways, name) for name in names}, repeats)
    return {name: tuple(map(statistics.median, zip(*pairs, strict=True))) for name, pairs in taken.items()}


def norm_seconds(model: nn.Module, repeats: int) -> dict[str, tuple[float, float]]:
    """The l2 norms of all weights, ours and PyTorch's: the median time, and the largest error against float64."""
    weights = [dict(model.named_parameters())[name].detach() for name in packable(model)]
    exact = [
        math.sqrt(sum(float(part.double().square().sum()) for part in w.reshape(-1).split(1 << 20))) for w in weights
    ]
    ways: dict[str, Callable[[], list[float]]] = {
        "shoal": lambda: [math.sqrt(total) for total in square_sums(weights)],
        "torch._foreach_norm": lambda: [float(norm) for norm in torch._foreach_norm(weights)],
    }
    taken = in_turns({name: timed(norms) for name, norms in ways.items()}, repeats)
    errors = {
        name: max(abs(ours / right - 1) for ours, right in zip(norms(), exact, strict=True))
        for name, norms in ways.items()
    }
    return {name: (statistics.median(taken[name]), errors[name]) for name in ways}


def bias_percent(values: torch.Tensor, codec: str) -> float:
    """How much smaller or larger magnitudes come back, in the mean over values that are not zero.

    >>> bias_percent(torch.tensor([1.0, 1.75, -1.75]), "truncate1") < -20
    True
    """
    kept = values[values != 0].double()
    back = codecs.get(codec).encode(values[values != 0].float()).decode().double()
    return float(100 * ((back.abs() - kept.abs()) / kept.abs()).mean())


def _batch(size: Size) -> tuple[torch.Tensor, torch.Tensor]:
    draw = torch.Generator().manual_seed(0)
    images = torch.randn(size.images, 3, size.pixels, size.pixels, generator=draw)
    return images, torch.randint(10, (size.images,), generator=draw)
