"""One rank of `bench.allreduce`: each contender averages the same gradients through DDP, in turns.

A step is DDP's forward and backward of a module that has its gradients ready, so what is timed is DDP's own copy into
buckets and the exchange, nothing else.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from bench import lab_rank
from bench.exchange_turns import Runner, in_turns
from bench.gradient_contenders import NOTHING, bucket_mib, install
from bench.layer_sizes import ReadyGradients, Shape, drawn, elems_of, shapes_of


def main() -> None:
    """Every model of the config, one after the other."""
    config = lab_rank.config()
    with lab_rank.joined():
        lab_rank.report([_model(name, config["contenders"], config["rounds"]) for name in config["models"]])


def _model(name: str, contenders: Sequence[str], rounds: int) -> dict[str, Any]:
    shapes = shapes_of(name)
    gradients = drawn(shapes, seed=1 + dist.get_rank())
    exact = _exact_mean(shapes)
    models: list[DistributedDataParallel] = []
    runners: list[Runner] = []
    for contender in contenders:
        model = DistributedDataParallel(
            ReadyGradients(shapes, gradients),
            gradient_as_bucket_view=True,
            init_sync=False,
            bucket_cap_mb=bucket_mib(contender),
        )
        installed = install(contender, model)
        runner = Runner(contender, partial(model.zero_grad, set_to_none=True), partial(_step, model), installed)
        runner.warm_up()
        models.append(model)
        runners.append(runner)
    in_turns(runners, rounds)
    rows = {}
    for model, runner in zip(models, runners, strict=True):
        found = torch.cat([weight.grad.flatten() for weight in model.parameters() if weight.grad is not None])
        error_percent = None if runner.name == NOTHING else 100 * float((found - exact).norm() / exact.norm())
        rows[runner.name] = {**runner.row([found]), "error_percent": error_percent}
        runner.installed.close()
    return {"model": name, "elems": elems_of(shapes), "rows": rows}


def _step(model: DistributedDataParallel) -> None:
    model().backward()


def _exact_mean(shapes: Sequence[Shape]) -> torch.Tensor:
    ranks = dist.get_world_size()
    total = torch.zeros(elems_of(shapes), dtype=torch.float64)
    for rank in range(ranks):
        total += torch.cat([gradient.flatten() for gradient in drawn(shapes, seed=1 + rank)])
    return (total / ranks).float()


if __name__ == "__main__":
    main()
