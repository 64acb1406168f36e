"""What splitting costs on the CPU: a step of the split network beside a step of the network.

    python -m bench.split_cost           some minutes on two cores
    python -m bench.split_cost --images 16 --networks densenet121    larger ops: less lost to many small ones
    python -m bench.split_cost --quick   one network, small images, one turn: does it run?

Half the convolutions in 2 x 2 patches, forward and backward in eager PyTorch, in both memory formats. `A/A` is the
network once more: what it differs from 1 by is the machine's noise. `exact` is `halo="exact"`, which computes what
overlaps twice; its gradients are held against the network's. All contenders of a row take turns in one process.
"""

from __future__ import annotations

import statistics
import sys
from collections.abc import Callable, Sequence
from typing import Any

import torch
from rich.table import Table
from torch import nn
from torch.nn import functional as F

import shoal
from bench.frame import Bench, Run, option
from bench.interleave import median_ratio
from bench.tables import new_table
from bench.workload import Workload, make_workload

NETWORKS = {"resnet18": (8, 224), "vgg16_bn": (4, 224), "densenet121": (4, 224)}  # images, pixels
LAYOUTS = {"channels_last": torch.channels_last, "contiguous": torch.contiguous_format}
WAYS: dict[str, Callable[[nn.Module], nn.Module]] = {
    "A/A": lambda model: model,
    "split": lambda model: shoal.split(model, 0.5, (2, 2)),
    "exact": lambda model: shoal.split(model, 0.5, (2, 2), halo="exact"),
}
TARGET = 1.05


def ratios(workload: Workload, turns: int) -> dict[str, Any]:
    """Median over the turns of each way's seconds, divided by the network's own in the same turn."""
    ways: dict[Any, Any] = {
        "plain": workload.shared_copy(),
        **{name: make(workload.shared_copy()) for name, make in WAYS.items()},
    }
    seconds = workload.in_turns(ways, turns, 1)
    found = {name: median_ratio(seconds[name], seconds["plain"]) for name in WAYS}
    return {"plain_seconds": statistics.median(seconds["plain"]), "ratios": found}


def assert_same_gradients(name: str) -> None:
    """Overlapping patches compute the network's own gradients, in float64 on small images.

    Raises:
        AssertionError: they do not.
    """
    workload = make_workload(name, 2, 64)
    workload.model.double()
    workload.images = workload.images.double()
    plain = workload.model
    gradients = []
    for model in (plain, WAYS["exact"](workload.shared_copy())):
        workload.reset()
        loss = F.cross_entropy(model(workload.images), workload.target)
        gradients.append(torch.cat([g.flatten() for g in torch.autograd.grad(loss, list(plain.parameters()))]))
    off = float((gradients[1] - gradients[0]).norm() / gradients[0].norm())
    assert off < 1e-6, f"{name}: halo='exact' has gradients that are {off:.1e} off"


def table(rows: Sequence[dict[str, Any]]) -> Table:
    shown = new_table(
        f"A step beside the network's own; the target of split is {TARGET:.2f}",
        f"<network | <memory format | images | plain step | {' | '.join(WAYS)}",
    )
    for row in rows:
        cells = [f"{row['ratios'][name]:.3f}" for name in WAYS]
        shown.add_row(row["network"], row["layout"], str(row["images"]), f"{1e3 * row['plain_seconds']:.0f} ms", *cells)
    return shown


def _run(run: Run) -> None:
    asked, rows = run.asked, []
    for name in run.pick(asked.networks, asked.networks[:1]):
        assert_same_gradients(name)
        images, pixels = run.pick((asked.images or NETWORKS[name][0], NETWORKS[name][1]), (2, 64))
        for layout, memory_format in LAYOUTS.items():
            workload = make_workload(name, images, pixels)
            workload.model.to(memory_format=memory_format)  # type: ignore[call-overload]
            workload.images = workload.images.contiguous(memory_format=memory_format)
            measured = ratios(workload, run.pick(asked.turns, 1))
            rows.append({"network": name, "images": images, "pixels": pixels, "layout": layout, **measured})
    run.save(rows=rows)
    run.say(table(rows))


main = Bench(
    _run,
    option("--networks", known=NETWORKS, default=list(NETWORKS)),
    option(
        "--images", type=int, help=f"in a batch; default: {', '.join(f'{n} {i}' for n, (i, _) in NETWORKS.items())}"
    ),
    option("--turns", type=int, default=9),
    quick="one network, small images, one turn: does it run?",
)

if __name__ == "__main__":
    sys.exit(main())
