"""Flags that several commands have."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import typer

import shoal
from shoal import planners
from shoal.memory import optimizer_state

if TYPE_CHECKING:
    from shoal import Options

Network = Annotated[str, typer.Option(help="resnet18 and others, a name of torchvision or timm, or FILE.py:FUNCTION.")]
Batch = Annotated[int, typer.Option(help="Images per step.")]
Pixels = Annotated[int, typer.Option(help="Pixels along each side.")]
Preset = Annotated[str | None, typer.Option(help="A preset of `shoal hardware`; none means this machine.")]
Planner = Annotated[str, typer.Option(help=f"{', '.join(planners.NAMES)}, or MODULE:FUNCTION.")]
StateOf = Annotated[str, typer.Option(help=f"Optimizer whose state counts: none, {', '.join(optimizer_state.NAMES)}.")]
Codec = Annotated[str, typer.Option(help="With --allow exact,encode: the codec, dynamic_tree, linear, ...")]
Allow = Annotated[
    str | None,
    typer.Option(help="Means that may be used: bitwise, exact (default), lossy, or names such as recompute,fuse."),
]
Kernels = Annotated[str, typer.Option(help="What is to run the step: eager, compiled or auto.")]
Split = Annotated[float | None, typer.Option(help="Share of the convolutions to split into patches.")]
Grid = Annotated[str, typer.Option(help="Patches along each dimension.")]
Stochastic = Annotated[float | None, typer.Option(help="Omega of cuts that are drawn again in every step.")]
Halo = Annotated[str | None, typer.Option(help="exact: patches overlap, and the function stays the same.")]
BatchNorm = Annotated[
    str | None, typer.Option(help="fused (or a level: rcf, mvf, bnff, icf), or inverted, with LeakyReLU for ReLU.")
]


def options(planner: str, kernels: str, codec: str) -> Options:
    """What the flags stand for; imported late, as all that captures is."""
    return shoal.Options(planner=planner, kernels=kernels, codec=codec)
