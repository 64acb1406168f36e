"""Who takes part in `bench.batchnorm`: data, and how each is made of the network."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import nn

import shoal
from bench.workload import Forward

EAGER, TWIN, INDUCTOR, FUSED = "eager", "twin", "inductor", "fused"
COMPILED, COMPILED_FUSED = "compiled", "compiled_fused"
LEVELS = ("rcf", "mvf", "bnff", "icf")


@dataclass(frozen=True)
class Contender:
    """One way to train the network.

    Attributes:
        title: what tables call it.
        make: the network (which becomes the contender's own) → what is called.
        compiles: whether its first step compiles for seconds to minutes.
        arena: whether its steps run in an arena (`bench.cpu_arena`).
        fuses: whether only PyTorch's ops around fused kernels run: then it is held in float64 too.
    """

    title: str
    make: Callable[[nn.Module], Forward]
    compiles: bool = False
    arena: bool = False
    fuses: bool = False


def _fused(level: str | None) -> Contender:
    def make(model: nn.Module) -> Forward:
        # A level is shown whole; the default is what a user gets, small maps unfused.
        return shoal.fuse_batchnorm(model, cast(Any, level), when="pays" if level is None else "always")

    return Contender(f"fuse_batchnorm, {level or 'default'}", make, fuses=True)


CONTENDERS: Mapping[str, Contender] = {
    EAGER: Contender("eager", lambda model: model),
    TWIN: Contender("eager again", lambda model: model),
    INDUCTOR: Contender("Inductor", lambda model: torch.compile(model, dynamic=False), compiles=True),
    **{level: _fused(level) for level in LEVELS},
    FUSED: _fused(None),
    COMPILED: Contender("compile, arena", lambda model: shoal.compile(model), compiles=True, arena=True),
    COMPILED_FUSED: Contender(
        "fuse_batchnorm, compile, arena",
        lambda model: shoal.compile(shoal.fuse_batchnorm(model)),
        compiles=True,
        arena=True,
    ),
}
DEFAULT = (EAGER, INDUCTOR, *LEVELS, COMPILED, COMPILED_FUSED)
QUICK = (EAGER, *LEVELS)  # none that compiles
ZOO = (EAGER, TWIN, FUSED)


@dataclass(frozen=True)
class Asked:
    """What one process measures.

    Attributes:
        network, batch, image: of `shoal.app.models`; images in the batch, pixels along each side.
        contenders: names of `CONTENDERS`; eager is the first.
        rounds: steps of each that count.
        threads: of OpenMP.
        pool_first: whether every contender has its average pools before its 1x1 convolutions.
        limit_side: of the largest matrices whose product is the machine's limit.
        seed: of weights, images and targets.
    """

    network: str
    batch: int
    image: int
    contenders: Sequence[str]
    rounds: int
    threads: int
    pool_first: bool = False
    limit_side: int = 3072
    seed: int = 0
