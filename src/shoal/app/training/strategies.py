"""The strategies of `shoal train`: weights on the host, in shards, hybrid or data parallel, by its options."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import nn

from shoal.app.training.optimizers import optimizer_of
from shoal.app.training.options import TrainOptions
from shoal.app.training.prepare import compiled
from shoal.app.training.ranks import Ranks
from shoal.app.training.saved_state import Groups
from shoal.app.training.strategy import DataParallel, Strategy
from shoal.distributed import AdaptivePrecision, HostWeights, ShardedWeights, compress_gradients
from shoal.distributed.comm.traffic import Sent, Traffic
from shoal.errors import InputError

_THRESHOLD = -2e-3  # the paper's for VGG


def strategy_of(options: TrainOptions, network: nn.Module, ranks: Ranks, steps: int) -> Strategy:
    """The network and its optimizer, compiled and among the ranks as asked; every rank calls it.

    Args:
        options: of the run.
        network: on its device, with equal weights on every rank.
        ranks: that train together.
        steps: of an epoch.

    Raises:
        InputError: what was asked for needs ranks that torchrun has not started, or does not fit the network.
    """
    if options.weights == "host":
        return WeightsOnHost(options, network, ranks, steps)
    asked = (
        ("--parallel hybrid", options.parallel),
        ("--weights sharded", options.weights),
        ("--compress-gradients", options.compress_gradients),
    )
    for flag, given in asked:
        if given and not ranks.grouped:
            raise InputError(f"{flag} is between ranks: start them with torchrun --nproc-per-node 2 -m shoal train ...")
    if options.parallel:
        return HybridParallel(options, network, ranks)
    if options.weights:
        return WeightsInShards(options, network, ranks, steps)
    optimizer = _optimizer(options, network)
    network = compiled(options, network, optimizer)
    if not ranks.grouped:
        return Strategy(network, optimizer, ranks)
    return DataParallel(network, optimizer, ranks, options.compress_gradients)


class WeightsOnHost(Strategy):
    """Weights and optimizer on the host; each step's weights reach the device packed (`HostWeights`)."""

    def __init__(self, options: TrainOptions, network: nn.Module, ranks: Ranks, steps: int) -> None:
        optimizer = _optimizer(options, network)
        weights = HostWeights(
            network,
            optimizer,
            precision=_precision(options, network, steps),
            one_byte=options.one_byte,
            gradients=options.compress_gradients or "raw",
            rehearse=options.rehearse,
        )
        super().__init__(network, optimizer, ranks, weights)


class WeightsInShards(Strategy):
    """A share of weights, gradients and optimizer on each rank; weights are gathered packed (`ShardedWeights`).

    Gradients are reduced as `compress_gradients` does.
    """

    def __init__(self, options: TrainOptions, network: nn.Module, ranks: Ranks, steps: int) -> None:
        from torch.distributed.device_mesh import init_device_mesh
        from torch.distributed.fsdp import fully_shard

        # FSDP2 takes no other; images may lie as they do.
        network.to(memory_format=torch.contiguous_format)  # type: ignore[call-overload]
        device = next(network.parameters()).device
        mesh = init_device_mesh(device.type, (ranks.count,))
        precision = _precision(options, network, steps)
        for block in blocks(network):
            fully_shard(block, mesh=mesh)
        fully_shard(network, mesh=mesh)
        optimizer = _optimizer(options, network)
        weights = ShardedWeights(
            network,
            optimizer,
            precision=precision,
            one_byte=options.one_byte,
            timeout_seconds=ranks.timeout_seconds,
        )
        super().__init__(compiled(options, network, optimizer), optimizer, ranks, weights)
        self._weights = weights
        self._gradients = compress_gradients(network, options.compress_gradients, timeout_seconds=ranks.timeout_seconds)
        self._reduced = Sent()
        optimizer.register_step_pre_hook(self._count_gradients)

    def state(self) -> dict[str, Any]:
        from torch.distributed.checkpoint.state_dict import StateDictOptions, get_state_dict

        whole = StateDictOptions(full_state_dict=True, cpu_offload=True)
        model, optimizer = get_state_dict(self.network, self.optimizer, options=whole)
        return {"model": model, "optimizer": optimizer}

    def load_state(self, state: dict[str, Any]) -> None:
        from torch.distributed.checkpoint.state_dict import StateDictOptions, set_state_dict

        set_state_dict(
            self.network,
            self.optimizer,
            model_state_dict=state["model"],
            optim_state_dict=state["optimizer"],
            options=StateDictOptions(full_state_dict=True),
        )

    def groups(self) -> Groups:
        names = {parameter: name for name, parameter in self.network.named_parameters()}
        return [[(names[one], one) for one in group["params"]] for group in self.optimizer.param_groups]

    def own_state(self) -> dict[str, Any]:
        return {**self._weights.state_dict(), **self._gradients.state_dict()}

    def load_own_state(self, state: dict[str, Any]) -> None:
        self._weights.load_state_dict(state)
        self._gradients.load_state_dict(state)

    def explain(self) -> str:
        return f"{self._weights.explain()}\n{self._gradients.explain()}"

    def close(self) -> None:
        self._gradients.close()
        self._weights.close()

    def _count_gradients(self, *_: Any) -> None:
        reduced = self._gradients.traffic.total()
        since = reduced - self._reduced
        self._weights.traffic.add("gradients", since.sent_bytes, since.raw_bytes)
        self._reduced = reduced


class HybridParallel(Strategy):
    """Data parallel convolutions, model parallel linear layers (`shoal.distributed.hybrid`)."""

    def __init__(self, options: TrainOptions, network: nn.Module, ranks: Ranks) -> None:
        from shoal.distributed import hybrid

        codec = options.compress_gradients
        self._hybrid = hybrid(
            network,
            codec="dynamic_tree" if codec == "auto" else codec,
            gradient_codec=codec,
            timeout_seconds=ranks.timeout_seconds,
        )
        optimizer = _optimizer(options, network, self._hybrid.parameter_groups())
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


def blocks(network: nn.Module) -> Iterator[nn.Module]:
    """What is gathered by itself: each module under the network, or under a container of it, that has parameters.

    >>> [type(block).__name__ for block in blocks(nn.Sequential(nn.Linear(2, 2), nn.ReLU(), nn.Linear(2, 2)))]
    ['Linear', 'Linear']
    """
    for child in network.children():
        if isinstance(child, nn.Sequential | nn.ModuleList):
            yield from blocks(child)
        elif any(True for _ in child.parameters()):
            yield child


def _optimizer(
    options: TrainOptions, network: nn.Module, groups: list[dict[str, Any]] | None = None
) -> torch.optim.Optimizer:
    return optimizer_of(
        options.optimizer,
        network,
        lr=options.lr,
        momentum=options.momentum,
        weight_decay=options.weight_decay,
        groups=groups,
    )


def _precision(options: TrainOptions, network: nn.Module, steps: int) -> int | str | AdaptivePrecision:
    match options.precision:
        case None:
            return 32
        case "adaptive":
            threshold = _THRESHOLD if options.awp_threshold is None else options.awp_threshold
            return AdaptivePrecision(network, threshold, options.awp_interval or steps)
        case "bf16":
            return "bf16"
        case bits:
            return int(bits)
