"""One rank of `bench.train_link`: each contender trains the same network on the same images, in turns."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.nn.functional import cross_entropy
from torch.nn.parallel import DistributedDataParallel

import shoal
from bench import lab_rank
from bench.gradient_contenders import PLANNED, Runner, bucket_mib, install, install_sharded, step_in_turns
from examples import networks as models


class _Training:
    """One network on all ranks, its DDP or FSDP2, and its optimizer."""

    def __init__(self, config: dict[str, Any], contender: str) -> None:
        network = models.build(config["network"], seed=0, num_classes=10)
        self.elems = sum(weight.numel() for weight in network.parameters())
        self.model: nn.Module
        if contender == PLANNED:
            shoal.compile(network)
        if config["sharded"]:
            self.model = _sharded(network)
            self.installed = install_sharded(contender, self.model)
        else:
            self.model = wrapped = DistributedDataParallel(network, bucket_cap_mb=bucket_mib(contender))
            self.installed = install(contender, wrapped)
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=config["rate"], momentum=0.9)
        shape = models.example_shape(config["network"], config["batch"], config["image"])
        generator = torch.Generator().manual_seed(100 + dist.get_rank())
        self._images = torch.randn(shape, generator=generator)
        self._labels = torch.randint(10, shape[:1], generator=generator)
        self.losses: list[float] = []

    def step(self) -> None:
        self.optimizer.zero_grad()
        loss = cross_entropy(self.model(self._images), self._labels)
        loss.backward()
        self.optimizer.step()
        self.losses.append(float(loss.detach()))

    def weights(self) -> list[torch.Tensor]:
        """Whole ones. A collective call where they are sharded."""
        return [weight.full_tensor() if isinstance(weight, DTensor) else weight for weight in self.model.parameters()]


def _sharded(network: nn.Module) -> nn.Module:
    """Each part of the network with weights gathers them, and reduces their gradients, by itself."""
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    for part in network.children():
        if any(True for _ in part.parameters()):
            fully_shard(part, mesh=mesh)
    return fully_shard(network, mesh=mesh)


def main() -> None:
    """All contenders of the config."""
    config = lab_rank.config()
    with lab_rank.joined():
        trained: list[tuple[_Training, Runner]] = []
        for contender in config["contenders"]:
            training = _Training(config, contender)
            runner = Runner(contender, lambda: None, partial(_Training.step, training), training.installed)
            runner.warm_up()
            trained.append((training, runner))
        step_in_turns([runner for _, runner in trained], config["rounds"])
        rows = {}
        for training, runner in trained:
            rows[runner.name] = {**runner.row(training.weights()), "error_percent": None, "losses": training.losses}
            runner.installed.close()
        lab_rank.report({"model": config["network"], "elems": trained[0][0].elems, "rows": rows})


if __name__ == "__main__":
    main()
