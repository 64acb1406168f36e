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

A convolution *normalises* where it reads a ReLU of a batch norm and nothing else came in between: then it can do both
itself. A residual sum before the ReLU comes in between.
"""

from __future__ import annotations

import argparse
import statistics
import sys
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import partial

import torch
from rich.table import Table
from torch import nn
from torch.nn import functional as F

from bench.frame import CPU_TIME, Bench, Run, WrongResult, bar, comma_separated, option, switch
from bench.interleave import in_turns
from examples import networks as models
from shoal.errors import InputError
from shoal.kernels.norm.norm_conv import norm_conv
from shoal.kernels.norm.norm_conv_native import ConvWindow

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
    window = ConvWindow(list(layer.stride), list(layer.padding), list(layer.dilation), layer.groups)
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
        reported = ", ".join(f"{name} {value:.1e}" for name, value in wrong.items())
        raise WrongResult(f"{tensors.layer.name}: farther from eager than {TOLERANCE:g} of its norm: {reported}")
    return off


def measure(
    network: str, layer: Layer, count: int, batch: int, rounds: int, *, inductor: bool = False, clock: Clock
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
        contenders["inductor"] = (lambda t: (compiled(t.x, t.gamma, t.beta, t.weight, t.layer),), for_eager, 1)

    def both_passes(
        forward: Callable[[Tensors], Outputs], leaves: list[torch.Tensor], results: int
    ) -> tuple[float, float]:
        started = clock()
        outputs = forward(tensors)
        turned = clock()
        torch.autograd.grad(outputs, leaves, tensors.grads[:results])
        return turned - started, clock() - turned

    taken = in_turns({name: partial(both_passes, *made) for name, made in contenders.items()}, rounds)
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
    reported = []
    for part, name in enumerate(("forward", "backward")):
        slower = [row.layer.name for row in rows if row.times(part, "eager") < 1]
        reported.append(f"slower than eager {name} in {len(slower)} of {len(rows)} shapes")
    most = max((value, what, row.layer.name) for row in rows for what, value in row.off.items())
    return f"{network}: {', '.join(reported)}; at most {most[0]:.1e} off eager ({most[1]}, {most[2]})"


def wanted(asked: argparse.Namespace) -> dict[str, dict[Layer, int]]:
    """The layers to measure, by network.

    Raises:
        InputError: an argument is the name of no layer.
    """
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


@dataclass(frozen=True)
class Layer:
    """One convolution of two dimensions at one size of its input.

    Attributes:
        in_channels, out_channels, groups: as of `nn.Conv2d`.
        kernel, stride, padding, dilation: along height and width.
        height, width: of the input, in pixels.
        normalises: whether it reads relu(batch_norm(...)).
        needs_input_gradient: not where it reads the images.
    """

    in_channels: int
    out_channels: int
    kernel: tuple[int, int]
    stride: tuple[int, int]
    padding: tuple[int, int]
    dilation: tuple[int, int]
    groups: int
    height: int
    width: int
    normalises: bool
    needs_input_gradient: bool

    @property
    def name(self) -> str:
        """Such as `norm 64>128 1x1 @56`; stride and groups where they are not 1.

        >>> ones = (1, 1)
        >>> Layer(64, 128, (3, 3), (2, 2), ones, ones, 1, 56, 56, True, True).name
        'norm 64>128 3x3 /2 @56'
        """
        side = f"{self.height}" if self.height == self.width else f"{self.height}x{self.width}"
        parts = ["norm"] if self.normalises else []
        parts += [f"{self.in_channels}>{self.out_channels}", f"{self.kernel[0]}x{self.kernel[1]}"]
        parts += [f"/{self.stride[0]}"] if self.stride != (1, 1) else []
        parts += [f"{self.groups} groups"] if self.groups != 1 else []
        return " ".join([*parts, f"@{side}"])

    def out_pixels(self) -> int:
        """Of one image's result."""
        sides = zip((self.height, self.width), self.kernel, self.stride, self.padding, self.dilation, strict=True)
        rows, columns = (
            (side + 2 * pad - reach * (size - 1) - 1) // step + 1 for side, size, step, pad, reach in sides
        )
        return rows * columns

    def flops(self, batch: int) -> int:
        """Of a forward pass; a backward pass takes one or two times as many."""
        taps = self.kernel[0] * self.kernel[1]
        return 2 * batch * self.out_pixels() * self.out_channels * taps * self.in_channels // self.groups


def layers_of(network: str, image: int) -> dict[Layer, int]:
    """Every convolution of a network of `examples.networks`, in the order of its forward pass, and how often it comes.

    Args:
        network: its name.
        image: pixels along each side of its input.

    Raises:
        InputError: there is no such network, or it does not take such images.

    >>> [(layer.name, count) for layer, count in layers_of("vgg19_bn", 32).items()][:3]
    [('3>64 3x3 @32', 1), ('norm 64>64 3x3 @32', 1), ('64>128 3x3 @16', 1)]
    """
    with torch.device("meta"):
        model = models.build(network)
        images = torch.empty(models.example_shape(network, 2, image))
    return collect(model, images)


def collect(model: nn.Module, images: torch.Tensor) -> dict[Layer, int]:
    """Every call of an `nn.Conv2d` in the forward pass of `model` on `images`; those with a padding mode left out."""
    found: Counter[Layer] = Counter()
    normalised: dict[int, int] = {}  # tensor → its version as the batch norm left it
    rectified: dict[int, int] = {}
    held: list[torch.Tensor] = []  # an address is used once

    reads_a_norm: dict[nn.Module, bool] = {}

    def before_relu(module: nn.Module, inputs: tuple[torch.Tensor, ...]) -> None:
        reads_a_norm[module] = normalised.get(id(inputs[0])) == inputs[0]._version

    def after_relu(module: nn.Module, inputs: tuple[torch.Tensor, ...], output: torch.Tensor) -> None:
        if reads_a_norm[module]:
            held.append(output)
            rectified[id(output)] = output._version

    def after_norm(module: nn.Module, inputs: tuple[torch.Tensor, ...], output: torch.Tensor) -> None:
        held.append(output)
        normalised[id(output)] = output._version

    def before_convolution(module: nn.Conv2d, inputs: tuple[torch.Tensor, ...]) -> None:
        x = inputs[0]
        if module.padding_mode == "zeros" and not isinstance(module.padding, str):
            pairs = [module.kernel_size, module.stride, module.padding, module.dilation]
            kernel, stride, padding, dilation = ((pair[0], pair[1]) for pair in pairs)
            of = (module.in_channels, module.out_channels, kernel, stride, padding, dilation, module.groups)
            reads_both = rectified.get(id(x)) == x._version
            found[Layer(*of, x.shape[-2], x.shape[-1], reads_both, x.requires_grad)] += 1

    hooks = []
    for module in model.modules():
        if isinstance(module, nn.Conv2d):
            hooks.append(module.register_forward_pre_hook(before_convolution))
        elif isinstance(module, nn.BatchNorm2d):
            hooks.append(module.register_forward_hook(after_norm))
        elif isinstance(module, nn.ReLU):
            hooks += [module.register_forward_pre_hook(before_relu), module.register_forward_hook(after_relu)]
    try:
        model(images)
    finally:
        for hook in hooks:
            hook.remove()
    return dict(found)


def _run(run: Run) -> None:
    asked = run.asked
    networks = wanted(asked)
    batch = asked.batch or run.pick(BATCH, QUICK_BATCH)
    rounds = asked.rounds or run.pick(ROUNDS, 1)
    rows: list[Row] = []
    with bar(sum(map(len, networks.values()))) as show:
        for network, layers in networks.items():
            of_network = []
            for layer, count in layers.items():
                show(network, layer.name)
                of_network.append(
                    measure(network, layer, count, batch, rounds, inductor=asked.inductor, clock=run.clock)
                )
                show(network, layer.name, 1)
            rows += of_network
            run.say(table(f"{network}, batch {batch}", of_network), summary(network, of_network))
            run.save(batch=batch, rows=[asdict(row) for row in rows])
    run.say(f"Every result within {TOLERANCE:g} of eager's norm")


main = Bench(
    _run,
    option("--networks", known=models.names(), default=list(NETWORKS), help="of examples.networks"),
    option("--layers", type=comma_separated, help="parts of names, such as 3x3,@14; default: all"),
    option("--batch", type=int, help=f"images; default: {BATCH}"),
    option("--image", type=int, help=f"pixels along each side of the network's input; default: {IMAGE}"),
    option("--rounds", type=int, help=f"calls of each that count; default: {ROUNDS}"),
    option("--threads", type=int, help="of OpenMP; default: as PyTorch has here"),
    switch("--inductor", "a contender more, which compiles for each shape"),
    CPU_TIME,
    quick="three small layers of each network, one round",
)

if __name__ == "__main__":
    sys.exit(main())
