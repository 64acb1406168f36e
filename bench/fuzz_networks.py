"""Random networks as plain data, and each as the Python source text that runs it; see `bench.fuzz`.

A layer says what it is, never what shape it meets: the text is written walking from the input on, and a layer that the
shape at hand does not allow (a stride over one pixel) writes nothing. So every list of layers is a network, and a
network with a layer taken out is one too.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from math import prod
from random import Random

from bench import fuzz_layers as layers

HEADS = (*("mean",) * 6, *("flatten", "dense", "two") * 2, "outside")
_KINDS = {
    "conv": 8,
    "norm": 8,
    "act": 7,
    "pool": 3,
    "pixels": 3,
    "attention": 2,
    "view": 6,
    "math": 5,
    "inplace": 3,
    "complex": 2,
}
_RARER = {"dropout": 2, "branch": 5, "repeat": 2}
_SIZES = {1: (64, 96, 33, 128), 2: (16, 12, 9, 20), 3: (6, 8, 5)}
_MAX_DEPTH = 2


@dataclass(frozen=True)
class Layer:
    """One layer, or, where it has others `inside`, a branch around them or a repetition of them.

    Attributes:
        kind: a key of `VARIANTS`.
        variant: which of that kind.
        amount: a number for whatever the variant has to choose: channels, groups, a probability.
    """

    kind: str
    variant: str
    amount: int = 0
    inside: tuple[Layer, ...] = ()


@dataclass(frozen=True)
class Network:
    """A network, its input and how it is run. The defaults are the plainest there is.

    Attributes:
        layers: from the input on.
        seed: of the weights, the batches and the random ops.
        dims, batch, channels, size: of the input: `batch` x `channels` x `size` along each of `dims`.
        dtype: "float32" or "float64".
        channels_last, autocast: the memory format; bfloat16 autocast.
        input_gradient: whether the input wants a gradient.
        head: what becomes of the last layer's result; one of `HEADS`.
    """

    layers: tuple[Layer, ...]
    seed: int = 0
    dims: int = 2
    batch: int = 2
    channels: int = 4
    size: int = 8
    dtype: str = "float32"
    channels_last: bool = False
    autocast: bool = False
    input_gradient: bool = False
    head: str = "mean"


def draw(seed: int, number: int, attempt: int = 0) -> Network:
    """The network of that number: the same for the same arguments, on every machine.

    >>> draw(0, 3) == draw(0, 3) != draw(0, 4)
    True
    """
    chance = Random(f"{seed} {number} {attempt}")
    dims = chance.choice((1, 2, 2, 2, 3))
    autocast = chance.random() < 0.2
    channels_last = dims > 1 and chance.random() < 0.35
    return Network(
        _layers(chance, chance.randint(3, 7), 0),
        seed=number,
        dims=dims,
        batch=chance.choice((1, 2, 2, 3, 4)),
        channels=chance.choice((3, 4, 6, 8)),
        size=chance.choice(_SIZES[dims]),
        dtype="float64" if not autocast and chance.random() < 0.1 else "float32",
        channels_last=channels_last,
        autocast=autocast,
        # PyTorch's group norm ends the process where a channels_last input wants no gradient.
        input_gradient=channels_last or chance.random() < 0.6,
        head=chance.choice(HEADS),
    )


def _layers(chance: Random, count: int, depth: int) -> tuple[Layer, ...]:
    kinds = _KINDS | (_RARER if depth < _MAX_DEPTH else {})
    return tuple(_layer(chance, kind, depth) for kind in chance.choices(list(kinds), list(kinds.values()), k=count))


def _layer(chance: Random, kind: str, depth: int) -> Layer:
    variant = chance.choice(layers.VARIANTS[kind])
    inside = _layers(chance, chance.randint(1, 3), depth + 1) if kind in ("branch", "repeat") else ()
    return Layer(kind, variant, chance.randrange(12), inside)


def render(network: Network) -> str:
    """The network as a module's source: a class `Network`, `build()`, `batch(step)` and the constants of a step."""
    writer = layers.Writer(network.batch, network.channels, (network.size,) * network.dims)
    _write(writer, network.layers)
    _HEADS[network.head](writer)
    in_loss = 1 if network.head == "outside" else 2
    shape = (network.batch, network.channels, *(network.size,) * network.dims)
    last = {2: ".to(memory_format=torch.channels_last)", 3: ".to(memory_format=torch.channels_last_3d)"}
    layout = last[network.dims] if network.channels_last else ""
    return "\n".join(
        [
            "import torch",
            "import torch.nn.functional as F",
            "from torch import nn",
            "",
            f"AUTOCAST = {network.autocast}",
            f"IN_LOSS = {in_loss}  # how many of the outputs the loss reads",
            "",
            "",
            "class Network(nn.Module):",
            "    def __init__(self):",
            "        super().__init__()",
            *(f"        {line}" for line in writer.made),
            "",
            "    def forward(self, x):",
            *(f"        {line}" for line in writer.lines),
            "",
            "",
            "def build():",
            f"    torch.manual_seed({network.seed})",
            f"    return Network().to(torch.{network.dtype}){layout}",
            "",
            "",
            "def batch(step):",
            f"    chance = torch.Generator().manual_seed({1000 * network.seed} + step)",
            f"    x = torch.randn({shape}, dtype=torch.{network.dtype}, generator=chance){layout}",
            f"    return x.requires_grad_({network.input_gradient})",
            "",
        ]
    )


def _write(writer: layers.Writer, todo: tuple[Layer, ...]) -> None:
    for layer in todo:
        if layer.kind == "branch":
            _branch(writer, layer)
        elif layer.kind == "repeat":
            _repeat(writer, layer)
        else:
            layers.WRITERS[layer.kind](writer, layer.variant, layer.amount)


def _branch(writer: layers.Writer, layer: Layer) -> None:
    """Aside goes what came in; it meets what the layers inside made of it."""
    aside, channels, sizes = writer.name(), writer.channels, writer.sizes
    writer.line(f"{aside} = x")
    before, made = len(writer.lines), len(writer.made)
    _write(writer, layer.inside)
    if layer.variant in ("frozen", "eval"):
        writer.put_in(layer.variant, made)
    if writer.sizes != sizes:  # they cannot meet but as numbers
        writer.line(f"x = x + {aside}.mean()")
    elif writer.channels != channels or layer.variant == "concat":
        writer.line(f"x = torch.cat((x, {aside}), 1)")
        writer.channels += channels
    elif len(writer.lines) > before:
        how = {
            "residual": f"x = x + {aside}",
            "in_place": f"x += {aside}",
            "gate": f"x = x * torch.sigmoid({aside})",
            "alpha": f"x = torch.add(x, {aside}, alpha=0.5)",
            "aside_in_place": f"x = {aside}.add_(x)",
        }
        writer.line(how.get(layer.variant, how["residual"]))


def _repeat(writer: layers.Writer, layer: Layer) -> None:
    """The same layers called twice, where what comes out can go in again."""
    outside, channels, sizes = writer.lines, writer.channels, writer.sizes
    writer.lines = []
    _write(writer, layer.inside)
    inside, writer.lines = writer.lines, outside
    if inside and (writer.channels, writer.sizes) == (channels, sizes):
        writer.line("for _ in range(2):")
        inside = [f"    {line}" for line in inside]
    writer.lines += inside


def _mean(writer: layers.Writer) -> None:
    last = writer.module(f"nn.Linear({writer.channels}, 5)")
    writer.line(f"y = {last}(x.flatten(2).mean(2))")
    writer.line("return y")


def _flatten(writer: layers.Writer) -> None:
    last = writer.module(f"nn.Linear({writer.channels * prod(writer.sizes)}, 2)")
    writer.line(f"return {last}(x.flatten(1))")


def _dense(writer: layers.Writer) -> None:
    last = writer.module(f"nn.Conv{writer.dims}d({writer.channels}, 2, 1)")
    writer.line(f"return {last}(x)")


def _two(writer: layers.Writer) -> None:
    """Two outputs, and one of them is in the loss where `IN_LOSS` is 1."""
    first, second = (writer.module(f"nn.Linear({writer.channels}, 3)") for _ in range(2))
    writer.line("y = x.flatten(2).mean(2)")
    writer.line(f"return {first}(y), {second}(y)")


_HEADS: dict[str, Callable[[layers.Writer], None]] = {
    "mean": _mean,
    "flatten": _flatten,
    "dense": _dense,
    "two": _two,
    "outside": _two,
}
