"""Hybrid parallelism in `shoal train`:

torchrun --nproc-per-node 2 -m shoal train --model examples.networks.alexnet:AlexNet --planner none \
    --parallel examples.parallel.strategy:HybridParallel
"""

from __future__ import annotations

from typing import Any

from torch import nn

from examples.parallel.hybrid import hybrid
from shoal.app.training.options import TrainOptions
from shoal.app.training.ranks import Ranks
from shoal.app.training.strategy import Strategy, optimizer_of
from shoal.distributed.comm.traffic import Traffic


class HybridParallel(Strategy):
    """Data parallel convolutions, model parallel linear layers (`hybrid`)."""

    def __init__(self, options: TrainOptions, network: nn.Module, ranks: Ranks) -> None:
        codec = options.compress_gradients
        self._hybrid = hybrid(
            network,
            codec="dynamic_tree" if codec == "auto" else codec,
            gradient_codec=codec,
            timeout_seconds=ranks.timeout_seconds,
        )
        optimizer = optimizer_of(options, self._hybrid.parameter_groups())
        super().__init__(self._hybrid, optimizer, ranks)

    def state(self) -> dict[str, Any]:
        return {
            "model": self._hybrid.full_state_dict(),
            "optimizer": self._hybrid.full_optimizer_state(self.optimizer),
        }

    def load_state(self, state: dict[str, Any]) -> None:
        self._hybrid.load_full_state_dict(state["model"])
        self._hybrid.load_full_optimizer_state(self.optimizer, state["optimizer"])

    @property
    def traffic(self) -> Traffic:
        return self._hybrid.traffic

    def own_state(self) -> dict[str, Any]:
        gradients = self._hybrid.gradients
        return {} if gradients is None else gradients.state_dict()

    def load_own_state(self, state: dict[str, Any]) -> None:
        if self._hybrid.gradients is not None:
            self._hybrid.gradients.load_state_dict(state)

    def explain(self) -> str:
        return self._hybrid.explain()

    def close(self) -> None:
        self._hybrid.close()
