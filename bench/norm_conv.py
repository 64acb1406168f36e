"""Fused normalise + ReLU + convolution + statistics, layer by layer, against PyTorch's own in channels_last.

`python -m bench.norm_conv [--batch 4] [--threads 1] [--layers densenet,resnet] [--cpu-time]`. Interleaved medians;
PyTorch's side is `batch_norm` in training mode, `relu` and `conv2d`, which measures what it reads, where ours measures
what it writes.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
from torch.nn import functional

from shoal.runtime import norm_conv_native
from shoal.runtime.norm_conv_native import Window

# (in, out, kernel, pixels a side)
LAYERS = {
    "densenet": (
        (64, 128, 1, 56),
        (224, 128, 1, 56),
        (128, 32, 3, 56),
        (128, 128, 1, 28),
        (480, 128, 1, 28),
        (128, 32, 3, 28),
        (256, 128, 1, 14),
        (992, 128, 1, 14),
        (128, 32, 3, 14),
        (512, 128, 1, 7),
        (992, 128, 1, 7),
        (128, 32, 3, 7),
    ),
    "resnet": (
        (256, 64, 1, 56),
        (64, 64, 3, 56),
        (64, 256, 1, 56),
        (512, 128, 1, 28),
        (128, 128, 3, 28),
        (128, 512, 1, 28),
        (1024, 256, 1, 14),
        (256, 256, 3, 14),
        (256, 1024, 1, 14),
        (2048, 512, 1, 7),
        (512, 512, 3, 7),
        (512, 2048, 1, 7),
    ),
}


@dataclass(frozen=True)
class Row:
    """One layer; seconds are medians of a call."""

    network: str
    layer: tuple[int, int, int, int]
    batch: int
    threads: int
    forward_flops: int
    ours_forward_seconds: float
    torch_forward_seconds: float
    ours_backward_seconds: float
    torch_backward_seconds: float


def measure(network: str, layer: tuple[int, int, int, int], batch: int, rounds: int, clock: Callable[[], float]) -> Row:
    """Both contenders on one layer, in turns, after one turn that does not count."""
    inner, outer, kernel, side = layer
    generator = torch.Generator().manual_seed(1)
    draw = lambda *shape: torch.randn(shape, generator=generator)  # noqa: E731
    x = draw(batch, inner, side, side).contiguous(memory_format=torch.channels_last)
    grad = draw(batch, outer, side, side).contiguous(memory_format=torch.channels_last)
    weight = (draw(outer, inner, kernel, kernel) / inner).contiguous(memory_format=torch.channels_last)
    gamma, beta, of_mean, of_variance = draw(inner), draw(inner), draw(outer), draw(outer)
    window = Window((1, 1), (kernel // 2,) * 2, (1, 1), 1)
    variance, mean = torch.var_mean(x, (0, 2, 3), correction=0)
    scale = gamma * torch.rsqrt(variance + 1e-5)
    leaves = [tensor.clone().requires_grad_() for tensor in (x, gamma, beta, weight)]

    def ours() -> Iterator[object]:
        y, mean_y, _ = norm_conv_native.forward(x, mean, scale, beta, True, weight, None, window, True)
        yield y
        yield norm_conv_native.backward(
            grad, of_mean, of_variance, x, y, mean_y, mean, scale, beta, True, weight, window, [True] * 3 + [False]
        )

    def eager() -> Iterator[object]:
        a = functional.relu(functional.batch_norm(leaves[0], None, None, leaves[1], leaves[2], True))
        y = functional.conv2d(a, leaves[3], padding=kernel // 2)
        yield y
        yield torch.autograd.grad(y, leaves, grad)

    times: dict[str, tuple[list[float], list[float]]] = {"ours": ([], []), "torch": ([], [])}
    contenders: dict[str, Callable[[], Iterator[object]]] = {"ours": ours, "torch": eager}
    for turn in range(rounds + 1):
        for name, contender in contenders.items():
            steps, start = contender(), clock()
            for part in range(2):
                result = next(steps)
                now = clock()
                if turn:
                    times[name][part].append(now - start)
                start = now
            del result
    flops = 2 * batch * side * side * inner * outer * kernel * kernel
    medians = [statistics.median(times[name][part]) for part in range(2) for name in ("ours", "torch")]
    return Row(network, layer, batch, torch.get_num_threads(), flops, *medians)


def table(rows: list[Row]) -> str:
    """Speeds in GFLOP/s, ours and PyTorch's, and how many times faster ours is."""
    lines = ["layer                     forward: ours  torch   times   backward: ours  torch   times"]
    for row in rows:
        inner, outer, kernel, side = row.layer
        name = f"{row.network} {inner}>{outer} {kernel}x{kernel} @{side}"
        speeds = [
            row.forward_flops / row.ours_forward_seconds / 1e9,
            row.forward_flops / row.torch_forward_seconds / 1e9,
            2 * row.forward_flops / row.ours_backward_seconds / 1e9,
            2 * row.forward_flops / row.torch_backward_seconds / 1e9,
        ]
        forward, backward = speeds[0] / speeds[1], speeds[2] / speeds[3]
        lines.append(
            f"{name:27}{speeds[0]:12.1f}{speeds[1]:7.1f}{forward:8.2f}{speeds[2]:17.1f}{speeds[3]:7.1f}{backward:8.2f}"
        )
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--batch", type=int, default=4)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--layers", default="densenet,resnet")
    parser.add_argument("--json", type=Path, default=None)
    parser.add_argument("--cpu-time", action="store_true", help="of the one thread: for a machine that others use too")
    options = parser.parse_args()
    if options.cpu_time and options.threads > 1:
        parser.error("--cpu-time counts one thread's time; leave out --threads")
    torch.set_num_threads(options.threads)
    rows = [
        measure(
            network, layer, options.batch, options.rounds, time.thread_time if options.cpu_time else time.perf_counter
        )
        for network in options.layers.split(",")
        for layer in LAYERS[network]
    ]
    print(table(rows))
    if options.json is not None:
        options.json.write_text(json.dumps([asdict(row) for row in rows], indent=1))


if __name__ == "__main__":
    main()
