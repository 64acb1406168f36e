"""One rank of `bench.train_link`: each contender trains the same network on the same images, in turns."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch.nn.functional import cross_entropy
from torch.nn.parallel import DistributedDataParallel

from bench import lab_rank
from bench.exchange_turns import Runner, in_turns
from bench.gradient_contenders import bucket_mib, install
from shoal import models


class _Training:
    """One network, its DDP and its optimizer."""

    def __init__(self, config: dict[str, Any], contender: str) -> None:
        network = models.build(config["network"], seed=0, num_classes=10)
        self.model = DistributedDataParallel(network, bucket_cap_mb=bucket_mib(contender))
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


def main() -> None:
    """All contenders of the config."""
    config = lab_rank.config()
    with lab_rank.joined():
        trained: list[tuple[_Training, Runner]] = []
        for contender in config["contenders"]:
            training = _Training(config, contender)
            installed = install(contender, training.model)
            runner = Runner(contender, lambda: None, partial(_Training.step, training), installed)
            runner.warm_up()
            trained.append((training, runner))
        in_turns([runner for _, runner in trained], config["rounds"])
        rows = {}
        for training, runner in trained:
            rows[runner.name] = {
                **runner.row(training.model.module.parameters()),
                "error_percent": None,
                "losses": training.losses,
            }
            runner.installed.close()
        elems = sum(weight.numel() for weight in trained[0][0].model.module.parameters())
        lab_rank.report({"model": config["network"], "elems": elems, "rows": rows})


if __name__ == "__main__":
    main()
