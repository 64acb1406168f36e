"""Batch norm's sweeps by themselves, against PyTorch's own kernels, at ResNet-50's and DenseNet-121's shapes.

`python -m bench.norm_sweeps [--device cuda] [--dtype float32] [--layout channels_last] [--batch 8] [--cpu-time]
[--sweeps inverted]`. Interleaved medians. PyTorch's side is what the same ops run where no kernel of ours applies, on
the same device: what it measures is how much the kernels help, not how much fusing does.
"""

from __future__ import annotations

import json
import os
import statistics
import sys
from collections.abc import Callable
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path

import torch
from rich.table import Table

from bench.frame import CPU_TIME, Bench, Run, option
from bench.interleave import in_turns, synchronize
from bench.tables import new_table
from shoal.kernels.invertible_norm.inverted_op import InvertedVectors, gradients_into
from shoal.kernels.norm.norm_act import activated, norm_act
from shoal.kernels.norm.norm_operands import Activation, NormAffine
from shoal.kernels.norm.norm_sweeps import sweeps
from shoal.kernels.norm.statistics import statistics as measured
from shoal.lowlevel.dispatch import VARIABLE

# (channels, pixels a side)
SHAPES = ((64, 112), (256, 56), (512, 28), (1024, 14), (2048, 7))
LAYOUTS = {"channels_last": torch.channels_last, "contiguous": torch.contiguous_format}


@dataclass(frozen=True)
class Row:
    """One sweep over one tensor; seconds are medians of a call."""

    sweep: str
    channels: int
    side: int
    tensor_bytes: int
    ours_seconds: float
    torch_seconds: float


def calls(x: torch.Tensor) -> dict[str, Callable[[], object]]:
    """What is measured, by name, for a tensor (N, C, H, W)."""
    generator = torch.Generator(x.device).manual_seed(1)
    draw = lambda *shape: torch.randn(shape, generator=generator, device=x.device)  # noqa: E731
    like = lambda: torch.empty_like(x).copy_(draw(*x.shape))  # noqa: E731
    grad, residual, (mean, scale, shift) = like(), like(), draw(3, x.shape[1])
    x, residual = x.requires_grad_(), residual.requires_grad_()
    leaves = [vector.clone().requires_grad_() for vector in (mean, scale, shift)]
    plain, added = norm_act([x], *leaves, None, True), norm_act([x], *leaves, residual, True)
    moments = measured(x)
    grads = [draw(x.shape[1]), draw(x.shape[1])]
    source, y, of_x = x.detach(), like(), like()
    elu = torch.nn.functional.elu(y)

    def inverted_by(y: torch.Tensor, activation: Activation) -> tuple[Callable[[], object], Callable[[], object]]:
        vectors = InvertedVectors(scale, shift, torch.ones_like(scale))
        affine = NormAffine(mean, scale, shift)
        return (
            lambda: sweeps(source, of_x).apply(source, affine, None, activation, of_x),
            lambda: gradients_into(grad, of_x, y, vectors, activation),
        )

    leaky_forward, leaky_backward = inverted_by(y, Activation("leaky_relu", 0.01))
    elu_forward, elu_backward = inverted_by(elu, Activation("elu", 1.0))
    return {
        "statistics": lambda: measured(x),
        "statistics backward": lambda: torch.autograd.grad(moments, [x], grads, retain_graph=True),
        "norm + ReLU": lambda: activated(source, NormAffine(mean, scale, shift), True, x.dtype),
        "norm + ReLU backward": lambda: torch.autograd.grad(plain, [x, *leaves], grad, retain_graph=True),
        "norm + residual + ReLU": lambda: norm_act([x], *leaves, residual, True),
        "the same backward": lambda: torch.autograd.grad(added, [x, *leaves, residual], grad, retain_graph=True),
        "inverted": leaky_forward,
        "inverted backward": leaky_backward,
        "inverted ELU": elu_forward,
        "inverted ELU backward": elu_backward,
    }


def measure(x: torch.Tensor, rounds: int, clock: Callable[[], float], named: str = "") -> list[Row]:
    """Both contenders on one tensor, in turns, after one turn that does not count.

    Args:
        x: (N, C, H, W).
        rounds: turns that count.
        clock: gives seconds.
        named: how the names begin of those that are measured.
    """
    rows = []
    before = os.environ.get(VARIABLE, "")
    for name, call in calls(x).items():
        if not name.startswith(named):
            continue

        def run(chosen: str, call: Callable[[], object] = call) -> float:
            os.environ[VARIABLE] = chosen
            synchronize(x.device)
            start = clock()
            result = call()
            synchronize(x.device)
            seconds = clock() - start
            del result
            return seconds

        try:
            taken = in_turns({"ours": partial(run, before), "torch": partial(run, "reference")}, rounds)
        finally:
            os.environ[VARIABLE] = before
        rows.append(Row(name, x.shape[1], x.shape[2], x.nbytes, *map(statistics.median, taken.values())))
    return rows


def table(rows: list[Row]) -> Table:
    """Milliseconds, ours and PyTorch's, and how many times faster ours is."""
    shown = new_table("Batch norm's sweeps: milliseconds", "<sweep | <shape | ours | torch | times")
    for row in rows:
        times = f"{row.torch_seconds / row.ours_seconds:.2f}"
        seconds = (f"{1e3 * row.ours_seconds:.3f}", f"{1e3 * row.torch_seconds:.3f}")
        shown.add_row(row.sweep, f"{row.channels}@{row.side}", *seconds, times)
    return shown


def _run(run: Run) -> None:
    asked, rows = run.asked, []
    for channels, side in SHAPES:
        x = torch.randn((asked.batch, channels, side, side), generator=torch.Generator().manual_seed(0))
        x = x.to(run.device, getattr(torch, asked.dtype)).contiguous(memory_format=LAYOUTS[asked.layout])
        rows += measure(x, asked.rounds, run.clock, asked.sweeps)
    run.say(table(rows))
    if asked.json is not None:
        asked.json.write_text(json.dumps([asdict(row) for row in rows], indent=1))


main = Bench(
    _run,
    option("--dtype", default="float32", choices=("float32", "float16", "bfloat16")),
    option("--layout", default="channels_last", choices=tuple(LAYOUTS)),
    option("--batch", type=int, default=8),
    option("--threads", type=int, default=1),
    option("--rounds", type=int, default=15),
    option("--sweeps", default="", help="those whose names begin so; by default all"),
    option("--json", type=Path, help="a file for the figures"),
    CPU_TIME,
    quick=None,
    device=True,
)

if __name__ == "__main__":
    sys.exit(main())
