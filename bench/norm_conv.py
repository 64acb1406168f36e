"""`shoal.kernels.norm.norm_conv`, layer by layer, against eager and Inductor: every convolution shape of the networks.

    python -m bench.norm_conv                        DenseNet-121 and ResNet-50, 16 x 224 pixels
    python -m bench.norm_conv --inductor             and Inductor, which compiles each of their ninety shapes
    python -m bench.norm_conv --layers 3x3,@7        those whose names have one of these in them
    python -m bench.norm_conv --quick                three small layers of each network, one round: does it run?

Shapes are collected from the networks, each once; "count" is how often a network has it, and the last line adds up
seconds by it. Where a layer reads relu(batch_norm(x)), eager's side is `batch_norm` in training mode, `relu` and
`conv2d`, channels_last float32, and ours is one op. Eager measures what it reads, ours what it writes, so that a whole
network measures each tensor once; where a layer reads something else ours still measures and eager does not, which is
to our disadvantage. All take turns, one call each; before that our results, statistics and gradients are held against
eager's. Times are medians; GFLOP/s count convolutions alone.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from rich.table import Table
from torch.nn import functional as F

from bench.frame import WrongResult, bar, comma_separated, conditions, describe, file_name, make_console, make_folder
from bench.interleave import turns
from bench.layers import Layer, layers_of
from shoal.core.files import write_json
from shoal.errors import InputError
from shoal.kernels.norm.norm_conv import norm_conv
from shoal.kernels.norm.norm_conv_native import Window

NETWORKS = ("densenet121", "resnet50")
BATCH, IMAGE, ROUNDS = 16, 224, 7
QUICK_BATCH, QUICK_IMAGE, QUICK_LAYERS = 2, 64, 3
TOLERANCE = 5e-3  # of a result's norm: a ReLU now and then falls on the other side, one element of a gradient of gamma
_EPS = 1e-5

Outputs = tuple[torch.Tensor, ...]
Clock = Callable[[], float]


@dataclass(frozen=True)
class Row:
    """One layer of one network; seconds are medians of a call, by contender: forward, backward."""

    network: str
    layer: Layer
    count: int
    forward_flops: int
    backward_flops: int
    seconds: Mapping[str, tuple[float, float]]
    off: Mapping[str, float]

    def times(self, part: int, against: str) -> float:
        """How many times faster ours is."""
        return self.seconds[against][part] / self.seconds["ours"][part]


class Tensors:
    """What one layer reads, drawn once, and the gradients that reach it.

    Args:
        layer: which.
        batch: images.
    """

    def __init__(self, layer: Layer, batch: int) -> None:
        generator = torch.Generator().manual_seed(1)
        draw = lambda *shape: torch.randn(shape, generator=generator)  # noqa: E731
        rows = lambda tensor: tensor.contiguous(memory_format=torch.channels_last)  # noqa: E731
        self.layer = layer
        self.x = rows(draw(batch, layer.in_channels, layer.height, layer.width))
        self.x.requires_grad_(layer.needs_input_gradient)
        fan_in = layer.in_channels // layer.groups * layer.kernel[0] * layer.kernel[1]
        self.weight = rows(draw(layer.out_channels, layer.in_channels // layer.groups, *layer.kernel) / fan_in**0.5)
        self.weight.requires_grad_()
        self.gamma, self.beta = (draw(layer.in_channels).requires_grad_() for _ in range(2))
        variance, self.mean = torch.var_mean(self.x.detach(), (0, 2, 3), correction=0)
        self.mean.requires_grad_()
        self.scale = (self.gamma.detach() * torch.rsqrt(variance + _EPS)).requires_grad_()
        y = eager(self)[0]
        self.grads = rows(draw(*y.shape)), draw(y.shape[1]), draw(y.shape[1])  # of y, its mean, its variance

    def leaves(self, *of_the_norm: torch.Tensor) -> list[torch.Tensor]:
        """What has a gradient."""
        x = [self.x] if self.layer.needs_input_gradient else []
        return [*x, *(of_the_norm if self.layer.normalises else ()), self.weight]


def ours(tensors: Tensors) -> Outputs:
    """The fused op, with the statistics of x as given: y, its mean, its variance."""
    return _fused(tensors, tensors.mean, tensors.scale)


def eager(tensors: Tensors) -> Outputs:
    """y, by PyTorch's own."""
    return (_plain(tensors.x, tensors.gamma, tensors.beta, tensors.weight, tensors.layer),)


def _fused(tensors: Tensors, mean: torch.Tensor, scale: torch.Tensor) -> Outputs:
    layer = tensors.layer
    window = Window(list(layer.stride), list(layer.padding), list(layer.dilation), layer.groups)
    if not layer.normalises:
        return norm_conv([tensors.x], None, None, None, False, tensors.weight, None, window, True)
    return norm_conv([tensors.x], mean, scale, tensors.beta, True, tensors.weight, None, window, True)


def _plain(
    x: torch.Tensor, gamma: torch.Tensor, beta: torch.Tensor, weight: torch.Tensor, layer: Layer
) -> torch.Tensor:
    if layer.normalises:
        x = F.relu(F.batch_norm(x, None, None, gamma, beta, training=True, eps=_EPS), inplace=True)
    return F.conv2d(x, weight, None, layer.stride, layer.padding, layer.dilation, layer.groups)


def hold(tensors: Tensors) -> dict[str, float]:
    """How far our results and gradients are from eager's, of their norms, where the statistics of x are our own.

    Raises:
        WrongResult: farther than the tolerance.
    """
    variance, mean = torch.var_mean(tensors.x, (0, 2, 3), correction=0)
    of_ours = _fused(tensors, mean, tensors.gamma * torch.rsqrt(variance + _EPS))
    y = eager(tensors)[0]
    variance_y, mean_y = torch.var_mean(y, (0, 2, 3), correction=0)
    of_eager = (y, mean_y, variance_y)
    leaves = tensors.leaves(tensors.gamma, tensors.beta)
    names = ["y", "mean", "variance", *(["of x"] if tensors.layer.needs_input_gradient else [])]
    names += ["of gamma", "of beta"] if tensors.layer.normalises else []
    both = [(*outputs, *torch.autograd.grad(outputs, leaves, tensors.grads)) for outputs in (of_ours, of_eager)]
    off = {
        name: float((a - b).detach().norm() / b.detach().norm().clamp(min=1e-30))
        for name, a, b in zip([*names, "of weight"], *both, strict=True)
    }
    wrong = {name: value for name, value in off.items() if not value <= TOLERANCE}
    if wrong:
        said = ", ".join(f"{name} {value:.1e}" for name, value in wrong.items())
        raise WrongResult(f"{tensors.layer.name}: farther from eager than {TOLERANCE:g} of its norm: {said}")
    return off


def measure(
    network: str, layer: Layer, count: int, *, batch: int, rounds: int, inductor: bool = False, clock: Clock
) -> Row:
    """All contenders on one layer, in turns, after one that does not count.

    Raises:
        WrongResult: ours is farther from eager than the tolerance.
    """
    tensors = Tensors(layer, batch)
    off = hold(tensors)
    for_eager = tensors.leaves(tensors.gamma, tensors.beta)
    contenders: dict[str, tuple[Callable[[Tensors], Outputs], list[torch.Tensor], int]] = {
        "ours": (ours, tensors.leaves(tensors.mean, tensors.scale, tensors.beta), 3),
        "eager": (eager, for_eager, 1),
    }
    if inductor:
        torch._dynamo.reset()  # Dynamo keeps only so many shapes of one function
        compiled = torch.compile(_plain, dynamic=False, fullgraph=True)
        contenders["inductor"] = (
            lambda t: (compiled(t.x, t.gamma, t.beta, t.weight, t.layer),),
            for_eager,
            1,
        )
    taken: dict[str, list[tuple[float, float]]] = {name: [] for name in contenders}
    for name, counts in turns(list(contenders), rounds, warm_ups=1):
        forward, leaves, results = contenders[name]
        started = clock()
        outputs = forward(tensors)
        turned = clock()
        gradients = torch.autograd.grad(outputs, leaves, tensors.grads[:results])
        ended = clock()
        del outputs, gradients
        if counts:
            taken[name].append((turned - started, ended - turned))
    seconds = {name: (_median(pairs, 0), _median(pairs, 1)) for name, pairs in taken.items()}
    flops = layer.flops(batch)
    return Row(network, layer, count, flops, flops * (1 + layer.needs_input_gradient), seconds, off)


def _median(pairs: Sequence[tuple[float, float]], part: int) -> float:
    return statistics.median(pair[part] for pair in pairs)


def table(network: str, rows: Sequence[Row]) -> Table:
    """Speeds in GFLOP/s and how many times faster ours is; last, all layers as often as the network has them."""
    others = [name for name in ("eager", "inductor") if name in rows[0].seconds]
    shown = Table(title=f"{network}, layer by layer: GFLOP/s, and how many times faster ours is", show_footer=True)
    total = {
        name: [sum(row.count * row.seconds[name][part] for row in rows) for part in range(2)]
        for name in ("ours", *others)
    }
    shown.add_column("layer", "all of them", no_wrap=True)
    shown.add_column("count", str(sum(row.count for row in rows)), justify="right")
    for part, name in enumerate(("forward", "backward")):
        for who in ("ours", *others):
            title = f"{name}: ours" if who == "ours" else who
            shown.add_column(title, f"{1e3 * total[who][part]:.0f} ms", justify="right")
            if who != "ours":
                shown.add_column(f"× {who}", f"{total[who][part] / total['ours'][part]:.2f}", justify="right")
    for row in rows:
        cells = [row.layer.name, str(row.count)]
        for part, flops in enumerate((row.forward_flops, row.backward_flops)):
            for who in ("ours", *others):
                cells.append(f"{flops / row.seconds[who][part] / 1e9:.1f}")
                cells += [f"{row.times(part, who):.2f}"] if who != "ours" else []
        shown.add_row(*cells)
    return shown


def summary(network: str, rows: Sequence[Row]) -> str:
    """How often ours is slower than eager, and how far off it is at most."""
    said = []
    for part, name in enumerate(("forward", "backward")):
        slower = [row.layer.name for row in rows if row.times(part, "eager") < 1]
        said.append(f"slower than eager {name} in {len(slower)} of {len(rows)} shapes")
    most = max((value, what, row.layer.name) for row in rows for what, value in row.off.items())
    return f"{network}: {', '.join(said)}; at most {most[0]:.1e} off eager ({most[1]}, {most[2]})"


def wanted(asked: argparse.Namespace) -> dict[str, dict[Layer, int]]:
    """The layers to measure, by network.

    Raises:
        InputError: an argument is out of its range, or names what there is not.
    """
    for option in ("batch", "image", "rounds", "threads"):
        value = getattr(asked, option)
        if value is not None and value < 1:
            raise InputError(f"--{option} {value}: give 1 or more")
    if asked.cpu_time and torch.get_num_threads() > 1:
        raise InputError("--cpu-time counts one thread's time; give --threads 1")
    if not asked.networks:
        raise InputError(f"--networks names none: give some, such as {','.join(NETWORKS)}")
    found = {}
    for network in asked.networks:
        layers = layers_of(network, asked.image or (QUICK_IMAGE if asked.quick else IMAGE))
        chosen = [layer for layer in layers if not asked.layers or any(part in layer.name for part in asked.layers)]
        if not chosen:
            raise InputError(
                f"--layers {','.join(asked.layers or [])}: none of the {len(layers)} layers of {network} has that in "
                f"its name; names are such as {', '.join(layer.name for layer in list(layers)[:3])}"
            )
        found[network] = {layer: layers[layer] for layer in (chosen[:QUICK_LAYERS] if asked.quick else chosen)}
    return found


def main(arguments: Sequence[str] | None = None) -> int:
    """Run it; 0 unless a result was wrong (1) or an argument was (2)."""
    asked = _parser().parse_args(arguments)
    before = torch.get_num_threads()
    try:
        if asked.threads is not None and asked.threads > 0:
            torch.set_num_threads(asked.threads)
        return _run(asked)
    except (InputError, WrongResult) as error:
        print(f"bench.norm_conv: {error}", file=sys.stderr)
        return 2 if isinstance(error, InputError) else 1
    finally:
        torch.set_num_threads(before)


def _run(asked: argparse.Namespace) -> int:
    networks = wanted(asked)
    out = make_folder(asked.out)
    found = conditions(torch.device("cpu"), 1)
    console = make_console()
    console.print(describe(found), highlight=False, markup=False)
    batch = asked.batch or (QUICK_BATCH if asked.quick else BATCH)
    path = out / file_name("norm_conv", torch.device("cpu"))
    rows: list[Row] = []
    with bar(sum(map(len, networks.values()))) as show:
        for network, layers in networks.items():
            of_network = []
            for layer, count in layers.items():
                show(network, layer.name)
                row = measure(
                    network,
                    layer,
                    count,
                    batch=batch,
                    rounds=asked.rounds or (1 if asked.quick else ROUNDS),
                    inductor=asked.inductor,
                    clock=time.thread_time if asked.cpu_time else time.perf_counter,
                )
                of_network.append(row)
                show(network, layer.name, 1)
            rows += of_network
            console.print(table(f"{network}, batch {batch}", of_network))
            console.print(summary(network, of_network), highlight=False, markup=False)
            result: dict[str, Any] = {"conditions": found, "batch": batch, "rows": [asdict(row) for row in rows]}
            write_json(path, result)
    console.print(f"Every result within {TOLERANCE:g} of eager's norm. Figures in {path}", highlight=False)
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m bench.norm_conv", description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--networks", type=comma_separated, default=list(NETWORKS), help="of shoal.app.models")
    parser.add_argument("--layers", type=comma_separated, help="parts of names, such as 3x3,@14; default: all")
    parser.add_argument("--batch", type=int, help=f"images; default: {BATCH}")
    parser.add_argument("--image", type=int, help=f"pixels along each side of the network's input; default: {IMAGE}")
    parser.add_argument("--rounds", type=int, help=f"calls of each that count; default: {ROUNDS}")
    parser.add_argument("--threads", type=int, help="of OpenMP; default: as PyTorch has here")
    parser.add_argument("--inductor", action="store_true", help="a contender more, which compiles for each shape")
    parser.add_argument("--cpu-time", action="store_true", help="of the one thread: for a machine that others use too")
    parser.add_argument("--quick", action="store_true", help="three small layers of each network, one round")
    parser.add_argument("--out", type=Path, default=Path("runs/bench"), help="folder for the JSON file")
    return parser


if __name__ == "__main__":
    sys.exit(main())
