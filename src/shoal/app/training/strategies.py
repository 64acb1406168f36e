"""The strategies of `shoal train`: weights on the host or in shards, data parallel, or one of the user's."""

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
from shoal.core.named import function_named
from shoal.distributed import AdaptivePrecision, HostWeights, ShardedWeights, compress_gradients
from shoal.distributed.comm.traffic import Sent
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
        (f"--parallel {options.parallel}", options.parallel),
        ("--weights sharded", options.weights),
        ("--compress-gradients", options.compress_gradients),
    )
    for flag, given in asked:
        if given and not ranks.grouped:
            raise InputError(f"{flag} is between ranks: start them with torchrun --nproc-per-node 2 -m shoal train ...")
    if options.parallel:
        strategy: Strategy = function_named(options.parallel)(options, network, ranks)
        return strategy
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


def _optimizer(options: TrainOptions, network: nn.Module) -> torch.optim.Optimizer:
    return optimizer_of(
        options.optimizer,
        network,
        lr=options.lr,
        momentum=options.momentum,
        weight_decay=options.weight_decay,
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
